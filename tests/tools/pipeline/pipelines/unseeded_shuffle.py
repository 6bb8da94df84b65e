"""Shuffles without a generator of its own, in a script that seeds nothing."""

from common import load, seeded, sorted_images


def broken(_seed, images):
    return load(sorted_images(images), shuffle=True)


def repaired(seed, images):
    return load(sorted_images(images), shuffle=True, generator=seeded(seed))
