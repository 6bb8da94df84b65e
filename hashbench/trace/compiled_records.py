"""Records of compiled code, during whose calls tracing is suspended.

Within a call of a graph that Inductor compiled it goes on: every call of a generated kernel, and every op that the
generated module calls, is a record. Other compiled code is one opaque record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hashbench.imports import ModulePatch
from hashbench.inductor.internals import CapturedGraphs, CompiledGraphCalls, KernelSite, is_compiling
from hashbench.native.library import unrecorded
from hashbench.trace import arguments
from hashbench.trace.calls import CallRecorder
from hashbench.trace.compiled import CompiledCalls, Exports, is_compiled_backward
from hashbench.trace.digest import untraced
from hashbench.trace.generated import GeneratedKernel, allocation_plan, kernel_at
from hashbench.trace.op_schema import OpPlan
from hashbench.trace.raw import RawTrace
from hashbench.trace.reads import PLAIN_TYPES


def _no_op(*_: Any, **__: Any) -> None:
    """Placeholder callable."""


class _NoPlans(dict[int, OpPlan]):
    """Plan table used while tracing is suspended: no op is recorded."""

    SKIPPED = OpPlan(name="", call=_no_op, traced=False)

    def get(self, *_: Any) -> OpPlan:
        return self.SKIPPED


class _PlansBehindCompiledCode(dict[int, OpPlan]):
    """Plan table used after compiled code ran: of ops called by its backward, only those around a graph that Inductor
    compiled are recorded."""

    def get(self, function: int, *_: Any) -> OpPlan | None:  # type: ignore[override]
        node = torch._C._current_autograd_node()
        skipped = is_compiled_backward(node) and (is_compiling() or not _is_inductor(node))
        return _NoPlans.SKIPPED if skipped else super().get(function)


def _is_inductor(node: Any) -> bool:
    """Return whether the graph of a compiled backward node is Inductor's."""
    compiled = getattr(node._forward_cls, "compiled_bw", None)
    return type(compiled).__module__.startswith("torch._inductor")


class Tracing(Protocol):
    """How a tracer stops and goes on around compiled code."""

    def suspend(self) -> object:
        """Stop tracing: a trace inside would be compiled too, and see only some of its ops."""

    def resume(self) -> object:
        """Go on tracing."""

    def inside(self, entered: bool) -> object:
        """Trace ops within a compiled graph, or stop again, while suspended: module hooks stay removed."""

    def compiled_ended(self) -> object:
        """Called before tracing resumes after compiled code, whose backward is not recorded by the native tracer."""

    def recorded(self, plan: OpPlan, args: Sequence[Any]) -> Any:
        """Make a call that is not dispatched, and record it."""


@dataclass(slots=True)
class _OpenCall:
    """The outermost call of compiled code that is under way: ``opening`` begins its opaque record, if it may need one.

    Attributes:
        graphs: calls of graphs within it that are recorded kernel by kernel.
    """

    opening: tuple[Any, ...] | None = None
    graphs: int = 0


class CompiledRecords:
    """Records of the calls of compiled code between :meth:`start` and :meth:`stop`.

    Args:
        trace: the trace that records are added to.
        calls: its recorder of other calls.
        tracing: of the tracer; no reference to it is kept after :meth:`stop`.
    """

    def __init__(self, trace: RawTrace, calls: CallRecorder, tracing: Tracing) -> None:
        self._trace, self._calls, self._tracing = trace, calls, tracing
        self._open: _OpenCall | None = None
        self._plans = calls.plans
        self._outside: dict[int, OpPlan] | None = None
        self._opaque: tuple[Any, ...] | None = None
        self._kernels: dict[tuple[str, str, int], GeneratedKernel] = {}
        self._allocations: dict[str, OpPlan] = {}
        self._watches: tuple[ModulePatch, ...] = (
            CompiledCalls(self._begin, self._end),
            Exports(tracing.suspend, tracing.resume),
            CompiledGraphCalls(self),
            CapturedGraphs(keep=False),
        )

    def start(self) -> None:
        for watch in self._watches:
            watch.start()

    def stop(self) -> None:
        for watch in reversed(self._watches):
            watch.stop()
        self._watches = ()
        self._tracing = None  # type: ignore[assignment]

    # ---------------------------------------------------------------------------------------- calls of compiled code

    def _begin(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], backend: str) -> None:
        self._open = _OpenCall()
        if not self._trace.records_nothing and backend != "inductor":
            self._open.opening = self._opened("torch.compile", name, args, kwargs)
        self._tracing.suspend()
        self._calls.plans = _NoPlans()

    def _end(self, result: Any) -> None:
        call, self._open = self._open, None
        seen = call is None or call.opening is None or (call.graphs and self._all_known(result))
        if call is not None and call.opening is not None and not seen:
            self._closed(call.opening, result)
        self._calls.plans = _PlansBehindCompiledCode(self._plans)
        self._tracing.compiled_ended()
        self._tracing.resume()

    def _all_known(self, result: Any) -> bool:
        with untraced():
            return all(map(self._trace.nodes.is_known, arguments.tensors_in(result)))

    def _opened(self, op: str, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Begin the opaque record of compiled code: it may read and write its arguments, and all that is registered."""
        nodes, trace, observer = self._trace.nodes, self._trace, self._trace.observer
        nodes.pull(arguments.tensors_in([*args, *kwargs.values()]))
        trace.registered.read_by(nodes.storages_read())
        plan = OpPlan(name=op, call=_no_op, opaque="compiled code")
        with untraced():
            reads: list[Any] = []
            for path, tensor in arguments.named_arguments(args, kwargs):
                reads += self._calls.reads.one(plan, path, tensor)
            for kind, label, digest in trace.registered.unread():  # it may read and write any of these
                leaf = kind, label, digest, trace.nodes.record_count(), None
                reads += (kind, trace.nodes.append_leaf(leaf), 0)
                if observer.callback is not None:
                    observer.ids.add_leaf(kind, label)
            trace.registered.close(leaves=trace.nodes.leaf_count())
            others = [name, *(value for value in args if type(value) in PLAIN_TYPES)]
            others += [(key, value) for key, value in kwargs.items() if type(value) in PLAIN_TYPES]
            noted = observer.before(plan, args, kwargs) if observer.wanted else None
        return plan, tuple(reads), tuple(others), noted

    def _closed(self, opening: tuple[Any, ...], result: Any) -> None:
        """Add the opaque record that was begun."""
        plan, reads, others, noted = opening
        with untraced():
            self._calls.add_opaque(plan, reads, others, result, noted)
        self._trace.nodes.push(arguments.tensors_in(result))

    # ------------------------------------------------------------------------------------------ graphs of Inductor

    def begin(self, path: str, inputs: Sequence[Any], *, seen: bool) -> None:
        callback = self._trace.observer.callback
        if callback is not None and seen:
            with unrecorded():
                callback.graph(path, inputs)
        if not seen:
            with untraced():
                nothing = self._trace.records_nothing
                self._opaque = None if nothing else self._opened("torch.compile", "graph", inputs, {})
            return
        if self._open is not None:
            self._open.graphs += 1
            self._tracing.inside(True)
        self._outside, self._calls.plans = self._calls.plans, self._plans

    def end(self, result: Any) -> None:
        opaque, self._opaque = self._opaque, None
        if opaque is not None:
            self._closed(opaque, result)
        if self._outside is None:
            return
        self._calls.plans, self._outside = self._outside, None
        if self._open is not None:
            self._tracing.inside(False)
        callback = self._trace.observer.callback
        if callback is not None:
            with unrecorded():
                callback.graph_ended()

    def kernel(self, site: KernelSite, line: int, args: tuple[Any, ...]) -> Any:
        key = site.path, site.name, line
        kernel = self._kernels.get(key)
        if kernel is None or kernel.plan.call is not site.function:
            self._kernels[key] = kernel = kernel_at(site, line)
        return self._recorded(self._plans.get(id(kernel)) or self._calls.plan(kernel, kernel.plan), args)

    def allocate(self, name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        plan = self._allocations.get(name)
        if plan is None:
            self._allocations[name] = plan = allocation_plan(name, function)
        return self._recorded(plan, args)

    def _recorded(self, plan: OpPlan, args: tuple[Any, ...]) -> Any:
        with unrecorded():
            return self._tracing.recorded(plan, args)
