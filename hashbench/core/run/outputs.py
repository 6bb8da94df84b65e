"""Collect the results of a run by name, and compare those of two runs bit by bit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from hashbench.core.run.distance import VALUE, Difference, measure, resolved
from hashbench.core.run.leaves import NotComparableError, leaves, without_data
from hashbench.core.trace.digest import digest

Results = Mapping[str, Any]
"""A tensor, plain Python value or :class:`~hashbench.core.run.leaves.LeftOut` by name: ``output.0.<place>`` and
``loss.0`` for every iteration, and after the last one ``grad.<parameter>``, ``input_grad.<place>``,
``parameter.<name>``, ``buffer.<name>`` and ``optimizer.<parameter>.<state>``."""


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
    first, second = resolved(first), resolved(second)
    a, b = digest(first), digest(second)
    if a == b or a.shape != b.shape or a.stride == b.stride:
        return a == b
    return logical_value(first) == logical_value(second)


def logical_value(tensor: torch.Tensor) -> str:
    """Return the digest value of a tensor in logical order, independent of strides."""
    tensor = resolved(tensor)
    return digest(tensor.contiguous() if tensor.layout is torch.strided else tensor).value


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
        representation=", ".join(sorted(kinds)) if VALUE not in kinds else "",
        total=sum(known("total")) or None,
        sum_relative=sum(known("sum_relative")) if known("sum_relative") else None,
        max_relative=max(known("max_relative"), default=None),
    )
