"""Answers to the recorder during a trace: calls that it forwards to Python, and tensors that it cannot name or hash."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from hashbench.core.native.library import Library, unrecorded
from hashbench.core.trace import arguments
from hashbench.core.trace.calls import CallRecorder
from hashbench.core.trace.digest import RawDigest, raw_digest
from hashbench.core.trace.native.nodes import RecorderNodes, ThreadState, marks_of, storages_of
from hashbench.core.trace.native.ops import plan_of
from hashbench.core.trace.nodes import state_number
from hashbench.core.trace.op_schema import OpPlan
from hashbench.core.trace.raw import RawTrace
from hashbench.core.trace.storage_writers import set_mark


class ForwardedCalls:
    """Callbacks of the recorder (:class:`~hashbench.core.native.library.RecorderCallbacks`): no dispatch mode is
    active, and calls that Python records look as they do to one.

    Attributes:
        calls: recorder of calls in Python.
        odd_digests: digests that the recorder asked for, by number.
    """

    def __init__(self, trace: RawTrace, nodes: RecorderNodes) -> None:
        self.calls = CallRecorder(trace, functools.partial(_plan, nodes.library, nodes.recorder, nodes.thread))
        self.odd_digests: list[RawDigest] = []
        self._trace, self._nodes = trace, nodes

    def name_of_leaf(self, tensor: torch.Tensor, number: int) -> int:
        """Check the recorder's guess that a leaf is this parameter or buffer; result as of ``Nodes.state_of``."""
        return state_number(self._nodes.modules, tensor, number)

    def digest_odd(self, tensor: torch.Tensor, number: int, *, blank: bool) -> int:
        """Hash and mark a tensor written by record ``number`` that the recorder cannot hash."""
        with unrecorded():
            set_mark(tensor, (self._nodes.token, number, None))
            self._nodes.push((tensor,))
            digest = raw_digest(tensor, self._trace.ledger)
        self.odd_digests.append((*digest[:3], None) if blank else digest)
        return len(self.odd_digests) - 1

    def handle(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Make a call forwarded by the recorder, and record it unless its op is excluded (as are ops called by the
        backward of compiled code)."""
        calls = self.calls
        plan = calls.plans.get(id(func)) or calls.plan(func)
        if not plan.traced:
            return self._nodes.library.make()
        return self.record(plan, args, kwargs)

    def record(self, plan: OpPlan, args: Sequence[Any], kwargs: dict[str, Any] | None) -> Any:
        """Make a call by its plan, with the recorder's marks of its arguments, and record it."""
        calls, nodes, observer = self.calls, self._nodes, self._trace.observer
        thread = nodes.thread
        interrupted = thread.outer, thread.given, thread.known, observer.last
        try:
            thread.outer = None
            if self._trace.records_nothing:
                return calls.call_unrecorded(plan, args, kwargs or {})
            given = arguments.tensors_in([*args, *(kwargs or {}).values()])
            storages = storages_of(given)
            nodes.pull_marks(storages)
            thread.given, thread.known = set(nodes.origins(storages)), marks_of(storages)
            output = calls.record(plan, args, kwargs)
            nodes.push((*given, *arguments.tensors_in(output)))
            return output
        finally:
            self._close()  # a callback may raise after the call
            thread.outer, thread.given, thread.known, observer.last = interrupted

    def _close(self) -> None:
        """Close this thread's last call scope if no record has done so."""
        thread = self._nodes.thread
        outer, thread.outer = thread.outer, None
        if outer is not None:
            self._nodes.library.close(self._nodes.recorder, outer, -1)


def _plan(library: Library, recorder: int, thread: ThreadState, func: Any) -> OpPlan:
    """Return the plan of an op whose calls the recorder makes. Not a method: records keep it by their plans, and must
    not keep the trace alive."""
    make = functools.partial(_make, library, recorder, thread, func.namespace != "aten")
    return replace(plan_of(func), call=make)


def _make(library: Library, recorder: int, thread: ThreadState, opened: bool, /, *_: Any, **__: Any) -> Any:
    """Make the forwarded call as it was dispatched; ``opened``: also record its inner calls."""
    outer = library.open() if opened else None
    try:
        output = library.make()
    except BaseException:
        if outer is not None:
            library.close(recorder, outer, -1)
        raise
    thread.outer = outer
    return output
