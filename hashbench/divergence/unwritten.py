"""Uninitialised memory: how much of each allocation the records of a run have written.

Pure: no torch. One pass over a trace; the writers of a storage form a chain, each record naming the one before it.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from hashbench.records import OpRecord, Ref, TensorDigest, Trace

_BITS = re.compile(r"\d+")


@dataclass(slots=True)
class _Chain:
    """The writes into one storage so far: its bytes, the op that allocated it blank, and the parts written."""

    size: int
    allocation: str = ""
    covered: int = 0
    parts: set[tuple[object, ...]] = field(default_factory=set)

    def cover(self, offset: int, digest: TensorDigest) -> None:
        part = (offset, digest.dtype, digest.shape, digest.stride)
        size = _bytes(digest)
        self.size = max(self.size, size)
        if part not in self.parts:
            self.parts.add(part)
            self.covered += size

    def is_open(self) -> bool:
        return bool(self.allocation) and self.covered < self.size


class Coverage:
    """Answers about every record and leaf of one trace, as of the moment after it.

    Writes count as covering what they show; two that overlap in part count twice. A record that writes several
    tensors answers for the largest.
    """

    def __init__(self, trace: Trace) -> None:
        self._chains = {leaf.id: _Chain(_bytes(leaf.digest)) for leaf in trace.leaves}
        self._sizes = {name: chain.size for name, chain in self._chains.items()}
        self._allocations: dict[str, str] = {}
        self._contents = {leaf.id: leaf.digest for leaf in trace.leaves}
        for record in trace.records:
            if record.outputs:
                self._enter(record, [ref for ref in record.inputs if ref.written and ref.source in self._chains])

    def allocation_behind(self, node: str) -> str:
        """The op that allocated the memory ``node`` wrote into, where a part of it is still blank; else empty."""
        return self._allocations.get(node, "")

    def writes_only_part(self, record: OpRecord, source: str) -> bool:
        """Whether ``record``, which writes into the tensor that ``source`` wrote, leaves some of it as it was."""
        return max(map(_bytes, record.outputs), default=0) < self._sizes.get(source, 0)

    def content(self, node: str) -> TensorDigest | None:
        """The digest of all that ``node`` left in its memory, where one digest tells all of it."""
        return self._contents.get(node)

    def _enter(self, record: OpRecord, written: Sequence[Ref]) -> None:
        largest = max(map(_bytes, record.outputs))
        chains = [self._chains[ref.source] for ref in written]
        if not chains or record.blank:
            chains = [_Chain(largest, record.id if record.blank else "")]
        else:
            for chain, ref, digest in zip(chains, written, record.outputs[-len(written) :], strict=False):
                chain.cover(ref.offset, digest)
        chain = next((chain for chain in chains if chain.is_open()), chains[0])
        self._chains[record.id] = chain
        self._sizes[record.id] = max(chain.size for chain in chains)
        if chain.is_open():
            self._allocations[record.id] = chain.allocation
        if len(record.outputs) == 1 and largest >= self._sizes[record.id] and not record.blank:
            self._contents[record.id] = record.outputs[0]


def _bytes(digest: TensorDigest) -> int:
    return math.prod(digest.shape) * _item_size(digest.dtype)


@functools.cache
def _item_size(dtype: str) -> int:
    """Bytes of one element, from the first number in the name of its dtype: ``float8_e4m3fn`` has 1, ``bool`` too."""
    bits = _BITS.search(dtype)
    return max(1, int(bits[0]) // 8 if bits is not None else 1)
