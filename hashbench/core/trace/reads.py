"""What a call reads: the writers of its tensor arguments, and its other arguments. Unknown tensors become leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hashbench.core.native.library import unrecorded
from hashbench.core.trace.build import RawLeaf
from hashbench.core.trace.digest import components, is_whole, raw_digest
from hashbench.core.trace.nodes import UNNAMED_PARAMETER, own_mark
from hashbench.core.trace.op_schema import GROUP, OpPlan
from hashbench.core.trace.raw import PLAIN_TENSORS, RawTrace
from hashbench.core.trace.storage_writers import (
    IN_FLIGHT,
    LeafViews,
    Mark,
    covers_storage,
    offset,
    set_mark,
    view_key,
    whole_storage,
)

PLAIN_TYPES = frozenset(
    (int, float, bool, str, complex, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)

Inputs = tuple[tuple[Any, ...], tuple[Any, ...]]
"""``reads`` and ``others`` of a ``RawRecord``."""


class Reads:
    """Reader of the arguments of a trace's calls."""

    def __init__(self, trace: RawTrace) -> None:
        self._trace, self._nodes, self._token = trace, trace.nodes, trace.nodes.token

    def positional(self, plan: OpPlan, args: Sequence[Any]) -> Inputs:
        """Split positional arguments into reads (flat argument, writer, offset) and non-tensor values."""
        reads: list[Any] = []
        others: list[Any] = []
        if plan.group:
            args = [GROUP if argument in plan.group else value for argument, value in enumerate(args)]
        for argument, value in enumerate(args):
            kind = type(value)
            if kind in PLAIN_TENSORS:
                try:
                    storage = value.untyped_storage()
                    owner, node, views = storage._hashbench_writer
                    if owner is not self._token and value.nbytes >= storage.nbytes() and value.is_contiguous():
                        owner, node, views = self._token, self._new_leaf(value, None), None
                    if owner is self._token and views is None:
                        reads += (argument, node, value.storage_offset())
                        continue
                except (NotImplementedError, RuntimeError):
                    pass  # without a storage: sparse, nested, opaque
                self._add(plan, argument, value, reads, others)
            elif kind in PLAIN_TYPES or (kind is list and value and type(value[0]) is int):
                others.append(value)  # no schema mixes tensors with sizes in a list
            else:
                self._add(plan, argument, value, reads, others)
        return tuple(reads), tuple(others)

    def named(self, plan: OpPlan, kwargs: Mapping[str, Any]) -> Inputs:
        """Split keyword arguments likewise; non-tensor values keep their names."""
        reads: list[Any] = []
        others: list[Any] = []
        for name, value in kwargs.items():
            if type(value) in PLAIN_TYPES or name in plan.group:
                others.append((name, GROUP if name in plan.group else value))
            else:
                self._add(plan, name, value, reads, others)
        return tuple(reads), tuple(others)

    def one(self, plan: OpPlan, argument: int | str, tensor: torch.Tensor) -> tuple[Any, ...]:
        """Return the reads of one tensor, or of each of its components, after a collective those that it has left."""
        if tensor.layout is not torch.strided:
            self._received(plan, tensor, own_mark(tensor, self._token))
        reads: tuple[Any, ...] = ()
        for part in components(tensor) or [tensor]:
            reads += (argument, self._node(plan, argument, part), offset(part))
        return reads

    def _add(self, plan: OpPlan, argument: int | str, value: Any, reads: list[Any], others: list[Any]) -> None:
        """Record one argument off the fast path: a leaf, a list, an odd tensor, or any other object."""
        if isinstance(value, torch.Tensor):
            reads += self.one(plan, argument, value)
            if value.is_complex() and value.is_conj():
                others.append(("conj", argument))
            return
        plain = value
        if isinstance(value, (list, tuple)):
            plain = []
            for index, item in enumerate(value):
                nested = isinstance(item, (list, tuple)) and any(isinstance(part, torch.Tensor) for part in item)
                if nested or isinstance(item, torch.Tensor):  # all-gather: tensors by rank
                    self._add(plan, f"{argument}.{index}", item, reads, others)
                else:
                    plain.append(item)
            if value and not plain:
                return
        others.append((argument, plain) if isinstance(argument, str) else plain)

    def _node(self, plan: OpPlan, argument: int | str, tensor: torch.Tensor) -> int:
        """Return the number of the record or leaf that last wrote this tensor; an unknown tensor becomes a leaf."""
        mark = own_mark(tensor, self._token)
        if mark is not None and not isinstance(mark[2], dict):
            if plan.fresh or plan.writes_arguments or plan.waits or plan.collective:  # not only a view
                self._received(plan, tensor, mark)
            return mark[1]
        view = view_key(tensor)
        views: LeafViews | None = mark[2] if mark is not None and isinstance(mark[2], dict) else None
        if views is None and not covers_storage(tensor):
            views = {}
        if views is not None and plan.writes(argument):  # the rest was never read, and is no leaf after the write
            return self._new_leaf(tensor, None, content=whole_storage(tensor))
        if views is not None and view in views:
            return views[view]
        return self._new_leaf(tensor, views)

    def _received(self, plan: OpPlan, tensor: torch.Tensor, mark: Mark | None) -> None:
        """Have what a collective left in a tensor hashed before it is read."""
        if mark is not None and mark[2] is IN_FLIGHT:
            position = self._nodes.record_count()
            self._trace.collectives.read(mark[1], tensor, position=position, by=plan)

    def _new_leaf(self, tensor: torch.Tensor, views: LeafViews | None, *, content: torch.Tensor | None = None) -> int:
        """Add a leaf for a tensor that no op of this trace wrote; ``content``: its whole storage instead."""

        def describe(number: int, views: LeafViews | None) -> RawLeaf:
            return self._leaf(number, tensor, views, content)

        return self._nodes.add_leaf(tensor, views, whole=content is not None, describe=describe)

    def _leaf(
        self, number: int, tensor: torch.Tensor, views: LeafViews | None, content: torch.Tensor | None
    ) -> RawLeaf:
        """Hash and name a leaf, and mark its storage with its number."""
        trace = self._trace
        state = self._nodes.state_of(tensor)
        kind, name = trace.state_name(state)
        kind, name, initial = trace.registered.read(self._nodes.storage_of(tensor)) or (kind, name, None)
        if not kind:
            kind, name = "parameter" if state == UNNAMED_PARAMETER else "other", trace.modules.current
        if trace.observer.callback is not None:
            leaf_id = trace.observer.ids.add_leaf(kind, name)
            with unrecorded():
                trace.observer.callback.leaf(leaf_id, tensor if content is None else content)
        if views is None and (content is not None or is_whole(tensor)):
            digest = trace.write(tensor if content is None else content, (self._token, number, None), blank=False)
        else:
            if views is not None:
                views[view_key(tensor)] = number
            set_mark(tensor, (self._token, number, views))
            digest = raw_digest(tensor, trace.ledger)
        seen = digest if content is None else raw_digest(tensor, trace.ledger)
        return kind, name, digest, self._nodes.record_count(), None if initial is None else (initial, seen)
