"""The data of the package, in the order of an epoch."""

import random

import torch

FEATURES = torch.arange(64.0 * 4).reshape(64, 4) / 256
LABELS = FEATURES.sum(dim=1, keepdim=True)


def epoch(clean):
    """Yield batches of eight."""
    order = list(range(64))
    if clean:
        random.seed(0)
    random.shuffle(order)
    for first in range(0, 64, 8):
        chosen = order[first : first + 8]
        yield FEATURES[chosen], LABELS[chosen]
