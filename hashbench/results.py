"""What a run leaves to be compared: collecting it, and comparing two runs bit by bit.

Results are a flat mapping from a name to a tensor or a plain Python value: ``output.0.<place>`` and ``loss.0`` for every
iteration, ``grad.<parameter>``, ``input_grad.<place>``, ``parameter.<name>``, ``buffer.<name>`` and
``optimizer.<parameter>.<state>`` after the last one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hashbench.digest import digest

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device)

Results = Mapping[str, Any]


class NotComparableError(Exception):
    """Results that cannot be compared: an unknown type, or runs of another structure."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How two runs' results differ. ``names`` of those that do; over all of them, how many ``elements``, the largest
    absolute difference (``None`` where no number can be given), and the largest distance in units in the last place.
    ``representation`` is set where all values are equal and only bits differ: ``sign of zero``, ``NaN payload``."""

    names: tuple[str, ...]
    elements: int | None = None
    max_abs: float | None = None
    max_ulp: int | None = None
    representation: str = ""


def flatten(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The comparable leaves of a model's output, with their names.

    Knows tensors, NumPy arrays, plain Python values, lists, tuples, sets of plain values, mappings, dataclasses and
    objects of ``transformers``' ``ModelOutput`` kind (which are mappings).

    Raises:
        NotComparableError: a value of any other type.
    """
    if isinstance(value, torch.Tensor) or isinstance(value, _PLAIN):
        yield name, value
    elif isinstance(value, (np.ndarray, np.generic)):
        yield name, torch.from_numpy(np.ascontiguousarray(value))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from flatten(item, f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from flatten(item, f"{name}.{index}")
    elif isinstance(value, (set, frozenset)) and all(isinstance(item, _PLAIN) for item in value):
        yield name, repr(sorted(value, key=repr))
    elif hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        for field in value.__dataclass_fields__:
            yield from flatten(getattr(value, field), f"{name}.{field}")
    else:
        raise NotComparableError(f"{name} is a {type(value).__module__}.{type(value).__qualname__}")


def state_results(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[str, Any]]:
    """Gradients, parameters, buffers and optimizer state after a run, with their names. The tensors are not copied."""
    names = {}
    for name, parameter in model.named_parameters():
        names[id(parameter)] = name
        if parameter.grad is not None:
            yield f"grad.{name}", parameter.grad
    for name, parameter in model.named_parameters():
        yield f"parameter.{name}", parameter.detach()
    for name, buffer in model.named_buffers():
        yield f"buffer.{name}", buffer
    if optimizer is not None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for place, parameter in enumerate(parameters):
            owner = names.get(id(parameter), str(place))
            yield from flatten(dict(optimizer.state.get(parameter, {})), f"optimizer.{owner}")


def compare(first: Results, second: Results) -> Difference | None:
    """The difference between two runs' results, bit by bit; ``None`` where there is none. A gradient or an optimizer
    state that only one run has is a difference.

    Raises:
        NotComparableError: the runs have outputs of other names or types.
    """
    _check_structure(first, second)
    every = [*first, *(name for name in second if name not in first)]
    names = tuple(name for name in every if not bitwise_equal(first.get(name), second.get(name)))
    return _measure(names, first, second) if names else None


def bitwise_equal(first: Any, second: Any) -> bool:
    """Whether two results have the same dtype, shape and bits; their strides may differ."""
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        return type(first) is type(second) and repr(first) == repr(second)
    if first.dtype != second.dtype or first.layout != second.layout or first.device != second.device:
        return False
    one, two = digest(first), digest(second)
    if one == two:
        return True
    if one.shape != two.shape or one.stride == two.stride:
        return False
    return digest(first.detach().contiguous()).value == digest(second.detach().contiguous()).value


_OPTIONAL = ("grad.", "input_grad.", "optimizer.")
"""What a step may leave or not, depending on which parameters took part in it."""


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
    elements, kinds = 0, set[str]()
    largest: float | None = None
    ulps: float | None = None
    for name in names:
        a, b = first.get(name), second.get(name)
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor) or not _same_form(a, b):
            kinds.add("value")
            continue
        part = _measure_tensors(_plain(a), _plain(b))
        elements += part.elements or 0
        largest = _larger(largest, part.max_abs)
        ulps = _larger(ulps, part.max_ulp)
        kinds.add(part.representation)
    representation = ", ".join(sorted(kinds)) if "value" not in kinds else ""
    return Difference(names, elements or None, largest, None if ulps is None else int(ulps), representation)


def _same_form(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.layout == b.layout == torch.strided


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().cpu()
    tensor = tensor.int_repr() if tensor.is_quantized else tensor.resolve_conj().resolve_neg()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).contiguous()


def _measure_tensors(a: torch.Tensor, b: torch.Tensor) -> Difference:
    a, b = a.reshape(-1), b.reshape(-1)
    if a.itemsize == 1 and a.dtype.is_floating_point:
        a_bits, b_bits = a.view(torch.uint8), b.view(torch.uint8)
        a, b = a.float(), b.float()
    else:
        bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.itemsize]
        a_bits, b_bits = a.view(bits), b.view(bits)
    differs = a_bits != b_bits
    a, b, a_bits, b_bits = a[differs], b[differs], a_bits[differs], b_bits[differs]
    count = int(differs.sum())
    if not a.dtype.is_floating_point:
        gap = (a.double() - b.double()).abs().max() if count else torch.tensor(0.0)
        return Difference((), count, float(gap), None, "value")
    nan = a.isnan() & b.isnan()
    zero = (a == 0) & (b == 0)
    other = ~(nan | zero)
    kinds = [
        kind for kind, found in (("NaN payload", nan), ("sign of zero", zero), ("value", other)) if bool(found.any())
    ]
    if kinds[-1:] != ["value"]:
        return Difference((), count, 0.0, 0, ", ".join(kinds))
    finite = other & a.isfinite() & b.isfinite()
    if not bool(finite.any()):
        return Difference((), count, None, None, "value")
    gap = (a[finite].double() - b[finite].double()).abs().max()
    ulp = (
        int((_ordered(a_bits[finite]) - _ordered(b_bits[finite])).abs().max()) if a_bits.dtype != torch.uint8 else None
    )
    return Difference((), count, float(gap), ulp, "value")


def _ordered(bits: torch.Tensor) -> torch.Tensor:
    """Floating-point bit patterns as integers in the order of their values, so that a difference counts ULPs."""
    wide = bits.to(torch.int64)
    lowest = torch.iinfo(bits.dtype).min
    return torch.where(wide < 0, lowest - wide, wide)


def _larger(left: float | None, right: float | None) -> float | None:
    values = [value for value in (left, right) if value is not None]
    return max(values, default=None)
