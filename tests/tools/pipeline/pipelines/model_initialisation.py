"""A model that is made before anything is seeded."""

import torch
from common import load, sorted_images


def broken(_seed, images):
    return load(sorted_images(images))


def repaired(seed, images):
    torch.manual_seed(seed)
    return load(sorted_images(images))


def make_model():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 2))
