"""Measure how far a float64 result is from its reference, as a multiple of what eager mode loses in its own dtype.

A relative difference is the wrong measure: the gradient of a convolution's bias in front of a batch norm is zero in
exact arithmetic, and two right programs compute it with a relative difference of 3. Eager mode in float32 misses it by
as much as it misses all else, and the difference in float64 is 1e-9 of that.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

import torch

EXPLAINED = 16.0
"""Multiple of what random roundings change, up to which rounding explains a difference."""


def mistake_limit(dtype: torch.dtype) -> float:
    """Return the distance from which a difference in a dtype is a mistake, in units of what rounding changes there.

    In float32 it is 1e-4. A guess on the safe side: a sum of a million terms in another order may move by a thousand
    ulps, of which random roundings of one ulp an op know nothing.
    """
    return max(EXPLAINED, 1e-4 / (float(torch.finfo(dtype).eps) / 2))


def moved_by_one_unit(value: torch.Tensor) -> torch.Tensor:
    """Return a result moved by an ulp of its largest element, which may be lost where nothing else is known."""
    if not (value.is_floating_point() or value.is_complex()) or not value.numel():
        return value
    plain = _plain(value)
    return plain + float(torch.finfo(plain.dtype).eps) * _magnitude(plain)


def distance(
    value: torch.Tensor,
    reference: torch.Tensor,
    own: torch.Tensor | None,
    *,
    floor: float = 0.0,
    own_dtype: torch.dtype,
) -> float:
    """Return the largest difference of ``value`` to ``reference`` over what eager mode loses.

    The unit of an element is the largest of: the greatest difference of ``own`` to ``reference`` over all elements
    inside the range of its dtype, half an ulp of that dtype at the element, and ``floor``.

    Args:
        value: the result to judge, of any dtype.
        reference: what eager mode computes in float64, of the same shape.
        own: what eager mode computes in the model's own dtype; ``None`` or a different shape: it loses half an ulp.
        floor: smallest unit (:func:`smallest_unit`).
        own_dtype: dtype of the model, where ``own`` does not say it.

    Returns:
        0 if equal; ``inf`` where shapes, integers or bools differ, or one side alone is infinite or not a number.
    """
    if value.shape != reference.shape:
        return math.inf
    value, reference = _plain(value), _plain(reference)
    if not (reference.is_floating_point() or reference.is_complex()):
        return 0.0 if torch.equal(value.to(reference.dtype), reference) else math.inf
    if own is not None and (own.is_floating_point() or own.is_complex()):
        own_dtype = own.dtype
    limits = torch.finfo(own_dtype)
    a, b = _float64(value), _float64(reference)
    if not a.numel():
        return 0.0
    finite = b.isfinite()
    if not torch.equal(a.isfinite(), finite) or not torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num()):
        return math.inf
    lost = 0.0 if own is None or own.shape != reference.shape else _lost(_float64(_plain(own)), b, float(limits.max))
    unit = (b.abs() * (float(limits.eps) / 2)).clamp_min(max(lost, floor))
    apart = (a - b).abs()
    differs = finite & (apart > 0)
    if not bool(differs.any()):
        return 0.0
    ratio = apart[differs] / unit[differs]  # a unit of 0 (the reference is 0, nothing is lost): inf
    return float(ratio.max())


def _lost(own: torch.Tensor, reference: torch.Tensor, largest: float) -> float:
    """Return the greatest loss among the elements that the dtype can hold: a mask of ``finfo.min`` is another number in
    each dtype, and would hide all else."""
    inside = (reference.abs() < largest / 4) & (own.abs() < largest / 4)
    apart = (own - reference).abs()[inside]
    return float(apart.max()) if apart.numel() else 0.0


def smallest_unit(reference: Mapping[str, torch.Tensor], own_dtype: torch.dtype) -> float:
    """Return the unit for a result of which eager mode loses nothing, or which is all rounding: 1e-3 of half an ulp of
    the model's dtype, at the median of the results' largest magnitudes.

    Differences below it times the limit of the ladder are a few ulps of float64.
    """
    largest = [magnitude for tensor in reference.values() if (magnitude := _magnitude(tensor)) > 0]
    return 1e-3 * float(torch.finfo(own_dtype).eps) / 2 * statistics.median(largest) if largest else 0.0


def _magnitude(tensor: torch.Tensor) -> float:
    if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
        return 0.0
    values = _float64(_plain(tensor)).abs()
    values = values[values < torch.finfo(torch.float32).max / 4]
    return float(values.max()) if values.numel() else 0.0


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense, strided copy or the tensor itself, outside autograd."""
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    return tensor.resolve_conj().resolve_neg()


def _float64(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor.to(torch.complex128)) if tensor.is_complex() else tensor.to(torch.float64)
