"""How far two tensors are apart. Which function answers depends on what the difference is held against.

* :func:`measure`, the bits: how many elements differ, by how many units in the last place, each relative to itself.
  Two runs of one program must have the same bits.
* :func:`relative`, the largest magnitude: a change of a program in float64 that is right moves results by 1e-15 of it.
* :func:`in_units`, what eager mode loses in its own dtype: for results that may be zero in exact arithmetic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

# ------------------------------------------------------------------------------------------------------- bit by bit


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


VALUE = "value"
"""Kind of a difference beyond representation."""


def measure(a: Any, b: Any) -> Difference:
    """Measure the difference of two results that are not bitwise equal, without names.

    ``representation`` is ``value`` if more than that differs. There are no numbers without a common dtype, shape and
    layout.
    """
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return Difference((), representation=VALUE)
    plain = a.layout is b.layout is torch.strided and not (a.is_nested or b.is_nested)
    if not plain or a.shape != b.shape or a.dtype != b.dtype:
        return Difference((), representation=VALUE)
    a, b = _in_rows(a), _in_rows(b)
    differs = integer_view(a) != integer_view(b)
    count = int(differs.any(dim=1).sum())
    difference = Difference((), count or None, representation=VALUE, total=len(a))
    if not count:  # quantized tensors of equal values and other parameters
        return difference
    a_bits, b_bits = integer_view(a)[differs], integer_view(b)[differs]
    if not a.dtype.is_floating_point:
        return replace(difference, max_abs=float(_largest_gap(_integers(a_bits, a.dtype), _integers(b_bits, a.dtype))))
    try:
        return _with_numbers(difference, a_bits.view(a.dtype), b_bits.view(b.dtype))
    except NotImplementedError:  # packed formats such as float4, which torch cannot convert
        return difference


def _in_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Convert to one row per element on the host: real and imaginary part, else itself; quantized tensors by value."""
    tensor = resolved(tensor).cpu()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    return torch.view_as_real(tensor).reshape(-1, 2) if tensor.is_complex() else tensor.reshape(-1, 1)


def integer_view(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor's bits as integers of the width of its elements, up to 8 bytes."""
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


def _with_numbers(difference: Difference, a: torch.Tensor, b: torch.Tensor) -> Difference:
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
    ulp = _largest_gap(_ordered(a)[finite], _ordered(b)[finite])
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


def _largest_gap(a: torch.Tensor, b: torch.Tensor) -> int:
    """Return the largest distance of two ``int64`` tensors, exactly: the wrapped difference is below 2**64."""
    return int((torch.maximum(a, b) - torch.minimum(a, b)).numpy().view(np.uint64).max())


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Materialise the conjugate and negative bits, which change the meaning of memory."""
    return tensor.detach().resolve_conj().resolve_neg()


# ---------------------------------------------------------------------------------------------- by size, in float64


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return the largest relative error of rounding to a floating or complex dtype: ``2**-24`` for float32."""
    return torch.finfo(dtype).eps / 2


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in float64, or complex128."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def relative(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the largest difference over the largest magnitude of the reference.

    Returns:
        0 if equal; ``inf`` where shapes, integers or bools differ, one side alone is infinite or not a number, or the
        reference is zero.
    """
    numbers = _finite(value, reference)
    if numbers is None:
        return math.inf
    apart, largest = (_largest(part) for part in (numbers[0] - numbers[1], numbers[1]))
    return apart / largest if largest else math.inf if apart else 0.0


def in_units(
    value: torch.Tensor,
    reference: torch.Tensor,
    own: torch.Tensor | None,
    *,
    floor: float = 0.0,
    own_dtype: torch.dtype,
) -> float:
    """Return the largest difference of ``value`` to ``reference`` over what eager mode loses.

    A relative difference is the wrong measure there: the gradient of a convolution's bias in front of a batch norm is
    zero in exact arithmetic, and two right programs compute it with a relative difference of 3. Eager mode in float32
    misses it by as much as it misses all else, and the difference in float64 is 1e-9 of that.

    The unit of an element is the largest of: the greatest difference of ``own`` to ``reference`` over all elements
    inside the range of its dtype, half an ulp of that dtype at the element, and ``floor``.

    Args:
        value: the result to judge, of any dtype.
        reference: what eager mode computes in float64, of the same shape.
        own: what eager mode computes in the model's own dtype; ``None`` or a different shape: it loses half an ulp.
        floor: smallest unit.
        own_dtype: dtype of the model, where ``own`` does not say it.

    Returns:
        0 if equal; ``inf`` as of :func:`relative`, where the unit is 0.
    """
    numbers = _finite(value, reference)
    if numbers is None:
        return math.inf
    if own is not None and (own.is_floating_point() or own.is_complex()):
        own_dtype = own.dtype
    a, b = numbers
    lost = 0.0
    if own is not None and own.shape == reference.shape:
        lost = _lost(_numbers(own), _numbers(reference), torch.finfo(own_dtype).max)
    unit = (b.abs() * unit_roundoff(own_dtype)).clamp_min(max(lost, floor))
    apart = (a - b).abs()
    differs = apart > 0
    return _largest(apart[differs] / unit[differs])


def magnitude(tensor: torch.Tensor) -> float:
    """Return the largest magnitude among the elements that float32 can hold; 0 of integers and bools."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return 0.0
    values = _numbers(tensor).abs()
    return _largest(values[values < torch.finfo(torch.float32).max / 4])


def _finite(value: torch.Tensor, reference: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the finite numbers of two tensors; ``None`` if they differ in shape, integers, infinities or NaN."""
    if value.shape != reference.shape:
        return None
    if not (reference.is_floating_point() or reference.is_complex()):
        reference = dense(reference)
        equal = torch.equal(dense(value).to(reference.dtype), reference)
        return (torch.zeros(0), torch.zeros(0)) if equal else None
    a, b = _numbers(value), _numbers(reference)
    finite = b.isfinite()
    if not torch.equal(a.isfinite(), finite) or not torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num()):
        return None
    return a[finite], b[finite]


def _lost(own: torch.Tensor, reference: torch.Tensor, most: float) -> float:
    """Return the greatest loss among the elements that the dtype can hold: a mask of ``finfo.min`` is another number in
    each dtype, and would hide all else."""
    inside = (reference.abs() < most / 4) & (own.abs() < most / 4)
    return _largest((own - reference)[inside])


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a tensor in float64, two for each complex one."""
    numbers = wide(dense(tensor))
    return torch.view_as_real(numbers) if numbers.is_complex() else numbers


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a strided tensor, outside autograd."""
    return resolved(tensor if tensor.layout == torch.strided else tensor.to_dense())
