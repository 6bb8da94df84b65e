"""Collect the results of a run by name, and compare those of two runs bit by bit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hashbench.core.run.leaves import NotComparableError, leaves, without_data
from hashbench.core.trace.digest import digest

Results = Mapping[str, Any]
"""A tensor, plain Python value or :class:`~hashbench.core.run.leaves.LeftOut` by name: ``output.0.<place>`` and
``loss.0`` for every iteration, and after the last one ``grad.<parameter>``, ``input_grad.<place>``,
``parameter.<name>``, ``buffer.<name>`` and ``optimizer.<parameter>.<state>``."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference between the results of two runs.

    ``share`` and ``mean_relative`` are the count variability and relative mean variability of Shanmugavelu et al.
    (2024), "Impacts of floating-point non-associativity on reproducibility for HPC and deep learning applications".
    Elements whose first value is zero or non-finite are excluded from ``sum_relative`` and ``max_relative``.

    Attributes:
        names: results that differ.
        elements: number of differing elements.
        max_abs: largest absolute difference; ``None`` if there is no number.
        max_ulp: largest distance in units in the last place.
        representation: ``sign of zero``, ``NaN payload``, if values are equal and only bits differ.
        total: number of elements of the results that differ.
        sum_relative: sum of ``|a - b| / |a|`` over them.
        max_relative: largest ``|a - b| / |a|``.
    """

    names: tuple[str, ...]
    elements: int | None = None
    max_abs: float | None = None
    max_ulp: int | None = None
    representation: str = ""
    total: int | None = None
    sum_relative: float | None = None
    max_relative: float | None = None

    @property
    def share(self) -> float | None:
        """Fraction of elements that differ, among all elements of the results that differ."""
        return None if not self.total or self.elements is None else self.elements / self.total

    @property
    def mean_relative(self) -> float | None:
        """Mean relative difference over all elements of the results that differ."""
        return None if not self.total or self.sum_relative is None else self.sum_relative / self.total


def state_results(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[str, Any]]:
    """Yield gradients, parameters, buffers and optimizer state after a run, with their names, without copying."""
    names = {}
    for name, parameter in model.named_parameters():
        names[id(parameter)] = name
        if parameter.grad is not None:
            yield _result(f"grad.{name}", parameter.grad)
    for name, parameter in model.named_parameters():
        yield _result(f"parameter.{name}", parameter)
    for name, buffer in model.named_buffers():
        yield _result(f"buffer.{name}", buffer)
    if optimizer is not None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for index, parameter in enumerate(parameters):
            owner = names.get(id(parameter), str(index))
            state = dict(optimizer.state.get(parameter, {}))
            if state:
                yield from leaves(state, f"optimizer.{owner}")


def _result(name: str, tensor: torch.Tensor) -> tuple[str, Any]:
    left_out = without_data(tensor, name)
    return name, tensor if left_out is None else left_out


def compare(first: Results, second: Results, *, noted: Mapping[str, bool] | None = None) -> Difference | None:
    """Measure the difference between the results of two runs; ``None`` if they are bitwise equal.

    Arguments and errors are those of :func:`differing`.
    """
    names = differing(first, second, noted=noted)
    return _measure(names, first, second) if names else None


def differing(first: Results, second: Results, *, noted: Mapping[str, bool] | None = None) -> tuple[str, ...]:
    """Return the names of results that differ bitwise between two runs, without measuring how far.

    A gradient or optimizer state that only one run has counts as a difference.

    Args:
        first: results of the first run.
        second: results of the second run.
        noted: for some results, whether their recorded digests differed; these are not compared again, since a tensor
            that both runs share may have changed.

    Raises:
        NotComparableError: the runs have outputs of different names or types.
    """
    _check_structure(first, second)
    every = [*first, *(name for name in second if name not in first)]
    known = noted or {}
    differ = (known[name] if name in known else not bitwise_equal(first.get(name), second.get(name)) for name in every)
    return tuple(itertools.compress(every, differ))


def bitwise_equal(first: Any, second: Any) -> bool:
    """Return whether two results have equal dtype, shape and bits; strides may differ."""
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        return type(first) is type(second) and repr(first) == repr(second)
    if first.dtype != second.dtype or first.layout != second.layout or first.device != second.device:
        return False
    first, second = _resolved(first), _resolved(second)
    a, b = digest(first), digest(second)
    if a == b or a.shape != b.shape or a.stride == b.stride:
        return a == b
    return logical_value(first) == logical_value(second)


def logical_value(tensor: torch.Tensor) -> str:
    """Return the digest value of a tensor in logical order, independent of strides."""
    tensor = _resolved(tensor)
    return digest(tensor.contiguous() if tensor.layout is torch.strided else tensor).value


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Materialise the conjugate and negative bits, which change the meaning of memory."""
    return tensor.detach().resolve_conj().resolve_neg()


_OPTIONAL = ("grad.", "input_grad.", "optimizer.")
"""Results that a step may or may not produce, depending on which parameters took part."""


def _check_structure(first: Results, second: Results) -> None:
    only = sorted(name for name in set(first) ^ set(second) if not name.startswith(_OPTIONAL))
    if only:
        where = "first" if only[0] in first else "second"
        raise NotComparableError(f"only the {where} run has {only[0]} ({len(only)} such names)")
    for name in sorted(set(first) & set(second)):
        types = [type(results[name]).__name__ for results in (first, second)]
        if isinstance(first[name], torch.Tensor) != isinstance(second[name], torch.Tensor):
            raise NotComparableError(f"{name} is a {types[0]} in the first run, a {types[1]} in the second")


def _measure(names: tuple[str, ...], first: Results, second: Results) -> Difference:
    parts = [measure(first.get(name), second.get(name)) for name in names]
    kinds = {kind for part in parts for kind in part.representation.split(", ")}

    def known(field: str) -> list[Any]:
        return [value for part in parts if (value := getattr(part, field)) is not None]

    return Difference(
        names,
        elements=sum(known("elements")) or None,
        max_abs=max(known("max_abs"), default=None),
        max_ulp=max(known("max_ulp"), default=None),
        representation=", ".join(sorted(kinds)) if _VALUE not in kinds else "",
        total=sum(known("total")) or None,
        sum_relative=sum(known("sum_relative")) if known("sum_relative") else None,
        max_relative=max(known("max_relative"), default=None),
    )


_VALUE = "value"
"""Kind of a difference beyond representation."""


def measure(a: Any, b: Any) -> Difference:
    """Measure the difference of two results that are not bitwise equal, without names.

    ``representation`` is ``value`` if more than that differs. There are no numbers without a common dtype, shape and
    layout.
    """
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return Difference((), representation=_VALUE)
    plain = a.layout is b.layout is torch.strided and not (a.is_nested or b.is_nested)
    if not plain or a.shape != b.shape or a.dtype != b.dtype:
        return Difference((), representation=_VALUE)
    a, b = _plain(a), _plain(b)
    differs = integer_view(a) != integer_view(b)
    count = int(differs.any(dim=1).sum())
    difference = Difference((), count or None, representation=_VALUE, total=len(a))
    if not count:  # quantized tensors of equal values and other parameters
        return difference
    a_bits, b_bits = integer_view(a)[differs], integer_view(b)[differs]
    if not a.dtype.is_floating_point:
        return replace(difference, max_abs=float(_distance(_integers(a_bits, a.dtype), _integers(b_bits, a.dtype))))
    try:
        return _measure_floats(difference, a_bits.view(a.dtype), b_bits.view(b.dtype))
    except NotImplementedError:  # packed formats such as float4, which torch cannot convert
        return difference


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Convert to one row per element on the host: real and imaginary part, else itself; quantized tensors by value."""
    tensor = _resolved(tensor).cpu()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    return torch.view_as_real(tensor).reshape(-1, 2) if tensor.is_complex() else tensor.reshape(-1, 1)


def integer_view(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor's bits as integers of the width of its elements, up to 8 bytes."""
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


def _measure_floats(difference: Difference, a: torch.Tensor, b: torch.Tensor) -> Difference:
    """Add numbers to ``difference``. ``a`` and ``b`` are flat, and their bits differ everywhere."""
    a_value, b_value = a.double(), b.double()
    nan = a_value.isnan() & b_value.isnan()
    zero = (a_value == 0) & (b_value == 0)
    if bool((nan | zero).all()):
        kinds = [kind for kind, where in (("NaN payload", nan), ("sign of zero", zero)) if bool(where.any())]
        return replace(difference, max_abs=0.0, max_ulp=0, representation=", ".join(kinds))
    finite = ~(nan | zero) & a_value.isfinite() & b_value.isfinite()
    if not bool(finite.any()):
        return difference
    gap = (a_value - b_value)[finite].abs().max()
    known = finite & (a_value != 0)
    relative = ((a_value - b_value) / a_value)[known].abs()
    ulp = _distance(_ordered(a)[finite], _ordered(b)[finite])
    largest = float(relative.max()) if len(relative) else None
    return replace(
        difference, max_abs=float(gap), max_ulp=ulp, sum_relative=float(relative.sum()), max_relative=largest
    )


def _ordered(tensor: torch.Tensor) -> torch.Tensor:
    """Map floating-point numbers to integers in the order of their values, so that a difference counts ULPs."""
    bits = integer_view(tensor)
    wide = bits.to(torch.int64)
    if tensor.dtype is torch.float8_e8m0fnu:  # has no sign
        return wide & 0xFF
    return torch.where(wide < 0, torch.iinfo(bits.dtype).min - wide, wide)


def _integers(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert integer bits of ``dtype`` to ``int64``; ``uint64`` is shifted down to fit."""
    if dtype is torch.uint64:
        return bits ^ torch.iinfo(torch.int64).min
    return bits.view(dtype).to(torch.int64)


def _distance(a: torch.Tensor, b: torch.Tensor) -> int:
    """Return the largest distance of two ``int64`` tensors, exactly: the wrapped difference is below 2**64."""
    return int((torch.maximum(a, b) - torch.minimum(a, b)).numpy().view(np.uint64).max())
