"""Random numbers that are drawn long before they are used: when this file is imported, or while the loader is made."""

import random
from pathlib import Path

import torch
from batches_by_hand import Batches
from common import PLAIN, Images, load, sorted_images
from common import make_model as make_seeded_model
from torch.utils.data import DataLoader

ORDER = random.sample(range(10), 10)
BRIGHTNESS = random.random()
CLASSIFIER = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 2))


def set_seed(seed):
    random.seed(seed)
    torch.manual_seed(seed)


def brighter(image):
    return PLAIN(image) + BRIGHTNESS


class Brighter:
    def __init__(self, by):
        self.by = by

    def __call__(self, image):
        return PLAIN(image) + self.by


def plain(_seed, images):
    return load(sorted_images(images))


def model_at_import():
    return CLASSIFIER


def model_after_seeding():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 2))


def order_at_import(_seed, images):
    files = sorted(Path(images).iterdir())
    return load(Images([files[place] for place in ORDER]))


def order_after_seeding(_seed, images):
    files = sorted(Path(images).iterdir())
    random.shuffle(files)
    return load(Images(files))


def transform_at_import(_seed, images):
    return load(sorted_images(images, brighter))


def transform_after_seeding(_seed, images):
    return load(sorted_images(images, Brighter(random.random())))


class Planned(Batches):
    """The same batches in every epoch."""

    def __init__(self, rng):
        self.plan = list(super().__init__(rng) or super().__iter__())

    def __iter__(self):
        return iter(self.plan)


def sampler_while_the_loader_is_made(_seed, images):
    return DataLoader(sorted_images(images), batch_sampler=Planned(random), num_workers=2)


def sampler_of_the_seed(seed, images):
    return DataLoader(sorted_images(images), batch_sampler=Planned(random.Random(seed)), num_workers=2)


make_model = make_seeded_model
