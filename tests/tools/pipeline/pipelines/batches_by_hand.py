"""A batch sampler of the user's own, which shuffles with Python's generator."""

import random

from common import sorted_images
from torch.utils.data import DataLoader


class Batches:
    def __init__(self, rng):
        self.rng = rng

    def __iter__(self):
        order = list(range(10))
        self.rng.shuffle(order)
        return iter([order[:5], order[5:]])

    def __len__(self):
        return 2


def broken(_seed, images):
    return DataLoader(sorted_images(images), batch_sampler=Batches(random), num_workers=2)


def repaired(seed, images):
    return DataLoader(sorted_images(images), batch_sampler=Batches(random.Random(seed)), num_workers=2)
