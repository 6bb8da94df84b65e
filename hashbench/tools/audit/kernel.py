"""The kernel of an op whose items' rows depend on the number of items: the first whose inputs' rows are equal and whose
outputs' are not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hashbench.batch.item_call import ItemCall, NotItemwiseError, copied, copied_leaf, item_digests, left_by
from hashbench.batch.layout import ItemAxis
from hashbench.trace.api import HashDebugTrace
from hashbench.trace.arguments import mapped, tensors_in
from hashbench.trace.callbacks import TraceCallback
from hashbench.trace.digest import digest
from hashbench.trace.op_schema import Pattern, plan_of


@dataclass(slots=True, eq=False)
class _Call:
    """One call of a kernel: copies of what it was given, and of what it left."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    left: list[torch.Tensor]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return tensors_in([*self.args, *self.kwargs.values()])


class _Calls(TraceCallback):
    """Keeps every call that computes something."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []

    def before(self, node: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        del node
        self.calls.append(_Call(func, mapped(tuple(args), copied_leaf), mapped(dict(kwargs), copied_leaf), []))

    def after(self, node: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> None:
        del node
        self.calls[-1].left = [copied(tensor) for tensor in left_by(func, args, kwargs, output)]


def _calls_of(call: ItemCall) -> list[_Call]:
    """The calls of kernels in one run."""
    watcher = _Calls()
    with HashDebugTrace(watcher=watcher, tracer="python"):
        call.run()
    plans = [(made, plan_of(made.func)) for made in watcher.calls]
    return [made for made, plan in plans if plan.pattern is not Pattern.VIEW and not plan.blank]


def draws_inside(call: ItemCall) -> bool:
    """Whether a kernel of the call draws random numbers, also after a seed that the call sets itself."""
    return any(plan_of(made.func).seeded for made in _calls_of(call))


def guilty_call(call: ItemCall, size: int) -> ItemCall | None:
    """The first kernel's call, on all items, in which a run of ``call`` on its first ``size`` items differs from one on
    all; ``None`` where none can be told: the runs make other calls, or items lie otherwise in their tensors."""
    whole, part = _calls_of(call), _calls_of(call.at(size))
    if [made.func for made in whole] != [made.func for made in part]:
        return None
    for reference, other in zip(whole, part, strict=True):
        try:
            if _is_guilty(reference, other, call.items, size):
                return _item_call(reference, other, call.items, size, call.settings)
        except NotItemwiseError:
            return None
    return None


def _is_guilty(reference: _Call, other: _Call, items: int, size: int) -> bool:
    read = zip(reference.tensors, other.tensors, strict=True)
    if not all(_equal(one, two, _axis(one, two, items, size), items, size) for one, two in read):
        return False
    written = zip(reference.left, other.left, strict=True)
    return not all(_equal(one, two, _axis(one, two, items, size), items, size) for one, two in written)


def _equal(one: torch.Tensor, other: torch.Tensor, axis: ItemAxis | None, items: int, size: int) -> bool:
    if axis is None:
        return digest(one).value == digest(other).value
    return item_digests(one, axis, items)[:size] == item_digests(other, axis, size)


def _axis(one: torch.Tensor, other: torch.Tensor, items: int, size: int) -> ItemAxis | None:
    """The dimension that holds as many items in each run; :class:`NotItemwiseError` where another one differs."""
    if one.dim() != other.dim():
        raise NotItemwiseError("other dimensions")
    grown = [dim for dim in range(one.dim()) if one.shape[dim] != other.shape[dim]]
    if not grown:
        return None
    each, rest = divmod(one.shape[grown[0]], items)
    if len(grown) > 1 or rest or not each or other.shape[grown[0]] != each * size:
        raise NotItemwiseError("a size that is not one of items")
    inner, outer = ItemAxis(grown[0], inner=each), ItemAxis(grown[0], outer=each)
    return inner if each == 1 or _equal(one, other, inner, items, size) else outer


def _item_call(reference: _Call, other: _Call, items: int, size: int, settings: Mapping[str, str]) -> ItemCall:
    def axes(whole: Sequence[torch.Tensor], part: Sequence[torch.Tensor]) -> tuple[ItemAxis | None, ...]:
        return tuple(_axis(*pair, items, size) for pair in zip(whole, part, strict=True))

    read, left = axes(reference.tensors, other.tensors), axes(reference.left, other.left)
    return ItemCall(reference.func, reference.args, reference.kwargs, items, read, left, settings=settings)
