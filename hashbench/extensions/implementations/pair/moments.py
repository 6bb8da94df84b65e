"""Moments of tensors: sums over all elements and over each row, in float64, blind to layout and to zeros of padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from hashbench.core.divergence.content import Moments

LARGEST = 1e30
"""Magnitude from which on an element counts as special: a mask's fill, an infinity."""

MOST_ROWS = 8192
"""Rows of a tensor whose moments are kept."""

SHORTEST_ROW = 2
"""Elements of a row from which on its moments are kept."""

_CANCELLED = 1e-8
"""Result over operands from which on cancellation may have left little but rounding."""

_LOST = 1e-4
"""What cancellation may lose, in tolerances of the operands' magnitude: 1e-13 at 1e-9."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What is kept of a tensor.

    Attributes:
        moments: of all elements.
        rows: ``[rows, 4]``, of each row along the last dimension that holds anything but zeros; ``None`` if not kept.
        ordered: see :class:`~hashbench.core.divergence.content.ContentNode`.
        largest: magnitude of the largest element that is not special.
    """

    moments: Moments
    rows: npt.NDArray[np.float64] | None
    ordered: tuple[float, float]
    largest: float


def measure(tensor: torch.Tensor, *, operands: float = 0.0, rows: bool = False) -> Measured:
    """Return the moments of a tensor of any dtype and shape.

    Args:
        tensor: strided; complex ones count as pairs of numbers, bools as 0 and 1.
        operands: largest magnitude of what the op read. Where the result is far below it, moments are compared with
            what cancellation may have lost.
        rows: keep the moments of rows.
    """
    value = tensor.detach().resolve_conj().resolve_neg()
    if value.is_quantized:
        value = value.dequantize()
    if value.is_complex():
        value = torch.view_as_real(value)
    numbers = value.to(torch.float64)
    width = numbers.shape[-1] if numbers.dim() else 1
    numbers = numbers.reshape(-1, width) if numbers.numel() else numbers.reshape(0, 1)
    magnitude = numbers.abs()
    special = 0
    if not bool((magnitude.sum() < LARGEST).item()):  # also false for NaN
        usual = magnitude < LARGEST
        special = int((~usual).sum())
        numbers = torch.where(usual, numbers, 0.0)
        magnitude = numbers.abs()
    square = numbers * numbers
    sums = torch.stack(
        [numbers.sum(1), square.sum(1), (square * numbers).sum(1), torch.sin(3.0 * numbers).sum(1)], dim=1
    )
    first, third = magnitude.sum(1), (square * magnitude).sum(1)
    largest = float(magnitude.max()) if magnitude.numel() else 0.0
    total, size = sums.sum(0), float(first.sum())
    sizes = [size, float(total[1]), float(third.sum()), 3.0 * size]
    if largest < _CANCELLED * operands:
        lost = _LOST * operands * numbers.numel()
        sizes = [x + lost * y for x, y in zip(sizes, (1.0, 2 * largest, 3 * largest**2, 3.0), strict=True)]
    kept = None
    if rows and width >= SHORTEST_ROW and len(sums) <= MOST_ROWS:
        kept = sums[first > 0].cpu().numpy()
    flat = numbers.reshape(-1)
    places = torch.arange(len(flat), dtype=torch.float64, device=flat.device).mul_(0.754877666).sin_()
    return Measured(
        Moments(_four(total.tolist()), _four(sizes), special),
        kept,
        (float((flat * places).sum()), size),
        largest,
    )


def _four(values: Sequence[float]) -> tuple[float, float, float, float]:
    first, second, third, fourth = values
    return first, second, third, fourth


def additive_digest(tensor: torch.Tensor) -> int:
    """Return a hash of the elements' values that is blind to their order and dtype, and additive over parts."""
    value = tensor.detach().resolve_conj().resolve_neg()
    if value.is_quantized:
        value = value.dequantize()
    if value.is_complex():
        value = torch.view_as_real(value)
    bits = (value.to(torch.float64) + 0.0).contiguous().view(torch.int64)
    bits = (bits ^ ((bits >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    bits = (bits ^ ((bits >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return int((bits ^ ((bits >> 31) & 0x1FFFFFFFF)).sum()) % 2**64
