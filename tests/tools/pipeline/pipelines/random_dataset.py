"""A dataset that cuts what it read at a place that a generator of its own says."""

from pathlib import Path

import numpy as np
from common import Images, load


class Cutting(Images):
    def __init__(self, files, rng):
        super().__init__(files)
        self.rng = rng

    def __getitem__(self, index):
        picture, label = super().__getitem__(index)
        return picture.roll(int(self.rng.integers(8)), -1), label


def _files(images):
    return sorted(Path(images).glob("*.png"))


def broken(_seed, images):
    return load(Cutting(_files(images), np.random.default_rng()), num_workers=0)


def repaired(seed, images):
    return load(Cutting(_files(images), np.random.default_rng(seed)), num_workers=0)
