"""What kind of fault made a result wrong: each guess is held against the wrong elements, and admits its doubt. Pure.

A guess counts if rounding explains what it leaves of the error, so that one that is told is true of the numbers; that
another mistake makes the same numbers is what ``doubt`` says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from hashbench.core.run.distance import integer_view, unit_roundoff
from hashbench.core.run.rounding_judge import Bias, JudgedResult
from hashbench.core.text import percent
from hashbench.core.trace.digest import dtype_name
from hashbench.extensions.kernels.conditions import fitting
from hashbench.extensions.kernels.displaced import displacement, moved_input
from hashbench.extensions.kernels.factors import factor_words
from hashbench.extensions.kernels.lines import FoundKind, factor_of_lines, lines_of
from hashbench.extensions.kernels.lost import lost_by_index, lost_carry, lost_elements, lost_on_average
from hashbench.extensions.kernels.misses import Index, Misses, misses, number, rms, whole
from hashbench.extensions.kernels.verdict import FaultKind

_ONLY_MEAN = "no element is beyond rounding: only the mean of many shows it"

_MOSTLY = 0.9
"""Share of the wrong elements that must be as a guess says where bits are compared."""

_SMOOTH = 0.8
"""Correlation of neighbours' errors, in order of an input, from which on the error is a function of it."""

_APPROXIMATE = 0.03
"""Largest error over the largest magnitude of a result that is called an approximation."""

_MAINLY = 0.5
"""Share of the wrong elements that NaN and infinities must be to be the kind of fault."""

_ALL_SIZES = 20.0
"""Powers of ten that numbers in memory which nobody wrote span."""

_SAMPLE = 1 << 14
"""Wrong elements that an explanation of each by itself is held against."""

_COARSE = (torch.float32, torch.float16, torch.bfloat16)


def kind_of(
    judged: JudgedResult,
    got: torch.Tensor,
    *,
    earlier: Sequence[torch.Tensor] = (),
    poison: Sequence[int] = (),
    inputs: Mapping[str, torch.Tensor] | None = None,
) -> FoundKind:
    """Return what kind of fault a wrong result shows.

    Args:
        judged: the result beside its reference.
        got: the result, of the same shape.
        earlier: results of other calls, or what the output held before, of the same shape and dtype.
        poison: bytes that memory was filled with before the call.
        inputs: the kernel's, by their names in the text; without them lost elements of a sum are not looked for.

    Returns:
        The kind; a clause with the measurement, ``by 1.01``; and why it may be another kind, empty if it is certain.
    """
    miss = misses(judged, got)
    if miss is None:
        words = lost_on_average(whole(judged, got), inputs or {}) if judged.bias is not None else ""
        return (FaultKind.LOST_ELEMENTS, words, _ONLY_MEAN) if words else _of_bias(judged.bias, got, judged.exact)
    special = _non_finite(miss)
    if special is not None and special.share >= _MAINLY:
        return _garbage(miss) or (FaultKind.NON_FINITE, special.words, "")
    found = next(filter(None, _guesses(miss, lambda: whole(judged, got), earlier, poison, inputs or {})), None)
    kind, detail, doubt = found or (FaultKind.BEYOND_ROUNDING, _size(miss), "")
    if special is not None and kind is not FaultKind.UNWRITTEN:
        if kind is FaultKind.BEYOND_ROUNDING:
            return FaultKind.NON_FINITE, f"{special.words} ({percent(special.share)} of what is wrong)", ""
        detail += f"; {special.words} as well"
    return kind, detail, doubt


def _guesses(
    miss: Misses,
    everything: Callable[[], Misses],
    earlier: Sequence[torch.Tensor],
    poison: Sequence[int],
    inputs: Mapping[str, torch.Tensor],
) -> Iterator[FoundKind | None]:
    yield _garbage(miss)
    yield _sign_of_zero(miss)
    yield _unwritten(miss, poison)
    yield _stale(miss, earlier)
    if words := lost_elements(miss, inputs):
        yield FaultKind.LOST_ELEMENTS, words, ""
    if words := displacement(miss):
        yield FaultKind.DISPLACED, words, ""
    yield _zeros(miss)
    at = miss.some(_SAMPLE)
    some = miss.changed(lambda tensor: tensor[at].reshape(-1))
    yield _scaled(some, miss)
    yield _shifted(some)
    if words := lost_carry(miss):
        yield FaultKind.LOST_ELEMENTS, words, ""
    yield _times_input(some, at, inputs, miss.value.shape)
    if words := lost_by_index(miss, inputs):
        yield FaultKind.LOST_ELEMENTS, words, ""
    if words := moved_input(miss, inputs):
        yield FaultKind.DISPLACED, words, ""
    if words := lost_on_average(miss, inputs) or lost_on_average(everything(), inputs):
        yield FaultKind.LOST_ELEMENTS, words, ""
    yield lines_of(miss, inputs)
    yield _lower_precision(miss)
    yield _smooth(everything(), inputs)
    yield _rough(some, miss)


def _size(miss: Misses) -> str:
    """Return the size of the largest error, and what all errors have in common."""
    error = miss.error[miss.finite]
    if not len(error):
        return ""
    largest = f"by up to {number(float(error.abs().max()))}"
    if error.is_complex() or len(error) < 16:
        return largest
    against = error * miss.exact[miss.finite]
    if bool((against < 0).all()):
        return f"{largest}: each is smaller in magnitude than it should be, or has the other sign"
    if bool((against > 0).all()):
        return f"{largest}: each is larger in magnitude than it should be"
    return largest


# ------------------------------------------------------------------------------------------------- by the bits alone


def _garbage(miss: Misses) -> FoundKind | None:
    """Return whether the wrong elements are numbers of all sizes, as memory that nobody wrote has them."""
    at = miss.some(_SAMPLE)
    value, exact = (part[at].reshape(-1).abs() for part in (miss.value, miss.exact))
    if not miss.got.is_floating_point() or miss.got.dtype is torch.float16:
        return None  # whose range is too small to tell
    value, exact = (part[part.isfinite() & (part > 0)].log10() for part in (value, exact))
    if len(value) < 2 or float(value.max() - value.min()) < _ALL_SIZES:
        return None
    if len(exact) and float(exact.max() - exact.min()) > _ALL_SIZES / 2:
        return None
    words = f"numbers of all sizes, {number(10 ** float(value.min()))} to {number(10 ** float(value.max()))}"
    return FaultKind.UNWRITTEN, words, "an overflow may also make them"


@dataclass(frozen=True, slots=True)
class _Special:
    """NaN and infinities in words, and their share of the wrong elements."""

    words: str
    share: float


def _non_finite(miss: Misses) -> _Special | None:
    value, exact = miss.value, miss.exact
    made = miss.wrong & ~value.isfinite() & exact.isfinite()
    hidden = miss.wrong & value.isfinite() & ~exact.isfinite()
    other = miss.wrong & ~value.isfinite() & ~exact.isfinite()
    part = max((made, hidden, other), key=lambda part: int(part.sum()))
    if not bool(part.any()):
        return None
    first = tuple(part.nonzero()[0])
    words = f"{number(value[first].item())} where the reference has {number(exact[first].item())}"
    return _Special(words, int(part.sum()) / int(miss.wrong.sum()))


def _sign_of_zero(miss: Misses) -> FoundKind | None:
    zeros = (miss.value == 0) & (miss.exact == 0)
    if not miss.got.is_floating_point() or not bool(zeros[miss.wrong].all()):
        return None
    if not bool((miss.value.signbit() != miss.exact.signbit())[miss.wrong].all()):
        return None
    negative = bool(miss.value.signbit()[miss.wrong].any())
    return FaultKind.SIGN_OF_ZERO, "-0 for 0" if negative else "0 for -0", ""


def _unwritten(miss: Misses, poison: Sequence[int]) -> FoundKind | None:
    if miss.got.dtype is torch.bool or miss.got.is_complex():
        return None
    bits = integer_view(miss.got)[miss.wrong]
    for byte in poison:
        pattern = torch.full((miss.got.itemsize,), byte, dtype=torch.uint8)
        filled = pattern.view(bits.dtype)[0]
        share = float((bits == filled).double().mean())
        value = number(pattern.view(miss.got.dtype)[0].item())
        if share >= _MOSTLY:
            return FaultKind.UNWRITTEN, f"it has the {value} that memory was filled with", ""
        start = pattern.view(miss.got.dtype)[0].to(miss.value.dtype)
        if miss.got.is_floating_point() and miss.fits(miss.error - start, miss.finite):
            words = f"the result and the {value} that memory was filled with are added up"
            return FaultKind.UNWRITTEN, words, ""
    return None


def _stale(miss: Misses, earlier: Sequence[torch.Tensor]) -> FoundKind | None:
    if miss.got.dtype is torch.bool or miss.got.is_complex():
        return None
    bits = integer_view(miss.got)[miss.wrong]
    for other in earlier:
        if other.shape != miss.got.shape or other.dtype is not miss.got.dtype:
            continue
        before = integer_view(other.detach().to(miss.got.device).contiguous())[miss.wrong]
        if float((bits == before).double().mean()) < _MOSTLY:
            continue
        distinct = len(bits.unique())
        if distinct > 1 or (bits != 0).any():
            doubt = "" if distinct > 8 else "few different values: a kernel may also compute them"
            return FaultKind.STALE, "the result of an earlier call", doubt
    return None


def _zeros(miss: Misses) -> FoundKind | None:
    if miss.got.dtype is torch.bool or not bool((miss.value == 0)[miss.wrong].all()):
        return None
    if not bool((miss.exact != 0)[miss.wrong].any()) or (int(miss.wrong.sum()) == 1 and miss.wrong.numel() > 1):
        return None
    if float((miss.value == 0).double().mean()) == 1:
        return FaultKind.ZEROS, "it is 0 everywhere", ""
    return FaultKind.ZEROS, "it is 0 there", "a mask, or an element that was not written"


# ------------------------------------------------------------------------------------------------- scaled and shifted


def _of_bias(bias: Bias | None, got: torch.Tensor, exact: torch.Tensor) -> FoundKind:
    """Return the kind of an error that only its direction shows."""
    if bias is None:
        zeros = (got == 0) & (exact == 0) if got.is_floating_point() and exact.is_floating_point() else None
        if zeros is not None and bool((got.signbit() != exact.signbit())[zeros].any()):
            return FaultKind.SIGN_OF_ZERO, "", ""
        return FaultKind.BEYOND_ROUNDING, "", ""
    what, _, place = bias.direction.partition(" at ")
    at = f" at {place}" if place else ""
    size = f"{number(bias.units)} roundoffs in the mean, {number(bias.errors)} standard errors of rounding"
    doubt = _ONLY_MEAN
    if what == "result":
        factor = factor_words(1 + bias.slope, abs(bias.slope) / bias.errors, got.shape)
        return FaultKind.SCALED, f"by {factor}{at} ({size})", doubt
    if what == "constant":
        return FaultKind.SHIFTED, f"by {number(bias.slope)}{at} ({size})", doubt
    if what.startswith("sign"):
        direction = "away from" if bias.slope > 0 else "towards"
        words = f"{direction} zero by {number(abs(bias.slope))}{at} ({size})"
        return FaultKind.BEYOND_ROUNDING, words, doubt
    grows = "upwards" if bias.slope > 0 else "downwards"
    return FaultKind.BEYOND_ROUNDING, f"{grows} by {number(abs(bias.slope))} of the magnitude{at} ({size})", doubt


def _scaled(miss: Misses, everything: Misses) -> FoundKind | None:
    among = miss.finite & (miss.exact != 0)
    if int(among.sum()) < 2:
        return None
    value, exact, weights = miss.value[among], miss.exact[among], miss.weights(among)[among]
    squares = float((weights * exact.abs().square()).sum())
    factor = (weights * value * exact.conj()).sum() / squares
    if not miss.fits(miss.value - factor * miss.exact, miss.finite) or bool((exact == exact[0]).all()):
        return None
    if better := factor_of_lines(everything, rms(miss.value[among] - factor * exact)):
        return better
    if factor.is_complex():
        return FaultKind.SCALED, f"by {number(factor.item())}", ""
    error = math.sqrt(len(value) / squares)
    detail = f"by {factor_words(float(factor), error, everything.got.shape)}"
    return FaultKind.SCALED, "the sign is the opposite" if abs(float(factor) + 1) < 1e-3 else detail, ""


def _shifted(miss: Misses) -> FoundKind | None:
    among = miss.finite
    if int(among.sum()) < 2:
        return None
    weights = miss.weights(among)[among]
    shift = (weights * miss.error[among]).sum() / weights.sum()
    if not miss.fits(miss.error - shift, among):
        return None
    return FaultKind.SHIFTED, f"by {number(shift.item())}", ""


def _times_input(miss: Misses, at: Index, inputs: Mapping[str, torch.Tensor], shape: torch.Size) -> FoundKind | None:
    """Return the input that the error is a multiple of: one that should have been added, or was added twice."""
    among = miss.finite
    if miss.value.is_complex() or int(among.sum()) < 8:
        return None
    weights, error = miss.weights(among)[among], miss.error[among]
    for name, tensor in inputs.items():
        if not tensor.is_floating_point() or tensor.numel() < 2:
            continue
        for values in fitting(tensor, tuple(shape)):
            along = values.broadcast_to(shape)[at].reshape(-1).double()
            there = along[among]
            squares = (weights * there.square()).sum()
            factor = float((weights * error * there).sum() / squares) if squares > 0 else 0.0
            if not math.isfinite(factor) or not miss.fits(miss.error - factor * along, among):
                continue
            if abs(factor + 1) < 0.01:
                return FaultKind.LOST_ELEMENTS, f"{name} is not added", ""
            if abs(factor - 1) < 0.01:
                return FaultKind.BEYOND_ROUNDING, f"{name} is added once too often", ""
            return FaultKind.BEYOND_ROUNDING, f"the error is {number(factor)} times {name}", ""
    return None


# -------------------------------------------------------------------------------------- precision, and approximations


def _lower_precision(miss: Misses) -> FoundKind | None:
    """Return the lower dtype whose numbers all results are."""
    if miss.got.dtype not in (torch.float32, torch.float64):
        return None
    among = miss.value.isfinite() & (miss.exact != 0)
    got, exact = miss.got[among], miss.exact[among].to(miss.got.dtype)
    if len(got) < 32:
        return None
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        if dtype is miss.got.dtype:
            continue
        same = [float((part.to(dtype).to(part.dtype) == part).double().mean()) for part in (got, exact)]
        if same[0] >= 0.99 and same[1] < 0.5:
            return FaultKind.LOWER_PRECISION, f"each result is a {dtype_name(dtype)} number", ""
    if miss.got.dtype is torch.float32:
        low = [float((integer_view(part) & 0x1FFF == 0).double().mean()) for part in (got, exact)]
        if low[0] >= 0.99 and low[1] < 0.5:
            return FaultKind.LOWER_PRECISION, "each result is a TensorFloat-32 number", ""
    return None


def _smooth(miss: Misses, inputs: Mapping[str, torch.Tensor]) -> FoundKind | None:
    """Return whether the error is a smooth function of an input, or of the result."""
    if miss.value.is_complex() or miss.value.numel() < 128 or not bool(miss.error.isfinite().all()):
        return None
    step = max(miss.value.numel() // (4 * _SAMPLE), 1)
    error, exact = (part.flatten()[::step] for part in (miss.error, miss.exact))
    same = {
        name: tensor.detach().to("cpu").flatten()[::step].double()
        for name, tensor in inputs.items()
        if tensor.shape == miss.value.shape and not tensor.is_complex()
    }
    squares = float(error.square().sum())
    found = ("", 0.0)
    for name, values in ({"the result": exact} | same).items():
        ordered = error[values.argsort()]
        alike = float((ordered[1:] * ordered[:-1]).sum()) / squares if squares else 0.0
        found = max(found, (name, alike), key=lambda pair: pair[1])
    if found[1] < _SMOOTH:
        return None
    share = float(miss.error.abs().max() / miss.exact.abs().max().clamp_min(1e-300))
    words = f"the error is a smooth function of {found[0]}, at most {number(share)} of the largest result"
    kind = FaultKind.APPROXIMATION if share <= _APPROXIMATE else FaultKind.BEYOND_ROUNDING
    return kind, words, "" if kind is FaultKind.BEYOND_ROUNDING else "another formula is as smooth"


def _rough(miss: Misses, everything: Misses) -> FoundKind | None:
    """Return the lower dtype whose roundoff the errors have the size of, where they have no direction."""
    if miss.got.dtype not in (torch.float32, torch.float64):
        return None
    among = miss.finite & (miss.exact != 0)
    relative = (miss.error / miss.exact)[among]
    if relative.is_complex() or len(relative) < 64 or float(everything.wrong.double().mean()) < 0.3:
        return None
    middle = float(relative.abs().median())
    signs = float(relative.sign().mean())
    if abs(signs) >= 0.3 or not middle:
        return None
    coarser = [dtype for dtype in _COARSE if unit_roundoff(dtype) > unit_roundoff(miss.got.dtype)]
    dtype = min(coarser, key=lambda dtype: abs(math.log(2 * middle / unit_roundoff(dtype))))
    if not 0.1 <= middle / unit_roundoff(dtype) <= 2:
        return None
    words = f"errors are as large as the roundoff of {dtype_name(dtype)}, {number(middle)} in the middle"
    return FaultKind.LOWER_PRECISION, words, "another error may have this size"
