"""Batches of which single samples are not seen: loaders that are no ``DataLoader`` (a list, a class, a generator, a
class that is indexed), streams, and a ``collate_fn`` that draws."""

import random

import numpy as np
import torch
from common import load, sorted_images
from torch.utils.data import DataLoader, IterableDataset, default_collate


def _batches(images, size=2):
    dataset = sorted_images(images)
    for begin in range(0, len(dataset), size):
        yield default_collate([dataset[place] for place in range(begin, begin + size)])


def _noisy(batch, noise):
    return batch[0] + noise, batch[1]


def broken_list(_seed, images):
    return [_noisy(batch, torch.rand(())) for batch in _batches(images)]


def repaired_list(seed, images):
    generator = torch.Generator().manual_seed(seed)
    return [_noisy(batch, torch.rand((), generator=generator)) for batch in _batches(images)]


def broken_generator(_seed, images):
    for batch in _batches(images):
        yield _noisy(batch, random.random())


def repaired_generator(seed, images):
    rng = random.Random(seed)
    for batch in _batches(images):
        yield _noisy(batch, rng.random())


class Shuffled:
    """Every batch in one order or another."""

    def __init__(self, images, rng):
        self.batches, self.rng = list(_batches(images, 1)), rng

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return iter(self.rng.sample(self.batches, len(self.batches)))


def broken_class(_seed, images):
    return Shuffled(images, random.Random())


def repaired_class(seed, images):
    return Shuffled(images, random.Random(seed))


class Indexed:
    """Batches by their number, in memory that is used again for the next."""

    def __init__(self, images, noise):
        self.batches, self.noise = list(_batches(images)), noise
        self.pictures = torch.empty_like(self.batches[0][0])

    def __getitem__(self, number):
        pictures, labels = self.batches[number]
        return self.pictures.copy_(pictures).add_(self.noise()), labels


def broken_indexed(_seed, images):
    return Indexed(images, np.random.normal)


def repaired_indexed(seed, images):
    return Indexed(images, np.random.default_rng(seed).normal)


class Stream(IterableDataset):
    def __init__(self, images, rng):
        self.images, self.rng = images, rng

    def __iter__(self):
        for picture, label in sorted_images(self.images):
            yield picture + self.rng.random(), label


def broken_stream(_seed, images):
    return DataLoader(Stream(images, random), batch_size=2)


def repaired_stream(seed, images):
    return DataLoader(Stream(images, random.Random(seed)), batch_size=2)


class Mixing:
    """A ``collate_fn`` that adds noise to the whole batch."""

    def __init__(self, noise):
        self.noise = noise

    def __call__(self, samples):
        return _noisy(default_collate(samples), self.noise())


def broken_collate(_seed, images):
    return load(sorted_images(images), num_workers=0, collate_fn=Mixing(np.random.normal))


def repaired_collate(seed, images):
    return load(sorted_images(images), num_workers=0, collate_fn=Mixing(np.random.default_rng(seed).normal))
