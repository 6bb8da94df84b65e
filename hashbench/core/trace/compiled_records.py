"""Records of compiled code, during whose calls tracing is suspended.

Within a call of a graph that Inductor compiled it goes on: every call of a generated kernel, and every op that the
generated module calls, is a record. Other compiled code is one opaque record.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hashbench.core.imports import ModulePatch
from hashbench.core.inductor.internals import (
    CapturedGraphs,
    CompiledGraphCalls,
    KernelSite,
    PackagedModelCalls,
    is_compiling,
)
from hashbench.core.inductor.nodes import BufferFacts, NodeFacts
from hashbench.core.native.library import is_recorded, unrecorded
from hashbench.core.trace import arguments
from hashbench.core.trace.calls import CallRecorder
from hashbench.core.trace.compiled import CompiledCalls, Exports, is_compiled_backward
from hashbench.core.trace.digest import untraced
from hashbench.core.trace.generated import GeneratedKernel, allocation_plan, facts_of_line, graph_plan, kernel_at
from hashbench.core.trace.op_schema import OpPlan
from hashbench.core.trace.raw import RawTrace
from hashbench.core.trace.reads import PLAIN_TYPES
from hashbench.core.trace.storage_writers import storage_key


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


Place = tuple[str, int | None, str, int]
"""Phase, iteration, module and sequence number of a record."""


class Tracing(Protocol):
    """How a tracer stops and goes on around compiled code."""

    def suspend(self) -> object:
        """Stop tracing: a trace inside would be compiled too, and see only some of its ops."""

    def resume(self) -> object:
        """Go on tracing."""

    def inside(self, entered: bool, *, suspended: bool) -> object:
        """Trace every op within a compiled graph, or stop that again.

        Args:
            entered: trace.
            suspended: tracing is suspended around the graph, and module hooks stay removed.
        """

    def allocated(self, tensor: torch.Tensor) -> int:
        """Mark new memory as that of the next record, and return the record's number."""

    def compiled_ended(self) -> object:
        """Called before tracing resumes after compiled code, whose backward is not recorded by the native tracer."""

    def add_allocation(self, plan: OpPlan, tensor: torch.Tensor) -> bool:
        """Add the record of an allocation of ``tensor`` without Python; return False if that is not possible."""

    def recorded(self, plan: OpPlan, args: Sequence[Any]) -> Any:
        """Make a call that is not dispatched, and record it."""


@dataclass(slots=True)
class _OpenCompiledCall:
    """The outermost call of compiled code that is under way.

    Attributes:
        name: of the compiled function.
        given: storages of the arguments.
        opening: begins its opaque record, if it may need one.
        graphs: calls of graphs within it that are recorded kernel by kernel.
    """

    name: str
    given: set[int | None]
    opening: tuple[Any, ...] | None = None
    graphs: int = 0


@dataclass(slots=True)
class _OpenGraph:
    """The call of a compiled graph that is under way.

    Attributes:
        outside: table of plans around it.
        lines: number of the next record, and what the ops from there on stand for, wherever that changed.
        place: phase, iteration, module and sequence number of its records.
        entered: stand-in for the module of the op that is called now.
    """

    outside: dict[int, OpPlan]
    lines: list[tuple[int, NodeFacts]]
    place: Place = ("forward", None, "", -1)
    entered: torch.nn.Module | None = None


class _Unseen(threading.local):
    """Calls of graphs that are not shown, in each thread."""

    def __init__(self) -> None:
        self.under_way: list[tuple[tuple[Any, ...] | None, AbstractContextManager[None], dict[int, OpPlan] | None]] = []


class CompiledRecords:
    """Records of the calls of compiled code between :meth:`start` and :meth:`stop`.

    Args:
        trace: the trace that records are added to.
        calls: its recorder of other calls.
        tracing: of the tracer; no reference to it is kept after :meth:`stop`.
    """

    def __init__(self, trace: RawTrace, calls: CallRecorder, tracing: Tracing) -> None:
        self._trace, self._calls, self._tracing = trace, calls, tracing
        self._open: _OpenCompiledCall | None = None
        self._graph: _OpenGraph | None = None
        self._unseen = _Unseen()
        self._plans = calls.plans
        self._owner = threading.get_ident()
        self._kernels: dict[tuple[int, int], tuple[GeneratedKernel, OpPlan]] = {}
        self._allocations: dict[str, OpPlan] = {}
        self._graph_plan = graph_plan()
        self._observed = trace.observer.wanted or trace.observer.callback is not None
        self._records = trace.nodes.records
        self._stand_ins: dict[str, torch.nn.Module] = {}
        self._watches: tuple[ModulePatch, ...] = (
            CompiledCalls(self._begin, self._end),
            Exports(tracing.suspend, tracing.resume),
            CompiledGraphCalls(self, self._sees_thread),
            PackagedModelCalls(self, self._sees_thread),
            CapturedGraphs(keep=False),
        )

    def start(self) -> None:
        self._owner = threading.get_ident()
        for watch in self._watches:
            watch.start()

    def stop(self) -> None:
        for watch in reversed(self._watches):
            watch.stop()
        self._watches = ()
        self._tracing = None  # type: ignore[assignment]

    def _sees_thread(self) -> bool:
        return threading.get_ident() == self._owner or is_recorded()

    # ---------------------------------------------------------------------------------------- calls of compiled code

    def _begin(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], backend: str) -> None:
        nothing = self._trace.records_nothing
        given = () if nothing else arguments.tensors_in([*args, *kwargs.values()])
        self._open = _OpenCompiledCall(name, set(map(storage_key, given)))
        if not nothing and backend != "inductor":
            self._open.opening = self._opened("torch.compile", name, args, kwargs)
        self._tracing.suspend()
        self._calls.plans = _NoPlans()

    def _end(self, result: Any) -> None:
        call, self._open = self._open, None
        if call is not None and not self._trace.records_nothing:
            self._end_recorded(call, result)
        self._calls.plans = _PlansBehindCompiledCode(self._plans)
        self._tracing.compiled_ended()
        self._tracing.resume()

    def _end_recorded(self, call: _OpenCompiledCall, result: Any) -> None:
        """Add the opaque record of a call, unless all of its results are known from the graphs within it."""
        with untraced():
            known = self._trace.nodes.is_known
            results = arguments.tensors_in(result)
            unknown = [tensor for tensor in results if not known(tensor) and storage_key(tensor) not in call.given]
        if call.opening is not None:
            if unknown or not call.graphs:
                self._closed(call.opening, result)
        elif unknown:  # computed by code that dynamo did not compile
            self._closed(self._opened("torch.compile", call.name, (), {}), unknown)

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

    def begin(self, path: str, inputs: Sequence[Any], *, seen: bool) -> bool:
        if not seen or threading.get_ident() != self._owner:
            self._begin_unseen(inputs)
            return False
        callback = self._trace.observer.callback
        if callback is not None:
            with unrecorded():
                callback.graph(path, inputs)
        call = self._open
        if call is not None:
            call.graphs += 1
        self._graph = graph = _OpenGraph(self._calls.plans, [])
        self._calls.plans = self._plans
        self._tracing.inside(True, suspended=call is not None)
        if not self._trace.records_nothing:
            graph.place = self._place()
            self._add(self._graph_plan, (), (), self._trace.nodes.next_record)
        return True

    def end(self, result: Any) -> None:
        if self._unseen.under_way:
            self._end_unseen(result)
            return
        graph, self._graph = self._graph, None
        if graph is None:
            return
        self._leave(graph)
        self._note_lines(graph)
        self._calls.plans = graph.outside
        self._tracing.inside(False, suspended=self._open is not None)
        callback = self._trace.observer.callback
        if callback is not None:
            with unrecorded():
                callback.graph_ended()

    def _begin_unseen(self, inputs: Sequence[Any]) -> None:
        """Begin the opaque record of a graph, and record nothing within it."""
        opening = None if self._trace.records_nothing else self._opened("torch.compile", "graph", inputs, {})
        outside = None
        if threading.get_ident() == self._owner:
            outside, self._calls.plans = self._calls.plans, _NoPlans()
        pause = unrecorded()
        pause.__enter__()
        self._unseen.under_way.append((opening, pause, outside))

    def _end_unseen(self, result: Any) -> None:
        opening, pause, outside = self._unseen.under_way.pop()
        pause.__exit__(None, None, None)
        if outside is not None:
            self._calls.plans = outside
        if opening is not None:
            self._closed(opening, result)

    def op(self, path: str, line: int, facts: BufferFacts) -> None:
        graph = self._graph
        if graph is None or self._trace.records_nothing:
            return
        found = facts_of_line(path, line, facts)
        self._leave(graph)
        self._trace.observer.line = found.source
        graph.lines.append((self._trace.nodes.record_count(), found))
        if found.module:
            stand_in = self._stand_ins.get(found.module)
            if stand_in is None:
                self._stand_ins[found.module] = stand_in = self._trace.modules.stand_in(found.module)
            graph.entered = stand_in
            self._trace.modules.stack.enter_by_hook(stand_in)

    def kernel(self, site: KernelSite, line: int, args: tuple[Any, ...]) -> Any:
        graph = self._graph
        assert graph is not None
        self._leave(graph)
        key = id(site), line
        known = self._kernels.get(key)
        if known is None:
            kernel = kernel_at(site, line)
            self._kernels[key] = known = kernel, self._calls.plan(kernel, kernel.plan)
        return self._tracing.recorded(known[1], args)

    def allocate(self, name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        tensor, graph = function(*args), self._graph
        if self._trace.records_nothing or graph is None or type(tensor) is not torch.Tensor:
            return tensor
        self._leave(graph)
        plan = self._allocations.get(name)
        if plan is None:
            self._allocations[name] = plan = allocation_plan(name, function)
        if not self._observed and len(args) == _ALLOCATED and self._tracing.add_allocation(plan, tensor):
            return tensor
        stride = None if tensor.is_contiguous() else tensor.stride()
        written = ((tensor.dtype, tensor.shape, stride, None),)
        if self._observed:
            number = self._add(plan, args, written, functools.partial(self._tracing.allocated, tensor))
        else:
            number = self._tracing.allocated(tensor)
            self._records.append((plan, *graph.place, (), args, written, None, None, number))
        if self._trace.hashed_inputs:
            self._trace.observer.unwritten.add(number)
        return tensor

    # ------------------------------------------------------------------------------------------- records of a graph

    def _place(self) -> Place:
        node = torch._C._current_autograd_node()
        if node is not None:
            phase, sequence = "backward", node._sequence_nr()
        else:
            phase = "optimizer" if self._trace.modules.optimizing else "forward"
            sequence = torch._C._autograd._get_sequence_nr() - 1
        return phase, self._trace.iteration, self._trace.modules.current, sequence

    def _add(self, plan: OpPlan, others: Sequence[Any], written: tuple[Any, ...], take: Callable[[], int]) -> int:
        """Add a record that reads nothing, and return its number: callbacks are not called around it."""
        observer, graph = self._trace.observer, self._graph
        assert graph is not None
        noted = None
        if self._observed:
            with unrecorded():
                noted = observer.before(plan, (), {}) if observer.wanted else None
                observer.last = self._calls.begin(plan)
        number = take()
        self._records.append((plan, *graph.place, (), others, written, None, None, number))
        if noted is not None:
            observer.after(number, plan, (), {}, noted)
        return number

    def _leave(self, graph: _OpenGraph) -> None:
        """Leave the module and the line of the last op."""
        if graph.lines and graph.lines[-1][1] is not _NOWHERE:
            self._trace.observer.line = ""
            graph.lines.append((self._trace.nodes.record_count(), _NOWHERE))
        if graph.entered is not None:
            self._trace.modules.stack.leave(graph.entered)
            graph.entered = None

    def _note_lines(self, graph: _OpenGraph) -> None:
        """Note the source lines of the ops of a graph that has ended."""
        kept, ends = self._trace.observer.kept, [first for first, _ in graph.lines[1:]]
        for (first, facts), end in zip(graph.lines, ends, strict=False):
            for number in range(first, end) if facts.source else ():
                kept.setdefault(number, {}).setdefault("source", facts.source)


_NOWHERE = NodeFacts()

_ALLOCATED = 3
"""Arguments of an allocator: size, stride and dtype."""
