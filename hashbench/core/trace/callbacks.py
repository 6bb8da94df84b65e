"""Callbacks around every traced call: the caller's own, and the notes kept beside records."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hashbench.core.devices.ledger import Ledger
from hashbench.core.native.library import unrecorded
from hashbench.core.records import OpRecord, TensorDigest
from hashbench.core.trace import arguments
from hashbench.core.trace.build import Ids, RawRecord, RawResult, RecordIdentity, build_record, without_gaps
from hashbench.core.trace.collectives import digest_unless_in_flight
from hashbench.core.trace.digest import UNDEFINED, RawDigest, is_waiting, raw_digest, readable, undefined
from hashbench.core.trace.op_schema import OpPlan
from hashbench.core.trace.storage_writers import (
    LeafViews,
    Mark,
    get_mark,
    is_in_flight,
    set_mark,
    storage_bytes,
    storage_key,
)


class TraceCallback:
    """Base class of callbacks around every op of a trace, called with the id of the op's record. It does nothing.

    All methods run with dispatch modes disabled, so their own ops are not traced.
    """

    wants_records = False
    """Call :meth:`recorded` for every record. Building each record at once costs about 10 µs a call."""

    wants_trace = True
    """Record the calls as well. If false, nothing is hashed, only :meth:`before` and :meth:`after` are called, and the
    finished trace is empty."""

    def before(self, node: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Called before the op ``func`` runs."""

    def after(self, node: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> None:
        """Called after the op ran, before its outputs are hashed."""

    def opaque(self, node: str, output: Any) -> None:
        """Called with the output of compiled code, whose ops are not shown."""

    def graph(self, path: str, inputs: Sequence[Any]) -> None:
        """Called before a call of a graph that Inductor compiled: the file of its generated module, and its inputs."""

    def graph_ended(self) -> None:
        """Called after that call, also if it raised."""

    def leaf(self, node: str, tensor: torch.Tensor) -> None:
        """Called before a leaf is hashed: a parameter, buffer or input at the start of the run, or a tensor that no
        recorded op wrote, at its first read."""

    def recorded(self, record: OpRecord) -> None:
        """Called with the finished record of a call, before the op returns to its caller: exceptions raised here
        propagate to that caller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """Options of a trace; :class:`~hashbench.core.trace.api.HashDebugTrace` explains each."""

    verbose: bool = False
    max_ops_logged: int | None = None
    include_timestamp: bool = False
    show_exec_time: bool = False
    hash_inputs: bool = False
    source_lines: bool = False
    callback: TraceCallback | None = None
    digests: str = "fast"

    @property
    def wants_records(self) -> bool:
        """True if the callback is passed every finished record."""
        return self.callback is not None and self.callback.wants_records

    @property
    def records_nothing(self) -> bool:
        """True if calls are shown to the callback only."""
        return self.callback is not None and not self.callback.wants_trace

    @property
    def notes_calls(self) -> bool:
        """True if anything is noted around every call."""
        return (
            self.hash_inputs
            or self.source_lines
            or self.verbose
            or self.include_timestamp
            or self.show_exec_time
            or self.wants_records
        )


_FIRST = 1 << 30
"""First number of possible writes; records count from 0, leaves from -1 down. The native recorder keeps numbers in 32
bits."""


class PossibleWrites:
    """Undeclared writes of one trace (writes that no schema declares), in call order.

    With every input hashed around every op, an argument that changed was written by the op. On an accelerator both
    digests are still on the device at that time, and comparing them would synchronize. So the storage is marked with a
    number that means "this record if it wrote, else the previous writer", resolved when digests may be read. One result
    differs from the CPU: if only part of a leaf was seen, and an op that declares its write follows an undeclared
    write, the whole storage becomes a second leaf.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int, RawDigest, RawDigest]] = []
        self._writers: list[int] = []

    def mark(self, number: int, before: Mark, digests: tuple[RawDigest, RawDigest]) -> Mark:
        """Return the mark of a storage that record ``number`` may have written.

        Args:
            number: the record.
            before: the storage's previous mark.
            digests: digests of the part seen by the op, before and after it.
        """
        token, node, views = before
        if not isinstance(views, dict):
            return token, self._add(number, node, digests), None
        aliased: LeafViews = {}
        for view, leaf in views.items():
            aliased[view] = self._add(number, leaf, digests)
        return token, node, aliased

    def resolve(self) -> list[tuple[int, RawDigest]]:
        """Return the writes found since the last call: record number, digest of the written tensor. Synchronizes
        devices."""
        writes: list[tuple[int, RawDigest]] = []
        for number, node, before, after in self._waiting[len(self._writers) :]:
            wrote = readable(before) != readable(after)
            if wrote and (number, after) not in writes[-1:]:  # one write seen through several views of a leaf
                writes.append((number, after))
            self._writers.append(number if wrote else self.node(node))
        return writes

    @property
    def empty(self) -> bool:
        """True if no write is pending."""
        return not self._waiting

    def node(self, node: int) -> int:
        """Resolve a number to that of a record or leaf."""
        return self._writers[node - _FIRST] if node >= _FIRST else node

    def _add(self, number: int, node: int, digests: tuple[RawDigest, RawDigest]) -> int:
        self._waiting.append((number, node, *digests))
        return _FIRST + len(self._waiting) - 1


class CallObserver:
    """Observer of the calls of one trace: runs its callback, with the ids and records that the finished trace will
    have, and keeps notes by record number in ``kept``.

    ``line`` is the source line from which a compiled graph made the current call; ``unwritten`` are the numbers of the
    records that allocated memory in such graphs.

    :meth:`before` and :meth:`after` are called for ops that resize, and for every op if ``wanted``. ``token``
    identifies the trace in marks; ``records`` is the tracer's list of raw records, to which digests of undeclared
    writes are added.
    """

    def __init__(self, options: TraceOptions, token: object, ledger: Ledger, records: list[tuple[Any, ...]]) -> None:
        self.callback = options.callback
        self.wants_records, self.wanted = options.wants_records, options.notes_calls
        self.kept: dict[int, dict[str, Any]] = {}
        self.ids = Ids()
        self.line = ""
        self.unwritten: set[int] = set()
        self._options, self._token, self._ledger, self._records = options, token, ledger, records
        self._possible = PossibleWrites()
        self._disturbed: list[tuple[dict[str, RawDigest], str, RawDigest, RawDigest]] = []
        self._thread = threading.local()
        self._handed_over: dict[str, OpRecord] = {}

    @property
    def last(self) -> RecordIdentity | None:
        """Identity of this thread's latest record."""
        return getattr(self._thread, "last", None)

    @last.setter
    def last(self, identity: RecordIdentity | None) -> None:
        self._thread.last = identity

    def call(
        self, func: Any, plan: OpPlan, identity: RecordIdentity, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call an op that will have this record, with the callback around it; a call that raises leaves no record."""
        assert self.callback is not None
        try:
            with unrecorded():
                self.callback.before(identity.id, func, args, kwargs)
            output = plan.call(*args, **kwargs)
            with unrecorded():
                self.callback.after(identity.id, func, args, kwargs, output)
        except BaseException:
            self.ids.take_back_record(identity.id)
            raise
        self.last = identity
        return output

    def take_back(self) -> None:
        """Drop the identity of a call that made no record after all."""
        assert self.last is not None
        self.ids.take_back_record(self.last.id)

    def opaque(self, identity: RecordIdentity, output: Any) -> None:
        """Pass a record that stands for several ops to the callback, which is not called around them."""
        assert self.callback is not None
        self.last = identity
        self.callback.opaque(identity.id, output)

    def before(self, plan: OpPlan, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Collect the notes that must be taken before a call."""
        noted: dict[str, Any] = {}
        if plan.resizes:
            noted["sizes"] = [
                (tensor, storage_key(tensor), storage_bytes(tensor))
                for tensor in arguments.tensors_in([*args, *kwargs.values()])
            ]
        if self._options.hash_inputs:
            unused = plan.unused_state(args, kwargs)
            if self.unwritten:
                unused |= {id(tensor) for tensor in plan.written_tensors(args, kwargs) if self._is_unwritten(tensor)}
            noted["inputs"] = {
                path: undefined(tensor) if id(tensor) in unused else digest_unless_in_flight(tensor, self._ledger)
                for path, tensor in arguments.named_arguments(args, kwargs)
            }
        if self._options.source_lines:
            caller = sys._getframe(1).f_back
            noted["source"], noted["own"] = arguments.caller_line(caller), arguments.in_own_backward(caller)
        noted["time"], noted["clock"] = time.time(), time.perf_counter()
        return noted

    def after(
        self, number: int, plan: OpPlan, args: Sequence[Any], kwargs: Mapping[str, Any], noted: Mapping[str, Any]
    ) -> None:
        """Keep the notes of the call that became record ``number``; print it and pass it on as requested."""
        kept = self.kept.get(number, {})
        for tensor, storage, size in noted.get("sizes", ()):
            if storage_key(tensor) == storage and storage_bytes(tensor) > size:
                # resize_ grew it: the new part is uninitialized
                set_mark(tensor, (self._token, number, None))
                self._set_written(number, ((*raw_digest(tensor, self._ledger)[:3], None),))
        if self._options.hash_inputs:
            kept["inputs"] = noted["inputs"]
            self._find_undeclared_writes(number, plan, args, kwargs, noted["inputs"])
        if self._options.source_lines:
            kept["source"], kept["own"] = noted["source"], noted["own"]
        if self.line:
            kept["source"] = self.line
        if self._options.include_timestamp:
            kept["time"] = f"{noted['time']:.6f}"
        if self._options.show_exec_time:
            kept["seconds"] = f"{time.perf_counter() - noted['clock']:.6f}"
        if kept:
            self.kept[number] = kept
        limit = self._options.max_ops_logged
        if self._options.verbose and (limit is None or number < limit):
            print(self._line(number))
        if self.wants_records and self.callback is not None:
            self._add_undeclared_writes()
            identity = self.last
            assert identity is not None
            forward = None if identity.forward is None else self._handed_over.get(self.ids.records[identity.forward])
            raw = self._record(number).renumbered(self._possible.node)
            self._handed_over[identity.id] = record = build_record(raw, self.ids, identity, forward, kept)
            with unrecorded():
                self.callback.recorded(record)

    def records(self, first: int = 0) -> list[RawRecord]:
        """Return the records so far from the ``first`` on, in the order they were appended. Synchronizes devices."""
        self._add_undeclared_writes()
        return list(map(RawRecord._make, self._records[first:]))  # a copy: other threads may append

    def op_names(self) -> set[str]:
        """Return the names of the ops of the records so far."""
        return {plan.name for plan, *_ in list(self._records)}

    @property
    def writer(self) -> Callable[[int], int] | None:
        """Function from a number among the reads to the writer's; ``None`` if they are the same."""
        return None if self._possible.empty else self._possible.node

    def notes_of(self, numbers: Container[int]) -> dict[int, dict[str, Any]]:
        """Return the notes of these records; notes of unfinished or failed calls are left out."""
        return {number: notes for number, notes in list(self.kept.items()) if number in numbers}

    def take_notes(self, numbers: Iterable[int]) -> dict[int, dict[str, Any]]:
        """Return the notes of these records, and release them."""
        return {number: self.kept.pop(number) for number in numbers if number in self.kept}

    def resolved(
        self, records: Sequence[RawRecord], results: Sequence[RawResult]
    ) -> tuple[Sequence[RawRecord], Sequence[RawResult], Mapping[int, Mapping[str, Any]]]:
        """Return records, results and notes with every number replaced by a record's index.

        With one thread, numbers are indices already. Threads that dispatch concurrently append in another order than
        they take numbers, and skip a number if an op ran and hashing its output failed.
        """
        notes = self.notes_of({record.number for record in records})
        in_order = all(record.number == index for index, record in enumerate(records))
        if in_order and self._possible.empty:
            return records, results, notes
        return without_gaps(records, results, notes, self._possible.node)

    def _is_unwritten(self, tensor: torch.Tensor) -> bool:
        """Return whether a compiled graph has allocated the tensor's memory, and nothing has written it since."""
        mark = get_mark(tensor)
        return mark is not None and mark[0] is self._token and mark[1] in self.unwritten

    def _find_undeclared_writes(
        self, number: int, plan: OpPlan, args: Sequence[Any], kwargs: Mapping[str, Any], before: dict[str, RawDigest]
    ) -> None:
        """Attribute to this op every argument that changed although its schema does not declare a write.

        torch's own schemas declare every write (its tests run each op under ``SchemaCheckMode``): what changed during
        such a call was written by others at the same time (another stream, a copy under way, a thread), and what the
        op read is not known. The digest of its input is the later one, which no recorded write explains. An argument
        that shares memory with a written one is written by the op.
        """
        targets = arguments.tensors_in(plan.written_values(args, kwargs))
        declared, written = {id(tensor) for tensor in targets}, {storage_key(tensor) for tensor in targets}
        changed = []
        for path, tensor in arguments.named_arguments(args, kwargs):
            if id(tensor) in declared or before[path][3] is UNDEFINED or plan.resizes or is_in_flight(tensor):
                continue
            after = raw_digest(tensor, self._ledger)
            if after == before[path]:
                continue
            mark = get_mark(tensor)
            if plan.name.startswith("aten.") and storage_key(tensor) not in written:
                self._disturbed.append((before, path, before[path], after))
            elif is_waiting(after) and mark is not None and mark[0] is self._token:
                set_mark(tensor, self._possible.mark(number, mark, (before[path], after)))
            elif readable(after) != readable(before[path]):
                set_mark(tensor, (self._token, number, None))
                changed.append(after)
        if changed:
            self._set_written(number, self._record(number).written + tuple(changed))

    def _add_undeclared_writes(self) -> None:
        for inputs, path, before, after in self._disturbed:
            if readable(before) != readable(after):
                inputs[path] = after
        self._disturbed.clear()
        for number, digest in self._possible.resolve():
            self._set_written(number, (*self._record(number).written, digest))

    def _set_written(self, number: int, written: tuple[RawDigest | TensorDigest, ...]) -> None:
        self._records[self._index_of(number)] = self._record(number)._replace(written=written)

    def _record(self, number: int) -> RawRecord:
        return RawRecord._make(self._records[self._index_of(number)])

    def _index_of(self, number: int) -> int:
        """Return the index of a record: its number, as long as one thread alone dispatches."""
        records = self._records
        if number < len(records) and records[number][-1] == number:
            return number
        return next(index for index in reversed(range(len(records))) if records[index][-1] == number)

    def _line(self, number: int) -> str:
        record = self._record(number)
        values = " ".join(f"{d.dtype}{list(d.shape)}:{d.value or 'blank'}" for d in map(readable, record.written))
        shown = f" = {record.scalar!r}" if record.scalar is not None else ""
        notes = self.kept.get(number, {})
        extra = "".join(f" {key}={notes[key]}" for key in ("source", "time", "seconds") if key in notes)
        call = f"{record.plan.name}({arguments.argument_text(record.others)})"
        return f"[{number:03d}] {record.phase} {record.module} {call} {values}{shown}{extra}"
