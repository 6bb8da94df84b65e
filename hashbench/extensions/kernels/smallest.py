"""The smallest inputs that still show a fault, and their words. Nothing is returned that did not show it.

Sizes shrink first, those that are equal together; then elements become zero, half by half (delta debugging: Zeller and
Hildebrandt, "Simplifying and isolating failure-inducing input", 2002); then those that are left become short numbers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from hashbench.core.text import cut, listed
from hashbench.core.trace.digest import dtype_name

Arguments = tuple[Any, ...]

_TINY = 8
"""Elements of a tensor that are written out."""

_FEW = 3
"""Elements that are named one by one."""

_LONGEST = 60
"""Characters of an argument that is no tensor."""

_FINEST = 64
"""Parts into which the elements of a tensor that are not zero are cut when they are tried one after the other."""


def smallest(
    args: Arguments, still_wrong: Callable[[Arguments], bool], *, seconds: float, shown: bool = False
) -> Arguments:
    """Return smaller inputs that still show a fault.

    Args:
        args: positional arguments of a kernel; those that are no tensors stay, but for integers that are sizes.
        still_wrong: whether arguments show the fault; may raise, which counts as no. It gets tensors of its own.
        seconds: how long to look; a call of ``still_wrong`` that has begun is awaited.
        shown: ``still_wrong`` was true of ``args``.

    Returns:
        Arguments of which ``still_wrong`` was true; empty if it is not even true of ``args``.
    """
    search = _InputSearch(still_wrong, time.monotonic() + seconds)
    if shown:
        search.best = args
    elif not search.keeps(args, first=True):
        return ()
    search.keeps(tuple(_map(argument, _contiguous) for argument in args))
    for step in (_shrink, _empty, _round):
        step(search)
    return search.best


class _InputSearch:
    """The best arguments so far, the predicate and the time that is left."""

    def __init__(self, still_wrong: Callable[[Arguments], bool], until: float) -> None:
        self.best: Arguments = ()
        self._still_wrong = still_wrong
        self._until = until

    @property
    def over(self) -> bool:
        return time.monotonic() >= self._until

    def keeps(self, args: Arguments, *, first: bool = False) -> bool:
        """Return whether arguments show the fault; they are then the best."""
        if self.over and not first:
            return False
        try:
            wrong = bool(self._still_wrong(tuple(_map(argument, _copy) for argument in args)))
        except Exception:  # inputs that the kernel or the reference refuses
            return False
        if wrong:
            self.best = args
        return wrong

    def replace(self, position: int, tensor: torch.Tensor) -> bool:
        """Try another tensor in the place of one."""
        return self.keeps((*self.best[:position], tensor, *self.best[position + 1 :]))

    def tensors(self) -> Iterator[int]:
        """Yield the positions of tensors with elements."""
        for position, argument in enumerate(self.best):
            if isinstance(argument, torch.Tensor) and argument.numel():
                yield position


def _map(argument: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return change(argument) if isinstance(argument, torch.Tensor) else argument


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous() if tensor.layout is torch.strided else tensor


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a leaf of its own with the same sizes, strides and offset."""
    plain = tensor.detach()
    if plain.layout is not torch.strided or plain.is_quantized:
        return plain.clone().requires_grad_(tensor.requires_grad)
    if _is_expanded(plain):
        held = [1 if step == 0 else size for size, step in zip(plain.shape, plain.stride(), strict=True)]
        return plain[tuple(map(slice, held))].clone().expand(plain.shape).requires_grad_(tensor.requires_grad)
    offset = plain.storage_offset() % 64
    length = offset + 1 + sum((size - 1) * step for size, step in zip(plain.shape, plain.stride(), strict=True))
    room = torch.zeros(length if plain.numel() else 0, dtype=plain.dtype, device=plain.device)
    made = room.as_strided(plain.shape, plain.stride(), offset if plain.numel() else 0)
    return made.copy_(plain).requires_grad_(tensor.requires_grad)


def _is_expanded(tensor: torch.Tensor) -> bool:
    return any(step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def _writable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy, of which each element has memory of its own."""
    plain = tensor.detach()
    return plain.clone(memory_format=torch.contiguous_format) if _is_expanded(plain) else _copy(plain)


# ------------------------------------------------------------------------------------------------------------ sizes


def _shrink(search: _InputSearch) -> None:
    done: set[int] = set()
    while not search.over:
        sizes = {size for at in search.tensors() for size in search.best[at].shape if size > 1} - done
        if not sizes:
            return
        size = max(sizes)
        done.add(_shrunk(search, size))
        done.add(size)


def _shrunk(search: _InputSearch, size: int) -> int:
    """Make all dimensions of a size smaller; return the new size."""
    powers = [1 << exponent for exponent in range(size.bit_length()) if 1 << exponent < size]
    for wanted in powers:
        if _try_size(search, size, wanted):
            break
    else:
        wanted = size
    low, high = wanted // 2, wanted  # low does not show it: a fault behind a block's border needs one element more
    if wanted == size:
        low = powers[-1] if powers else 0
    while high - low > 1 and not search.over:
        middle = (low + high) // 2
        low, high = (low, middle) if _try_size(search, high, middle) else (middle, high)
    return high


def _try_size(search: _InputSearch, size: int, wanted: int) -> bool:
    striking = [min(place, size - wanted) for place in _striking(search, size)]
    for start in dict.fromkeys((0, size - wanted, *striking)):
        for indices in (False, True):
            args = tuple(_resized(argument, size, wanted, start, indices=indices) for argument in search.best)
            if search.keeps(args):
                return True
            if not any(_is_index(argument) for argument in search.best):
                break
    return False


def _striking(search: _InputSearch, size: int) -> list[int]:
    """Return where the largest element of each tensor lies along a dimension of a size; NaN counts as largest."""
    found = []
    for position in search.tensors():
        tensor = search.best[position]
        if size in tensor.shape and tensor.is_floating_point() and _is_plain(tensor):
            flat = tensor.detach().abs().nan_to_num(nan=math.inf, posinf=math.inf).flatten().argmax()
            indices = torch.unravel_index(flat, tensor.shape)
            found += [int(place) for place, length in zip(indices, tensor.shape, strict=True) if length == size]
    return found[:4]


def _is_index(argument: Any) -> bool:
    if isinstance(argument, torch.Tensor):
        return not (argument.is_floating_point() or argument.is_complex() or argument.dtype is torch.bool)
    return type(argument) is int


def _resized(argument: Any, size: int, wanted: int, start: int, *, indices: bool) -> Any:
    """Return the part of an argument of which dimensions of ``size`` have the ``wanted`` one; with ``indices``,
    integers stay below it as well."""
    if not isinstance(argument, torch.Tensor):
        return wanted if indices and type(argument) is int and argument == size else argument
    if argument.layout is not torch.strided:
        return argument
    for dim, length in enumerate(argument.shape):
        if length == size:
            argument = argument.narrow(dim, start, wanted)
    if indices and _is_index(argument) and argument.numel() and wanted <= int(argument.max()) < size:
        argument = argument % wanted
    return argument


# ---------------------------------------------------------------------------------------------------------- elements


def _empty(search: _InputSearch) -> None:
    """Make as many elements of tensors zero as can be; all of them equal where many must not be zero."""
    for position in [*search.tensors()]:
        tensor = search.best[position]
        if not _is_plain(tensor) or search.replace(position, _filled(tensor, 0)):
            continue
        _bisect(search, position)
        if int(torch.count_nonzero(search.best[position])) > _FEW:
            search.replace(position, _filled(search.best[position], 1))


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether elements can be compared and written: not of float8, quantized and sparse tensors."""
    small = tensor.is_floating_point() and tensor.itemsize < 2
    return tensor.layout is torch.strided and not tensor.is_quantized and not small


def _filled(tensor: torch.Tensor, value: int) -> torch.Tensor:
    return _writable(tensor).fill_(value).requires_grad_(tensor.requires_grad)


def _bisect(search: _InputSearch, position: int) -> None:
    """Make parts of the elements that are not zero zero: halves, then quarters, as long as the fault stays."""
    parts = 2
    while not search.over:
        tensor = search.best[position]
        places = (tensor != 0).flatten().nonzero()[:, 0]
        if len(places) < 2:
            return
        parts = min(parts, len(places))
        if any(search.replace(position, _without(tensor, part)) for part in _halved(places, parts)):
            parts = max(parts - 1, 2)
        elif parts >= min(len(places), _FINEST):
            return
        else:
            parts *= 2


def _halved(places: torch.Tensor, parts: int) -> Iterator[torch.Tensor]:
    """Yield what becomes zero: all but one part, where there are more than two; then one part."""
    pieces = torch.tensor_split(places, parts)
    if parts > 2:
        yield from (torch.cat([*pieces[:at], *pieces[at + 1 :]]) for at in range(parts))
    yield from reversed(pieces)


def _without(tensor: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    changed = _writable(tensor)
    changed[torch.unravel_index(places, changed.shape)] = 0
    return changed.requires_grad_(tensor.requires_grad)


def _round(search: _InputSearch) -> None:
    """Make the elements that are left short numbers."""
    for position in [*search.tensors()]:
        tensor = search.best[position]
        if not tensor.is_floating_point() or not _is_plain(tensor):
            continue
        for change in (_ones, torch.round, _power, _digits):
            if search.replace(position, change(tensor.detach()).to(tensor.dtype).requires_grad_(tensor.requires_grad)):
                break


def _ones(tensor: torch.Tensor) -> torch.Tensor:
    return torch.where(tensor.isfinite(), tensor.sign(), tensor)


def _power(tensor: torch.Tensor) -> torch.Tensor:
    power = torch.exp2(tensor.double().abs().log2().round()) * tensor.sign()
    return torch.where(tensor.isfinite() & (tensor != 0), power, tensor.double())


def _digits(tensor: torch.Tensor) -> torch.Tensor:
    """Return numbers of two decimal digits."""
    wide = tensor.double()
    scale = torch.pow(10.0, 1 - wide.abs().log10().floor())
    return torch.where(tensor.isfinite() & (tensor != 0), (wide * scale).round() / scale, wide)


# ------------------------------------------------------------------------------------------------------------- words


def words_of(args: Sequence[Any]) -> tuple[str, ...]:
    """Return each argument in words: ``float32[1, 7], zeros but 1 at [0, 6]``, ``bfloat16[2]: [0.5, nan]``."""
    return tuple(
        _words(argument) if isinstance(argument, torch.Tensor) else cut(repr(argument), _LONGEST) for argument in args
    )


def _words(tensor: torch.Tensor) -> str:
    name = f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return name
    values = tensor.detach().resolve_conj().to("cpu")
    name += _layout(tensor)
    if not tensor.is_complex():
        values = values.double() if tensor.is_floating_point() else values.to(torch.int64)
    if values.numel() <= _TINY:
        return f"{name}: {_nested(values.tolist())}"
    flat = values.flatten()
    for common, called in ((0, "zeros"), (1, "ones"), (flat[0].item(), f"all {_number(flat[0].item())}")):
        rest = (flat != common).nonzero()[:, 0]
        if len(rest) <= _FEW:
            spots = [
                f"{_number(flat[at].item())} at {[int(part) for part in torch.unravel_index(at, values.shape)]}"
                for at in rest
            ]
            return f"{name}, {called}{' but ' if spots else ''}{listed(spots)}"
    return f"{name}, {_extent(flat)}"


def _layout(tensor: torch.Tensor) -> str:
    strides = "" if tensor.is_contiguous() else f" with strides {list(tensor.stride())}"
    offset = tensor.storage_offset()
    return strides + (f"{' and' if strides else ' with'} offset {offset}" if offset and strides else "")


def _extent(flat: torch.Tensor) -> str:
    """Return the range of many values, and how many are not finite or zero."""
    if flat.is_complex():
        return f"magnitudes up to {_number(float(flat.abs().max()))}"
    finite = flat[flat.isfinite()] if flat.is_floating_point() else flat
    words = f"from {_number(finite.min().item())} to {_number(finite.max().item())}" if len(finite) else ""
    left = len(flat) - len(finite)
    return ", ".join(filter(None, (words, f"{left} NaN or infinite" if left else "")))


def _nested(value: Any) -> str:
    return f"[{', '.join(map(_nested, value))}]" if isinstance(value, list) else _number(value)


def _number(value: complex) -> str:
    if isinstance(value, complex):
        return f"{value:.4g}"
    return f"{value:.6g}" if math.isfinite(value) else str(value)
