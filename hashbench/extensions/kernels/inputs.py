"""The inputs of a kernel as a list of leaves, and what is known of their meaning."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hashbench.core.diagnose.calls.capture import copied
from hashbench.core.trace.arguments import items_of, mapped

_MASK_VALUES = 3
"""A floating-point tensor with two to so many distinct values, and more elements than that, is a mask."""


@dataclass(frozen=True, slots=True)
class KernelInputs:
    """Arguments of a call: nested tuples, lists and dicts, whose leaves are tensors, numbers and anything else.

    Attributes:
        args: positional ones; only their nesting counts.
        kwargs: those by name; only their nesting counts.
        leaves: values in the order of :func:`~hashbench.core.trace.arguments.mapped`; arrays are tensors here.
        arrays: numbers of leaves that the kernel gets as arrays of NumPy.
        labels: names of the leaves; empty: they are called by their place.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    leaves: tuple[Any, ...]
    arrays: frozenset[int] = frozenset()
    labels: tuple[str, ...] = ()

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> KernelInputs:
        """Take arguments as a caller gives them. Tensors are detached, not copied."""
        found: list[Any] = []
        mapped((tuple(args), dict(kwargs)), found.append)
        arrays = frozenset(number for number, leaf in enumerate(found) if isinstance(leaf, np.ndarray))
        return cls(tuple(args), dict(kwargs), tuple(map(_plain, found)), arrays)

    def having(self, leaves: Sequence[Any]) -> KernelInputs:
        """Return the same arguments with other leaves."""
        return replace(self, leaves=tuple(leaves))

    def copied(self) -> KernelInputs:
        """Return copies of all tensors, with their strides and their alignment."""
        return self.having([copied(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves])

    def arguments(self, *, arrays: bool = False) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional arguments and those by name, as the reference takes them.

        Args:
            arrays: as the kernel takes them: those that were given as arrays are arrays again.
        """
        leaves = list(self.leaves)
        for number in self.arrays if arrays else ():
            leaves[number] = leaves[number].numpy()
        following = iter(leaves)
        args, kwargs = mapped((self.args, self.kwargs), lambda _: next(following))
        return args, kwargs

    def all_arrays(self) -> KernelInputs | None:
        """Return inputs whose tensors are given to the kernel as arrays; ``None`` where NumPy lacks a dtype."""
        numbers = [number for number, _ in self.tensors()]
        if any(tensor.dtype is torch.bfloat16 or not tensor.is_cpu for _, tensor in self.tensors()):
            return None
        return replace(self, arrays=frozenset(numbers))

    def device(self) -> torch.device:
        """Return the device of the first tensor; the CPU where there is none."""
        return next((tensor.device for _, tensor in self.tensors()), torch.device("cpu"))

    def named(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name: ``input 0``, ``input 1.2``, ``input scale``."""
        names = self.names()
        return {names[number]: leaf for number, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)}

    def names(self) -> list[str]:
        """Return a name of each leaf."""
        if self.labels:
            return list(self.labels)
        return [f"input {path}" for path in (*_paths(self.args, ""), *_paths(self.kwargs, ""))]

    def tensors(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the tensors with the number of their leaf."""
        yield from ((number, leaf) for number, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor))


def _paths(value: Any, path: str) -> Iterator[str]:
    items = items_of(value) if isinstance(value, (MutableMapping, list, tuple)) else None
    if items is None:
        yield path
        return
    for name, item in items:
        yield from _paths(item, f"{path}.{name}" if path else str(name))


def _plain(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return torch.from_numpy(np.array(leaf))
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


# ------------------------------------------------------------------------------------------------------------ meaning


@dataclass(frozen=True, slots=True)
class Meaning:
    """What the values of a tensor say about what it may hold.

    Attributes:
        fixed: its values have a meaning of their own and are not varied: bools, masks, indices, tables.
        positive: no element is zero or negative.
        non_negative: no element is negative.
        ascending: each line of the last dimension is sorted.
        shares: each line of the last dimension is non-negative and has the sum 1.
        zeros: elements that are zero and stay so (triangles, sparse patterns); ``None``: few of them are.
        largest: largest magnitude.
    """

    fixed: bool
    positive: bool = False
    non_negative: bool = False
    ascending: bool = False
    shares: bool = False
    zeros: torch.Tensor | None = None
    largest: float = 0.0


def meaning_of(tensor: torch.Tensor) -> Meaning:
    """Return what the values of a tensor say."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel() or tensor.dtype.itemsize < 2:
        return Meaning(fixed=True)
    if tensor.is_complex():
        size = float(torch.view_as_real(tensor.resolve_conj()).abs().max())
        return Meaning(fixed=not math.isfinite(size), largest=size)
    values = tensor.resolve_neg().double()
    if not bool(values.isfinite().all()):
        return Meaning(fixed=True)
    largest, least = float(values.abs().max()), float(values.min())
    if tensor.numel() > _MASK_VALUES and _is_mask(values):
        return Meaning(fixed=True, largest=largest)
    zero = values == 0
    share = float(zero.double().mean())
    lines = values if tensor.dim() else values.reshape(1)
    return Meaning(
        fixed=False,
        positive=least > 0,
        non_negative=least >= 0,
        ascending=lines.shape[-1] > 2 and bool((lines.diff(dim=-1) > 0).all()),
        shares=least >= 0 and lines.shape[-1] > 1 and bool(((lines.sum(-1) - 1).abs() < 1e-2).all()),
        zeros=zero if 0.1 < share < 1 else None,
        largest=largest,
    )


def _is_mask(values: torch.Tensor) -> bool:
    """Return whether a tensor has two or three distinct values, zero or a very large one among them. One alone is a
    constant: ones as a weight, zeros as a bias, which may be anything."""
    some = values.flatten()[:4096].unique()
    if len(some) > _MASK_VALUES:
        return False
    distinct = values.unique()
    return 1 < len(distinct) <= _MASK_VALUES and bool(((distinct == 0) | (distinct.abs() > 1e4)).any())


# -------------------------------------------------------------------------------------------------------------- sizes


def free_sizes(inputs: KernelInputs) -> list[int]:
    """Return the distinct sizes above 1 that can be varied, the largest first.

    Not those that sorted integers refer to (``cu_seqlens`` ends at the number of tokens), nor the number of these.
    """
    sizes = {size for _, tensor in inputs.tensors() for size in tensor.shape if size > 1}
    held: set[int] = set()
    for _, tensor in inputs.tensors():
        if is_discrete(tensor) and tensor.numel() > 1 and _is_table(tensor):
            largest = int(tensor.max())
            held |= {*tensor.shape, min((size for size in sizes if size >= largest), default=0)}
    return sorted(sizes - held, reverse=True)


def is_discrete(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has integers."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)


def _is_table(integers: torch.Tensor) -> bool:
    """Return whether integers are sorted, but not simply counted: offsets, segments."""
    steps = integers.flatten().diff()
    return bool((steps >= 0).all()) and not bool((steps == 1).all())


def resized(inputs: KernelInputs, sizes: Mapping[int, int], *, integers: bool) -> KernelInputs:
    """Return the inputs with other sizes. Equal sizes stay equal.

    A smaller tensor is a corner of the given one; a larger one repeats it. Integers that may index a dimension stay
    inside it.

    Args:
        inputs: arguments of any shapes.
        sizes: new size by the size that is replaced.
        integers: numbers that are a size, or the number of elements of a tensor, follow.
    """
    counts = {
        tensor.numel(): math.prod(sizes.get(size, size) for size in tensor.shape) for _, tensor in inputs.tensors()
    }
    leaves: list[Any] = []
    for leaf in inputs.leaves:
        if isinstance(leaf, torch.Tensor):
            leaves.append(_resized(leaf, sizes))
        elif integers and type(leaf) is int and leaf > 1:
            leaves.append(sizes.get(leaf, counts.get(leaf, leaf)))
        else:
            leaves.append(leaf)
    return inputs.having(leaves)


def _resized(tensor: torch.Tensor, sizes: Mapping[int, int]) -> torch.Tensor:
    new = tensor
    for dimension, size in enumerate(tensor.shape):
        wanted = sizes.get(size, size)
        if wanted < size:
            new = new.narrow(dimension, 0, wanted)
        elif wanted > size:
            new = new.index_select(dimension, torch.arange(wanted, device=tensor.device) % size)
    if is_discrete(tensor) and tensor.numel() > 1:
        new = _inside(tensor, new, sizes)
    return new if new is tensor else new.contiguous()


def _inside(given: torch.Tensor, new: torch.Tensor, sizes: Mapping[int, int]) -> torch.Tensor:
    """Return integers inside the smallest dimension that they may index; those that differ go on to differ."""
    largest = int(given.max())
    smallest = min((to for size, to in sizes.items() if size > largest), default=largest + 1)
    if largest < smallest or _is_table(given):
        return new
    if len(given.unique()) == given.numel() and new.numel() <= smallest:
        return new.flatten().argsort().argsort().reshape(new.shape).to(given.dtype)
    return torch.where(new < 0, new, new % smallest)


# ------------------------------------------------------------------------------------------------------------- values


def keep_meaning(values: torch.Tensor, tensor: torch.Tensor, meaning: Meaning) -> torch.Tensor:
    """Return float64 values as a tensor of the dtype, device and shape of another one that keeps its meaning: sign,
    order, zeros, sums."""
    if meaning.non_negative and not tensor.is_complex():
        values = values.abs()
    if meaning.ascending:
        values = values.sort(dim=-1).values
    if meaning.shares:
        values = values / values.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    if meaning.zeros is not None and meaning.zeros.shape == values.shape:
        values = values.masked_fill(meaning.zeros.to(values.device), 0)
    made = values.to(tensor.dtype)
    if meaning.positive:
        made = made.clamp_min(torch.finfo(tensor.dtype).tiny)
    return made.to(tensor.device)


@functools.cache
def prime_below(number: int) -> int:
    """Return the largest prime that is smaller; 1 where there is none."""
    for candidate in range(number - 1, 1, -1):
        if all(candidate % divisor for divisor in range(2, math.isqrt(candidate) + 1)):
            return candidate
    return 1
