"""Digests of a tensor: an additive one, blind to order; a positional one; and both for its rows and columns. No torch.

Each element's bits are mixed into 64 bits. The sum of these modulo 2**64 is the additive digest: that of a fused tensor
is the sum of those of its parts. In the digest of a line (a row, a column) each element is weighted by its place.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from hashbench.extensions.implementations.dtypes import Bits, is_representable, rounded, unsigned

CHUNK = 2**20
"""Elements that are read and digested at once: some 50 MiB of memory."""

Words = npt.NDArray[np.uint64]

_TABLED = 2
"""Bytes of the largest elements of which all hashes are kept in a table."""


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """What is known of a tensor before it is read. ``dtype``: as torch calls it."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def count(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=object)) if self.shape else 1

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


class TensorSource(Protocol):
    """Tensors by name, which are read part by part."""

    @property
    def headers(self) -> dict[str, TensorHeader]:
        """Every tensor's header, by its name."""

    def read(self, name: str, start: int, stop: int) -> Bits:
        """Return the elements from ``start`` to ``stop`` of a tensor, row after row."""


@dataclass(frozen=True, slots=True)
class Digest:
    """Digests of a whole tensor in one dtype.

    Attributes:
        count: number of elements.
        additive: blind to the order of elements, and so to shape and layout.
        positional: blind to the shape alone.
        constant: bits of the element that all elements are equal to; ``None`` if they are not.
    """

    count: int
    additive: int
    positional: int
    constant: int | None


@dataclass(frozen=True, slots=True)
class Lines:
    """Positional digests of the rows and of the columns of a tensor, as a stack of matrices.

    Attributes:
        shape: number of matrices, rows and columns of each.
        rows: of each row: ``shape[0] * shape[1]`` digests.
        columns: of each column: ``shape[0] * shape[2]`` digests.
    """

    shape: tuple[int, int, int]
    rows: Words
    columns: Words

    def of(self, axis: str) -> Words:
        """Return the digests along ``rows`` or ``columns``."""
        return self.rows if axis == "rows" else self.columns

    def length(self, axis: str) -> int:
        """Return the number of elements of a row, or of a column."""
        return self.shape[2] if axis == "rows" else self.shape[1]

    def place(self, axis: str, line: int) -> tuple[int, int]:
        """Return where a line begins, and the distance of its elements, both in elements of the tensor."""
        _, rows, columns = self.shape
        if axis == "rows":
            return line * columns, 1
        matrix, column = divmod(line, columns)
        return matrix * rows * columns + column, columns


def mixed(values: Words) -> Words:
    """Return a hash of each value (the finalizer of SplitMix64)."""
    x = values + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@functools.cache
def _table(size: int) -> Words:
    return mixed(np.arange(1 << (8 * size), dtype=np.uint64))


def hashes(bits: Bits) -> Words:
    """Return the hash of each element."""
    if bits.itemsize <= _TABLED:
        return _table(bits.itemsize)[bits]
    return mixed(bits.astype(np.uint64))


def _weights(start: int, stop: int) -> Words:
    """Return a weight for each place on a line."""
    return mixed(np.arange(start, stop, dtype=np.uint64) ^ np.uint64(0x5851F42D4C957F2D)) | np.uint64(1)


def total(values: Words) -> int:
    """Return the sum modulo 2**64."""
    return int(values.sum(dtype=np.uint64))


def line_of_zeros(length: int) -> int:
    """Return the digest of a line whose bits are all zero."""
    zero = int(mixed(np.zeros(1, np.uint64))[0])
    return zero * total(_weights(0, length)) % 2**64


def additive(bits: Bits) -> int:
    """Return the additive digest of elements."""
    return total(hashes(bits))


def chunks(tensors: TensorSource, name: str) -> Iterator[Bits]:
    """Yield the elements of a tensor, some at a time."""
    count = tensors.headers[name].count
    for start in range(0, count, CHUNK):
        yield tensors.read(name, start, min(count, start + CHUNK))


def digest(tensors: TensorSource, name: str, dtype: str) -> Digest:
    """Return the digests of a tensor whose elements are rounded to ``dtype``."""
    own = tensors.headers[name]
    summed, ordered, first, constant = 0, xxhash.xxh3_64(), None, True
    for chunk in chunks(tensors, name):
        bits = rounded(chunk, own.dtype, dtype)
        summed += additive(bits)
        ordered.update(np.ascontiguousarray(bits).data)
        first = int(bits[0]) if first is None else first
        constant = constant and bool(np.all(bits == bits.dtype.type(first)))
    return Digest(own.count, summed % 2**64, ordered.intdigest(), first if constant else None)


def is_through(tensors: TensorSource, name: str, dtype: str) -> bool:
    """Return whether each element of a tensor is representable in ``dtype``."""
    own = tensors.headers[name].dtype
    return all(is_representable(chunk, own, dtype) for chunk in chunks(tensors, name))


def matrices(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return a shape as a stack of matrices: convolutions are one matrix, a row for each output channel."""
    wide = [size for size in shape if size != 1]
    if len(wide) < 2:
        return 1, 1, int(np.prod(wide, dtype=object)) if wide else 1
    if len(wide) > 2 and min(wide[-2:]) >= SHORTEST_LINE:
        return int(np.prod(wide[:-2], dtype=object)), wide[-2], wide[-1]
    return 1, wide[0], int(np.prod(wide[1:], dtype=object))


SHORTEST_LINE = 8
"""Elements of a line from which on it tells tensors apart."""


def lines(tensors: TensorSource, name: str, dtype: str) -> Lines:
    """Return the digests of the rows and columns of a tensor whose elements are rounded to ``dtype``."""
    own = tensors.headers[name]
    stack, rows, columns = shape = matrices(own.shape)
    of_rows, of_columns = np.zeros(stack * rows, np.uint64), np.zeros((stack, columns), np.uint64)
    step = max(1, CHUNK // max(1, columns))
    with np.errstate(over="ignore"):
        for matrix in range(stack):
            for top in range(0, rows, step):
                bottom = min(rows, top + step)
                for left in range(0, columns, CHUNK):
                    right = min(columns, left + CHUNK)
                    first = (matrix * rows + top) * columns + left
                    last = (matrix * rows + bottom - 1) * columns + right
                    bits = rounded(tensors.read(name, first, last), own.dtype, dtype)
                    block = hashes(bits).reshape(bottom - top, right - left)
                    at = matrix * rows
                    of_rows[at + top : at + bottom] += (block * _weights(left, right)).sum(axis=1, dtype=np.uint64)
                    of_columns[matrix, left:right] += (block * _weights(top, bottom)[:, None]).sum(
                        axis=0, dtype=np.uint64
                    )
    return Lines(shape, of_rows, of_columns.ravel())


def elements(tensors: TensorSource, name: str, dtype: str) -> Bits:
    """Return all elements of a tensor, rounded to ``dtype``."""
    own = tensors.headers[name].dtype
    made = np.empty(tensors.headers[name].count, unsigned(dtype))
    start = 0
    for chunk in chunks(tensors, name):
        made[start : start + chunk.size] = rounded(chunk, own, dtype)
        start += chunk.size
    return made
