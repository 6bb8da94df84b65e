"""The smallest input that shows a fault, with an element that is wrong of it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from hashbench.core.run.rounding import LIMIT
from hashbench.core.run.rounding_judge import JudgedResult
from hashbench.extensions.kernels.smallest import Arguments, smallest, words_of
from hashbench.extensions.kernels.verdict import Example

_CLEARLY = 4 * LIMIT
"""Ratio that smaller inputs must reach if the fault reaches it: they show the same, and no borderline of their own."""

Judge = Callable[[Arguments], tuple[torch.Tensor, JudgedResult] | None]
"""Calls the kernel with arguments of its own; returns one result as it came and as it is judged, ``None``: refused."""


def example_of(args: Arguments, judge: Judge, *, seconds: float) -> Example | None:
    """Return the smallest input that shows a result to be wrong, and the element that is most wrong.

    Args:
        args: tensors and other leaves that show it.
        judge: of arguments like them; may raise, which counts as refused.
        seconds: how long to look for smaller ones.

    Returns:
        ``None`` if no element is wrong of ``args``: a fault that only the mean of many shows has no small example.
    """
    first = judge(args)
    worst = _worst(first)
    if worst is None:
        return None
    least = min(worst[1], _CLEARLY)

    def still_wrong(tried: Arguments) -> bool:
        found = _worst(judge(tried))
        return found is not None and found[1] >= least and found[2] == worst[2]

    best = smallest(args, still_wrong, seconds=seconds, shown=True)
    result = first if best is args else judge(best)
    found = _worst(result)
    if result is None or found is None:
        return None
    got, judged = result
    index = found[0]
    return Example(words_of(best), index, _number(got[index]), _number(judged.exact[index]))


def _worst(result: tuple[torch.Tensor, JudgedResult] | None) -> tuple[tuple[int, ...], float, bool] | None:
    """Return the index of the element that is most wrong, its ratio, and whether it or what it should be is finite."""
    if result is None or not bool(result[1].beyond.any()):
        return None
    got, judged = result
    units = torch.where(judged.beyond, judged.units.nan_to_num(nan=math.inf), 0.0)
    flat = units.flatten().argmax()
    index = tuple(int(place) for place in torch.unravel_index(flat, units.shape))
    finite = bool(got[index].isfinite()) and bool(judged.exact[index].isfinite())
    return index, float(units[index]), finite


def _number(element: torch.Tensor) -> float | complex:
    value = element.item()
    return value if isinstance(value, complex) else float(value)
