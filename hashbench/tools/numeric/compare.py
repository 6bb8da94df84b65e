"""Two values, tensors or not, to one :class:`TensorComparison`; two collections of them, by name, to a
:class:`Comparison`.

Bit by bit is decided by digests (``outputs.bitwise_equal``); tolerances by ``torch.isclose`` with ``equal_nan=True``: a
NaN equals a NaN, an infinity only itself, in both cases at the same place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.testing._comparison import default_tolerances

from hashbench.core.errors import HashbenchError
from hashbench.core.run import distance, outputs
from hashbench.core.run.leaves import LeftOut, leaves
from hashbench.core.text import squeezed
from hashbench.core.trace.digest import dtype_name, untraced
from hashbench.tools.numeric.report import FORMS, Comparison, Rename, Rule, TensorComparison

_ABSENT = object()

# ------------------------------------------------------------------------------------------------------- by name


def compare_mappings(
    stage: str, before: Mapping[str, Any], after: Mapping[str, Any], *, rule: Rule, rename: Rename = None
) -> Comparison:
    """Compare values name by name. A name that only one side has is a difference, and so is ``None`` against a tensor;
    ``None`` on both sides is not. Names of the gradients of inputs (``input.0``) are not renamed."""
    inputs = [name for name in before if stage == "gradients" and name.startswith("input.")]
    targets = renamed([name for name in before if name not in inputs], rename) | {name: name for name in inputs}
    known = set(targets.values())
    pairs = [(name, before[name], after.get(target, _ABSENT)) for name, target in targets.items()]
    pairs += [(name, _ABSENT, value) for name, value in after.items() if name not in known]
    return Comparison(stage, tuple(compare_values(name, a, b, rule=rule) for name, a, b in pairs))


def leaves_of(value: Any, name: str) -> dict[str, Any]:
    """Return the leaves of a nested value by their names (see ``run.leaves``); two of one name (the keys ``1`` and
    ``"1"`` of a dict) are both kept."""
    found: dict[str, Any] = {}
    for leaf, item in leaves(value, name):
        is_nested = isinstance(item, torch.Tensor) and item.is_nested
        parts = {f"{leaf}.{number}": part for number, part in enumerate(item.unbind())} if is_nested else {leaf: item}
        for part, content in parts.items():
            while part in found:
                part += "'"
            found[part] = content
    return found


def renamed(names: Iterable[str], rename: Rename) -> dict[str, str]:
    """Return the name in the model after of every name in the model before.

    Args:
        names: those in the model before, such as ``conv1.weight``.
        rename: a function from one to the other; or a mapping, of whole names or of what they begin with up to a dot
            (``{"conv1": "stem.0"}`` takes ``conv1.weight`` to ``stem.0.weight``). The longest that fits counts.

    Raises:
        HashbenchError: two names become one.
    """
    targets = {name: rename(name) if callable(rename) else _by_prefix(name, rename or {}) for name in names}
    taken: dict[str, str] = {}
    for name, target in targets.items():
        if taken.setdefault(target, name) != name:
            raise HashbenchError(
                f"rename takes both {taken[target]!r} and {name!r} to {target!r}",
                consequence="one of them would not be compared",
                tip="Give each name one of its own.",
            )
    return targets


def unused(names: Sequence[str], rename: Rename) -> list[str]:
    """Return the entries of a mapping that fit no name: most likely misspelt."""
    if rename is None or callable(rename):
        return []
    return [old for old in rename if not any(_fits(name, old) for name in names)]


def _by_prefix(name: str, rename: Mapping[str, str]) -> str:
    longest = max((old for old in rename if _fits(name, old)), key=len, default="")
    return f"{rename[longest]}{name[len(longest) :]}" if longest else name


def _fits(name: str, old: str) -> bool:
    return name == old or name.startswith(f"{old}.")


def without_wrapper(name: str) -> str:
    """Return a parameter's or module's name without the part that ``torch.compile`` puts into it, which keeps the
    module that it wraps as ``_orig_mod``."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def without_wrappers(named: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return parameters or buffers by name, without the part that ``torch.compile`` puts into it."""
    return {without_wrapper(name): tensor for name, tensor in named}


# ------------------------------------------------------------------------------------------------------ two values


def compare_values(name: str, before: Any, after: Any, *, rule: Rule) -> TensorComparison:
    """Compare two leaves of results. Draws no random numbers and changes neither."""
    if before is _ABSENT or after is _ABSENT or (before is None) != (after is None):
        return _one_sided(name, before, after)
    for value in (before, after):
        if isinstance(value, LeftOut):
            return _differing(name, "not comparable", str(value))
    with untraced():
        if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor):
            return _compare_tensors(name, before, after, rule)
        return _compare_plain(name, before, after, rule)


def _differing(name: str, kind: str = "", detail: str = "") -> TensorComparison:
    return TensorComparison(name, within=False, bitwise=False, kind=kind, detail=detail)


def _one_sided(name: str, before: Any, after: Any) -> TensorComparison:
    has_before = before is not _ABSENT and before is not None
    other = after if has_before else before
    detail = "" if other is _ABSENT else f"None {'after' if has_before else 'before'}"
    return _differing(name, "only before" if has_before or after is _ABSENT else "only after", detail)


def _compare_plain(name: str, before: Any, after: Any, rule: Rule) -> TensorComparison:
    """Compare Python values: floating-point and complex numbers by the tolerances of double precision, others
    exactly."""
    if outputs.bitwise_equal(before, after):
        return TensorComparison(name, within=True, bitwise=True)
    numbers = all(isinstance(value, (int, float, complex)) and type(value) is not bool for value in (before, after))
    if numbers and not (type(before) is int and type(after) is int):
        dtype = torch.complex128 if isinstance(before, complex) or isinstance(after, complex) else torch.float64
        a, b = (torch.tensor(value, dtype=dtype) for value in (before, after))
        return replace(_compare_tensors(name, a, b, rule), bitwise=False)
    if type(before) is not type(after):
        return _differing(name, "type", f"{type(before).__name__} and {type(after).__name__}")
    return _differing(name, "value", f"{before!r:.60} and {after!r:.60}")


def _compare_tensors(name: str, before: torch.Tensor, after: torch.Tensor, rule: Rule) -> TensorComparison:
    shapes = f"{_form(before)} and {_form(after)}"
    if before.shape != after.shape:
        return _differing(name, "shape", shapes)
    if before.is_meta or after.is_meta:
        return _differing(name, "no data", shapes)
    forms = [form for form in FORMS if getattr(before, form) != getattr(after, form)]
    counted = next((form for form in forms if form not in rule.ignore), "")
    detail = f"{getattr(before, counted)} and {getattr(after, counted)}".replace("torch.", "") if counted else ""
    compared = _differing(name, counted, detail)
    try:
        a, b = _in_common_form(before, after, forms)
        compared = replace(compared, total=a.numel(), nan_in_both=_nan_in_both(a, b))
        if not {"dtype", "layout"} & set(forms) and outputs.bitwise_equal(a, b):
            return replace(compared, within=not counted, bitwise=not counted)
        limits = rule.limits(default_tolerances(before, after))
        return _with_numbers(compared, _dense(a), _dense(b), limits, form=forms[0] if forms else "")
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:  # a kind of tensor without arithmetic
        if not forms and outputs.bitwise_equal(before, after):
            return replace(compared, within=True, bitwise=True)
        text = squeezed(f"{type(error).__name__}: {error}", 100)
        return replace(compared, kind="not comparable", detail=f"{_form(before)}: {text}")


def _with_numbers(
    compared: TensorComparison, a: torch.Tensor, b: torch.Tensor, limits: tuple[float, float], *, form: str
) -> TensorComparison:
    """Add the numbers of a difference: ``a`` and ``b`` are the two in a common form; ``form`` is the first in which
    they differed. What is ``compared`` so far has it as its kind if it counts."""
    rtol, atol = limits
    close = _close(a, b, rtol, atol)
    beyond = int((~close).sum())
    only_form = bool(form) and outputs.bitwise_equal(a, b)
    numbers = distance.Difference((), 0, 0.0, 0, max_relative=0.0) if only_form else distance.measure(a, b)
    representation = numbers.representation if numbers.representation != "value" else ""
    kind = form if only_form else "representation" if representation else "value"
    return replace(
        compared,
        within=not beyond and not compared.kind,
        kind=compared.kind or kind,
        detail=compared.detail or representation,
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


def _in_common_form(a: torch.Tensor, b: torch.Tensor, forms: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both without the differences in ``forms``; bits are kept where only the device differs."""
    a, b = a.detach(), b.detach()
    if "device" in forms:
        a, b = a.cpu(), b.cpu()
    if "layout" in forms or "dtype" in forms:
        a, b = _dense(a), _dense(b)
    if "dtype" in forms:
        try:
            common = torch.promote_types(a.dtype, b.dtype)
        except RuntimeError:  # float8 has no promotion
            common = torch.float64
        a, b = a.to(common), b.to(common)
    return a, b


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_quantized:
        return tensor.dequantize()
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _close(a: torch.Tensor, b: torch.Tensor, rtol: float, atol: float) -> torch.Tensor:
    if a.dtype is torch.bool:
        return a == b
    try:
        return torch.isclose(a, b, rtol=rtol, atol=atol, equal_nan=True)
    except (NotImplementedError, RuntimeError):  # float8 and unsigned integers, exact in double precision
        return torch.isclose(a.double(), b.double(), rtol=rtol, atol=atol, equal_nan=True)


def _excess(a: torch.Tensor, b: torch.Tensor, close: torch.Tensor, rtol: float, atol: float) -> float:
    """Return the largest difference as a multiple of what is allowed."""
    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    finite = a.isfinite() & b.isfinite()
    if bool((~close & ~finite).any()):
        return math.inf
    gap, allowed = (a - b).abs(), atol + rtol * b.abs()
    ratio = torch.where(gap == 0, torch.zeros_like(gap), gap / allowed)[finite]
    return float(ratio.max()) if len(ratio) else 0.0


def _nan_in_both(a: torch.Tensor, b: torch.Tensor) -> int:
    if not (a.is_floating_point() or a.is_complex()) or a.is_quantized or a.layout is not torch.strided:
        return 0
    return int((a.isnan() & b.isnan()).sum())


def _form(tensor: torch.Tensor) -> str:
    return f"{dtype_name(tensor.dtype)}[{','.join(map(str, tensor.shape))}]"
