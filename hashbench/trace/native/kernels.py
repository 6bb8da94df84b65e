"""Records of generated kernels, whose calls are not dispatched: Python makes them, with the recorder's numbers."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from hashbench.native.library import KNOWN
from hashbench.trace.native.forwarded import ForwardedCalls
from hashbench.trace.native.nodes import RecorderNodes
from hashbench.trace.op_schema import OpPlan
from hashbench.trace.raw import PLAIN_TENSORS, RawTrace


class KernelCalls:
    """Recorder of calls that get plain tensors and numbers and return nothing. No observer is called."""

    def __init__(self, trace: RawTrace, nodes: RecorderNodes, forwarded: ForwardedCalls) -> None:
        self._trace, self._nodes, self._forwarded = trace, nodes, forwarded

    def record(self, plan: OpPlan, args: Sequence[Any], place: tuple[str, int | None, str, int]) -> Any:
        """Make a call, and add its record; ``place`` is its phase, iteration, module and sequence number."""
        nodes, trace = self._nodes, self._trace
        library, recorder, node = nodes.library, nodes.recorder, ctypes.c_int32()
        reads: list[Any] = []
        others: list[Any] = []
        for at, value in enumerate(args):
            if type(value) not in PLAIN_TENSORS:
                others.append(value)
                continue
            state = library.node(recorder, value.untyped_storage()._cdata, node)
            if state == KNOWN:
                reads += at, node.value, value.storage_offset()
            elif state or at in plan.written:  # seen in parts, or written by nobody that is known
                return self._forwarded.record(plan, args, None)
            else:
                reads += self._leaf(plan, at, value)
        try:
            output = plan.call(*args)
        except BaseException:
            trace.failed_op = plan.name
            raise
        number = library.take_record(recorder)
        mark, written = (nodes.token, number, None), []
        for at in plan.written:
            written.append(trace.write(args[at], mark, False))
            library.set_node(recorder, args[at].untyped_storage()._cdata, number, 0)
        phase, iteration, module, sequence = place
        module = plan.module or module
        nodes.records.append(
            (plan, phase, iteration, module, sequence, tuple(reads), others, tuple(written), None, None, number)
        )
        return output

    def _leaf(self, plan: OpPlan, argument: int, tensor: torch.Tensor) -> tuple[Any, ...]:
        """Add a tensor that no record wrote as a leaf, and return its read."""
        thread = self._nodes.thread
        before, thread.known = thread.known, []
        try:
            return self._forwarded.calls.reads.one(plan, argument, tensor)
        finally:
            thread.known = before
