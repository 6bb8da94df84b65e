"""Whose memory a kernel read: from addresses and digests of the calls of one graph. Pure, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hashbench.core.inductor.graphs import BufferRead, BufferWrite, KernelCall

CALLER, RETURN = "caller", "return"
"""Stand in the place of a kernel for who calls the graph: it left the inputs, and it reads what is returned."""


@dataclass(frozen=True, slots=True)
class LeftContent:
    """What was left for a reader.

    Attributes:
        name: of the buffer, or of the input.
        digest: of its content.
        position: of the call that left it; -1 for an input.
        address: of its first byte; 0 if unknown.
        nbytes: of its content.
    """

    name: str
    digest: str
    position: int = -1
    address: int = 0
    nbytes: int = 0


Memory = LeftContent | BufferRead | BufferWrite
"""What has an address and a size."""


@dataclass(frozen=True, slots=True)
class Access:
    """What a call read and wrote.

    Attributes:
        node: id of its record.
        kernel: its name.
        reads: as in :class:`~hashbench.core.inductor.graphs.KernelCall`.
        writes: what it left.
        recorded: names of written buffers that are the value of a node.
    """

    node: str
    kernel: str
    reads: tuple[BufferRead, ...] = ()
    writes: tuple[LeftContent, ...] = ()
    recorded: frozenset[str] = frozenset()

    @classmethod
    def of(cls, call: KernelCall, position: int, recorded: frozenset[str] = frozenset()) -> Access:
        """Return the access of a call, without its tensors."""
        writes = tuple(
            LeftContent(item.buffer, item.digest, position, item.address, item.nbytes) for item in call.writes
        )
        return cls(call.node, call.kernel, call.reads, writes, recorded)


@dataclass(frozen=True, slots=True)
class LostInput:
    """A value that was written over before a kernel read it.

    Attributes:
        reader: kernel that should have read it; :data:`RETURN` if the graph should have returned it.
        buffer: name of the buffer, or of the input of the graph.
        written_by: kernel that left it; :data:`CALLER` for an input.
        overwritten_by: last kernel that wrote over its memory before it was read: the one to blame.
        node: id of that kernel's record.
    """

    reader: str
    buffer: str
    written_by: str
    overwritten_by: str
    node: str = ""


def overlap(first: Memory, second: Memory) -> bool:
    """Return True if two tensors share memory; False if an address is unknown."""
    begin = max(first.address, second.address)
    end = min(first.address + first.nbytes, second.address + second.nbytes)
    return bool(first.address and second.address and begin < end)


def writer_of(read: BufferRead, accesses: Sequence[Access]) -> tuple[int, LeftContent] | None:
    """Return the position of the last of ``accesses`` that wrote what was read, and what it wrote: by address, or by
    digest if addresses are unknown; None if the caller did."""
    for position in range(len(accesses) - 1, -1, -1):
        for left in accesses[position].writes:
            if overlap(left, read) or (not read.address and read.digest and left.digest == read.digest):
                return position, left
    return None


def behind(reads: Sequence[BufferRead], accesses: Sequence[Access]) -> tuple[int, ...]:
    """Return the positions of the ``accesses`` whose results stand between recorded values and ``reads``, in order:
    those that wrote what is no node's value, and those that wrote for them."""
    found: set[int] = set()
    waiting = [(read, len(accesses)) for read in reads]
    while waiting:
        read, end = waiting.pop()
        writer = writer_of(read, accesses[:end])
        if writer is None or writer[0] in found or writer[1].name in accesses[writer[0]].recorded:
            continue
        found.add(writer[0])
        waiting += [(item, writer[0]) for item in accesses[writer[0]].reads]
    return tuple(sorted(found))


def overwriter(left: LeftContent, accesses: Sequence[Access]) -> Access | None:
    """Return the last of ``accesses`` after the one that left a value which wrote over its memory; None if none did."""
    later = accesses[left.position + 1 :]
    return next((item for item in reversed(later) if any(overlap(left, write) for write in item.writes)), None)


def lost_inputs(
    kernel: str, reads: Sequence[BufferRead], needed: Sequence[LeftContent], accesses: Sequence[Access]
) -> tuple[LostInput, ...]:
    """Return what a kernel did not read although it was left for it, and was written over.

    Args:
        kernel: its name.
        reads: what it read. If empty, nobody knows what it read, and nothing is lost.
        needed: what its buffer is evaluated from.
        accesses: of all calls before it.
    """
    through = [read for position in behind(reads, accesses) for read in accesses[position].reads]
    seen = {read.digest for read in [*reads, *through]}
    if not reads:
        return ()
    found = []
    for left in needed:
        guilty = None if left.digest in seen else overwriter(left, accesses)
        if guilty is not None:
            found.append(LostInput(kernel, left.name, left_by(left, accesses), guilty.kernel, guilty.node))
    return tuple(found)


def left_by(left: LeftContent, accesses: Sequence[Access]) -> str:
    """Return the name of the kernel that left a value."""
    return CALLER if left.position < 0 else accesses[left.position].kernel
