"""What kind of fault made a result wrong: each guess is held against the wrong elements, and admits its doubt. Pure.

A guess counts if rounding explains what it leaves of the error, so that one that is told is true of the numbers; that
another mistake makes the same numbers is what ``doubt`` says.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from hashbench.core.run.distance import integer_view, unit_roundoff
from hashbench.core.text import percent
from hashbench.core.trace.digest import dtype_name
from hashbench.extensions.kernels.displaced import displacement
from hashbench.extensions.kernels.factors import factor_words
from hashbench.extensions.kernels.lost import lost_carry, lost_elements
from hashbench.extensions.kernels.misses import Direction, Judged, Misses, misses, number, rms
from hashbench.extensions.kernels.slices import axis_of
from hashbench.extensions.kernels.verdict import FaultKind

Kind = tuple[FaultKind, str, str]
"""The kind, a clause with the measurement, and why it may be another."""

_MOSTLY = 0.9
"""Share of the wrong elements that must be as a guess says where bits are compared."""

_SMOOTH = 0.8
"""Correlation of neighbours' errors, in order of an input, from which on the error is a function of it."""

_APPROXIMATE = 0.03
"""Largest error over the largest magnitude of a result that is called an approximation."""

_COARSE = (torch.float32, torch.float16, torch.bfloat16)

_LEAST_ALONG = 8
"""Wrong elements of a row from which on its own factor is looked for."""


def kind_of(
    judged: Judged,
    got: torch.Tensor,
    *,
    earlier: Sequence[torch.Tensor] = (),
    poison: Sequence[int] = (),
    inputs: Mapping[str, torch.Tensor] | None = None,
) -> Kind:
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
        return _of_bias(judged.bias, got, judged.exact)
    for found in _guesses(miss, earlier, poison, inputs or {}):
        if found is not None:
            return found
    return FaultKind.BEYOND_ROUNDING, _size(miss), ""


def _guesses(
    miss: Misses, earlier: Sequence[torch.Tensor], poison: Sequence[int], inputs: Mapping[str, torch.Tensor]
) -> Iterator[Kind | None]:
    yield _non_finite(miss)
    yield _sign_of_zero(miss)
    yield _unwritten(miss, poison)
    yield _stale(miss, earlier)
    if words := lost_elements(miss, inputs):
        yield FaultKind.LOST_ELEMENTS, words, ""
    if words := displacement(miss):
        yield FaultKind.DISPLACED, words, ""
    yield _zeros(miss)
    yield _scaled(miss)
    yield _shifted(miss)
    if words := lost_carry(miss):
        yield FaultKind.LOST_ELEMENTS, words, ""
    yield _by_line(miss)
    yield _lower_precision(miss)
    yield _smooth(miss, inputs)
    yield _rough(miss)


def _size(miss: Misses) -> str:
    """Return the size of the largest error, and what all errors have in common."""
    error = (miss.value - miss.exact)[miss.finite]
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


def _non_finite(miss: Misses) -> Kind | None:
    value, exact = miss.value, miss.exact
    made = miss.wrong & ~value.isfinite() & exact.isfinite()
    hidden = miss.wrong & value.isfinite() & ~exact.isfinite()
    other = miss.wrong & ~value.isfinite() & ~exact.isfinite()
    spots = [(int(part.sum()), part) for part in (made, hidden, other)]
    count, part = max(spots, key=lambda spot: spot[0])
    if not count:
        return None
    first = tuple(part.nonzero()[0])
    words = f"{number(value[first].item())} where the reference has {number(exact[first].item())}"
    share = count / int(miss.wrong.sum())
    return FaultKind.NON_FINITE, words if share == 1 else f"{words}; {percent(share)} of the wrong elements", ""


def _sign_of_zero(miss: Misses) -> Kind | None:
    zeros = (miss.value == 0) & (miss.exact == 0)
    if not miss.got.is_floating_point() or not bool(zeros[miss.wrong].all()):
        return None
    if not bool((miss.value.signbit() != miss.exact.signbit())[miss.wrong].all()):
        return None
    negative = bool(miss.value.signbit()[miss.wrong].any())
    return FaultKind.SIGN_OF_ZERO, "-0 for 0" if negative else "0 for -0", ""


def _unwritten(miss: Misses, poison: Sequence[int]) -> Kind | None:
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
        if miss.got.is_floating_point() and miss.fits(miss.value - miss.exact - start, miss.finite):
            words = f"the result and the {value} that memory was filled with are added up"
            return FaultKind.UNWRITTEN, words, ""
    return None


def _stale(miss: Misses, earlier: Sequence[torch.Tensor]) -> Kind | None:
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


def _zeros(miss: Misses) -> Kind | None:
    if miss.got.dtype is torch.bool or not bool((miss.value == 0)[miss.wrong].all()):
        return None
    if not bool((miss.exact != 0)[miss.wrong].any()) or (int(miss.wrong.sum()) == 1 and miss.wrong.numel() > 1):
        return None
    if float((miss.value == 0).double().mean()) == 1:
        return FaultKind.UNWRITTEN, "it is 0 everywhere", "a kernel may also compute zeros"
    return FaultKind.UNWRITTEN, "it is 0 there", "a kernel may also compute zeros, as behind a mask"


# ------------------------------------------------------------------------------------------------- scaled and shifted


def _of_bias(bias: Direction | None, got: torch.Tensor, exact: torch.Tensor) -> Kind:
    """Return the kind of an error that only its direction shows."""
    if bias is None:
        zeros = (got == 0) & (exact == 0) if got.is_floating_point() and exact.is_floating_point() else None
        if zeros is not None and bool((got.signbit() != exact.signbit())[zeros].any()):
            return FaultKind.SIGN_OF_ZERO, "", ""
        return FaultKind.BEYOND_ROUNDING, "", ""
    what, _, place = bias.direction.partition(" at ")
    at = f" at {place}" if place else ""
    size = f"{number(bias.units)} roundoffs in the mean, {number(bias.errors)} standard errors of rounding"
    doubt = "no element is beyond rounding: only the mean of many shows it"
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


def _weights(miss: Misses, among: torch.Tensor) -> torch.Tensor:
    """Return what the squares of errors are multiplied by: small where rounding is large; 0 outside of elements."""
    unit = miss.unit + rms(miss.unit[among]) + 1e-300
    return torch.where(among, unit.square().reciprocal(), 0.0)


def _scaled(miss: Misses) -> Kind | None:
    among = miss.finite & (miss.exact != 0)
    if int(among.sum()) < 2:
        return None
    value, exact, weights = miss.value[among], miss.exact[among], _weights(miss, among)[among]
    squares = float((weights * exact.abs().square()).sum())
    factor = (weights * value * exact.conj()).sum() / squares
    if not miss.fits(miss.value - factor * miss.exact, miss.finite) or bool((exact == exact[0]).all()):
        return None
    if factor.is_complex():
        return FaultKind.SCALED, f"by {number(factor.item())}", ""
    error = math.sqrt(len(value) / squares)
    detail = f"by {factor_words(float(factor), error, miss.got.shape)}"
    return FaultKind.SCALED, "the sign is the opposite" if abs(float(factor) + 1) < 1e-3 else detail, ""


def _shifted(miss: Misses) -> Kind | None:
    among = miss.finite
    if int(among.sum()) < 2:
        return None
    weights = _weights(miss, among)[among]
    shift = (weights * (miss.value - miss.exact)[among]).sum() / weights.sum()
    if not miss.fits(miss.value - miss.exact - shift, among):
        return None
    return FaultKind.SHIFTED, f"by {number(shift.item())}", ""


def _by_line(miss: Misses) -> Kind | None:
    """Return a factor, or a constant, or both, of each row, column, or slice along a dimension."""
    shape = tuple(miss.value.shape)
    if len(shape) < 2 or miss.value.is_complex():
        return None
    for dim, size in enumerate(shape):
        others = [other for other in range(len(shape)) if other != dim]
        alone = [(others, f"each {axis_of(shape, dim).noun}")] if miss.value.numel() // size > 1 and size > 1 else []
        if len(shape) > 2 and size > 1:
            alone.append(([dim], f"each line along dimension {dim}"))
        for dims, name in alone:
            if found := _of_lines(miss, dims, name.replace("each dimension", "each slice of dimension")):
                return found
    return None


def _of_lines(miss: Misses, dims: list[int], name: str) -> Kind | None:
    among = miss.finite
    number_of = among.sum(dims, keepdim=True)
    if int((number_of >= _LEAST_ALONG).sum()) < 2:
        return None
    known = among & (number_of >= _LEAST_ALONG)
    weights = _weights(miss, known)
    value, exact = torch.where(known, miss.value, 0.0), torch.where(known, miss.exact, 0.0)
    total = weights.sum(dims, keepdim=True).clamp_min(1e-300)
    squares = (weights * exact.square()).sum(dims, keepdim=True).clamp_min(1e-300)
    factor = (weights * value * exact).sum(dims, keepdim=True) / squares
    has = number_of >= _LEAST_ALONG
    if miss.fits(value - factor * exact, known):
        low, high = (number(float(part)) for part in (factor[has].min(), factor[has].max()))
        doubt = "a sum that a row divides by lacks elements, or has too many: it scales the row as well"
        return FaultKind.SCALED, f"{name} by a factor of its own, {low} to {high}", doubt.replace("row", "line")
    shift = (weights * (value - exact)).sum(dims, keepdim=True) / total
    if miss.fits(value - exact - shift, known):
        low, high = (number(float(part)) for part in (shift[has].min(), shift[has].max()))
        return FaultKind.SHIFTED, f"{name} by a constant of its own, {low} to {high}", ""
    mean = (weights * exact).sum(dims, keepdim=True) / total
    centred = torch.where(known, exact - mean, 0.0)
    slope = (weights * value * centred).sum(dims, keepdim=True) / (weights * centred.square()).sum(
        dims, keepdim=True
    ).clamp_min(1e-300)
    offset = (weights * (value - slope * exact)).sum(dims, keepdim=True) / total
    if miss.fits(value - slope * exact - offset, known):
        words = f"{name} by a factor and a constant of its own, as if its mean or variance were off"
        return FaultKind.SCALED, words, ""
    return None


# -------------------------------------------------------------------------------------- precision, and approximations


def _lower_precision(miss: Misses) -> Kind | None:
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


def _smooth(miss: Misses, inputs: Mapping[str, torch.Tensor]) -> Kind | None:
    """Return whether the error is a smooth function of an input, or of the result."""
    error = miss.value - miss.exact
    if error.is_complex() or not bool(error.isfinite().all()) or error.numel() < 128:
        return None
    same = {name: tensor for name, tensor in inputs.items() if tensor.shape == error.shape and not tensor.is_complex()}
    squares = float(error.square().sum())
    found = ("", 0.0)
    for name, values in ({"the result": miss.exact} | same).items():
        ordered = error.flatten()[values.detach().to("cpu").flatten().double().argsort()]
        alike = float((ordered[1:] * ordered[:-1]).sum()) / squares if squares else 0.0
        found = max(found, (name, alike), key=lambda pair: pair[1])
    if found[1] < _SMOOTH:
        return None
    share = float(error.abs().max() / miss.exact.abs().max().clamp_min(1e-300))
    words = f"the error is a smooth function of {found[0]}, at most {number(share)} of the largest result"
    kind = FaultKind.APPROXIMATION if share <= _APPROXIMATE else FaultKind.BEYOND_ROUNDING
    return kind, words, "" if kind is FaultKind.BEYOND_ROUNDING else "another formula is as smooth"


def _rough(miss: Misses) -> Kind | None:
    """Return the lower dtype whose roundoff the errors have the size of, where they have no direction."""
    if miss.got.dtype not in (torch.float32, torch.float64):
        return None
    among = miss.finite & (miss.exact != 0)
    relative = ((miss.value - miss.exact) / miss.exact)[among]
    if relative.is_complex() or len(relative) < 64 or float(miss.wrong.double().mean()) < 0.3:
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
