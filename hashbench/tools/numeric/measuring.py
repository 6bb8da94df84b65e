"""Two values, tensors or not, to one :class:`TensorComparison`; two collections of them to one :class:`Comparison`.

Bit by bit is decided by digests (``results.bitwise_equal``); tolerances are decided by ``torch.isclose`` with
``equal_nan=True``: a NaN equals a NaN, an infinity only itself, in both cases at the same place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.testing._comparison import default_tolerances
from torch.utils._python_dispatch import _disable_current_modes

from hashbench.run import outputs
from hashbench.tools.numeric.findings import Comparison, Rename, Rule, TensorComparison, renamed
from hashbench.trace.digest import dtype_name

_ABSENT = object()


def compare_mappings(
    stage: str, before: Mapping[str, Any], after: Mapping[str, Any], *, rule: Rule, rename: Rename = None
) -> Comparison:
    """Values of one name, name by name. A name that only one side has is a difference, and so is ``None`` against a
    tensor; ``None`` on both sides is not."""
    targets = renamed(before, rename)
    known = set(targets.values())
    pairs = [(name, before[name], after.get(target, _ABSENT)) for name, target in targets.items()]
    pairs += [(name, _ABSENT, value) for name, value in after.items() if name not in known]
    return Comparison(stage, tuple(compare_values(name, a, b, rule=rule) for name, a, b in pairs))


def leaves_of(value: Any, name: str) -> dict[str, Any]:
    """The leaves of a nested value by their names (see ``results.flatten``); two of one name (the keys ``1`` and
    ``"1"`` of a dict) are both kept. What is of another type stands for itself."""
    found: dict[str, Any] = {}
    for leaf, item in _flattened(value, name):
        while leaf in found:
            leaf += "'"
        found[leaf] = item
    return found


def _flattened(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    try:
        leaves = list(outputs.flatten(value, name))
    except outputs.NotComparableError as error:
        yield name, error
        return
    for leaf, item in leaves:
        if isinstance(item, torch.Tensor) and item.is_nested:
            yield from ((f"{leaf}.{place}", part) for place, part in enumerate(item.unbind()))
        else:
            yield leaf, item


def compare_values(name: str, before: Any, after: Any, *, rule: Rule) -> TensorComparison:
    """Two leaves of results compared. Draws no random numbers and changes neither."""
    if before is _ABSENT or after is _ABSENT or (before is None) != (after is None):
        return _one_sided(name, before, after)
    if isinstance(before, outputs.NotComparableError) or isinstance(after, outputs.NotComparableError):
        error = before if isinstance(before, outputs.NotComparableError) else after
        return TensorComparison(name, within=False, bitwise=False, kind="not comparable", detail=str(error))
    with _disable_current_modes(), torch.no_grad():
        if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor):
            return _compare_tensors(name, before, after, rule)
        return _compare_plain(name, before, after, rule)


def _one_sided(name: str, before: Any, after: Any) -> TensorComparison:
    has_before = before is not _ABSENT and before is not None
    has = has_before or after is _ABSENT
    other = after if has_before else before
    detail = "" if other is _ABSENT else f"None {'after' if has_before else 'before'}"
    kind = "only before" if has else "only after"
    return TensorComparison(name, within=False, bitwise=False, kind=kind, detail=detail)


def _compare_plain(name: str, before: Any, after: Any, rule: Rule) -> TensorComparison:
    """Python values: floating-point and complex numbers by the tolerances of double precision, others exactly."""
    if outputs.bitwise_equal(before, after):
        return TensorComparison(name, within=True, bitwise=True)
    numbers = all(isinstance(value, (int, float, complex)) and type(value) is not bool for value in (before, after))
    if numbers and not all(type(value) is int for value in (before, after)):
        dtype = torch.complex128 if any(isinstance(value, complex) for value in (before, after)) else torch.float64
        a, b = (torch.tensor(value, dtype=dtype) for value in (before, after))
        return replace(_compare_tensors(name, a, b, rule), bitwise=False)
    if type(before) is not type(after):
        detail = f"{type(before).__name__} and {type(after).__name__}"
        return TensorComparison(name, within=False, bitwise=False, kind="type", detail=detail)
    return TensorComparison(name, within=False, bitwise=False, kind="value", detail=f"{before!r:.60} and {after!r:.60}")


def _compare_tensors(name: str, before: torch.Tensor, after: torch.Tensor, rule: Rule) -> TensorComparison:
    found = TensorComparison(name, within=False, bitwise=False)
    if before.shape != after.shape:
        return replace(found, kind="shape", detail=f"{_form(before)} and {_form(after)}")
    if before.is_meta or after.is_meta:
        return replace(found, kind="no data", detail=f"{_form(before)} and {_form(after)}")
    odd = [form for form in ("dtype", "device", "layout") if getattr(before, form) != getattr(after, form)]
    counted = [form for form in odd if form not in rule.ignore]
    if counted:
        both = (f"{getattr(value, counted[0])}".removeprefix("torch.") for value in (before, after))
        found = replace(found, kind=counted[0], detail=" and ".join(both))
    try:
        a, b = _alike(before, after, odd)
        same_bits = outputs.bitwise_equal(a, b) and "dtype" not in odd and "layout" not in odd
        found = replace(found, total=a.numel(), nan_in_both=_nan_in_both(a, b))
        if same_bits:
            return replace(found, within=not counted, bitwise=not counted)
        limits = rule.limits(_default_limits(before, after))
        return _with_numbers(found, _dense(a), _dense(b), limits, form=odd[0] if odd else "", counted=bool(counted))
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:  # a kind of tensor without arithmetic
        if not odd and outputs.bitwise_equal(before, after):
            return replace(found, within=True, bitwise=True)
        text = f"{type(error).__name__}: {error}"
        return replace(found, kind="not comparable", detail=f"{_form(before)}: {' '.join(text.split()):.100}")


def _with_numbers(
    found: TensorComparison,
    a: torch.Tensor,
    b: torch.Tensor,
    limits: tuple[float, float],
    *,
    form: str,
    counted: bool,
) -> TensorComparison:
    """``a`` and ``b`` are the two in a common form; ``form`` is in what they differed, which counts or not."""
    rtol, atol = limits
    close = _close(a, b, rtol, atol)
    beyond = int((~close).sum())
    only_form = bool(form) and outputs.bitwise_equal(a, b)
    numbers = outputs.Difference((), 0, 0.0, 0, max_relative=0.0) if only_form else outputs.measure(a, b)
    representation = numbers.representation if numbers.representation != "value" else ""
    kind = found.kind or (form if only_form else "representation" if representation else "value")
    return replace(
        found,
        within=not beyond and not counted,
        kind=kind,
        detail=found.detail or representation,
        elements=numbers.elements,
        total=a.numel(),
        beyond=beyond,
        max_abs=numbers.max_abs,
        max_relative=0.0 if representation else numbers.max_relative,
        max_ulp=numbers.max_ulp,
        excess=_excess(a, b, close, rtol, atol),
        rtol=rtol,
        atol=atol,
    )


def _alike(a: torch.Tensor, b: torch.Tensor, odd: Iterable[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Both in a form in which they can be compared; bits are kept where only the device differs."""
    a, b = a.detach(), b.detach()
    if "device" in odd:
        a, b = a.cpu(), b.cpu()
    if "layout" in odd:
        a, b = _dense(a), _dense(b)
    if "dtype" in odd:
        a, b = _dense(a), _dense(b)
        common = _common_dtype(a.dtype, b.dtype)
        a, b = a.to(common), b.to(common)
    return a, b


def _common_dtype(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    try:
        return torch.promote_types(one, other)
    except RuntimeError:  # float8 has no promotion
        return torch.float64


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_quantized:
        return tensor.dequantize()
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _default_limits(before: torch.Tensor, after: torch.Tensor) -> tuple[float, float]:
    """``(rtol, atol)`` of ``torch.testing.assert_close`` for the two dtypes; the float8 kinds, which have none there
    and would have to be equal, have none here either."""
    rtol, atol = default_tolerances(before, after)
    return float(rtol), float(atol)


def _close(a: torch.Tensor, b: torch.Tensor, rtol: float, atol: float) -> torch.Tensor:
    if a.dtype is torch.bool:
        return a == b
    try:
        return torch.isclose(a, b, rtol=rtol, atol=atol, equal_nan=True)
    except (NotImplementedError, RuntimeError):  # float8 and unsigned integers, exact in double precision
        return torch.isclose(a.double(), b.double(), rtol=rtol, atol=atol, equal_nan=True)


def _excess(a: torch.Tensor, b: torch.Tensor, close: torch.Tensor, rtol: float, atol: float) -> float:
    """The largest difference as a multiple of what is allowed."""
    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    if bool((~close & ~(a.isfinite() & b.isfinite())).any()):
        return math.inf
    gap, allowed = (a - b).abs(), atol + rtol * b.abs()
    ratio = torch.where(gap == 0, torch.zeros_like(gap), gap / allowed)
    finite = ratio[a.isfinite() & b.isfinite()]
    return float(finite.max()) if len(finite) else 0.0


def _nan_in_both(a: torch.Tensor, b: torch.Tensor) -> int:
    if not (a.is_floating_point() or a.is_complex()) or a.is_quantized or a.layout is not torch.strided:
        return 0
    return int((a.isnan() & b.isnan()).sum())


def _form(tensor: torch.Tensor) -> str:
    return f"{dtype_name(tensor.dtype)}[{','.join(map(str, tensor.shape))}]"
