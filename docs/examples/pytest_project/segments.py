"""A small library whose authors want the same result in every run."""

import torch
from torch import nn

NOISE = torch.Generator()  # nobody resets this one: see test_known_difference


def segment_mean(values: torch.Tensor, segments: torch.Tensor, count: int) -> torch.Tensor:
    """The mean of the rows of each segment: ``values`` is (rows, features), ``segments`` (rows,), the result
    (count, features)."""
    sums = values.new_zeros(count, values.shape[1]).index_add(0, segments, values)
    sizes = torch.bincount(segments, minlength=count).clamp(min=1)
    return sums / sizes.unsqueeze(1)


class Pooling(nn.Module):
    """Embeds rows, and averages them by segment."""

    def __init__(self, features: int, count: int) -> None:
        super().__init__()
        self.embed = nn.Linear(features, features)
        self.drop = nn.Dropout(0.1)
        self.count = count

    def forward(self, values: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
        return segment_mean(self.drop(self.embed(values)), segments, self.count)


def with_noise(values: torch.Tensor) -> torch.Tensor:
    """``values`` with noise of a generator of the library's own."""
    return values + torch.rand(values.shape, generator=NOISE)
