"""Models whose Triton code is right, though it rounds otherwise than eager mode, or looks as if it were wrong."""

from __future__ import annotations

import torch
from _planted import undo
from torch import nn
from torch.nn import functional

Example = tuple[nn.Module, tuple[torch.Tensor, ...]]


class LongSums(nn.Module):
    """Sums of long rows whose terms have one sign: every order of them rounds otherwise."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.exp(rows).sum(-1)


class Gated(nn.Module):
    """Elementwise work in bfloat16, which generated code does in float32 between load and store."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(features))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return functional.silu(rows * self.scale) * torch.sigmoid(rows) + rows


class Normalised(nn.Module):
    """A batch norm of features far from zero."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(features)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(rows))


class Attention(nn.Module):
    """Probabilities of rows so long that their maximum is corrected block by block."""

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.softmax(logits, -1)


class Offset(nn.Module):
    """Add a large number and take it away again: half of the digits cancel."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(features))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.tanh((rows * self.scale + 3000.0) - 3000.0)


class Dropped(nn.Module):
    """Dropout, whose scale is a constant of seven digits."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(features))
        self.dropout = nn.Dropout(0.3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.dropout(rows * self.scale))


class Nearest(nn.Module):
    """The group of readings with the largest mean, of groups that are nearly equal."""

    def forward(self, readings: torch.Tensor) -> torch.Tensor:
        return torch.exp(readings).mean(2).argmax(1)


class Counter(nn.Module):
    """Update a buffer in place, and use a view of what was updated."""

    seen: torch.Tensor

    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(features))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.seen.mul_(0.9).add_(rows.mean(0))
        scaled = rows.clone()
        scaled[1:] *= self.seen
        return scaled.t()[::2] + 1


class Empty(nn.Module):
    """A selection of no rows, beside all of them."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        none = rows[:0]
        return torch.cat([none * 2, torch.tanh(rows)]) + none.sum(0)


class Integers(nn.Module):
    """Divisions, remainders and shifts of signed numbers, and bytes that wrap around."""

    def forward(self, numbers: torch.Tensor) -> tuple[torch.Tensor, ...]:
        bytes_ = (numbers + 200).to(torch.uint8)
        return numbers // 3 + numbers % 7, torch.fmod(numbers, 7), numbers >> 2, bytes_ + bytes_


def triton_long_sums() -> Example:
    undo()
    return LongSums(), (torch.randn(16, 3000),)


def triton_bfloat16() -> Example:
    undo()
    return Gated(24).bfloat16(), (torch.randn(16, 24).bfloat16(),)


def triton_batch_statistics() -> Example:
    undo()
    return Normalised(6), (torch.randn(60, 6) + 30,)


def triton_online_softmax() -> Example:
    undo()
    return Attention(), (torch.randn(2, 1500) * 20,)


def triton_cancellation() -> Example:
    undo()
    return Offset(24), (torch.randn(12, 24),)


def triton_dropout() -> Example:
    undo()
    return Dropped(24), (torch.randn(12, 24),)


def triton_near_ties() -> Example:
    undo()
    readings = torch.randn(24, 1, 40).expand(-1, 8, -1).contiguous()
    order = torch.rand_like(readings).argsort(2)
    return Nearest(), (readings.gather(2, order) + 1e-7 * torch.randn_like(readings),)


def triton_updates() -> Example:
    undo()
    return Counter(10), (torch.randn(12, 10),)


def triton_empty() -> Example:
    undo()
    return Empty(), (torch.randn(12, 10),)


def triton_integers() -> Example:
    undo()
    return Integers(), (torch.arange(-60, 60),)


MODELS = {
    "triton_long_sums": triton_long_sums,
    "triton_bfloat16": triton_bfloat16,
    "triton_batch_statistics": triton_batch_statistics,
    "triton_online_softmax": triton_online_softmax,
    "triton_cancellation": triton_cancellation,
    "triton_dropout": triton_dropout,
    "triton_near_ties": triton_near_ties,
    "triton_updates": triton_updates,
    "triton_empty": triton_empty,
    "triton_integers": triton_integers,
}
