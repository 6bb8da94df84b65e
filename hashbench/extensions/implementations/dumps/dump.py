"""A dump as it was found, before its tensors are read, and the errors of reading one. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hashbench.core.errors import HashbenchError
from hashbench.extensions.implementations.digest import TensorHeader, TensorSource


@dataclass(frozen=True, slots=True)
class DumpedTensor:
    """One tensor of a dump.

    Attributes:
        name: as people read it, unique in its dump.
        source: what reads its elements.
        key: its name there.
        step: number of the step or pass; ``None`` if nothing says so.
    """

    name: str
    source: TensorSource
    key: str
    step: int | None = None

    @property
    def header(self) -> TensorHeader:
        """Its shape and dtype."""
        return self.source.headers[self.key]


@dataclass(frozen=True, slots=True)
class Dump:
    """All tensors of a run.

    Attributes:
        kind: who wrote it, in words.
        order: the order of its tensors, in words.
        of_calls: it is the order in which they were computed.
        tensors: in this order, steps one after another.
        notes: what it lacks, in sentences.
    """

    kind: str
    order: str
    of_calls: bool
    tensors: tuple[DumpedTensor, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DumpReader:
    """Reads the dumps of one tool.

    Attributes:
        applies: whether a path, which exists, is such a dump; reads no tensor.
        read: returns it, or raises :class:`~hashbench.core.errors.HashbenchError`.
    """

    applies: Callable[[Path], bool]
    read: Callable[[Path], Dump]


def unreadable(path: Path, why: str, tip: str = "Write the dump again.") -> HashbenchError:
    """Return the error of a dump that cannot be read."""
    return HashbenchError(f"cannot read {path}", consequence=f"{why}, so nothing was compared", tip=tip)
