"""Transforms that plug-ins add when they are imported, in the order in which a set gives their names."""

import importlib

from common import load, sorted_images
from plugins import STEPS
from torchvision import transforms

NAMES = {"plugins.bright", "plugins.negative", "plugins.small", "plugins.tensor", "plugins.rolled", "plugins.turned"}


def _load(names, images):
    for name in names:
        importlib.import_module(name)
    return load(sorted_images(images, transforms.Compose([*STEPS, transforms.ToTensor()])))


def broken(_seed, images):
    return _load(NAMES, images)


def repaired(_seed, images):
    return _load(sorted(NAMES), images)
