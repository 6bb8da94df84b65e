"""Planted ops and rows for the tests of ``hashbench audit --rows``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hashbench.extensions.invariance.layout import ItemAxis
from hashbench.extensions.invariance.ops.axis import Itemwise, find_axis

FIRST = ItemAxis(0)


def found(function: Callable[..., Any], *args: Any) -> Itemwise | None:
    return find_axis(function, args, {})


@torch.library.custom_op("planted_rows::by_place", mutates_args=())
def planted_place(rows: torch.Tensor) -> torch.Tensor:
    return rows * (1.0 + 0.001 * (torch.arange(len(rows)) % 2)).view(-1, *[1] * (rows.dim() - 1))
