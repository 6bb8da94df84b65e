"""Workers whose ``worker_init_fn`` seeds NumPy from the system's entropy."""

import numpy as np
import torch
from common import PLAIN, load, seeded, sorted_images


def noisy(image):
    return PLAIN(image) + float(np.random.normal())


def from_entropy(_worker):
    np.random.seed()


def from_the_loader(_worker):
    np.random.seed(torch.initial_seed() % 2**32)


def broken(seed, images):
    return load(sorted_images(images, noisy), generator=seeded(seed), worker_init_fn=from_entropy)


def repaired(seed, images):
    return load(sorted_images(images, noisy), generator=seeded(seed), worker_init_fn=from_the_loader)
