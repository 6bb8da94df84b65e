"""What is done around every traced call: the caller's callback, and notes beside its record."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hashbench.devices.ledger import Ledger
from hashbench.native.library import unrecorded
from hashbench.records import OpRecord, TensorDigest
from hashbench.trace import arguments
from hashbench.trace.build import Ids, RawRecord, RawResult, RecordIdentity, build_record, without_gaps
from hashbench.trace.digest import PENDING, RawDigest, is_waiting, raw_digest, readable
from hashbench.trace.op_schema import OpPlan
from hashbench.trace.storage_writers import (
    LeafViews,
    Mark,
    get_mark,
    is_in_flight,
    set_mark,
    storage_bytes,
    storage_key,
)


class TraceCallback:
    """Called around every op of a trace with the id that the op's record will have. The base class does nothing.

    All methods run with dispatch modes disabled, so what they compute is not traced.
    """

    wants_records = False
    """Whether :meth:`recorded` is to be called. Making every record at once costs some 10 µs a call."""

    wants_trace = True
    """Whether the calls that it is shown are recorded, too. Where not, nothing is hashed, only :meth:`before` and
    :meth:`after` are called, and the finished trace is empty."""

    def before(self, node: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """The op ``func`` is about to be called."""

    def after(self, node: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> None:
        """The call has been made; what it wrote is hashed after this."""

    def opaque(self, node: str, output: Any) -> None:
        """Called with what compiled code returned, whose calls are not shown."""

    def leaf(self, node: str, tensor: torch.Tensor) -> None:
        """A parameter, buffer or input at the start of the run, or any tensor that no recorded op wrote and that is
        read for the first time; it is hashed after this."""

    def recorded(self, record: OpRecord) -> None:
        """The record of a call is made, as the finished trace will have it. The caller of the op has not gone on yet:
        what is raised here reaches it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """What to record beside every op's outputs; :class:`~hashbench.trace.api.HashDebugTrace` explains each."""

    verbose: bool = False
    max_ops_logged: int | None = None
    include_timestamp: bool = False
    show_exec_time: bool = False
    hash_inputs: bool = False
    source_lines: bool = False
    callback: TraceCallback | None = None
    digests: str = "fast"


_FIRST = 1 << 30
"""Numbers from here on stand for a possible write; records count from 0, leaves from -1 down. The native recorder keeps
them in 32 bits."""


class PossibleWrites:
    """Writes that no schema declares, of one trace, in the order of the calls.

    With every input hashed around every op, an argument that changed was written by the op. On an accelerator both
    digests are still on the device then, and asking would make the program wait. So the storage is marked with a number
    that stands for "this record if it wrote, else whoever wrote before", resolved when digests may be read. One thing
    comes out otherwise than on the CPU: where only a part of a leaf was seen, and an op that declares it writes after
    an undeclared write, the whole is taken for a leaf once more.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int, RawDigest, RawDigest]] = []
        self._writers: list[int] = []

    def mark(self, number: int, before: Mark, digests: tuple[RawDigest, RawDigest]) -> Mark:
        """The mark of a storage of which record ``number`` may have written a part; ``digests`` are those of the part
        before and after, and ``before`` is the mark that the storage has."""
        token, node, views = before
        if not isinstance(views, dict):
            return token, self._add(number, node, digests), None
        aliased: LeafViews = {}
        for view, leaf in views.items():
            aliased[view] = self._add(number, leaf, digests)
        return token, node, aliased

    def resolve(self) -> list[tuple[int, RawDigest]]:
        """The writes found since the last call: number of the record, digest of what it wrote. Waits for devices."""
        writes: list[tuple[int, RawDigest]] = []
        for number, node, before, after in self._waiting[len(self._writers) :]:
            wrote = readable(before) != readable(after)
            if wrote and (number, after) not in writes[-1:]:  # one write, seen through several views of a leaf
                writes.append((number, after))
            self._writers.append(number if wrote else self.node(node))
        return writes

    @property
    def empty(self) -> bool:
        """Whether there was none."""
        return not self._waiting

    def node(self, node: int) -> int:
        """The number of a record or leaf, once resolved."""
        return self._writers[node - _FIRST] if node >= _FIRST else node

    def _add(self, number: int, node: int, digests: tuple[RawDigest, RawDigest]) -> int:
        self._waiting.append((number, node, *digests))
        return _FIRST + len(self._waiting) - 1


class CallObserver:
    """Looks at the calls of one trace beside recording them: its callback is called, with the ids and records that the
    finished trace will have, and notes are ``kept`` by record number.

    :meth:`before` and :meth:`after` are for calls that resize, and for all where they are ``wanted``. ``token`` stands
    for the trace in marks; ``records`` is the tracer's list of raw records, in which the digests of writes that no
    schema declares are added.
    """

    def __init__(self, options: TraceOptions, token: object, ledger: Ledger, records: list[tuple[Any, ...]]) -> None:
        self.callback = options.callback
        self.wants_records = self.callback is not None and self.callback.wants_records
        self.records_nothing = self.callback is not None and not self.callback.wants_trace
        self.wanted = (
            options.hash_inputs
            or options.source_lines
            or options.verbose
            or options.include_timestamp
            or options.show_exec_time
            or self.wants_records
        )
        self.kept: dict[int, dict[str, Any]] = {}
        self.ids = Ids()
        self._options, self._token, self._ledger, self._records = options, token, ledger, records
        self._possible = PossibleWrites()
        self._thread = threading.local()
        self._handed_over: dict[str, OpRecord] = {}

    @property
    def last(self) -> RecordIdentity | None:
        """The identity of the record that this thread made last."""
        return getattr(self._thread, "last", None)

    @last.setter
    def last(self, identity: RecordIdentity | None) -> None:
        self._thread.last = identity

    def call(
        self, func: Any, plan: OpPlan, identity: RecordIdentity, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call an op that will have this record, with the callback around it; one that raises leaves no record."""
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
        """The call made no record after all."""
        assert self.last is not None
        self.ids.take_back_record(self.last.id)

    def opaque(self, identity: RecordIdentity, output: Any) -> None:
        """Tell the callback of a record that is no op's: it is not called around what the record stands for."""
        assert self.callback is not None
        self.last = identity
        self.callback.opaque(identity.id, output)

    def before(self, plan: OpPlan, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """What has to be looked at before a call."""
        noted: dict[str, Any] = {}
        if plan.resizes:
            noted["sizes"] = [
                (tensor, storage_key(tensor), storage_bytes(tensor))
                for tensor in arguments.tensors_in([*args, *kwargs.values()])
            ]
        if self._options.hash_inputs:
            named = arguments.named_arguments(args, kwargs)
            noted["inputs"] = {path: self._input_digest(tensor) for path, tensor in named}
        if self._options.source_lines:
            noted["source"] = arguments.caller_line(sys._getframe(1).f_back)
        noted["time"], noted["clock"] = time.time(), time.perf_counter()
        return noted

    def after(
        self, number: int, plan: OpPlan, args: Sequence[Any], kwargs: Mapping[str, Any], noted: Mapping[str, Any]
    ) -> None:
        """Keep the notes of the call that became record ``number``, print it and hand it over as asked."""
        kept: dict[str, Any] = {}
        for tensor, storage, size in noted.get("sizes", ()):
            if storage_key(tensor) == storage and storage_bytes(tensor) > size:
                # resize_ grew it: the new part is memory that nobody wrote
                set_mark(tensor, (self._token, number, None))
                self._set_written(number, ((*raw_digest(tensor, self._ledger)[:3], None),))
        if self._options.hash_inputs:
            kept["inputs"] = noted["inputs"]
            self._find_undeclared_writes(number, plan, args, kwargs, noted["inputs"])
        if self._options.source_lines:
            kept["source"] = noted["source"]
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

    def records(self) -> list[RawRecord]:
        """The records so far, as they were appended. Waits for devices."""
        self._add_undeclared_writes()
        return list(map(RawRecord._make, list(self._records)))  # other threads may append

    def notes_of(self, numbers: Container[int]) -> dict[int, dict[str, Any]]:
        """The notes of these records: there may be some of calls that are not done, or that failed."""
        return {number: notes for number, notes in list(self.kept.items()) if number in numbers}

    def resolved(
        self, records: Sequence[RawRecord], results: Sequence[RawResult]
    ) -> tuple[Sequence[RawRecord], Sequence[RawResult], Mapping[int, Mapping[str, Any]]]:
        """Records, results and notes, in which every number is the place of a record.

        Of one thread they are that already. Several threads that dispatch at once append in another order than they
        take numbers, and leave a number out where an op was done and its digest then failed.
        """
        notes = self.notes_of({record.number for record in records})
        in_order = all(record.number == index for index, record in enumerate(records))
        if in_order and self._possible.empty:
            return records, results, notes
        return without_gaps(records, results, notes, self._possible.node)

    def _input_digest(self, tensor: torch.Tensor) -> RawDigest:
        """The digest of a tensor before a call; ``pending`` of one that a collective still writes."""
        if is_in_flight(tensor):
            return tensor.dtype, tuple(tensor.shape), None, PENDING
        return raw_digest(tensor, self._ledger)

    def _find_undeclared_writes(
        self, number: int, plan: OpPlan, args: Sequence[Any], kwargs: Mapping[str, Any], before: Mapping[str, RawDigest]
    ) -> None:
        """An argument that changed although the schema does not say so was written by this op all the same."""
        declared = {id(tensor) for tensor in arguments.tensors_in(plan.written_values(args, kwargs))}
        changed = []
        for path, tensor in arguments.named_arguments(args, kwargs):
            if id(tensor) in declared or plan.resizes or is_in_flight(tensor):
                continue
            after = raw_digest(tensor, self._ledger)
            if after == before[path]:
                continue
            mark = get_mark(tensor)
            if is_waiting(after) and mark is not None and mark[0] is self._token:
                set_mark(tensor, self._possible.mark(number, mark, (before[path], after)))
            elif readable(after) != readable(before[path]):
                set_mark(tensor, (self._token, number, None))
                changed.append(after)
        if changed:
            self._set_written(number, self._record(number).written + tuple(changed))

    def _add_undeclared_writes(self) -> None:
        for number, digest in self._possible.resolve():
            self._set_written(number, (*self._record(number).written, digest))

    def _set_written(self, number: int, written: tuple[RawDigest | TensorDigest, ...]) -> None:
        self._records[self._index_of(number)] = self._record(number)._replace(written=written)

    def _record(self, number: int) -> RawRecord:
        return RawRecord._make(self._records[self._index_of(number)])

    def _index_of(self, number: int) -> int:
        """Where a record stands: at its number, as long as one thread alone dispatches."""
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
