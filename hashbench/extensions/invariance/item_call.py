"""One op call whose tensors hold several items of a batch, repeated on other numbers, orders and neighbours of them.

An item is what a user would pass alone: one image, one sequence. Along which dimension of each tensor the items lie is
said by :class:`~hashbench.extensions.invariance.layout.ItemAxis`; a tensor without one is shared by all items (a
weight, a mask).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch

from hashbench.core.diagnose.calls.call import TensorForm, plan_for
from hashbench.core.diagnose.calls.capture import copied, is_plain, own_copy
from hashbench.core.diagnose.calls.live import LiveCall, flat_memory, generator_states, laid_over
from hashbench.core.diagnose.replay.methods import with_exact_values
from hashbench.core.run.rng import reset_rng_state, seed_host, states_differ
from hashbench.core.trace.arguments import leaves, mapped, tensors_in
from hashbench.core.trace.digest import hash_memory
from hashbench.extensions.invariance.layout import ItemAxis, NotItemwiseError

Rows = dict[int, tuple[int, ...]]
"""By the item's number: the digest of its rows in each tensor that the call left."""

SEED = 1337
"""Of the random generators before every run: an op that draws draws the same."""


@dataclass(frozen=True, slots=True, eq=False)
class ItemCall:
    """A call of ``func`` on ``items`` items.

    ``func`` is an overload of an op, which is run below autograd as a trace saw it, or any function. ``axes`` has one
    entry for each tensor among the arguments (``tensors_in([*args, *kwargs.values()])``), ``outputs`` one for each
    tensor that the call leaves: what it returns, then arguments that it changes and does not return. ``scaled`` are
    the positions among ``leaves([*args, *kwargs.values()])`` of whole numbers that count items (a size given to
    ``expand``): they are multiples of ``items``. ``settings`` of torch are put in force for every run. Nothing among
    the arguments is written to, and no generator among them is drawn from: every run has copies. ``watched``, where not
    ``None``, is the first or the last item, and the only one whose rows are compared: it keeps its place, and the
    others may depend on it by right.
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    items: int
    axes: tuple[ItemAxis | None, ...]
    outputs: tuple[ItemAxis | None, ...]
    scaled: tuple[int, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    watched: int | None = None

    def __post_init__(self) -> None:
        tensors = self.tensors
        if len(tensors) != len(self.axes):
            raise NotItemwiseError(f"{len(self.axes)} item axes are given for {len(tensors)} tensors")
        for tensor, axis in zip(tensors, self.axes, strict=True):
            if axis is not None and tensor.shape[axis.dim] != axis.outer * self.items * axis.inner:
                raise NotItemwiseError(f"dimension {axis.dim} of {list(tensor.shape)} does not hold {self.items} items")

    @property
    def name(self) -> str:
        """The op, as a trace names it, or the function's name."""
        return plan_for(self.func).name

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the arguments, in order."""
        return tensors_in([*self.args, *self.kwargs.values()])

    @property
    def shapes(self) -> str:
        """``(8,256)x(256,512)``: the shapes of the tensors among the arguments."""
        return "x".join(f"({','.join(map(str, tensor.shape))})" for tensor in self.tensors)

    # --------------------------------------------------------------------------------------- other items

    def select(self, chosen: Sequence[int]) -> ItemCall:
        """Return the call on these of its items, in this order; an item may be repeated.

        Raises:
            NotItemwiseError: a tensor that holds items has no plain memory.
        """
        indices = torch.tensor(list(chosen), dtype=torch.int64)
        axes = iter(self.axes)

        def changed(tensor: torch.Tensor) -> torch.Tensor:
            axis = next(axes)
            return tensor if axis is None else _selected(tensor, axis, self.items, indices)

        return self.with_tensors(changed, items=len(chosen))

    def at(self, count: int) -> ItemCall:
        """Return the call on its first ``count`` items."""
        return self.select(range(count))

    def with_scaled_neighbours(self, kept: int, factor: float) -> ItemCall:
        """Return the call with the floating-point content of all items but ``kept`` multiplied by ``factor``.

        If one item is watched, whole numbers are multiplied by 2, too: positions and counts do not round.
        """
        axes = iter(self.axes)

        def changed(tensor: torch.Tensor) -> torch.Tensor:
            axis = next(axes)
            rounds = tensor.is_floating_point() or tensor.is_complex()
            if axis is None or not (rounds or (self.watched is not None and tensor.dtype is not torch.bool)):
                return tensor
            by = factor if rounds else 2
            new = copied(tensor)
            dense = new
            for dim in (dim for dim, step in enumerate(new.stride()) if not step and dim != axis.dim):
                dense = dense.narrow(dim, 0, 1)  # the same memory for all of it
            if axis.also:
                own = _of_item(dense, axis, self.items, kept)
                dense.copy_(torch.where(own, dense, dense * by))
                return new
            rows = items_first(dense, axis, self.items)
            rows[:kept] *= by
            rows[kept + 1 :] *= by
            return new

        return self.with_tensors(changed)

    def with_exact_values(self) -> ItemCall:
        """Return the call with small whole numbers in place of every floating-point number, so that sums are exact in
        any order.

        Raises:
            InapplicableError: there is no such number.
        """
        live = LiveCall(with_exact_values(own_copy(self.func, self.args, self.kwargs).call))
        return dataclasses.replace(self, args=live.args, kwargs=live.kwargs)

    def with_tensors(self, change: Callable[[torch.Tensor], torch.Tensor], *, items: int | None = None) -> ItemCall:
        """Return the call with every tensor mapped by ``change``, in order, and its sizes set for ``items``."""
        count = self.items if items is None else items
        numbers = iter(range(len([*leaves([*self.args, *self.kwargs.values()])])))

        def changed(leaf: Any) -> Any:
            number = next(numbers)
            if isinstance(leaf, torch.Tensor):
                return change(leaf)
            return leaf // self.items * count if number in self.scaled else leaf

        args = mapped(tuple(self.args), changed)
        kwargs = mapped(dict(self.kwargs), changed)
        return dataclasses.replace(self, args=args, kwargs=kwargs, items=count)

    # --------------------------------------------------------------------------------------- running it

    def run(self, *, seed: int = SEED, clock: Callable[[], float] = perf_counter) -> tuple[list[torch.Tensor], float]:
        """Run the call on copies of the arguments; return the tensors that it leaves, detached, and the seconds by
        ``clock``.

        Generators among the arguments are in the state of the capture, or seeded if ``seed`` is not :data:`SEED`.
        """
        live = own_copy(self.func, self.args, self.kwargs)
        for leaf in leaves([live.args, live.kwargs]) if seed != SEED else ():
            if isinstance(leaf, torch.Generator):
                leaf.manual_seed(seed)
        self._seed(seed)
        outcome = live.run(clock=clock)
        return [tensor.detach() for tensor in outcome.left], outcome.seconds

    def _seed(self, seed: int) -> None:
        """Seed the generators that the call may use. Those of devices that it does not touch are left out: a process
        that has not started one notes with a stack, which takes longer than most calls, that it is to be seeded."""
        if self.device.type != "cpu":
            reset_rng_state(seed)
        else:
            seed_host(seed)

    def draws(self) -> bool:
        """Return True if a run draws from a generator among its arguments or a global one, even if it discards the
        numbers."""
        live = own_copy(self.func, self.args, self.kwargs)
        states = functools.partial(
            generator_states, live.args, live.kwargs, device=live.call.device, outside_torch=True
        )
        self._seed(SEED)
        before = states()
        live.run()
        return states_differ(before, states())

    @property
    def device(self) -> torch.device:
        """The first accelerator that holds a tensor, else the CPU."""
        devices = (tensor.device for tensor in self.tensors if tensor.device.type not in ("cpu", "meta"))
        return next(devices, torch.device("cpu"))

    def rows(self, *, seed: int = SEED) -> tuple[tuple[int, ...], ...]:
        """Run the call and return for each place in the batch the digests of its rows, one for each tensor with an item
        axis.

        If no tensor has one, the digests of the whole tensors count for every item.

        Raises:
            NotItemwiseError: it leaves other tensors than at the number of items that it was captured with.
        """
        return digests_of(self.run(seed=seed)[0], self.outputs, self.items)

    def rows_of(self, chosen: Sequence[int]) -> Rows:
        """Return the rows of a run on these of its items, by the item's number; of a repeated item its first."""
        rows = self.select(chosen).rows()
        return {item: rows[place] for place, item in reversed([*enumerate(chosen)])}


# ------------------------------------------------------------------------------------------------------- tensors


def items_first(tensor: torch.Tensor, axis: ItemAxis, items: int) -> torch.Tensor:
    """Return a tensor of shape ``(items, …)`` with the part of each item contiguous; a view if the items are along one
    dimension."""
    split: torch.Tensor = tensor.unflatten(axis.dim, (axis.outer, items, axis.inner))
    rows = split.movedim(axis.dim + 1, 0)
    for dim in axis.also:
        at, length = dim if dim < axis.dim else dim + 1, tensor.shape[dim] // items
        rows = torch.stack([row.narrow(at, item * length, length) for item, row in enumerate(rows)])
    return rows


def _of_item(tensor: torch.Tensor, axis: ItemAxis, items: int, item: int) -> torch.Tensor:
    """Return a boolean mask of the elements of ``item``."""
    own = torch.ones(tensor.shape, dtype=torch.bool, device=tensor.device)
    for dim_axis in (dataclasses.replace(axis, also=()), *(_further(tensor, dim, items) for dim in axis.also)):
        rows = items_first(own, dim_axis, items)
        rows[:item], rows[item + 1 :] = False, False
    return own


def _further(tensor: torch.Tensor, dim: int, items: int) -> ItemAxis:
    return ItemAxis(dim, inner=tensor.shape[dim] // items)


def _items_back(rows: torch.Tensor, axis: ItemAxis) -> torch.Tensor:
    """Undo :func:`items_first`, for fewer or more rows."""
    return rows.movedim(0, axis.dim + 1).flatten(axis.dim, axis.dim + 2)


def item_digests(tensor: torch.Tensor, axis: ItemAxis, items: int) -> tuple[int, ...]:
    """Hash the bytes of each item's part of ``tensor`` with XXH3-64, in the order of its dimensions, independent of
    strides."""
    rows = items_first(tensor.resolve_conj().resolve_neg(), axis, items).contiguous().cpu()
    each = rows[0].nbytes if items else 0
    return tuple(hash_memory(rows.data_ptr() + place * each, each) for place in range(items))


def digests_of(
    left: Sequence[torch.Tensor], outputs: Sequence[ItemAxis | None], items: int
) -> tuple[tuple[int, ...], ...]:
    """Return for each item the digests of its rows in the tensors of ``left``; see :meth:`ItemCall.rows`."""
    if len(left) != len(outputs):
        raise NotItemwiseError(f"it leaves {len(left)} tensors, and {len(outputs)} when it was captured")
    columns = []
    for tensor, axis in zip(left, outputs, strict=True):
        if axis is not None:
            if tensor.dim() <= axis.dim or tensor.shape[axis.dim] != axis.outer * items * axis.inner:
                raise NotItemwiseError(f"an output of shape {list(tensor.shape)} does not hold {items} items")
            columns.append(item_digests(tensor, axis, items))
    if not columns:
        whole = tuple(hash_memory((single := tensor.contiguous().cpu()).data_ptr(), single.nbytes) for tensor in left)
        return (whole,) * items
    return tuple(zip(*columns, strict=True))


def _selected(tensor: torch.Tensor, axis: ItemAxis, items: int, indices: torch.Tensor) -> torch.Tensor:
    """Return the tensor of the chosen items, with the memory order of its dimensions kept."""
    if not is_plain(tensor):
        raise NotItemwiseError(f"a {type(tensor).__name__} without plain memory cannot be sliced")
    if axis.also:
        for dim_axis in (dataclasses.replace(axis, also=()), *(_further(tensor, dim, items) for dim in axis.also)):
            rows = items_first(tensor.detach(), dim_axis, items).index_select(0, indices.to(tensor.device))
            tensor = _items_back(rows, dim_axis)
        return tensor.contiguous()
    rows = items_first(tensor.detach(), axis, items).index_select(0, indices.to(tensor.device))
    return _like(_items_back(rows, axis), tensor, axis.dim)


def _like(values: torch.Tensor, tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Copy ``values`` to new memory laid out as ``tensor``, which has other items along ``dim``.

    It has the same strides if ``dim`` is outermost, else the same order of dimensions; a transposed matrix stays
    transposed, since kernels are selected by strides.
    """
    strides = tensor.stride()
    outermost = all(strides[dim] >= step for at, step in enumerate(strides) if tensor.shape[at] > 1)
    disjoint = TensorForm(0, tensor.dtype, tuple(tensor.shape), strides).is_injective()
    if outermost and values.numel() and disjoint and not (tensor.is_conj() or tensor.is_neg()):
        form = TensorForm(0, tensor.dtype, tuple(values.shape), strides)
        room = flat_memory(form.span()[1], tensor.device, address=tensor.data_ptr())
        return laid_over(room, form).copy_(values)
    order = [*range(tensor.dim())]
    if not tensor.is_contiguous():
        order.sort(key=lambda at: -strides[at])
    made = torch.empty_permuted(tuple(values.shape), order, dtype=values.dtype, device=values.device)
    return made.copy_(values)
