"""Random rounding of the values of ops. Pure: tensors in, tensors out."""

from __future__ import annotations

from typing import Any

import torch


class RandomRounding:
    """Move each element up or down by one unit, at random, the same at every use with one seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def moved(self, value: torch.Tensor, unit: float) -> torch.Tensor:
        """Return ``value (1 ± unit)`` of a float64 or complex128 tensor; both parts of a complex number move."""
        if value.is_complex():
            return torch.view_as_complex(self.moved(torch.view_as_real(value.resolve_conj()), unit))
        return value * self.signs(value).mul_(unit).add_(1)

    def signs(self, value: torch.Tensor) -> torch.Tensor:
        """Return 1 or -1 for each element of a tensor, in its dtype."""
        generator = self._generators.get(value.device)
        if generator is None:
            generator = self._generators[value.device] = torch.Generator(value.device).manual_seed(self._seed)
        signs = torch.randint(0, 2, value.shape, generator=generator, device=value.device, dtype=torch.int8)
        return signs.to(value.dtype).mul_(2).sub_(1)


def folded_terms(func: Any, operand: Any, result: Any) -> int:
    """Return how many elements a reduction (by torch's tag) folds into one; 1 for other ops and unknown sizes.

    The rounding errors of n additions, one after the other, are a random walk: they grow with sqrt(n), see Higham and
    Mary, "A new approach to probabilistic rounding error analysis" (2019).

    Args:
        func: op overload.
        operand, result: its first tensor argument, and its first result.
    """
    if not is_reduction(func) or not (isinstance(result, torch.Tensor) and isinstance(operand, torch.Tensor)):
        return 1
    sizes = (operand.numel(), result.numel())
    return max(1, sizes[0] // sizes[1]) if all(type(size) is int and size for size in sizes) else 1


def is_reduction(func: Any) -> bool:
    """Return True if torch tags an op overload as a reduction."""
    return getattr(torch.Tag, "reduction", None) in func.tags
