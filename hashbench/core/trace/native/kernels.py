"""Records of calls that are not dispatched, made by the recorder: of generated kernels, and of their allocators."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hashbench.core.native.library import unrecorded
from hashbench.core.trace.native.forwarded import ForwardedCalls
from hashbench.core.trace.native.nodes import RecorderNodes
from hashbench.core.trace.native.ops import Op
from hashbench.core.trace.op_schema import OpPlan
from hashbench.core.trace.raw import RawTrace

_MOST = 64
"""Arguments of a call that the recorder can take."""

_ALLOCATOR_ARGUMENTS = ("int[]", "int[]", "ScalarType")


@dataclass(frozen=True, slots=True, eq=False)
class _KnownKernel:
    """What the recorder knows of a callee.

    Attributes:
        plan: its plan.
        number: the recorder's number of it; -1 if Python must record its calls.
        tensors: which of its arguments are tensors; all others are numbers.
    """

    plan: OpPlan
    number: int
    tensors: Sequence[bool] = ()


class KernelCalls:
    """Recorder of calls that get plain tensors and numbers. No observer is called.

    Attributes:
        ops: what was called, by the recorder's number.
    """

    def __init__(self, trace: RawTrace, nodes: RecorderNodes, forwarded: ForwardedCalls) -> None:
        self.ops: dict[int, Op] = {}
        self._trace, self._nodes, self._forwarded = trace, nodes, forwarded
        self._known: dict[int, _KnownKernel] = {}  # by the id of the plan

    def record(self, plan: OpPlan, args: Sequence[Any]) -> Any:
        """Make a call that returns nothing, and add its record."""
        library = self._nodes.library
        callee = self._known.get(id(plan)) or self._kernel(plan, args)
        call = None
        if callee.number >= 0:
            values = array("q", [value._cdata if tensor else value for value, tensor in zip(args, callee.tensors)])  # noqa: B905
            call = library.kernel(self._nodes.recorder, callee.number, values.buffer_info()[0])
        if call is None:  # reads a part of a leaf, or no plain tensor
            with unrecorded():
                return self._forwarded.record(plan, args, None)
        returned = False
        try:
            output = plan.call(*args)
            returned = True
            return output
        finally:
            library.kernel_ended(call, returned)
            if not returned:
                self._trace.failed_op = plan.name

    def add_allocation(self, plan: OpPlan, tensor: torch.Tensor) -> bool:
        """Add the record of an allocation (size, stride, dtype); return False if Python must."""
        callee = self._known.get(id(plan)) or self._know(plan, (False,) * 3, _ALLOCATOR_ARGUMENTS)
        return bool(self._nodes.library.allocated(self._nodes.recorder, callee.number, tensor._cdata))

    def _kernel(self, plan: OpPlan, args: Sequence[Any]) -> _KnownKernel:
        tensors = [type(value) is not int for value in args]
        if len(args) <= _MOST and all(hasattr(args[at], "_cdata") for at in _places(tensors)):
            return self._know(plan, tensors, ("int",) * len(args))
        self._known[id(plan)] = callee = _KnownKernel(plan, -1)
        return callee

    def _know(self, plan: OpPlan, tensors: Sequence[bool], kinds: Sequence[str]) -> _KnownKernel:
        """Tell the recorder of a callee."""
        bits, written = (sum(1 << at for at in those) for those in (_places(tensors), plan.written))
        number = self._nodes.library.know_kernel(self._nodes.recorder, len(kinds), bits, written, plan.blank)
        self.ops[number] = Op(plan, range(len(kinds)), kinds)
        self._known[id(plan)] = callee = _KnownKernel(plan, number, tensors)
        return callee


def _places(tensors: Sequence[bool]) -> list[int]:
    return [at for at, tensor in enumerate(tensors) if tensor]
