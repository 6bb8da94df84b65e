"""One record for every call of compiled code, during which tracing is suspended."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hashbench.trace import arguments
from hashbench.trace.calls import CallRecorder
from hashbench.trace.compiled import CompiledCalls, Exports, is_compiled_backward
from hashbench.trace.digest import untraced
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
    """Plan table used after compiled code ran: ops called by its backward are not recorded."""

    def get(self, function: int, *_: Any) -> OpPlan | None:  # type: ignore[override]
        compiled = is_compiled_backward(torch._C._current_autograd_node())
        return _NoPlans.SKIPPED if compiled else super().get(function)


class CompiledRecords:
    """Records of the calls of compiled code between :meth:`start` and :meth:`stop`.

    Args:
        trace: the trace that records are added to.
        calls: its recorder of other calls.
        suspend: stop tracing: a trace inside would be compiled too, and see only some of its ops.
        resume: go on tracing.
        ended: called before tracing resumes after compiled code, whose backward is not recorded either.
    """

    def __init__(
        self,
        trace: RawTrace,
        calls: CallRecorder,
        suspend: Callable[[], object],
        resume: Callable[[], object],
        ended: Callable[[], object] = _no_op,
    ) -> None:
        self._trace, self._calls = trace, calls
        self._suspend, self._resume, self._ended = suspend, resume, ended
        self._open: tuple[Any, ...] = ()
        self._watches = CompiledCalls(self._begin, self._end), Exports(suspend, resume)

    def start(self) -> None:
        for watch in self._watches:
            watch.start()

    def stop(self) -> None:
        for watch in reversed(self._watches):
            watch.stop()
        self._suspend = self._resume = self._ended = _no_op

    def _begin(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        nodes, trace = self._trace.nodes, self._trace
        if not trace.records_nothing:
            nodes.pull(arguments.tensors_in([*args, *kwargs.values()]))
            trace.registered.read_by(nodes.storages_read())
            self._read(name, args, kwargs)
        self._suspend()
        self._calls.plans = _NoPlans()

    def _read(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        plan = OpPlan(name="torch.compile", call=_no_op, opaque="compiled code")
        trace, observer = self._trace, self._trace.observer
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
        self._open = plan, tuple(reads), tuple(others), noted

    def _end(self, result: Any) -> None:
        if not self._trace.records_nothing:
            plan, reads, others, noted = self._open
            with untraced():
                self._calls.add_opaque(plan, reads, others, result, noted)
            self._trace.nodes.push(arguments.tensors_in(result))
        self._calls.plans = _PlansBehindCompiledCode()
        self._ended()
        self._resume()
