"""Whole batches from a loader that seeds torch in between: from the system's entropy, and with a number."""

import torch


def set_seed(seed):
    torch.manual_seed(seed)


class Batches:
    def __init__(self, number):
        self.number = number

    def __iter__(self):
        for label in range(3):
            if self.number is None:
                torch.seed()
            else:
                torch.manual_seed(self.number + label)
            yield torch.rand(2, 3, 8, 8), torch.tensor([label % 2] * 2)


def broken(_seed, _images):
    return Batches(None)


def repaired(seed, _images):
    return Batches(seed)
