"""Python part of the native tracer: start and end the recorder, and build the trace from its records.

The recorder handles calls on dense CPU tensors. All other calls, and all calls under an observer, are forwarded one by
one to ``forwarded`` and recorded in Python, as the dispatch mode does. Both sides share the numbers of records and
leaves, and the last writer of each storage (``nodes``).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import xxhash

from hashbench.core.errors import HashbenchError
from hashbench.core.native.library import LANES, Library, unrecorded
from hashbench.core.records import TensorDigest, Trace
from hashbench.core.trace.build import IndexedTrace, RawRecord, RawResult, without_gaps
from hashbench.core.trace.callbacks import TraceOptions
from hashbench.core.trace.compiled_records import CompiledRecords
from hashbench.core.trace.digest import BY_DTYPE, is_waiting
from hashbench.core.trace.lanes import callers_of, in_schedule_independent_order
from hashbench.core.trace.module_paths import ModulePaths
from hashbench.core.trace.native.decode import DecodedTrace, content_of, recorded_ops
from hashbench.core.trace.native.forwarded import ForwardedCalls
from hashbench.core.trace.native.kernels import KernelCalls
from hashbench.core.trace.native.nodes import RecorderNodes
from hashbench.core.trace.native.ops import Ops
from hashbench.core.trace.native.threads import ThreadLanes
from hashbench.core.trace.op_schema import OpPlan
from hashbench.core.trace.raw import RawTrace
from hashbench.core.trace.segments import RawSegment, TraceSegment, TraceSegments


class NativeTracer:
    """Tracer that records by a fallback kernel on its own dispatch key: traced code runs exactly as untraced.

    Attributes:
        raw: the trace in the making.
    """

    def __init__(self, options: TraceOptions, library: Library, ops: Ops) -> None:
        observed = options.notes_calls or options.callback is not None or options.digests == "device"
        self._mixed = not observed
        odd = sum(1 << number for number, dtype in library.dtypes.items() if dtype in BY_DTYPE) if BY_DTYPE else 0
        modules = ModulePaths()
        recorder = library.new(1, int(observed), int(options.records_nothing), odd)
        self._library, self._ops = library, ops
        self.nodes = RecorderNodes(library, recorder, modules)
        self.raw = RawTrace(options, self.nodes, modules)
        self._forwarded = ForwardedCalls(self.raw, self.nodes)
        self._kernels = KernelCalls(self.raw, self.nodes, self._forwarded)
        self._threads = ThreadLanes(self.nodes, self._forwarded)
        self._compiled: CompiledRecords | None = None
        self._compiled_ran = False
        self._decoded: DecodedTrace | None = None
        self.raw.changed()

    def __enter__(self) -> NativeTracer:
        if not self._library.begin(self.nodes.recorder):
            raise HashbenchError(
                "cannot enter a native trace while another thread is in one",
                consequence="the recorder sees all threads of a process",
                tip='Exit that one first, or use HashDebugTrace(tracer="python") for both.',
            )
        try:
            self.raw.start()
            self._compiled = CompiledRecords(self.raw, self._forwarded.calls, self)
            self._compiled.start()
            self._library.listener = self._forwarded
            self.resume()
        except BaseException:
            self._library.end(self.nodes.recorder)
            self._library.listener = None
            self.suspend()
            self._stop()
            raise
        return self

    def __exit__(self, *exception: Any) -> None:
        self.suspend()
        failed = self._library.end(self.nodes.recorder)
        self._library.listener = None
        if failed >= 0:
            self.raw.failed_op = self._ops.by_number[failed].plan.name
        if exception[0] is None:
            self.raw.finish_collectives()
        if self.raw.active:
            self._stop()
        errors, self._library.errors = self._library.errors, []
        if errors and exception[0] is None:
            raise errors[-1]

    def _stop(self) -> None:
        compiled, self._compiled = self._compiled, None
        if compiled is not None:
            compiled.stop()
        self.raw.stop()

    def suspend(self) -> None:
        """Stop recording this thread; see :class:`~hashbench.core.trace.compiled_records.Tracing` for this and the
        next."""
        self.raw.modules.remove_hooks()
        self._threads.remove()
        self._library.thread(0)

    def resume(self) -> None:
        """Go on recording this thread."""
        self.raw.modules.install_hooks()
        self._threads.install()
        self._library.thread(1)

    def inside(self, entered: bool, *, suspended: bool) -> None:
        """Record every op within a compiled graph, or stop that again."""
        if suspended:
            self._library.thread(int(entered))
        if self._compiled_ran:
            self._library.backward_in_python(self.nodes.recorder, int(not entered))

    def compiled_ended(self) -> None:
        """Let Python choose from now on which ops called by the backward of compiled code are recorded."""
        self._compiled_ran = True
        self._library.backward_in_python(self.nodes.recorder, 1)

    def allocated(self, tensor: torch.Tensor) -> int:
        """Mark new memory as that of the next record, and return the record's number."""
        number = int(self._library.take_record(self.nodes.recorder))
        self._library.set_node(self.nodes.recorder, tensor.untyped_storage()._cdata, number, 0)
        return number

    def add_allocation(self, plan: OpPlan, tensor: torch.Tensor) -> bool:
        """Add the record of an allocation without Python; return False if Python must."""
        return self._mixed and self._kernels.add_allocation(plan, tensor)

    def recorded(self, plan: OpPlan, args: Sequence[Any]) -> Any:
        """Make a call that is not dispatched, and record it."""
        if self._mixed:
            return self._kernels.record(plan, args)
        with unrecorded():
            return self._forwarded.record(plan, args, None)

    # --------------------------------------------------------------------------------------------- the finished trace

    def finish(self) -> tuple[Trace, Mapping[int, Mapping[str, Any]]]:
        """Return the trace, and notes by record number; release the raw records."""
        self.raw.ledger.read()
        built = self.built()
        self.raw.clear()
        self.nodes.detach()
        self._threads.release()
        return built

    def content(self) -> bytes:
        """Return a cheap equality token: equal non-empty tokens of one process imply equal traces; ``b""`` means
        "compare the finished traces". It is a digest of the recorder's content, without what no finished trace
        shows."""
        raw, nodes = self.raw, self.nodes
        in_python = (
            nodes.records or nodes.leaves or self._forwarded.odd_digests or raw.observer.kept or self._kernels.ops
        )
        waiting = any(not isinstance(digest, TensorDigest) and is_waiting(digest) for _, digest, _ in raw.results)
        threads = self._library.count(nodes.recorder, LANES) > 1  # records in arbitrary order
        if not self._mixed or in_python or waiting or threads or not nodes.record_count():
            return b""
        kept = content_of(self._library, nodes.recorder, first_sequence=raw.first_sequence or 0)
        if kept is None:
            return b""
        content, leaves = kept
        registered = raw.registered.along(storage for storage, _ in leaves)
        states = (raw.modules.state(name) if name >= 0 else None for _, name in leaves)
        named = list(zip(registered, states, strict=True))
        rest = (named, raw.modules.contexts.modules, raw.modules.contexts.steps, raw.results, raw.setting_marks)
        return xxhash.xxh3_128_digest(b"".join([*content, repr(rest).encode()]))

    def op_names(self) -> set[str]:
        """Return the names of the ops recorded so far, without decoding the records."""
        ops = {**self._ops.by_number, **self._kernels.ops}
        numbers = recorded_ops(self._library, self.nodes.recorder)
        return {ops[number].plan.name for number in numbers if number >= 0} | self.raw.observer.op_names()

    def segments(self) -> TraceSegments:
        """Return the segments of this trace, none so far."""
        self._decoded = DecodedTrace(self._library, self.nodes.recorder, self._threads.callbacks)
        return self.raw.segments(hashed_inputs=not self._mixed and self.raw.hashed_inputs)

    def taken(self, segments: TraceSegments) -> TraceSegment:
        """Add what is new to ``segments``, and return it."""
        # Other threads may be recording: copy referrers before what they refer to.
        raw, contexts, kept = self.raw, self.raw.modules.contexts, self._decoded
        assert kept is not None
        results = raw.results[segments.results :]
        made, early_results = raw.new_records(segments)
        kept.load()
        records = [kept.placed(record, contexts) for record in made]
        with self.nodes.leaf_lock:  # else a leaf may have its number and no content
            in_python, first = dict(self.nodes.leaves), segments.leaves
            if self._mixed:
                leaves = list(kept.leaves(contexts, raw.modules.state, raw.registered, in_python, first=first))
            else:
                leaves = [leaf for _, leaf in sorted(in_python.items(), reverse=True)][first:]
        if self._mixed:
            by_number = {record.number: record for record in records}
            ops = {**self._ops.by_number, **self._kernels.ops}
            records = list(kept.records(ops, contexts, by_number, self._forwarded.odd_digests))
        part = RawSegment(
            records=records,
            made=segments.made + len(made),
            leaves=leaves,
            results=results,
            marks=raw.setting_marks[segments.marks :],
            notes=raw.observer.take_notes([record.number for record in records]),
            early_results=early_results,
            callers=kept.callers(),
            lanes=kept.lanes(),
            lane_of=kept.lane_of,
            names=self._threads.names,
            writer=raw.observer.writer,
        )
        segment = segments.add(part, raw.collectives.is_in_flight)
        kept.release(record.number for record in made)
        return segment

    def built(self) -> tuple[Trace, Mapping[int, Mapping[str, Any]]]:
        """Build the trace so far, and notes by record number."""
        # Other threads may be recording: copy referrers before what they refer to.
        raw, contexts = self.raw, self.raw.modules.contexts
        results: Sequence[RawResult] = list(raw.results)
        made, early_results = raw.made()
        kept = DecodedTrace(self._library, self.nodes.recorder, self._threads.callbacks)
        in_python = [kept.placed(record, contexts) for record in made]
        records: Sequence[RawRecord]
        notes: Mapping[int, Mapping[str, Any]]
        if self._mixed:
            by_number = {record.number: record for record in in_python}
            ops = {**self._ops.by_number, **self._kernels.ops}
            records = list(kept.records(ops, contexts, by_number, self._forwarded.odd_digests))
            leaves = list(kept.leaves(contexts, raw.modules.state, raw.registered, self.nodes.leaves))
            numbers = [record.number for record in records]
            notes = raw.observer.notes_of(set(numbers))
        else:
            numbers, leaves = (
                sorted([record.number for record in in_python]),
                [leaf for _, leaf in sorted(self.nodes.leaves.items(), reverse=True)],
            )
            records, results, notes = raw.observer.resolved(in_python, results)
        lanes = kept.lanes()
        lane_of = list(map(kept.lane_of, numbers)) if len(lanes) > 1 else []
        callers = kept.callers()
        callers |= callers_of(numbers, lane_of, lanes) if lane_of else {}
        gaps = bool(numbers) and numbers[-1] >= len(numbers)  # failed or unfinished calls have no record
        if callers or gaps:
            places = {number: place for place, number in enumerate(numbers)}
            callers = {places[at]: places[to] for at, to in callers.items() if at in places and to in places}
            lanes = [lane._replace(position=bisect_left(numbers, lane.position)) for lane in lanes]
            if self._mixed and gaps:
                records, results, notes = without_gaps(records, results, notes)
        indexed = IndexedTrace(records, leaves, results, raw.setting_marks, notes, callers)
        if lane_of:
            indexed = in_schedule_independent_order(indexed, lane_of, lanes, self._threads.names)
        hashed_inputs = not self._mixed and raw.hashed_inputs
        return raw.built(indexed, early_results, hashed_inputs=hashed_inputs), indexed.notes
