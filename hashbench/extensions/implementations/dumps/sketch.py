"""What is kept of a dumped tensor: its moments, those of its rows, and a digest of its bits. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import xxhash

from hashbench.core.divergence.content import Moments
from hashbench.extensions.implementations.digest import TensorHeader
from hashbench.extensions.implementations.dtypes import NARROWER, Bits, as_float
from hashbench.extensions.implementations.dumps.dump import DumpedTensor

Doubles = npt.NDArray[np.float64]

FILL = 1e30
"""Smallest magnitude of an element that is counted alone: a mask's fill, whose powers would hide all others."""

CHUNK = 2**15
"""Elements that are read at once: their powers stay in the processor's cache."""

SHORTEST_ROW = 8
"""Elements of the last dimension from which on rows tell tensors apart."""


@dataclass(frozen=True, slots=True)
class Sketch:
    """A tensor of a dump.

    Attributes:
        name, step, header: those of the :class:`~.dump.DumpedTensor`.
        digest: of its bits in their order, whatever its shape.
        constant: all its elements are the same.
        moments: of all elements.
        rows: along the last dimension: ``[rows, 8]``, four sums and their four sizes; ``None`` where rows are short.
    """

    name: str
    step: int | None
    header: TensorHeader
    digest: int
    constant: bool
    moments: Moments
    rows: Doubles | None = field(default=None, compare=False, repr=False)


def is_number(header: TensorHeader) -> bool:
    """Return whether moments of a dtype can be taken here."""
    return header.dtype in NARROWER or header.dtype.startswith(("int", "uint", "bool"))


def sketch_of(tensor: DumpedTensor) -> Sketch:
    """Read a tensor, some rows at a time."""
    header = tensor.header
    width = header.shape[-1] if header.shape else 1
    step = max(1, CHUNK // max(1, width)) * max(1, width)
    digest, parts, special, first, constant = xxhash.xxh3_64(), [np.zeros((0, 8))], 0, None, True
    for start in range(0, header.count, step):
        bits = tensor.source.read(tensor.key, start, min(header.count, start + step))
        digest.update(np.ascontiguousarray(bits).data)
        first = bits[0] if first is None else first
        constant = constant and bool(np.all(bits == first))
        values = _values(bits, header.dtype).reshape(-1, max(1, width))
        usual = np.abs(values) < FILL  # not NaN, either
        special += int(values.size - np.count_nonzero(usual))
        parts.append(_row_moments(np.where(usual, values, 0.0)))
        if width < SHORTEST_ROW:  # only the sums are needed
            parts = [np.concatenate(parts).sum(0, keepdims=True)]
    rows = np.concatenate(parts)
    sums = rows.sum(0).tolist()
    moments = Moments(tuple(sums[:4]), tuple(sums[4:]), special)
    kept = rows if width >= SHORTEST_ROW else None
    return Sketch(tensor.name, tensor.step, header, digest.intdigest(), constant, moments, kept)


def _values(bits: Bits, dtype: str) -> Doubles:
    if dtype in NARROWER:
        return as_float(bits, dtype).astype(np.float64)
    return bits.view(f"<i{bits.itemsize}").astype(np.float64) if dtype.startswith("int") else bits.astype(np.float64)


def _row_moments(x: Doubles) -> Doubles:
    square, size = x * x, np.abs(x)
    sums = [term.sum(-1) for term in (x, square, square * x, np.sin(3 * x), size, square * size)]
    # The size of sin(3x) is 3|x|: no smaller than it, and what an error of x does to it.
    return np.stack([*sums[:5], sums[1], sums[5], 3 * sums[4]], -1)
