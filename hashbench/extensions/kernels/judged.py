"""The judge's numbers on the results of one call, as the data of a verdict."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from hashbench.core.errors import named_line
from hashbench.core.run.distance import unit_roundoff
from hashbench.core.run.rounding_judge import JudgedResult, judge_results
from hashbench.core.run.rounding_reference import ReferenceRuns
from hashbench.core.trace.digest import dtype_name
from hashbench.extensions.kernels.calls import Called
from hashbench.extensions.kernels.inputs import KernelInputs
from hashbench.extensions.kernels.kind import kind_of
from hashbench.extensions.kernels.verdict import Fault, FaultKind, JudgedOutput
from hashbench.extensions.kernels.where import wrong_places

_NEARLY_INFINITE = 2.0**118
"""Magnitude of a result whose steps may have been infinite in float32."""

_PICTURE = 64
"""Largest number of rows and of columns of a picture of errors."""


@dataclass(frozen=True, slots=True)
class JudgedKernelCall:
    """What was found out about one call.

    Attributes:
        called: the call.
        results: of the judge, one for each result; empty if they could not be compared.
        structure: how the results differ in number, shape or dtype; empty if they do not.
        exchanged: elements that are NaN where the reference's are infinite, or the other way.
    """

    called: Called
    results: tuple[JudgedResult, ...] = ()
    structure: str = ""
    exchanged: int = 0

    @property
    def right(self) -> bool:
        """Whether the call returned what rounding explains."""
        return not self.called.error and not self.structure and all(result.right() for result in self.results)

    @property
    def usable(self) -> bool:
        """Whether there are results that can be compared."""
        return not self.structure and self.called.error is None

    @property
    def ratio(self) -> float | None:
        """Largest ratio of all results."""
        return max((result.ratio for result in self.results), default=None)

    def outputs(self) -> tuple[JudgedOutput, ...]:
        """Return each result as the data of a verdict."""
        each = zip(self.called.names, self.called.results, self.results, strict=True)
        return tuple(_output(name, got, judged) for name, got, judged in each) if self.results else ()

    def faults(
        self,
        variation: str,
        inputs: KernelInputs,
        earlier: Sequence[torch.Tensor] = (),
        known: Collection[str] = (),
    ) -> list[Fault]:
        """Return what is wrong, at most one fault for each result.

        Args:
            variation: its name.
            inputs: those of the call.
            earlier: results of other calls, which may be left over in this one's.
            known: names of results whose fault has its kind and places already: nobody looks for these again.
        """
        if self.called.error is not None:
            return [Fault(FaultKind.RAISED, variation, detail=named_line(self.called.error, limit=300))]
        if self.structure:
            return [Fault(FaultKind.STRUCTURE, variation, detail=self.structure)]
        each = zip(self.called.names, self.called.results, self.results, strict=True)
        return [
            Fault(FaultKind.BEYOND_ROUNDING, variation, name, ratio=judged.ratio)
            if name in known
            else _fault(variation, name, got, judged, inputs, earlier)
            for name, got, judged in each
            if not judged.right()
        ]


def judge(
    called: Called,
    runs: ReferenceRuns,
    *,
    approximate: float | None = None,
    excused: Sequence[torch.Tensor] = (),
) -> JudgedKernelCall:
    """Judge the results of a call.

    NaN for an infinity, and an infinity for NaN or for the other one, are exchanged and no fault.

    Args:
        called: of the kernel.
        runs: of the reference.
        approximate: what the kernel claims.
        excused: elements of each result that may be anything.

    Raises:
        NotJudgedError: the reference cannot tell.
        Exception: whatever the reference raises.
    """
    wanted = runs.own
    if called.error is not None:
        return JudgedKernelCall(called)
    if structure := _structure(called, wanted):
        return JudgedKernelCall(called, structure=structure)
    results, exchanged = [], 0
    for number, (got, own) in enumerate(zip(called.results, wanted, strict=True)):
        lost = _exchanged(got, own)
        exchanged += 0 if lost is None else int(lost.sum())
        if excused:
            lost = excused[number] if lost is None else lost | excused[number]
        results.append(got if lost is None else torch.where(lost, own, got))
    return JudgedKernelCall(called, judge_results(results, runs, approximate=approximate), exchanged=exchanged)


def _exchanged(got: torch.Tensor, own: torch.Tensor) -> torch.Tensor | None:
    """Return where two results are not finite and not the same; ``None`` if they are nowhere."""
    if not (got.is_floating_point() or got.is_complex()) or bool(got.isfinite().all()):
        return None
    if got.is_complex():
        left, right = (torch.view_as_real(each.resolve_conj()) for each in (got, own))
        same = ((left == right) | (left.isnan() & right.isnan())).all(-1)
        lost = ~got.isfinite() & ~own.isfinite() & ~same
        return lost if bool(lost.any()) else None
    largest = own.abs() >= _NEARLY_INFINITE if unit_roundoff(own.dtype) >= 2.0**-24 else ~own.isfinite()
    lost = ~got.isfinite() & (largest | ~own.isfinite()) & (got != own) & ~(got.isnan() & own.isnan())
    return lost if bool(lost.any()) else None


def _structure(called: Called, wanted: Sequence[torch.Tensor]) -> str:
    """Return how results differ from those of the reference in number, shape and dtype."""
    if len(called.results) != len(wanted):
        if not called.results and called.written:
            written = ", ".join(called.given.names()[number] for number in sorted(called.written))
            return (
                f"returns no tensor, but writes {written}: give a function that returns what was written, as "
                "lambda x, out: (kernel(x, out), out)[1]"
            )
        return f"returns {_count(len(called.results))}, the reference {_count(len(wanted))}"
    for name, got, own in zip(called.names, called.results, wanted, strict=True):
        if got.shape != own.shape or got.dtype is not own.dtype:
            return f"{name} is {described(got)}, that of the reference {described(own)}"
        if got.device != own.device:
            return f"{name} is on {got.device}, that of the reference on {own.device}"
    return ""


def _count(number: int) -> str:
    return {0: "no tensor", 1: "1 tensor"}.get(number, f"{number} tensors")


def described(tensor: torch.Tensor) -> str:
    """Return ``bfloat16[8, 64]``."""
    return f"{dtype_name(tensor.dtype)}[{', '.join(map(str, tensor.shape))}]"


def _output(name: str, got: torch.Tensor, judged: JudgedResult) -> JudgedOutput:
    worst = _worst(judged)
    return JudgedOutput(
        name,
        dtype_name(got.dtype),
        tuple(got.shape),
        judged.ratio,
        judged.explained_by,
        judged.own_ratio,
        judged.better,
        worst,
        number_at(got, worst),
        number_at(judged.exact, worst),
        _picture(judged.units),
    )


def _worst(judged: JudgedResult) -> tuple[int, ...]:
    if not judged.units.numel():
        return ()
    largest = int(judged.units.nan_to_num(nan=math.inf).flatten().argmax())
    return tuple(int(place) for place in torch.unravel_index(torch.tensor(largest), judged.units.shape))


def number_at(tensor: torch.Tensor, index: tuple[int, ...]) -> float | complex | None:
    """Return an element as a number; ``None`` where there is none."""
    if not tensor.numel() or len(index) != tensor.dim():
        return None
    value = tensor[index].item()
    return value if isinstance(value, complex) else float(value)


def _picture(units: torch.Tensor) -> tuple[tuple[float, ...], ...]:
    """Return the largest of each block of a matrix of (all leading dimensions, last dimension)."""
    if not units.numel():
        return ()
    matrix = units.reshape(-1, units.shape[-1]) if units.dim() else units.reshape(1, 1)
    for dimension in (0, 1):
        size = matrix.shape[dimension]
        if size > _PICTURE:
            blocks = torch.arange(size) * _PICTURE // size
            shape = (_PICTURE, matrix.shape[1]) if dimension == 0 else (matrix.shape[0], _PICTURE)
            index = blocks[:, None] if dimension == 0 else blocks[None, :]
            empty = matrix.new_zeros(shape)
            matrix = empty.scatter_reduce_(dimension, index.expand_as(matrix), matrix, "amax")
    return tuple(tuple(row) for row in matrix.tolist())


def _fault(
    variation: str,
    name: str,
    got: torch.Tensor,
    judged: JudgedResult,
    inputs: KernelInputs,
    earlier: Sequence[torch.Tensor],
) -> Fault:
    alike = [tensor for tensor in earlier if tensor.shape == got.shape and tensor.dtype is got.dtype]
    kind, detail, doubt = kind_of(judged, got, earlier=alike, inputs=inputs.named())
    some = bool(judged.beyond.any())
    return Fault(
        kind,
        variation,
        name,
        where=wrong_places(judged, inputs.named()),
        share=float(judged.beyond.double().mean()) if some else None,
        ratio=judged.ratio,
        detail=detail,
        doubt=doubt,
    )
