"""The tensors of one side that still have no partner, with their digests, each computed once. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from hashbench.extensions.implementations.digest import (
    Digest,
    Lines,
    TensorSource,
    digest,
    is_through,
    lines,
    matrices,
)
from hashbench.extensions.implementations.dtypes import NARROWER, SIZES, common_dtypes


class Level(NamedTuple):
    """Tensors of which dtypes are compared, and rounded to which.

    Attributes:
        a, b: dtypes of both sides.
        common: the dtype in which they are compared.
        rounded: only tensors of which one side went through ``common`` and the other did not.
    """

    a: str
    b: str
    common: str
    rounded: bool = False

    @property
    def cast(self) -> str:
        """The dtypes in words, where they differ."""
        return "" if self.a == self.b else f"{self.a} to {self.b}"


def levels(dtypes_a: Iterable[str], dtypes_b: Iterable[str]) -> tuple[Level, ...]:
    """Return how dtypes can be compared: the same first, then casts, then what went through a narrower one."""
    ours, theirs = [*dict.fromkeys(dtypes_a)], [*dict.fromkeys(dtypes_b)]
    same = [dtype for dtype in ours if dtype in theirs]
    casts = [
        Level(one, other, common)
        for one in ours
        for other in theirs
        if one != other
        for common in common_dtypes(one, other)
    ]
    through = [
        Level(dtype, dtype, way, rounded=True)
        for dtype in same
        for way in NARROWER.get(dtype, ())
        if SIZES[way] < SIZES[dtype]
    ]
    return (*(Level(dtype, dtype, dtype) for dtype in same), *casts, *through)


class Pool:
    """Tensors of one side, by name, from which those are taken that have a partner.

    Attributes:
        tensors: all of them.
        left: names without a partner so far, in order; tensors without elements are not among them.
        constants: those of one repeated value, with its bits.
        twins: name -> others of this side with the same elements in the same shape, which follow it.
    """

    def __init__(self, tensors: TensorSource) -> None:
        self.tensors = tensors
        self.left = {name: None for name, header in tensors.headers.items() if header.count}
        self._digests: dict[tuple[str, str], Digest] = {}
        self._lines: dict[tuple[str, str], Lines] = {}
        self._through: dict[tuple[str, str], bool] = {}
        self.constants: dict[str, int] = {}
        for name in self.left:
            value = self.digest(name, self.dtype(name)).constant
            if value is not None:
                self.constants[name] = value
        self.twins = self._find_twins()

    def _find_twins(self) -> dict[str, tuple[str, ...]]:
        seen: dict[object, list[str]] = {}
        for name in self.left:
            if name not in self.constants:
                header = self.tensors.headers[name]
                key = (header, self.digest(name, header.dtype))
                seen.setdefault(key, []).append(name)
        return {names[0]: tuple(names[1:]) for names in seen.values() if len(names) > 1}

    def dtype(self, name: str) -> str:
        """Return the dtype of a tensor."""
        return self.tensors.headers[name].dtype

    def count(self, name: str) -> int:
        """Return the number of elements of a tensor."""
        return self.tensors.headers[name].count

    def digest(self, name: str, dtype: str) -> Digest:
        """Return the digest of a tensor in a dtype."""
        key = (name, dtype)
        if key not in self._digests:
            self._digests[key] = digest(self.tensors, name, dtype)
        return self._digests[key]

    def lines(self, name: str, dtype: str) -> Lines:
        """Return the digests of the rows and columns of a tensor in a dtype."""
        key = (name, dtype)
        if key not in self._lines:
            self._lines[key] = lines(self.tensors, name, dtype)
        return self._lines[key]

    def went_through(self, name: str, dtype: str) -> bool:
        """Return whether all elements are representable in a narrower dtype."""
        key = (name, dtype)
        if key not in self._through:
            self._through[key] = is_through(self.tensors, name, dtype)
        return self._through[key]

    def candidates(self, dtype: str) -> list[str]:
        """Return the tensors of a dtype that are left and no constants."""
        return [name for name in self.left if name not in self.constants and self.dtype(name) == dtype]

    def with_lines(self, dtype: str) -> list[str]:
        """Return the candidates that are matrices, of tensors that are equal the first alone."""
        twins = {twin for names in self.twins.values() for twin in names}
        names = (name for name in self.candidates(dtype) if name not in twins)
        return [name for name in names if matrices(self.tensors.headers[name].shape)[:2] != (1, 1)]

    def take(self, names: Iterable[str]) -> tuple[str, ...]:
        """Remove tensors, with their twins, from those that are left; return them all."""
        taken = tuple(dict.fromkeys(each for name in names for each in (name, *self.twins.get(name, ()))))
        for name in taken:
            self.left.pop(name, None)
        return taken
