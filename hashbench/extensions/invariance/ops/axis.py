"""Where the items of a batch are in the sample inputs of an op, found by experiment.

An item axis is a dimension of the inputs and one of the outputs such that one more item in is one more out, and items
in another order come out in that order. Sample inputs are tiny, and kernels take other paths for longer ones: so
samples are also widened, one size of their other dimensions at a time.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from hashbench.core.diagnose.calls.capture import is_plain
from hashbench.core.trace.api import HashDebugTrace
from hashbench.core.trace.arguments import mapped, tensors_in
from hashbench.core.trace.callbacks import TraceCallback
from hashbench.core.trace.op_schema import plan_of
from hashbench.extensions.invariance.item_call import SEED, ItemCall, items_first
from hashbench.extensions.invariance.layout import ItemAxis, NotItemwiseError

MOST_TRIED = 24
"""Ways to give the tensors of a sample an item axis, of which so many are tried."""

WIDENED = 256
"""What a size of inner dimensions becomes at least: long enough that sums are split and blocks are full."""

MOST_CLASSES = 3
"""Sizes of inner dimensions that are widened, each alone."""

MOST_ELEMENTS = 2**18
"""Of any tensor of a widened sample for each of its items, of one that they share, and of an output for each item."""

TOLERANCE = 0.02
"""Part of the largest number by which rows may differ that are the same but for rounding, in 16 bits too."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Itemwise:
    """A call whose tensors hold items. ``coupled``: other content in the others changes an item by more than rounding;
    ``widened``: what the inner dimensions of which size became, ``10→260``."""

    call: ItemCall
    coupled: bool = False
    widened: str = ""

    @property
    def elements(self) -> int:
        """Of each item, in all tensors that hold items."""
        tensors = zip(self.call.tensors, self.call.axes, strict=True)
        return sum(tensor.numel() for tensor, axis in tensors if axis is not None) // self.call.items


def draws(call: ItemCall) -> bool | None:
    """Return True if the call draws random numbers: it gives other results after another seed, or a kernel of it takes
    numbers from torch's generator, which the call may seed and put back itself; ``None`` where it gives other results
    after the same seed, too."""
    first, other = (call.run(seed=seed)[0] for seed in (SEED, SEED + 1))
    if not _all_close(first, other):
        return True if _all_close(first, call.run()[0]) else None
    watcher = _Drawing()
    with HashDebugTrace(watcher=watcher, tracer="python"):
        call.run()
    return watcher.seen


class _Drawing(TraceCallback):
    """Notes whether a kernel that may draw did: it left torch's generator in another state."""

    def __init__(self) -> None:
        self.seen = False
        self._state: torch.Tensor | None = None

    def before(self, node: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        del node, args, kwargs
        self._state = torch.get_rng_state() if plan_of(func).seeded else None

    def after(self, node: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> None:
        del node, func, args, kwargs, output
        self.seen |= self._state is not None and not torch.equal(self._state, torch.get_rng_state())


def find_axis(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Itemwise | None:
    """Find the item axes of a call, the first dimension of its first tensor before all others; ``None`` where it has
    none.

    Raises:
        NotItemwiseError: an argument has no plain memory.
    """
    tensors = tensors_in([*args, *kwargs.values()])
    if not all(map(is_plain, tensors)):
        raise NotItemwiseError("an argument has no plain memory")
    shapes = [tuple(tensor.shape) for tensor in tensors]
    leading = [
        place
        for place, tensor in enumerate(tensors)
        if place == 0 or max(shapes[0], default=1) == 1 or _holds_indices(tensor)
    ]
    for first, axes, items in itertools.islice(_assignments(shapes, leading), MOST_TRIED):
        found = _verified(ItemCall(func, tuple(args), kwargs, items, axes, ()))
        if found is not None:
            return _with_fewest_axes(found, first)
    return None


def _with_fewest_axes(found: Itemwise, first: int) -> Itemwise:
    """Keep the axis in the tensor number ``first``, and in those others that the op does not take as they are beside
    fewer items, where another dimension of the first is as large as the batch: they may be statistics of as many
    channels. Kernels that check no sizes write beyond such a tensor where it is cut, or not widened, as the items are.
    """
    if found.call.tensors[first].shape.count(found.call.items) < 2:
        return found
    for place in range(len(found.call.axes)):
        if place != first and found.call.axes[place] is not None:
            axes = tuple(None if at == place else axis for at, axis in enumerate(found.call.axes))
            found = _verified(dataclasses.replace(found.call, axes=axes, outputs=()), step=-1) or found
    return found


def _holds_indices(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.int64, torch.int32)


def _assignments(
    shapes: Sequence[tuple[int, ...]], leading: Sequence[int]
) -> Iterator[tuple[int, tuple[ItemAxis | None, ...], int]]:
    """Yield ways to give tensors of these shapes an item axis: the number of the one that decides, the axes, and the
    number of items. The first dimension of the ``leading`` tensors, then the next (the first tensor; others are
    weights, unless they hold indices or the first is a single number); of the rest the dimension of that size at the
    same place, counted from either end, none, or another."""
    for dim, first in itertools.product(range(max(map(len, shapes), default=0)), leading):
        if len(shapes[first]) > dim and (items := shapes[first][dim]) > 1:
            choices = [
                [ItemAxis(dim)] if place == first else _choices(other, dim, len(shapes[first]), items)
                for place, other in enumerate(shapes)
            ]
            for axes in itertools.product(*choices):
                yield first, axes, items


def _choices(shape: tuple[int, ...], dim: int, dims: int, items: int) -> list[ItemAxis | None]:
    same = [at for at in range(len(shape)) if shape[at] == items]
    aligned = [at for at in dict.fromkeys((dim, len(shape) - dims + dim)) if at in same]
    return [*map(ItemAxis, aligned), None, *(ItemAxis(at) for at in same if at not in aligned)]


def _verified(call: ItemCall, *, step: int = 1) -> Itemwise | None:
    """Find the axes of the outputs, where one more item in is one more out, or with a ``step`` of -1 one less, and
    their order is kept."""
    everybody = [*range(call.items)]
    order = [*everybody[1:], 0]
    other = [*everybody, 0] if step == 1 else everybody[:-1]
    try:
        base = call.run()[0]
        if any(tensor.numel() > MOST_ELEMENTS * call.items for tensor in base):
            return None
        changed = call.select(other).run()[0]
        turned = call.select(order).run()[0]
        outputs = tuple(_axis_of(*each, step=step, order=order) for each in zip(base, changed, turned, strict=True))
        if not any(outputs):
            return None
        call = dataclasses.replace(call, outputs=outputs)
        return Itemwise(call, coupled=_is_coupled(call, base))
    except Exception:  # the op does not take other numbers of these, or not the same item several times
        return None


def _axis_of(
    base: torch.Tensor, changed: torch.Tensor, turned: torch.Tensor, *, step: int, order: Sequence[int]
) -> ItemAxis | None:
    """Return the dimension of an output that changed with the number of items, by ``step``, and has them in their
    ``order``; ``None`` where none did.

    Raises:
        NotItemwiseError: what changed are not items.
    """
    items = len(order)
    scaled = [dim for dim in range(base.dim()) if base.shape[dim] != changed.shape[dim]]
    if not scaled:
        return None
    dim = scaled[0]
    each, rest = divmod(base.shape[dim], items)
    if len(scaled) == 1 and not rest and each and changed.shape[dim] == each * (items + step) and is_plain(base):
        for axis in dict.fromkeys((ItemAxis(dim, inner=each), ItemAxis(dim, outer=each))):
            if _close(items_first(turned, axis, items), items_first(base, axis, items)[list(order)]):
                return axis
    raise NotItemwiseError("its outputs are not one for each item")


def _is_coupled(call: ItemCall, base: Sequence[torch.Tensor]) -> bool:
    """Return True if the content of the other items changes one by more than rounding does."""
    for kept in (0, call.items - 1):
        left = call.select([kept] * call.items).run()[0]
        for there, here, axis in zip(base, left, call.outputs, strict=True):
            if axis is not None:
                first, other = (items_first(each, axis, call.items)[kept] for each in (there, here))
                if not _close(first, other):
                    return True
    return False


def _all_close(first: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return len(first) == len(other) and all(map(_close, first, other))


def _close(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two tensors are equal but for rounding."""
    if tensor.shape != other.shape or tensor.dtype != other.dtype:
        return False
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return torch.equal(tensor, other)
    tensor, other = (each.to(torch.complex128 if each.is_complex() else torch.float64) for each in (tensor, other))
    finite = torch.where(torch.isfinite(tensor), tensor.abs(), 0)
    most = float(finite.max()) if tensor.numel() else 0.0
    return torch.allclose(tensor, other, rtol=TOLERANCE, atol=TOLERANCE * most, equal_nan=True)


def with_items(call: ItemCall, count: int) -> ItemCall:
    """Return the call on ``count`` items: its own, then copies of them, each with its floating-point numbers multiplied
    by one factor of its own below 1, since where an item went that equals another is not known."""
    chosen = call.select([item % call.items for item in range(count)])
    factors = 1 - torch.arange(count, dtype=torch.float64).sub(call.items - 1).clamp(min=0) / (2 * count)
    for tensor, axis in zip(chosen.tensors, chosen.axes, strict=True):
        if axis is not None and (tensor.is_floating_point() or tensor.is_complex()):
            rows = items_first(tensor, axis, count)  # of memory that was made for the selection
            rows.copy_(rows * factors.to(tensor.device, torch.float32).view(-1, *[1] * (rows.dim() - 1)))
    return chosen


# ----------------------------------------------------------------------------------------------------- wider samples


def widened(found: Itemwise) -> Iterator[Itemwise]:
    """Yield the call with inner dimensions of one size made wider, for each of a few sizes for which the op takes that.
    Rows and columns are drawn among those that are there, so that what an op asks of its numbers mostly holds; each
    number becomes smaller by up to an eighth, so that no two rows are equal: what a decomposition leaves of a matrix
    that is singular for that reason is not defined."""
    call = found.call
    classes: dict[int, None] = {}
    for tensor, axis in zip(call.tensors, call.axes, strict=True):
        inner = [size for dim, size in enumerate(tensor.shape) if axis is None or dim != axis.dim]
        classes |= dict.fromkeys(size for size in reversed(inner) if 1 < size < WIDENED)
    for size in [*classes][:MOST_CLASSES]:
        wide = size * -(-WIDENED // size)
        for with_numbers in (False, True):
            new = _wide(call, size, wide, with_numbers=with_numbers)
            verified = None if new is None else _verified(new)
            if verified is not None:
                yield dataclasses.replace(verified, widened=f"{size}→{wide}")
                break


def _wide(call: ItemCall, size: int, wide: int, *, with_numbers: bool) -> ItemCall | None:
    """Return the call with ``wide`` in place of every inner ``size``, and with ``with_numbers`` of every such whole
    number among its arguments; ``None`` where a tensor grows too large."""
    generator = torch.Generator().manual_seed(SEED)
    drawn = torch.randint(size, (wide,), generator=generator)
    axes = iter(call.axes)
    fits = True

    def changed(leaf: Any) -> Any:
        nonlocal fits
        if not isinstance(leaf, torch.Tensor):
            return wide if with_numbers and type(leaf) is int and leaf == size else leaf
        axis = next(axes)
        dims = [dim for dim, here in enumerate(leaf.shape) if here == size and (axis is None or dim != axis.dim)]
        fits &= leaf.numel() * (wide // size) ** len(dims) <= MOST_ELEMENTS * (call.items if axis is not None else 1)
        new = leaf.detach()
        for dim in dims if fits else ():
            new = new.index_select(dim, drawn.to(leaf.device))
        if dims and fits and (new.is_floating_point() or new.is_complex()):
            shrunk = 1 - torch.rand(new.shape, generator=generator) / 8
            new = (new * shrunk.to(new.device)).to(new.dtype)
        return new

    args, kwargs = mapped(tuple(call.args), changed), mapped(dict(call.kwargs), changed)
    return dataclasses.replace(call, args=args, kwargs=kwargs, outputs=()) if fits else None
