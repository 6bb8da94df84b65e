"""Conditions on the inputs that hold where a result is wrong: ``where input 0 < 0``, ``where |input 1| > 88``.

They are looked for in a sample of the elements, the same one every time; whoever asks counts those found in full.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from hashbench.extensions.kernels.slices import Words, axis_of

_SAMPLE = 4096
"""Wrong elements, and right ones, that a condition is looked for in."""

_MOST_FOUND = 4
"""Conditions that are counted in full."""

_COVERED = 0.96
"""Share of the wrong elements of the sample for which a condition must hold."""

_MOST_INPUTS = 6

_EXTENTS = 4
"""Ways in which an input can lie along the dimensions of a result that are looked at."""


@dataclass(frozen=True, slots=True)
class InputCondition:
    """A condition in words, and its mask, which broadcasts to the result."""

    words: Words
    mask: Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Aligned:
    """A tensor by its name, in a shape that broadcasts to the result; ``index``: it counts along a dimension."""

    name: str
    values: torch.Tensor
    index: bool = False


class _ConditionSample:
    """Some wrong and some right elements, by index; one of them stands for ``weight`` of its kind."""

    def __init__(self, wrong: torch.Tensor, known: torch.Tensor | None) -> None:
        flat, total = wrong.flatten(), wrong.numel()
        number = int(torch.count_nonzero(flat))
        drawn = torch.arange(total)
        if total > 16 * _SAMPLE:
            drawn = torch.randint(total, (16 * _SAMPLE,), generator=torch.Generator().manual_seed(1337))
        right = ~flat if known is None else (known.flatten() & ~flat)
        correct = total - number if known is None else int(torch.count_nonzero(right))
        self.wrong = flat.nonzero()[:, 0] if number < total / 4 else drawn[flat[drawn]]
        self.right = right.nonzero()[:, 0] if correct < total / 4 else drawn[right[drawn]]
        self.wrong, self.right = _thinned(self.wrong), _thinned(self.right)
        self.at = torch.unravel_index(torch.cat([self.wrong, self.right]), wrong.shape)
        self.number = len(self.wrong)
        self.weights = number / max(len(self.wrong), 1), correct / max(len(self.right), 1)
        self.shape = tuple(wrong.shape)

    def values(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the values of a tensor there, the wrong elements first."""
        return tensor.broadcast_to(self.shape)[self.at]

    def length(self, holds: torch.Tensor) -> torch.Tensor:
        """Return the bits that say which elements are wrong, given a condition (columns: several conditions); infinite
        where it misses wrong elements."""
        hits = holds[: self.number].sum(0).double()
        return self.message(hits, holds[self.number :].sum(0).double())

    def message(self, hits: torch.Tensor, false: torch.Tensor) -> torch.Tensor:
        """Return the same for numbers of wrong and right elements that a condition holds for."""
        a, b = hits * self.weights[0], false * self.weights[1]
        c, d = self.number * self.weights[0] - a, (len(self.at[0]) - self.number) * self.weights[1] - b
        return torch.where(hits >= _COVERED * self.number, _entropy(a, b) + _entropy(c, d), math.inf)


def _entropy(wrong: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    total = (wrong + right).clamp_min(1e-300)
    return -(torch.xlogy(wrong, wrong / total) + torch.xlogy(right, right / total)) / math.log(2)


def _thinned(indices: torch.Tensor) -> torch.Tensor:
    step = -(-len(indices) // _SAMPLE)
    return indices[:: max(step, 1)]


def conditions_on(
    wrong: torch.Tensor, inputs: Mapping[str, torch.Tensor], known: torch.Tensor | None = None
) -> list[InputCondition]:
    """Return the conditions that say most about which elements are wrong, a few, the best first.

    Args:
        wrong: bools, shape of the result, some True and some False.
        inputs: tensors by name, of any shape and dtype; those that fit the result in no way are left out.
        known: bools, the elements that count; ``None``: all.
    """
    tensors = {name: tensor for name, tensor in [*inputs.items()][:_MOST_INPUTS] if _usable(tensor)}
    if not tensors:
        return []
    sample = _ConditionSample(wrong, known)
    aligned = [fit for name, tensor in tensors.items() for fit in _fits(name, tensor, sample.shape)]
    indices = [
        _Aligned(
            _index_name(sample.shape, dim),
            torch.arange(size).view([-1 if d == dim else 1 for d in range(wrong.ndim)]),
            True,
        )
        for dim, size in enumerate(sample.shape)
        if size > 1
    ]
    found: list[tuple[float, InputCondition]] = []
    for fit in aligned:
        found += _of_one(fit, sample)
    for one, other in itertools.combinations([*aligned, *indices], 2):
        if not (one.index or other.values is one.values or one.name == other.name):
            found += _of_two(one, other, sample)
    found += [pair for name, tensor in tensors.items() for pair in _as_indices(name, tensor, sample)]
    everywhere = float(sample.length(torch.ones(len(sample.at[0]), dtype=torch.bool)))
    found = [pair for pair in found if pair[0] < everywhere]
    return [condition for _, condition in sorted(found, key=lambda pair: pair[0])[:_MOST_FOUND]]


def _usable(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized and tensor.numel() > 0


def _index_name(shape: tuple[int, ...], dim: int) -> str:
    noun = axis_of(shape, dim).noun
    return f"the index of {noun}" if noun.startswith("dimension") else f"the {noun}"


def _fits(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> list[_Aligned]:
    return [_Aligned(name, values) for values in fitting(tensor, shape)]


def fitting(tensor: torch.Tensor, shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Return a tensor as it may lie along the dimensions of a result: by broadcasting, or because it has the sizes of
    some of them; of shapes that broadcast to the result."""
    values = tensor.detach().resolve_conj().to("cpu")
    sizes = tuple(values.shape)
    if values.numel() == 1:
        return []
    found = {}
    padded = (1,) * (len(shape) - len(sizes)) + sizes
    if len(padded) == len(shape) and all(a in (1, b) for a, b in zip(padded, shape, strict=True)):
        found[padded] = values.reshape(padded)
    if len(sizes) < len(shape):
        for dims in itertools.islice(itertools.combinations(range(len(shape)), len(sizes)), 64):
            if tuple(shape[dim] for dim in dims) == sizes:
                wanted = tuple(size if dim in dims else 1 for dim, size in enumerate(shape))
                found.setdefault(wanted, values.reshape(wanted))
    return [*found.values()][:_EXTENTS]


# ---------------------------------------------------------------------------------------------------- of one input


def _of_one(fit: _Aligned, sample: _ConditionSample) -> Iterator[tuple[float, InputCondition]]:
    name, tensor = fit.name, fit.values
    raw = sample.values(tensor)
    whole = not (raw.is_floating_point() or raw.is_complex())
    values = raw.to(torch.float64) if not raw.is_complex() else raw.to(torch.complex128)
    if raw.dtype is torch.bool:
        yield _judged(sample, f"where {name} is True", 4.0, lambda t: t, tensor, raw)
        yield _judged(sample, f"where {name} is False", 4.0, lambda t: ~t, tensor, raw)
        return
    yield _judged(sample, f"where {name} == 0", 4.0, lambda t: t == 0, tensor, values)
    yield _judged(sample, f"where {name} != 0", 5.0, lambda t: t != 0, tensor, values)
    if not whole and not bool(values.isfinite().all()):
        yield _judged(sample, f"where {name} is NaN", 3.0, torch.isnan, tensor, values)
        yield _judged(sample, f"where {name} is infinite", 3.0, torch.isinf, tensor, values)
        yield _judged(sample, f"where {name} is NaN or infinite", 4.0, lambda t: ~torch.isfinite(t), tensor, values)
        if tensor.ndim and tensor.shape[-1] > 1:
            rows = (~torch.isfinite(tensor)).any(-1, keepdim=True)
            yield _judged(
                sample,
                f"where {name} has NaN or infinities in its last dimension",
                6.0,
                lambda t: t,
                rows,
                sample.values(rows),
            )
    if values.is_complex():
        return
    if whole:
        common = values[: sample.number].mode().values.item()
        yield _judged(sample, f"where {name} is {common:.0f}", 10.0, lambda t: t == common, tensor, values)
    yield _judged(sample, f"where {name} < 0", 4.0, lambda t: t < 0, tensor, values)
    yield _judged(sample, f"where {name} > 0", 4.0, lambda t: t > 0, tensor, values)
    yield from _thresholds(name, tensor, values, sample)


def _judged(
    sample: _ConditionSample,
    text: str,
    bits: float,
    test: Callable[[torch.Tensor], torch.Tensor],
    tensor: torch.Tensor,
    values: torch.Tensor,
) -> tuple[float, InputCondition]:
    length = float(sample.length(test(values))) + 2 * bits
    return length, InputCondition(Words(text, bits), lambda: test(tensor))


def _thresholds(
    name: str, tensor: torch.Tensor, values: torch.Tensor, sample: _ConditionSample
) -> Iterator[tuple[float, InputCondition]]:
    """Yield the best bounds of a value, of its magnitude, and an interval."""
    low = _best_bound(values, sample)
    if low is not None:
        yield _judged(sample, f"where {name} > {low:g}", 14.0, lambda t: t > low, tensor, values)
    high = _best_bound(-values, sample)
    if high is not None:
        yield _judged(sample, f"where {name} < {-high:g}", 14.0, lambda t: t < -high, tensor, values)
    above = _best_bound(values.abs(), sample)
    if above is not None and above > 0:
        yield _judged(sample, f"where |{name}| > {above:g}", 15.0, lambda t: t.abs() > above, tensor, values)
    below = _best_bound(-values.abs(), sample)
    if below is not None and below < 0:
        yield _judged(sample, f"where |{name}| < {-below:g}", 15.0, lambda t: t.abs() < -below, tensor, values)
    if low is not None and high is not None and low < -high:
        yield _judged(
            sample,
            f"where {low:g} < {name} < {-high:g}",
            28.0,
            lambda t: (t > low) & (t < -high),
            tensor,
            values,
        )
    if above is not None and below is not None and 0 < above < -below:
        yield _judged(
            sample,
            f"where {above:g} < |{name}| < {-below:g}",
            29.0,
            lambda t: (t.abs() > above) & (t.abs() < -below),
            tensor,
            values,
        )


def _best_bound(values: torch.Tensor, sample: _ConditionSample) -> float | None:
    """Return the bound above which wrong elements are told best from right ones, as a short number."""
    known = ~values.isnan()
    ordered, order = torch.where(known, values, -math.inf).sort(stable=True)
    is_wrong = order < sample.number
    # hits[i], false[i]: those from i on
    hits = is_wrong.flip(0).cumsum(0).flip(0).double()
    false = (~is_wrong).flip(0).cumsum(0).flip(0).double()
    length = sample.message(hits, false)
    length[1:][ordered[1:] == ordered[:-1]] = math.inf
    length[0] = math.inf
    at = int(length.argmin())
    if not math.isfinite(length[at]):
        return None
    return roundest(float(ordered[at - 1]), float(ordered[at]))


def roundest(low: float, high: float) -> float:
    """Return the shortest number from ``low`` up to ``high``, ``high`` not included.

    >>> roundest(87.93, 88.31), roundest(-0.2, 0.4), roundest(1.0, 2.0)
    (88.0, 0.0, 1.0)
    """
    if low <= 0 < high:
        return 0.0
    if not (math.isfinite(low) and math.isfinite(high)):
        return low if math.isfinite(low) else math.nextafter(high, -math.inf)
    for digits in range(17):
        for number in (low, high, (low + high) / 2):
            rounded = float(f"{number:.{digits}e}")
            if low <= rounded < high:
                return rounded
    return low


# ---------------------------------------------------------------------------------------- of two, and of indices


def _of_two(one: _Aligned, other: _Aligned, sample: _ConditionSample) -> Iterator[tuple[float, InputCondition]]:
    if one.values.is_complex() or other.values.is_complex():
        return
    if other.index and one.values.is_floating_point():
        return
    a, b = sample.values(one.values).double(), sample.values(other.values).double()
    tests: Sequence[tuple[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = (
        ("==", torch.eq),
        ("<", torch.lt),
        (">", torch.gt),
        ("<=", torch.le),
        (">=", torch.ge),
    )
    for sign, test in tests:
        if other.index:  # "where the column >= input 1"
            a_name, b_name, first, second, holds = other.name, one.name, other.values, one.values, test(b, a)
        else:
            a_name, b_name, first, second, holds = one.name, other.name, one.values, other.values, test(a, b)
        bits = 9.0 if len(sign) == 1 else 10.0
        yield (
            float(sample.length(holds)) + 2 * bits,
            InputCondition(
                Words(f"where {a_name} {sign} {b_name}", bits),
                functools.partial(test, first, second),
            ),
        )


def _as_indices(name: str, tensor: torch.Tensor, sample: _ConditionSample) -> Iterator[tuple[float, InputCondition]]:
    """Yield what integers say as indices into a dimension of the result: named once, more than once, never."""
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool:
        return
    flat = tensor.detach().to("cpu", torch.int64).flatten()
    for dim, size in enumerate(sample.shape):
        inside = flat[(flat >= 0) & (flat < size)]
        if size < 2 or len(inside) < 0.9 * len(flat):  # some may be a padding index, as -100
            continue
        times = torch.bincount(inside, minlength=size).view([-1 if d == dim else 1 for d in range(len(sample.shape))])
        here = sample.values(times)
        where = axis_of(sample.shape, dim).noun
        for words, test in (
            (f"where {name} names the {where} more than once", lambda t: t > 1),
            (f"where {name} names the {where}", lambda t: t > 0),
            (f"where {name} does not name the {where}", lambda t: t == 0),
        ):
            yield _judged(sample, words, 9.0, test, times, here)
