"""A model with a kernel of its own that gives another result in every process."""

import os

import torch
from common import load, sorted_images
from common import make_model as make_classifier

NOISE = int.from_bytes(os.urandom(4), "little")


@torch.library.custom_op("hashbench_pipeline::unsteady", mutates_args=())
def unsteady(values: torch.Tensor) -> torch.Tensor:
    return values + NOISE * 1e-9


@torch.library.custom_op("hashbench_pipeline::steady", mutates_args=())
def steady(values: torch.Tensor) -> torch.Tensor:
    return values + 1e-9


class With(torch.nn.Module):
    def __init__(self, kernel):
        super().__init__()
        self.kernel, self.classifier = kernel, make_classifier()

    def forward(self, pictures):
        with torch.no_grad():
            pictures = self.kernel(pictures)
        return self.classifier(pictures)


def broken(_seed, images):
    return load(sorted_images(images))


repaired = broken
