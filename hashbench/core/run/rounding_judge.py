"""Judge the results of a kernel by what rounding explains of its reference's. Pure: tensors in, numbers out.

An element is right if its error is at most :data:`~hashbench.core.run.rounding.LIMIT` units. Rounding has no direction:
an error that follows the result, its sign, a constant, or that at a position, is judged by its mean (:class:`Bias`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from hashbench.core.run.distance import unit_roundoff, wide
from hashbench.core.run.rounding import LIMIT, NEAR, SAMPLES, References, Units, discrete_ratio
from hashbench.core.run.rounding_reference import ReferenceRuns, Rounding
from hashbench.core.trace.digest import dtype_name, untraced

ERRORS = 6.0
"""Standard errors that a direction must exceed: chance does so once in 10^8 directions."""

ROUNDOFFS = 1.5
"""Unit roundoffs that an error along a direction must exceed: a constant that was rounded to the dtype is right."""

FULL_ROUNDOFFS = 16.0
"""The same in the dtype that kernels compute in, float32 or float64: there each step may round a constant."""

ONCE = 2.0
"""Ratio below which a result in a low dtype was rounded once, from float32."""

EQUAL = "equal"
APPROXIMATION = "approximation"

_BLOCKS = (1, 16, 64)
"""Sizes of blocks that are looked at along each dimension."""

FEWEST = 16
"""Elements that a block must have: the mean of fewer says no more than each of them."""


@dataclass(frozen=True, slots=True)
class Bias:
    """An error that has a direction.

    Attributes:
        direction: ``result``, ``sign of the result``, ``magnitude of the result``, ``constant``, or one of them ``at
            dimension 1, 96 to 127``.
        slope: relative error along it: 0.01 for a result that is scaled by 1.01; of a constant: absolute.
        units: its mean size in unit roundoffs of the results there.
        errors: in standard errors of what rounding does along it.
    """

    direction: str
    slope: float
    units: float
    errors: float


@dataclass(frozen=True, slots=True)
class JudgedResult:
    """One result of a kernel beside its reference's.

    Attributes:
        ratio: largest error of an element in units; infinite if nothing explains it. Below
            :data:`~hashbench.core.run.rounding.NEAR` an upper bound.
        explained_by: ``equal``, ``accumulation in float32``, ``rounding after each op in bfloat16``, ``accumulation in
            bfloat16``, ``approximation``; empty if nothing does.
        own_ratio: the same as ``ratio`` of the reference in its own dtype; ``None`` if nobody asked.
        better: root mean square error of the reference in its own dtype over that of the kernel; ``None`` where one is
            0, and of integers.
        bias: the leading direction if it is one that rounding does not explain.
        error: result less reference, in float64 or complex128, of the result's shape; 0 where both are the same
            infinity or NaN, infinite where one alone is.
        units: magnitude of the error in units, float64.
        beyond: elements that nothing explains, bools.
        exact: the reference in float64 or complex128, or integers.
    """

    ratio: float
    explained_by: str
    own_ratio: float | None
    better: float | None
    bias: Bias | None
    error: torch.Tensor
    units: torch.Tensor
    beyond: torch.Tensor
    exact: torch.Tensor

    def right(self) -> bool:
        """Return True if rounding, or the approximation that was claimed, explains the result."""
        return self.ratio <= LIMIT and self.bias is None


def judge_results(
    got: Sequence[torch.Tensor], runs: ReferenceRuns, *, approximate: float | None = None
) -> tuple[JudgedResult, ...]:
    """Judge each result of a kernel.

    Args:
        got: results in the reference's order, of its shapes. A dtype may be wider or narrower than the reference's: the
            roundoff of the narrower one counts.
        runs: of the reference.
        approximate: what the kernel claims: each error is at most so much of the largest magnitude of the result.

    Raises:
        ValueError: another number of results, or other shapes.
        NotJudgedError: the reference cannot be judged by.
    """
    own = runs.own
    if [item.shape for item in got] != [item.shape for item in own]:
        shapes = [[tuple(item.shape) for item in items] for items in (got, own)]
        raise ValueError(f"results have shapes {shapes[0]}, the reference's {shapes[1]}")
    with untraced():
        return tuple(
            _judged(value.detach().resolve_conj().resolve_neg(), runs, index, approximate)
            for index, value in enumerate(got)
        )


def _judged(got: torch.Tensor, runs: ReferenceRuns, index: int, approximate: float | None) -> JudgedResult:
    own, exact = runs.own[index], runs.exact[index]
    if _is_discrete(own) or _is_discrete(got):
        return _judged_discrete(got, runs, index)
    if got.numel() == 0:
        return JudgedResult(0.0, EQUAL, None, None, None, *_nothing(exact), exact=exact)
    return _FloatingJudge(got, runs, index).judged(approximate)


def _nothing(exact: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    error = torch.zeros(exact.shape, dtype=torch.complex128 if exact.is_complex() else torch.float64)
    return error, torch.zeros(exact.shape, dtype=torch.float64), torch.zeros(exact.shape, dtype=torch.bool)


def _is_discrete(tensor: torch.Tensor) -> bool:
    return not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)


def _judged_discrete(got: torch.Tensor, runs: ReferenceRuns, index: int) -> JudgedResult:
    own, exact = runs.own[index], runs.exact[index]
    level = Rounding.EACH_OP

    def rounded(seed: int, scale: float) -> torch.Tensor:
        return runs.rounded(level, torch.float32, seed, scale)[index]

    ratio, beyond = discrete_ratio(got, References(own, lambda: exact, rounded))
    error = wide(got) - wide(exact)
    units = torch.where(beyond, math.inf, torch.where(got != exact, min(ratio, LIMIT), 0.0)).to(torch.float64)
    explained = EQUAL if ratio == 0 else "" if ratio > LIMIT else f"rounding after each op in {dtype_name(runs.lowest)}"
    return JudgedResult(ratio, explained, None, None, None, error, units, beyond, exact)


def _equal(got: torch.Tensor, own: torch.Tensor) -> bool:
    """Return True if two tensors have the same dtype and values; False where torch cannot compare those of a dtype."""
    if got.dtype is not own.dtype or got.dtype.itemsize == 1:
        return False
    return torch.equal(torch.view_as_real(got), torch.view_as_real(own)) if got.is_complex() else torch.equal(got, own)


class _FloatingJudge:
    """Judge one floating or complex result."""

    def __init__(self, got: torch.Tensor, runs: ReferenceRuns, index: int) -> None:
        self._got, self._runs, self._index = got, runs, index
        own, self._exact = runs.own[index], runs.exact[index]
        self._own = own
        self._dtype = max(got.dtype, own.dtype, key=unit_roundoff)
        self._accumulate = torch.float64 if self._dtype in (torch.float64, torch.complex128) else torch.float32
        self._full = unit_roundoff(self._dtype) <= unit_roundoff(self._accumulate)
        self._units = Units(got, own, self._exact, self._dtype)
        self._accumulated = self._units.floor
        self._directions = _Directions(got, self._units, self._dtype)

    def judged(self, approximate: float | None) -> JudgedResult:
        """Return what was found out."""
        units, error = self._units, self._directions.error
        equal = _equal(self._got, self._own)
        explained, bias = (EQUAL, None) if equal else self._explained()
        ratios = torch.zeros_like(units.allowed()) if equal else units.ratios()
        ratio = 0.0 if equal else units.ratio
        if ratio > LIMIT or bias is not None:
            explained = ""
            if approximate is not None:
                allowed = (NEAR * units.allowed() + approximate * units.largest).nan_to_num(nan=0.0)
                if bool((error.abs() <= allowed).all()):
                    explained, ratio, ratios, bias = APPROXIMATION, min(ratio, LIMIT), ratios.clamp(max=LIMIT), None
        own_ratio = None if equal or ratio <= NEAR else units.own_ratio
        return JudgedResult(ratio, explained, own_ratio, units.better, bias, error, ratios, ratios > LIMIT, self._exact)

    def _explained(self) -> tuple[str, Bias | None]:
        """Take in samples of each model of rounding until one explains the error; return its name and the bias."""
        units, name, bias = self._units, "", None
        samples: list[torch.Tensor] = []
        roundings = list(Rounding) if self._coarser else [Rounding.ACCUMULATION, Rounding.EACH_OP]
        for rounding in roundings:
            near = ONCE if rounding is Rounding.ACCUMULATION and self._coarser else NEAR
            units.tighten(False)
            if rounding is not Rounding.ACCUMULATION:
                units.count_own()
            if rounding is Rounding.ACCUMULATION or self._coarser:
                samples = []
            bias = self._bias(samples) if units.ratio <= near else None
            while len(samples) < SAMPLES and (units.ratio > near or bias is not None):
                samples.append(self._sample(rounding, len(samples), 1.0))
                units.add(samples[-1])
            if len(samples) == SAMPLES:
                units.tighten(True)
            if rounding is Rounding.ACCUMULATION:
                self._accumulated = units.allowed()
            if samples and units.ratio <= LIMIT:
                bias = self._bias(samples)
            if units.ratio <= (near if self._coarser else LIMIT) and bias is None:
                name = name or self._name(rounding)
            if units.ratio <= near and bias is None:
                return name, None
        if units.ratio > LIMIT:
            if 2 * units.beyond <= self._got.numel():  # a step that flips does so for few elements
                units.look_for_flips(functools.partial(self._sample, roundings[-1]))
            bias = self._bias(samples)  # describes what is wrong
        return name or self._name(roundings[-1]), bias

    def _bias(self, samples: Sequence[torch.Tensor]) -> Bias | None:
        roundoffs = FULL_ROUNDOFFS if self._full else ROUNDOFFS
        return self._directions.leading(samples, roundoffs, self._accumulated)

    @functools.cached_property
    def _coarser(self) -> bool:
        """Whether ops of the reference round to a lower dtype than sums accumulate in."""
        return unit_roundoff(self._runs.lowest) > unit_roundoff(self._accumulate)

    def _sample(self, rounding: Rounding, seed: int, scale: float) -> torch.Tensor:
        return self._runs.rounded(rounding, self._accumulate, seed, scale)[self._index]

    def _name(self, rounding: Rounding) -> str:
        if rounding is Rounding.ACCUMULATION:
            return f"accumulation in {dtype_name(self._accumulate)}"
        kind = "accumulation" if rounding is Rounding.LOW_ACCUMULATION else "rounding after each op"
        return f"{kind} in {dtype_name(self._runs.lowest)}"


class _Directions:
    """The error of a result along directions that mistakes have. Real and imaginary parts count as elements.

    Sums are in float32, of errors in unit roundoffs of the largest magnitude.
    """

    def __init__(self, got: torch.Tensor, units: Units, dtype: torch.dtype) -> None:
        value, reference = wide(got), units.reference
        error = value - reference
        self._finite: torch.Tensor | None = None
        if not bool(error.sum().isfinite()):
            self._finite = value.isfinite() & reference.isfinite()
            same = (value == reference) | (value.isnan() & reference.isnan()) | (units.ratios() == 0)
            error = torch.where(self._finite, error, torch.where(same, 0.0, math.inf))
        self.error = error
        self._units, self._reference = units, reference
        self._roundoff, self._least = unit_roundoff(dtype), units.least
        self._scale = units.largest or 1.0
        self._w = self._parts(reference.to(error.dtype), self._scale)
        self._signed = bool((self._w < 0).any())
        self._places = list(_places(self._w.shape))
        self._repeated: dict[tuple[int, int], float] = {}

    def leading(self, samples: Sequence[torch.Tensor], roundoffs: float, accumulated: torch.Tensor) -> Bias | None:
        """Return the direction that most of the error follows, of those that rounding does not explain.

        Args:
            samples: values with random rounding.
            roundoffs: what its mean must exceed.
            accumulated: what accumulation explains of each element, float64; so often its mean must exceed it, too.
        """
        suspects = [sums for sums in self._sums if sums.suspect(roundoffs)]
        if not suspects:
            return None
        spread = self._parts(_of_each_part(self._units.allowed(), self.error), self._one)
        least = self._parts(_of_each_part(accumulated, self.error), self._one) * ROUNDOFFS
        moved = [self._parts(wide(sample) - self._reference, self._one) for sample in samples]
        found: list[tuple[float, Bias]] = []
        for sums in suspects:
            along = self._along(sums.name)
            alone = _lines((spread * along).square_())
            shared = [_lines(sample * along) for sample in moved]
            explained = _lines(least * along.abs())
            for place in self._places:
                variance = place.of(alone)
                if shared:
                    parts = torch.stack([place.of(lines).square() for lines in shared])
                    variance = variance + parts.amax(0) + parts.mean()
                mean, most, norm = (place.of(lines) for lines in (sums.error, sums.floor, sums.norm))
                over = mean.abs() > torch.maximum(roundoffs * most, place.of(explained))
                errors = torch.where(over, mean.abs() / variance.sqrt(), 0.0)
                best = int(errors.argmax())
                if float(errors[best]) > ERRORS * math.sqrt(self._alike(place, best) if samples else 1.0):
                    slope = float(mean[best] / norm[best]) * self._roundoff
                    if sums.name != "result":
                        slope *= self._scale if sums.name != "magnitude of the result" else 1.0
                    mean_size = float(mean[best].abs() / most[best])
                    bias = Bias(sums.name + place.text(best, self._w.shape), slope, mean_size, float(errors[best]))
                    found.append((float(mean[best].square() / norm[best]), bias))
        return max(found, key=lambda pair: pair[0])[1] if found else None

    def _alike(self, place: _DirectionPlace, block: int) -> float:
        """Return how many elements of a block have the same value, in the mean: they have the same error."""
        key = self._places.index(place), block
        if key not in self._repeated:
            values = self._w if not place.size else self._w.narrow(place.dim, *place.range(block, self._w.shape))
            self._repeated[key] = values.numel() / max(1, len(values.unique()))
        return self._repeated[key]

    @functools.cached_property
    def _one(self) -> float:
        """One roundoff of the largest magnitude."""
        return self._scale * self._roundoff

    @functools.cached_property
    def _sums(self) -> list[_Sums]:
        e, size = self._parts(self.error, self._one), self._w.abs()
        least, count = self._least / self._one, _lines(torch.ones_like(size))
        sizes, squares = _lines(size), _lines(self._w.square())
        of_constant = [line + least * terms for line, terms in zip(sizes, count, strict=True)]
        of_result = [line + least * terms for line, terms in zip(squares, sizes, strict=True)]
        found = []
        for name in ("result", "sign of the result", "constant", "magnitude of the result"):
            if name != "magnitude of the result" or self._signed:
                along = name in ("result", "magnitude of the result")
                floor, norm = (of_result, squares) if along else (of_constant, count)
                found.append(_Sums(name, _lines(e * self._along(name)), floor, norm, self._places))
        return found

    def _along(self, name: str) -> torch.Tensor:
        if name == "constant":
            return torch.ones(())
        return {"result": self._w, "sign of the result": self._w.sign()}.get(name, self._w.abs())

    def _parts(self, tensor: torch.Tensor, scale: float) -> torch.Tensor:
        """Return finite parts of a tensor over ``scale`` with at least one dimension, in float32: those of complex
        numbers in a last one."""
        if self._finite is not None:
            tensor = torch.where(self._finite, tensor, 0.0)
        tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        found = (tensor / scale).to(torch.float32)
        if not bool(found.sum().isfinite()):
            found = found.nan_to_num_(nan=0.0, posinf=_MOST, neginf=-_MOST).clamp_(-_MOST, _MOST)
        return found if found.dim() else found.unsqueeze(0)


def _of_each_part(unit: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    return torch.complex(unit, unit) if error.is_complex() else unit


_MOST = 1e15
"""Largest size in units that is told from larger ones: squares stay in the range of float32."""


@dataclass(frozen=True, slots=True)
class _DirectionPlace:
    """Elements that are summed: all of them (``size`` 0), or each block of ``size`` along a dimension."""

    dim: int
    size: int

    def of(self, lines: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum of each block, of shape (blocks,)."""
        along = lines[self.dim]
        if not self.size:
            return along.sum().reshape(1)
        if self.size == 1:
            return along
        return torch.nn.functional.pad(along, (0, -len(along) % self.size)).view(-1, self.size).sum(1)

    def text(self, block: int, shape: torch.Size) -> str:
        """Return where a block is, to follow the name of a direction."""
        if not self.size:
            return ""
        first, length = self.range(block, shape)
        last = first + length - 1
        return f" at dimension {self.dim}, {first} to {last}" if length > 1 else f" at dimension {self.dim}, {first}"

    def range(self, block: int, shape: torch.Size) -> tuple[int, int]:
        """Return the first index of a block along the dimension, and its length."""
        first = block * self.size
        return first, min(self.size, shape[self.dim] - first)


@dataclass(frozen=True, slots=True)
class _Sums:
    """Sums along each dimension of what a direction needs: error, one rounding, and its square."""

    name: str
    error: list[torch.Tensor]
    floor: list[torch.Tensor]
    norm: list[torch.Tensor]
    places: list[_DirectionPlace]

    def suspect(self, roundoffs: float) -> bool:
        """Return True if the mean error of a block exceeds so many roundoffs."""
        return any(bool((place.of(self.error).abs() > roundoffs * place.of(self.floor)).any()) for place in self.places)


def _lines(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the sums over all other dimensions of each dimension."""
    if tensor.dim() == 1:
        return [tensor]
    return [tensor.sum([other for other in range(tensor.dim()) if other != dim]) for dim in range(tensor.dim())]


def _places(shape: torch.Size) -> Iterator[_DirectionPlace]:
    yield _DirectionPlace(0, 0)
    for dim, length in enumerate(shape):
        for size in _BLOCKS:
            if length > size and shape.numel() // length * size >= FEWEST:
                yield _DirectionPlace(dim, size)


def resolves(
    got: torch.Tensor, moved: torch.Tensor, reference: torch.Tensor, reference_moved: torch.Tensor
) -> bool | None:
    """Return whether a kernel computes in the dtype of its inputs: it answers to a small change as the reference does.

    A kernel that rounds float32 inputs to a lower dtype does not see most of a change by 2^-14, and of some elements
    sees 2^-9 and more. One that is wrong in another way may still answer: it loses rows, or is scaled.

    Args:
        got, moved: results of the kernel for some inputs, and for those times ``1 ± 2**-14`` with random signs.
        reference, reference_moved: those of the reference, of the same shapes.

    Returns:
        ``None`` if the reference does not answer beyond its own rounding.
    """
    ours, theirs = wide(moved) - wide(got), wide(reference_moved) - wide(reference)
    noise = 64 * unit_roundoff(reference.dtype) * wide(reference).abs()
    answers = (theirs.abs() > noise) & theirs.isfinite()
    if not bool(answers.any()):
        return None
    alike = (ours - theirs).abs() <= theirs.abs() / 4
    return float(alike[answers].double().mean()) >= 0.5
