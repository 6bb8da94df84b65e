"""Noise for every image, seeded with its name: by hash(), and by a checksum."""

import zlib
from pathlib import Path

import numpy as np
from common import Images, load


class Noisy(Images):
    def __init__(self, files, code):
        super().__init__(files)
        self.code = code

    def __getitem__(self, index):
        image, *rest = super().__getitem__(index)
        noise = np.random.default_rng(self.code(self.files[index].name) % 2**32).random()
        return (image + float(noise), *rest)


def broken(_seed, images):
    return load(Noisy(sorted(Path(images).iterdir()), hash))


def repaired(_seed, images):
    return load(Noisy(sorted(Path(images).iterdir()), lambda name: zlib.crc32(name.encode())))
