"""Moments of tensors: sums over all elements and over each row, in float64, blind to layout and to zeros of padding."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from hashbench.core.divergence.content import Moments

LARGEST = 9e8
"""Magnitude from which on an element counts as special: a mask's fill (-1e9), an infinity. As a number a fill
would hide whatever is beside it."""

MOST_ROWS = 8192
"""Rows of a tensor whose moments are kept."""

SHORTEST_ROW = 2
"""Elements of a row from which on its moments are kept."""

_CANCELLED = 1e-8
"""Result over operands from which on cancellation may have left little but rounding."""

_LOST = 1e-4
"""What cancellation may lose, in tolerances of the operands' magnitude: 1e-13 at 1e-9."""


@dataclass(frozen=True, slots=True)
class MeasuredTensor:
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


def measure(tensor: torch.Tensor, *, operands: float = 0.0, rows: bool = False) -> MeasuredTensor:
    """Return the moments of a tensor of any dtype and shape.

    Args:
        tensor: strided; complex ones count as pairs of numbers, bools as 0 and 1.
        operands: largest magnitude of what the op read. Where the result is far below it, moments are compared with
            what cancellation may have lost.
        rows: keep the moments of rows.
    """
    value = _plain(tensor)
    width = value.shape[-1] if value.dim() else 1
    by_rows = rows and width >= SHORTEST_ROW and value.numel() // width <= MOST_ROWS
    matrix = value.reshape(-1, width) if by_rows else value.reshape(1, -1)
    blocks = [_block(part, by_rows=by_rows, number=number) for number, part in enumerate(_blocks(matrix))]
    totals = torch.stack([block.totals for block in blocks]) if blocks else torch.zeros(1, _TOTALS)
    largest = float(totals[:, -1].max())
    first, second, third, fourth, size, ordered, special, _ = totals.sum(0).tolist()
    sizes = [size, second, second * largest, size]
    if largest < _CANCELLED * operands:
        lost = _LOST * operands * value.numel()
        sizes = [x + lost * y for x, y in zip(sizes, (1.0, 2 * largest, 3 * largest**2, 1.0), strict=True)]
    kept = torch.cat([block.rows for block in blocks]).cpu().numpy() if by_rows and blocks else None
    moments = Moments((first, second, third, fourth), _four(sizes), int(special))
    return MeasuredTensor(moments, kept, (ordered, size), largest)


_BLOCK = 1 << 15
"""Elements that are measured at once: in a processor's cache, by one thread (the grain of torch's parallel loops)."""

_TOTALS = 8


@dataclass(frozen=True, slots=True)
class _MomentBlock:
    """Sums of a block: four moments, magnitudes, places, number of special elements, largest; and moments of rows."""

    totals: torch.Tensor
    rows: torch.Tensor


def _blocks(matrix: torch.Tensor) -> Iterator[torch.Tensor]:
    if not matrix.numel():
        return
    if matrix.shape[0] == 1:
        yield from matrix.split(_BLOCK, dim=1)
    else:
        yield from matrix.split(max(1, _BLOCK // matrix.shape[1]))


def _block(part: torch.Tensor, *, by_rows: bool, number: int) -> _MomentBlock:
    numbers = part.to(torch.float64)
    magnitude = numbers.abs()
    special = torch.zeros((), dtype=torch.float64, device=part.device)
    if not bool(magnitude.max() < LARGEST):  # also false for NaN
        usual = magnitude < LARGEST
        special = (~usual).sum().to(torch.float64)
        numbers = torch.where(usual, numbers, 0.0)
        magnitude = numbers.abs()
    square = numbers * numbers
    sums = torch.stack(
        [numbers.sum(1), square.sum(1), (square * numbers).sum(1), (numbers / (square + 1.0)).sum(1)], dim=1
    )
    sizes = magnitude.sum(1)
    weights = _places(numbers.numel(), part.device).view(numbers.shape)
    places = (numbers * weights).sum() * (1.0 + number * 0.7548776662 % 1)
    totals = torch.stack([*sums.sum(0), sizes.sum(), places, special, magnitude.max()])
    return _MomentBlock(totals, sums[sizes > 0] if by_rows else sums)


@functools.lru_cache(maxsize=4)
def _places(count: int, device: torch.device) -> torch.Tensor:
    """Return a weight in 0 ... 1 for each place of a block."""
    return torch.arange(count, dtype=torch.float64, device=device).mul_(0.5698402910).frac_()


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    value = tensor.detach().resolve_conj().resolve_neg()
    if value.is_quantized:
        value = value.dequantize()
    return torch.view_as_real(value) if value.is_complex() else value


def _four(values: Sequence[float]) -> tuple[float, float, float, float]:
    first, second, third, fourth = values
    return first, second, third, fourth


def additive_digest(tensor: torch.Tensor) -> int:
    """Return a hash of the elements' values that is blind to their order and dtype, and additive over parts."""
    return sum(_digest(part) for part in _plain(tensor).reshape(-1).split(_BLOCK)) % 2**64


def _digest(part: torch.Tensor) -> int:
    bits = (part.to(torch.float64) + 0.0).view(torch.int64)
    bits = (bits ^ ((bits >> 30) & 0x3FFFFFFFF)).mul_(-0x40A7B892E31B1A47)
    bits = (bits ^ ((bits >> 27) & 0x1FFFFFFFFF)).mul_(-0x6B2FB644ECCEEE15)
    return int((bits ^ ((bits >> 31) & 0x1FFFFFFFF)).sum())
