"""Digest the rows of every tensor that an op reads or writes, along the dimension that holds the items of the batch.

Views write nothing and need no rule: what a kernel reads through one is digested as the kernel sees it. A tensor that
is read as it was written is digested once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from xxhash import xxh3_64_digest

from hashbench.core.diagnose.calls.capture import is_plain
from hashbench.core.diagnose.calls.ops import is_custom
from hashbench.core.trace.arguments import generator_digest, leaves, named_arguments, tensors_in
from hashbench.core.trace.callbacks import TraceCallback
from hashbench.core.trace.digest import dtype_name, raw_digest, readable
from hashbench.core.trace.op_schema import OpPlan, Pattern, plan_of
from hashbench.extensions.invariance.layout import WHOLE, Cut, ItemSubset, Shape
from hashbench.extensions.invariance.match import CallRows, Draw, TensorRows

NodeShapes = Mapping[str, Mapping[str, Shape]]
"""Id of a record → shapes of its inputs, by argument, and of its outputs, by ``>0``."""


class ShapeNotes(TraceCallback):
    """Notes the shapes that every call read and wrote."""

    def __init__(self) -> None:
        self.shapes: dict[str, dict[str, Shape]] = {}

    def before(self, node: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:  # noqa: ARG002
        """Note the shapes of the inputs before the call may change them."""
        self.shapes[node] = {path: tuple(tensor.shape) for path, tensor in named_arguments(args, kwargs)}

    def after(self, node: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> None:
        """Note the shapes of the outputs."""
        written = plan_of(func).written_by(args, kwargs, output)
        self.shapes[node] |= {f">{at}": tuple(tensor.shape) for at, tensor in enumerate(written)}


def whole_numbers(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Return all values among the arguments, in order: whole numbers, and ``None`` for each other."""
    return tuple(leaf if type(leaf) is int else None for leaf in leaves([*args, *kwargs.values()]))


class RowDigests(TraceCallback):
    """Digests, for every call, the rows of its inputs and outputs.

    Args:
        subset: the sizes of the two runs.
        others: the shapes of the other run (if both have all items: of one that shows what scales), by the ids that
            this run's records have.
        reference: whether this is the run of the whole batch.

    Attributes:
        calls: id of a record → rows.
        shapes: the shapes.
        numbers: of the smaller run, the whole numbers among the arguments.
        views: of the smaller run, the ops through which a call reads a view.
    """

    def __init__(self, subset: ItemSubset, others: NodeShapes, *, reference: bool) -> None:
        self.calls: dict[str, CallRows] = {}
        self.shapes: dict[str, dict[str, Shape]] = {}
        self.numbers: dict[str, tuple[int | None, ...]] = {}
        self.views: dict[str, dict[str, tuple[str, ...]]] = {}
        self._subset, self._others, self._reference = subset, others, reference
        self._cuts: dict[tuple[Shape, Shape], Cut | None] = {}
        self._read: dict[str, tuple[tuple[str, TensorRows], ...]] = {}
        self._states: dict[str, int] = {}
        self._shown: dict[int, dict[tuple[Any, ...], tuple[str, ...]]] = {}
        self._known: dict[int, dict[tuple[Any, ...], TensorRows]] = {}
        self._state: dict[int, str] = {}

    def leaf(self, node: str, tensor: torch.Tensor) -> None:
        """Forget what is known of this memory, which was another tensor's.

        A parameter or buffer is the same in both runs until it is written to: its name replaces its content.
        """
        address = _address(tensor)
        self._known.pop(address, None)
        self._state.pop(address, None)
        self._shown.pop(address, None)
        if node.startswith(("parameter/", "buffer/")) and address:
            self._state[address] = node

    def before(self, node: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Digest the inputs before the call may change them."""
        plan = plan_of(func)
        if plan.pattern is Pattern.VIEW:
            return
        if not self._reference:
            self.numbers[node] = whole_numbers(args, kwargs)
            self.views[node] = {
                path: ops for path, tensor in named_arguments(args, kwargs) if (ops := self._ops_of(tensor))
            }
        shapes = self._others.get(node, {})
        self._read[node] = tuple(
            (path, self._rows(tensor, shapes.get(path))) for path, tensor in named_arguments(args, kwargs)
        )
        if _may_draw(func, plan):
            self._states[node] = generator_digest(args, kwargs)

    def after(self, node: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> None:
        """Digest the outputs; of a view note the ops that made it."""
        plan = plan_of(func)
        if plan.pattern is Pattern.VIEW:
            if not self._reference:
                before = next((self._ops_of(tensor) for _, tensor in named_arguments(args, kwargs)), ())
                for tensor in tensors_in(output):
                    self._shown.setdefault(_address(tensor), {})[_place(tensor)] = (*before, plan.name)
            return
        written = plan.written_by(args, kwargs, output)
        for address in {_address(tensor) for tensor in (tensors_in(output) if plan.resizes else written)}:
            self._known[address] = {}
            self._state.pop(address, None)
        if plan.fresh:
            for tensor in tensors_in(output):
                self._shown.pop(_address(tensor), None)
        shapes, read = self._others.get(node, {}), self._read.pop(node, ())
        named = [(f">{at}", tensor) for at, tensor in enumerate(written)]
        rows = () if plan.blank else tuple(self._rows(tensor, shapes.get(path)) for path, tensor in named)
        self.calls[node] = CallRows(read, rows, self._drew(node, args, kwargs))
        self.shapes[node] = {path: each.shape for path, each in read}
        self.shapes[node] |= {path: tuple(tensor.shape) for path, tensor in named}

    def _drew(self, node: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Draw | None:
        before = self._states.pop(node, None)
        if before is None:
            return None
        after = generator_digest(args, kwargs)
        return Draw(before, after) if after != before else None

    def _rows(self, tensor: torch.Tensor, other: Shape | None) -> TensorRows:
        given = tuple(tensor.shape)
        if self._subset.together and other is not None and len(other) == len(given):
            tensor = self._without_repeats(tensor, other)
        rows = self._cut_rows(tensor, other)
        return rows if rows.shape == given else rows._replace(given=given)

    def _without_repeats(self, tensor: torch.Tensor, other: Shape) -> torch.Tensor:
        """Return the tensor without repeats along a dimension in which the other run has none: the heads of keys, which
        one of the runs repeats for those of the queries."""
        for dim, (here, there) in enumerate(zip(tensor.shape, other, strict=True)):
            if here <= there or not there or here % there or not is_plain(tensor) or tensor.is_meta:
                continue
            if self._subset.multiple(*((here, there) if self._reference else (there, here))):
                continue
            for along, sizes in ((dim + 1, (there, -1)), (dim, (-1, there))):
                all_of_it = tensor.detach().unflatten(dim, sizes)
                once = all_of_it.select(along, 0)
                if torch.equal(all_of_it, once.unsqueeze(along).expand_as(all_of_it)):
                    tensor = once
                    break
        return tensor

    def _cut_rows(self, tensor: torch.Tensor, other: Shape | None) -> TensorRows:
        shape = tuple(tensor.shape)
        cut = WHOLE if other is None or other == shape else self._cut(shape, other)
        address = _address(tensor)
        if not address:
            return _odd(tensor, shape, comparable=cut is WHOLE)
        dtype = dtype_name(tensor.dtype)
        if cut is None:
            return TensorRows(dtype, shape, None)
        place = _place(tensor)
        state = self._state.get(address)
        if state is not None and cut is WHOLE:
            return TensorRows(dtype, shape, cut, state=(state, *place))
        known = self._known.setdefault(address, {})
        key = (place, cut)
        if key not in known:
            if not is_plain(tensor) or tensor.is_meta:
                return _odd(tensor, shape, comparable=cut is WHOLE)
            known[key] = TensorRows(dtype, shape, cut, *row_digests(tensor, cut))
        return known[key]

    def _ops_of(self, tensor: torch.Tensor) -> tuple[str, ...]:
        """Return the ops that made a view of its memory, in order."""
        shown = self._shown.get(_address(tensor))
        return shown.get(_place(tensor), ()) if shown else ()

    def _cut(self, shape: Shape, other: Shape) -> Cut | None:
        if (shape, other) not in self._cuts:
            first = self._reference or self._subset.turned
            both = self._subset.cuts(*((shape, other) if first else (other, shape)))
            self._cuts[shape, other] = None if both is None else both[0 if self._reference else 1]
        return self._cuts[shape, other]


def _may_draw(func: Any, plan: OpPlan) -> bool:
    """Return True if a call may draw random numbers: by its schema, or, in a custom op, inside."""
    return plan.seeded or is_custom(func)


def row_digests(tensor: torch.Tensor, cut: Cut) -> tuple[bytes, int]:
    """Return the digests of a tensor's rows, concatenated, and the bytes of each.

    A digest is XXH3-64 over the row's elements in logical order, or the elements themselves if they are no longer.
    Reads in place if rows are contiguous.
    """
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    for dim, start, length in cut.narrowed:
        tensor = tensor.narrow(dim, start, length)
    repeated = 1
    if cut.dim is None:
        count = 1
    else:
        count = tensor.shape[cut.dim] // cut.step
        if count > 1 and tensor.stride(cut.dim) == 0:  # expanded: one row, shown many times
            tensor, repeated = tensor.narrow(cut.dim, 0, cut.step), count
        tensor = tensor.movedim(cut.dim, 0)
    if not tensor.is_cpu:
        tensor = tensor.cpu()
    tensor = tensor.contiguous()
    nbytes = tensor.nbytes
    width = nbytes * repeated // count if count else 0
    if not nbytes:
        return b"", 0
    content = memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr())).cast("B")
    if width <= 8:
        return bytes(content) * repeated, width
    return b"".join([xxh3_64_digest(row) for row in _rows_of(content, width)]) * repeated, 8


def _rows_of(content: memoryview, width: int) -> Iterator[memoryview]:
    return (content[start : start + width] for start in range(0, len(content), width))


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the memory and layout that a tensor shows."""
    shape, stride = tuple(tensor.shape), tensor.stride()
    return tensor.storage_offset(), shape, stride, dtype_name(tensor.dtype), tensor.is_conj(), tensor.is_neg()


def _address(tensor: torch.Tensor) -> int:
    """Return the address of the tensor's memory; 0 without any."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0


def _odd(tensor: torch.Tensor, shape: Shape, *, comparable: bool) -> TensorRows:
    """Digest a tensor without elements, or one that is sparse, quantized or nested, as a whole."""
    digest = readable(raw_digest(tensor))
    return TensorRows(digest.dtype, shape, WHOLE if comparable else None, digest.value.encode())
