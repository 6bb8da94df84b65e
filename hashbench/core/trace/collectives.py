"""Collectives of a trace: what a rank contributes, read just before the call, and what it receives, once it is there.

The outputs of asynchronous collectives are hashed once their Work is done: at the first read, or at the end of the
trace.

A collective returns before its data have arrived: gloo's threads, or a stream, go on writing. Its outputs are kept
until they are hashed (its Work keeps them alive anyway); their storages are marked
:data:`~hashbench.core.trace.storage_writers.IN_FLIGHT`.

A program that reads such an output should have waited for the Work. Whether it did is unknown: waits in C++ are
invisible, and ``is_completed`` may stay false after a wait. So if the Work is not known to be done at the first read,
the output is hashed before and after the trace waits: different digests prove that the program reads too early.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hashbench.core.devices.ledger import Ledger
from hashbench.core.native.library import unrecorded
from hashbench.core.records import PENDING, Collective
from hashbench.core.trace.arguments import caller_line, named_tensors
from hashbench.core.trace.build import EARLY, RawRecord
from hashbench.core.trace.collective_ops import UNKNOWN
from hashbench.core.trace.digest import Arrival, RawDigest, raw_digest, readable
from hashbench.core.trace.groups import RankGroup, RankGroups
from hashbench.core.trace.op_schema import OpPlan
from hashbench.core.trace.storage_writers import IN_FLIGHT, get_mark, is_in_flight, set_mark, storage_bytes

LIMIT = 60.0
"""Timeout in seconds, at the end of a trace, for collectives whose outputs were never read."""


@dataclass(frozen=True, slots=True)
class _Exchange:
    """One collective: its outputs, their future digests, and its Work (``None`` for functional collectives, which keep
    it in a table by tensor)."""

    tensors: Sequence[torch.Tensor]
    arrivals: Sequence[Arrival]
    work: Any
    receives_once: bool

    @property
    def on_cpu(self) -> bool:
        """True if all outputs are on the CPU."""
        return all(tensor.is_cpu for tensor in self.tensors)

    def is_done(self) -> bool:
        """Return True if the Work is known to be done. Within a callback of its future, only the future is."""
        try:
            return self.work is not None and bool(self.work.is_completed() or self._has_future_value())
        except RuntimeError:  # raised again by the program's own wait; a Work that copies in its wait has no future
            return False

    def _has_future_value(self) -> bool:
        return self.on_cpu and bool(self.work.get_future().done())

    def arrive(self, *, limit: float | None = None) -> bool:
        """Wait for the data, ``limit`` seconds at most if given; return whether they arrived.

        Messages that the program has not waited for are left to it, and a failed collective never arrives.
        ``is_completed`` stays false after a wait for some of gloo's collectives (``reduce_scatter``).
        """
        try:
            if self.is_done() and (self.on_cpu or self.receives_once):
                return True
            if self.receives_once:
                return False
            if limit is None or not self.on_cpu:
                # On an accelerator, only the stream waits: of a Work that is done, gloo's copies may be under way.
                self._wait()
                return True
        except RuntimeError:  # raised again by the program's own wait
            return False
        return _ends_within(limit, self._wait)

    def _wait(self) -> None:
        if self.work is not None:
            self.work.wait()
            return
        for tensor in self.tensors:
            torch.ops._c10d_functional.wait_tensor(tensor)


@dataclass(frozen=True, slots=True)
class _Read:
    """The first read of a collective's output while its Work was not known to be done.

    Attributes:
        number: number of the record of the collective.
        position: number of records so far; the record of the read comes at or after it.
        result: name of the result that was read, empty where an op read it.
        source: line of the caller's code.
        before: digests of all outputs at that moment.
        after: digests of all outputs once the Work was done.
    """

    number: int
    position: int
    result: str
    source: str
    before: Sequence[RawDigest]
    after: Sequence[Arrival]

    def is_before_change(self) -> bool:
        """Return True if an output changed after the read. Waits for devices."""
        pairs = zip((readable(raw).value for raw in self.before), self.left(), strict=True)
        return any(old != new != PENDING for old, new in pairs)

    def left(self) -> list[str]:
        """Return the digests of all outputs once the Work was done."""
        return [readable((*raw[:3], then)).value for raw, then in zip(self.before, self.after, strict=True)]

    def reader_among(self, records: Sequence[RawRecord]) -> RawRecord | None:
        """Return the record of the op that read; ``None`` where it raised, and has none."""
        readers = (record for record in records if record.number >= self.position and self.number in record.reads[1::3])
        return min(readers, key=lambda record: record.number, default=None)

    def is_part_of_wait(self, reader: RawRecord, argument: int | str) -> bool:
        """Return True if the op copies to the output what the collective left there: gloo's Work of a reduce-scatter
        copies its output when it is waited for."""
        return reader.plan.writes(argument) and {readable(raw).value for raw in reader.written} <= {*self.left()}


@dataclass(frozen=True, slots=True)
class Exchanged:
    """What a call exchanges, with digests of all that this rank contributes, by argument."""

    collective: Collective
    group: RankGroup
    contributed: Mapping[str, RawDigest]


class Collectives:
    """Collectives of one trace: its process groups, and those whose outputs are not hashed yet, by record number."""

    def __init__(self, token: object, ledger: Ledger) -> None:
        self._token, self._ledger = token, ledger
        self.groups = RankGroups()
        self._thread = threading.local()
        self._open: dict[int, _Exchange] = {}
        self._unsure: dict[int, _Read] = {}

    @property
    def under_way(self) -> bool:
        """True if outputs are waiting to be hashed."""
        return bool(self._open)

    def exchanged(
        self, plan: OpPlan, args: Sequence[Any], kwargs: Mapping[str, Any], known: Mapping[str, RawDigest]
    ) -> Exchanged:
        """Return what a call that is about to be made exchanges.

        A collective that another calls meets in the same group, and what it contributes is not hashed again.

        Args:
            known: digests of its arguments, if taken.
        """
        op = plan.collective
        assert op is not None
        outer: RankGroup | None = getattr(self._thread, "group", None)
        group = outer or self.groups.of(op.group(args, kwargs))
        root = op.root(args, kwargs)
        is_root = root is None or group.own is None or group.own == root
        contributed = {
            path: tensor
            for argument, value in op.contributed(args, kwargs, is_root=is_root)
            for path, tensor in named_tensors(value, argument)
        }
        collective = Collective(
            op.kind,
            group.ranks,
            group.ordinal,
            tuple(contributed),
            group.global_rank(root),
            group.global_rank(op.peer(args, kwargs)),
            op.tag(args, kwargs),
        )
        if outer is not None:
            return Exchanged(collective, group, {})
        digests = {
            path: known[path] if path in known else digest_unless_in_flight(tensor, self._ledger)
            for path, tensor in contributed.items()
        }
        return Exchanged(collective, group, digests)

    @contextlib.contextmanager
    def within(self, exchanged: Exchanged) -> Iterator[None]:
        """Make a call that exchanges this within this context."""
        outer = getattr(self._thread, "group", None)
        if exchanged.collective.kind != UNKNOWN:
            self._thread.group = exchanged.group
        try:
            yield
        finally:
            self._thread.group = outer

    @unrecorded()
    def begin(
        self, number: int, tensors: Sequence[torch.Tensor], output: Any, *, receives_once: bool
    ) -> tuple[RawDigest, ...]:
        """Register the collective that became record ``number``; return the future digests of its outputs."""
        arrivals = [Arrival() for _ in tensors]
        # A collective gives a tensor without a storage other components: a detached one would keep the old.
        kept = [tensor.detach() if tensor.layout is torch.strided else tensor for tensor in tensors]
        self._open[number] = _Exchange(kept, arrivals, _work_in(output), receives_once)
        for tensor in tensors:
            set_mark(tensor, (self._token, number, IN_FLIGHT))
        return tuple(
            [
                (tensor.dtype, tuple(tensor.shape), _stride(tensor), arrival)
                for tensor, arrival in zip(tensors, arrivals, strict=True)
            ]
        )

    @unrecorded()
    def read(
        self, number: int, tensor: torch.Tensor, *, position: int, by: OpPlan | None = None, result: str = ""
    ) -> None:
        """Wait for record ``number`` and hash its outputs, if ``tensor``, which is about to be read, shows one of them.

        Args:
            number: record of the collective.
            tensor: the tensor that is read.
            position: number of records so far.
            by: the op that reads. An op that waits is never early, nor is a collective on an accelerator, which is
                queued behind earlier ones anyway.
            result: name of the result that is read, if no op reads.
        """
        exchange = self._open.get(number)
        if exchange is None or not any(_overlap(tensor, other) for other in exchange.tensors):
            return
        in_order = by is not None and (by.waits or (by.collective and not tensor.is_cpu))
        if number not in self._unsure and not in_order and not exchange.is_done():
            source = caller_line(sys._getframe(1))
            before = [raw_digest(other, self._ledger) for other in exchange.tensors]
            self._unsure[number] = _Read(number, position, result, source, before, exchange.arrivals)
        self._hash(number, exchange)

    def is_in_flight(self, number: int) -> bool:
        """Return True if the outputs of the collective of this record may still be hashed."""
        return number in self._open

    @unrecorded()
    def settle(self) -> None:
        """Hash the outputs of collectives whose Work is known to be done; wait for none."""
        for number, exchange in sorted(self._open.items()):
            if exchange.is_done():
                self._hash(number, exchange)

    def note_early_reads(
        self, records: Sequence[RawRecord], notes: dict[int, dict[str, Any]], *, once: bool = False
    ) -> dict[str, str]:
        """Add early reads to ``notes``, by record number; return the results that were read early.

        Both with source lines. Synchronizes devices. If ``once`` is set, a read is noted by one call only.
        """
        reads = list(self._unsure.values())
        if once:
            reads = [read for read in reads if not self.is_in_flight(read.number)]
            for read in reads:
                del self._unsure[read.number]
        early = [read for read in reads if read.is_before_change()]
        for read in early:
            reader = None if read.result else read.reader_among(records)
            if reader is not None:
                at = reader.reads[1::3].index(read.number)
                if not read.is_part_of_wait(reader, reader.reads[3 * at]):
                    notes.setdefault(reader.number, {}).setdefault(EARLY, {})[at] = read.source
        return {read.result: read.source for read in early if read.result}

    @unrecorded()
    def finish(self) -> None:
        """Wait for outputs that were never read, :data:`LIMIT` seconds at most, and hash them."""
        until = time.monotonic() + LIMIT
        for number, exchange in sorted(self._open.items()):
            self._hash(number, exchange, limit=max(0.0, until - time.monotonic()))
        self._open.clear()

    def _hash(self, number: int, exchange: _Exchange, *, limit: float | None = None) -> None:
        if not exchange.arrive(limit=limit) or self._open.pop(number, None) is None:
            return
        marks = [get_mark(tensor) for tensor in exchange.tensors]  # some may share a storage
        for tensor, arrival, mark in zip(exchange.tensors, exchange.arrivals, marks, strict=True):
            if mark is not None and mark[1:] == (number, IN_FLIGHT) and _is_whole(tensor):
                set_mark(tensor, (self._token, number, None))
                arrival.value = raw_digest(tensor, self._ledger)[3]


def digest_unless_in_flight(tensor: torch.Tensor, ledger: Ledger) -> RawDigest:
    """Hash a tensor before a call; return ``pending`` for one that a collective still writes."""
    if is_in_flight(tensor):
        return tensor.dtype, tuple(tensor.shape), None, PENDING
    return raw_digest(tensor, ledger)


def _ends_within(limit: float, wait: Callable[[], None]) -> bool:
    """Return True if ``wait``, run in its own thread, returns within ``limit`` seconds without raising."""
    ended: list[bool] = []

    def run() -> None:
        with contextlib.suppress(RuntimeError):
            wait()
            ended.append(True)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit)
    return bool(ended)


def _work_in(output: Any) -> Any:
    """Return the Work among the outputs of a ``c10d`` op: its only output, or the last of several."""
    last = output[-1] if isinstance(output, (tuple, list)) and output else output
    if not isinstance(last, torch.ScriptObject):
        return None
    from torch.distributed import Work

    return Work.unbox(last)


def _is_whole(tensor: torch.Tensor) -> bool:
    """Return True if the storage still covers the tensor: FSDP frees memory by shrinking storages."""
    try:
        begin, end = _extent(tensor)
        return bool(end - begin + tensor.storage_offset() * tensor.element_size() <= storage_bytes(tensor))
    except (NotImplementedError, RuntimeError):
        return True  # without a storage: sparse


def _stride(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(tensor.stride()) if tensor.layout is torch.strided else ()


def _overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return True if two tensors may share memory (also if that cannot be determined)."""
    try:
        (begin, end), (other_begin, other_end) = _extent(first), _extent(second)
    except (NotImplementedError, RuntimeError):
        return True
    return begin < other_end and other_begin < end


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of the tensor's first byte and one past its last."""
    begin = tensor.data_ptr()
    if not tensor.numel():
        return begin, begin
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()
