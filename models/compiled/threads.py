"""Specimens whose compiled results depend on threads."""

from __future__ import annotations

import torch
from _planted import undo
from torch import nn

Example = tuple[nn.Module, tuple[torch.Tensor, ...]]


class SlotSum(nn.Module):
    """Sum rows by slot: in order when run eagerly, by atomic additions of several threads when compiled."""

    def __init__(self, features: int, slots: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(features))
        self.slots = slots

    def forward(self, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(rows * self.scale)
        return hidden.new_zeros(self.slots, hidden.shape[1]).index_add(0, slots, hidden)


def atomic_add(*, repeated: bool) -> Example:
    """Rows of the twin have a slot each, so that every order of additions has one result."""
    undo()
    rows, slots = 800_000, 64  # enough for two threads to meet on a busy machine, too
    where = torch.randint(slots, (rows,)) if repeated else torch.randperm(rows)
    return SlotSum(8, slots if repeated else rows), (torch.randn(rows, 8), where)


class Energy(nn.Module):
    """The sum of squares of all values, each thread's share on its own; or of each row, then of the rows."""

    def __init__(self, features: int, *, by_row: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(features))
        self.by_row = by_row

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        squares = torch.square(rows * self.scale)
        return (squares.sum(1) if self.by_row else squares).sum()


def split_reduction(*, by_row: bool) -> Example:
    undo()
    return Energy(500, by_row=by_row), (torch.randn(1000, 500),)


MODELS = {
    "atomic_add": lambda: atomic_add(repeated=True),
    "atomic_add_twin": lambda: atomic_add(repeated=False),
    "split_reduction": lambda: split_reduction(by_row=False),
    "split_reduction_twin": lambda: split_reduction(by_row=True),
}
