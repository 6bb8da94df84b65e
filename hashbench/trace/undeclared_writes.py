"""Writes that no schema declares, where it is known only later whether there were any.

With every input hashed around every op, an argument that changed was written by the op. On an accelerator both digests
are still on the device then, and asking would make the program wait. So the storage is marked with a number that stands
for "this record if it wrote, else whoever wrote before", and the trace settles it when digests may be read. One thing
comes out otherwise than on the CPU: where only a part of a leaf was seen, and an op that declares it writes after
an undeclared write, the whole is taken for a leaf once more.
"""

from __future__ import annotations

from typing import Any

from hashbench.trace.digest import RawDigest, readable
from hashbench.trace.storage_writers import LeafViews, Mark

_FIRST = 1 << 60
"""Numbers from here on stand for a suspicion; records count from 0, leaves from -1 down."""


class Suspicions:
    """All of one trace, in the order of its calls."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int, RawDigest, RawDigest]] = []
        self._writers: list[int] = []

    def mark(self, number: int, before: Mark, digests: tuple[RawDigest, RawDigest]) -> Mark:
        """The mark of a storage of which record ``number`` may have written a part; ``digests`` are those of the part
        before and after, and ``before`` is the mark that the storage has."""
        token, node, views = before
        if views is None:
            return token, self._add(number, node, digests), None
        aliased = LeafViews()
        for place, leaf in views.numbers.items():
            aliased.numbers[place] = self._add(number, leaf, digests)
        return token, node, aliased

    def settle(self) -> list[tuple[int, RawDigest]]:
        """The writes found since the last call: number of the record, digest of what it wrote. Waits for devices."""
        found: list[tuple[int, RawDigest]] = []
        for number, node, before, after in self._waiting[len(self._writers) :]:
            wrote = readable(before) != readable(after)
            if wrote and (number, after) not in found[-1:]:  # one write, seen through several views of a leaf
                found.append((number, after))
            self._writers.append(number if wrote else self.node(node))
        return found

    def node(self, node: int) -> int:
        """The number of a record or leaf, once settled."""
        return self._writers[node - _FIRST] if node >= _FIRST else node

    def settled(self, record: tuple[Any, ...]) -> tuple[Any, ...]:
        """A raw record whose reads name records and leaves, once settled."""
        reads = record[5]
        if not any(node >= _FIRST for node in reads[1::3]):
            return record
        plain = tuple([self.node(value) if at % 3 == 1 else value for at, value in enumerate(reads)])
        return (*record[:5], plain, *record[6:])

    def _add(self, number: int, node: int, digests: tuple[RawDigest, RawDigest]) -> int:
        self._waiting.append((number, node, *digests))
        return _FIRST + len(self._waiting) - 1
