"""Where two runs write: an op that leaves the same in another part of a memory leaves another memory. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hashbench.core.divergence.align import PairedRuns
from hashbench.core.records import OpRecord, Ref

_COUNTED_ELEMENTS = 1 << 16
"""Parts with gaps that have more elements than this are taken to overlap: counting them would take seconds."""


class Place(NamedTuple):
    """A part of a memory: offset and strides in elements of its dtype."""

    offset: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def __str__(self) -> str:
        stride = "" if self.is_block else f" stride {list(self.stride)}"
        return f"offset {self.offset} shape {list(self.shape)}{stride}"

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        """The element behind the last one."""
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=False))
        return self.offset + (1 + last if self.size else 0)

    @property
    def is_block(self) -> bool:
        """True if it has no gaps."""
        return self.end - self.offset == self.size

    def elements(self) -> Iterator[int]:
        """Yield the indices of its elements in the storage."""
        steps = [[at * step for at in range(size)] for size, step in zip(self.shape, self.stride, strict=False)]
        return (self.offset + sum(at) for at in itertools.product(*steps))


class Written(NamedTuple):
    """One tensor that a record wrote in place: the argument, the part of its memory, and the content that it left."""

    ref: Ref
    place: Place
    content: str

    @property
    def is_idle(self) -> bool:
        """True if nothing changed: known where inputs were hashed."""
        return not self.place.size or (bool(self.content) and self.ref.digest == self.content)


@dataclass(slots=True)
class Parts:
    """What two runs wrote to the parts of one memory since they left the same in all of it.

    Attributes:
        first, second: content by place.
        odd: the places where the runs left different content, or only one of them wrote.
        end: the element behind all of the places.
        overlap: a part covers another one in part, so that their order counts.
    """

    first: dict[Place, str] = field(default_factory=dict)
    second: dict[Place, str] = field(default_factory=dict)
    odd: set[Place] = field(default_factory=set)
    end: int = 0
    overlap: bool = False

    def add(self, a: Written, b: Written) -> None:
        """Add what a pair of records wrote."""
        self.first[a.place], self.second[b.place] = a.content, b.content
        self.end = max(self.end, a.place.end, b.place.end)
        for place in (a.place, b.place):
            differs = self.first.get(place) != self.second.get(place)
            (self.odd.add if differs else self.odd.discard)(place)

    def agree(self) -> bool:
        """Return True if the memory is the same in both runs."""
        if not self.odd:
            self.overlap = self.overlap or not _lie_apart([*self.first])
        return not self.odd and not self.overlap

    def lie_before(self, offset: int, dtypes: Collection[str]) -> bool:
        """Return True if all parts end before what is read from ``offset`` on, by an op that wrote these dtypes.

        The dtype of what is read is not known: an op that writes that of the parts is taken to read it as well, which
        is wrong of ``v.view(torch.uint8)[8:].float()``.
        """
        return self.end <= offset and all(place.dtype in dtypes for place in (*self.first, *self.second))


def _lie_apart(places: Sequence[Place]) -> bool:
    if len({place.dtype for place in places}) > 1:
        return False  # offsets count other elements
    if all(place.is_block for place in places):
        ordered = sorted(places)
        return all(before.end <= after.offset for before, after in itertools.pairwise(ordered))
    count = sum(place.size for place in places)
    return count <= _COUNTED_ELEMENTS and count == len({at for place in places for at in place.elements()})


def written_in_place(record: OpRecord) -> list[Written]:
    """List what a record wrote in place; nothing where a trace does not say which output is which.

    That is so of an op whose inner calls wrote it, of one that returns more than it wrote (``batch_norm``), and of one
    whose argument overlaps what it wrote: ``v[1:].copy_(v[:-1])`` leaves its source as an output as well.
    """
    written = [ref for ref in record.inputs if ref.written]
    if len(record.outputs) != len(written):
        return []
    return [
        Written(ref, Place(ref.offset, output.dtype, output.shape, output.stride), output.value)
        for ref, output in zip(written, record.outputs, strict=True)
    ]


def written_elsewhere(
    runs: PairedRuns, first: Sequence[Written], second: Sequence[Written]
) -> tuple[Written, Written] | None:
    """Return the first tensor that a pair of records wrote to another part of the same memory, if it changed there.

    Memory that an op resized (``out=``) is no other part.
    """
    for written, other in zip(first, second, strict=False):
        same = written.ref.argument == other.ref.argument and written.ref.source == runs.node_of[other.ref.source]
        if not same or written.place == other.place or written.place.dtype != other.place.dtype:
            continue
        resized = written.place.offset == other.place.offset and not written.ref.argument[:1].isdigit()
        if not resized and not (written.is_idle and other.is_idle):
            return written, other
    return None
