"""Dispatch mode behind ``HashDebugTrace``: every call that reaches it becomes one record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._C import _len_torch_dispatch_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from hashbench.core.native.library import is_recorded
from hashbench.core.records import Trace
from hashbench.core.trace import op_schema
from hashbench.core.trace.build import IndexedTrace
from hashbench.core.trace.callbacks import TraceOptions
from hashbench.core.trace.calls import CallRecorder
from hashbench.core.trace.compiled import skip_frames
from hashbench.core.trace.compiled_records import CompiledRecords
from hashbench.core.trace.digest import has_no_data, is_distributed, unobserved
from hashbench.core.trace.module_paths import ModulePaths
from hashbench.core.trace.nodes import Nodes, PythonNodes
from hashbench.core.trace.op_schema import OpPlan
from hashbench.core.trace.raw import RawTrace
from hashbench.core.trace.segments import RawSegment, TraceSegment, TraceSegments


def is_tracing() -> bool:
    """Return True if a trace is active in this thread."""
    if is_recorded():
        return True
    return _len_torch_dispatch_stack() > 0 and any(
        isinstance(mode, TracingMode) for mode in _get_current_dispatch_mode_stack()
    )


class TracingMode(TorchDispatchMode):
    """Dispatch mode that records every op with digests of its outputs.

    Attributes:
        raw: the trace in the making.
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The base class would wrap __torch_dispatch__ in torch._disable_dynamo: one more Python frame for every op.
        # ``skip_frames`` below has the same effect at no cost.
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, options: TraceOptions, plan_of: Callable[[Any], OpPlan] = op_schema.plan_of) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        modules = ModulePaths()
        self.raw = RawTrace(options, PythonNodes(modules), modules)
        self._calls = CallRecorder(self.raw, plan_of)
        self._compiled: CompiledRecords | None = None

    def __enter__(self) -> TracingMode:
        modules = self.raw.modules
        self._compiled = CompiledRecords(self.raw, self._calls, _ModeTracing(modules, self._calls, self.raw.nodes))
        try:
            self.raw.start()
            self._compiled.start()
        except BaseException:
            self._stop()
            raise
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self.end(*exception)

    def end(self, *exception: Any) -> None:
        """End the trace, but for torch's stack of modes: for a mode that was taken off it by others."""
        if exception[0] is None:
            self.raw.finish_collectives()
        self._stop()

    def _stop(self) -> None:
        if self._compiled is not None:
            self._compiled.stop()
            self._compiled = None
            self.raw.stop()

    def content(self) -> bytes:
        """Return ``b""``: traces of a mode have no cheap equality token."""
        return b""

    def op_names(self) -> set[str]:
        """Return the names of the ops recorded so far."""
        return self.raw.observer.op_names()

    def built(self) -> tuple[Trace, Mapping[int, Mapping[str, Any]]]:
        """Build the trace so far, and notes by record number."""
        raw = self.raw
        made, early_results = raw.made()
        records, results, notes = raw.observer.resolved(made, raw.results)
        leaves = list(raw.nodes.leaves.values())
        indexed = IndexedTrace(records, leaves, results, raw.setting_marks, notes, {})
        return raw.built(indexed, early_results, hashed_inputs=raw.hashed_inputs), notes

    def segments(self) -> TraceSegments:
        """Return the segments of this trace, none so far."""
        return self.raw.segments(hashed_inputs=self.raw.hashed_inputs)

    def taken(self, segments: TraceSegments) -> TraceSegment:
        """Add what is new to ``segments``, and return it."""
        raw = self.raw
        records, early_results = raw.new_records(segments)
        part = RawSegment(
            records=records,
            made=segments.made + len(records),
            leaves=list(raw.nodes.leaves.values())[segments.leaves :],
            results=raw.results[segments.results :],
            marks=raw.setting_marks[segments.marks :],
            notes=raw.observer.take_notes([record.number for record in records]),
            early_results=early_results,
            writer=raw.observer.writer,
        )
        return segments.add(part, raw.collectives.is_in_flight)

    def finish(self) -> tuple[Trace, Mapping[int, Mapping[str, Any]]]:
        """Return the trace, and notes by record number; release the raw records."""
        self.raw.ledger.read()
        built = self.built()
        self.raw.clear()
        return built

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if types:  # subclasses with their own __torch_dispatch__
            if any(map(is_distributed, types)):
                return NotImplemented  # the class then dispatches ops on local tensors
            if has_no_data(*types):  # shape propagation of DTensor, graphs of torch.export
                return func(*args, **(kwargs or {}))
        calls = self._calls
        plan = calls.plans.get(id(func)) or calls.plan(func)
        if not plan.traced:
            return func(*args, **(kwargs or {}))
        return calls.record(plan, args, kwargs)


class _ModeTracing:
    """How the mode stops and goes on around compiled code: what it records is chosen by the table of plans."""

    def __init__(self, modules: ModulePaths, calls: CallRecorder, nodes: Nodes) -> None:
        self.suspend, self.resume = modules.remove_hooks, modules.install_hooks
        self._calls, self._nodes = calls, nodes

    def inside(self, entered: bool, *, suspended: bool) -> None: ...

    def allocated(self, tensor: torch.Tensor) -> int:
        number = self._nodes.next_record()
        tensor.untyped_storage()._hashbench_writer = self._nodes.token, number, None  # type: ignore[attr-defined]
        return number

    def compiled_ended(self) -> None: ...

    def add_allocation(self, plan: OpPlan, tensor: torch.Tensor) -> bool:  # noqa: ARG002
        return False

    def recorded(self, plan: OpPlan, args: Sequence[Any]) -> Any:
        with unobserved():
            return self._calls.record(plan, args, None)


skip_frames(TracingMode.__torch_dispatch__)
