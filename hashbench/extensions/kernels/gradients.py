"""The gradient of a function as a function: so that it is judged like any other result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hashbench.core.trace.arguments import mapped, tensors_in
from hashbench.extensions.kernels.inputs import KernelInputs

Function = Callable[..., Any]


class NoGradientError(RuntimeError):
    """No result depends on an input by way of autograd."""


@dataclass(frozen=True, slots=True)
class Gradients:
    """What the gradients of a kernel and its reference are taken of.

    Attributes:
        inputs: those of the functions, ``(args, kwargs, cotangents)``.
        names: of the gradients: ``gradient of input 0``.
        wanted: numbers of the leaves of ``(args, kwargs)`` whose gradients are taken.
        outputs: numbers of the results that have a gradient.
        remarks: what has none, as sentences.
    """

    inputs: KernelInputs
    names: tuple[str, ...]
    wanted: tuple[int, ...]
    outputs: tuple[int, ...]
    remarks: tuple[str, ...]

    def of(self, function: Function) -> Function:
        """Return the function that takes ``args, kwargs, cotangents`` and returns the gradients."""
        return gradient_of(function, self.wanted, self.outputs)


def gradients_of(kernel: Function, reference: Function, inputs: KernelInputs, *, seed: int) -> Gradients:
    """Find out which results have a gradient with respect to which inputs; draw cotangents.

    Args:
        kernel: function with a backward.
        reference: plain torch.
        inputs: arguments of both.
        seed: of the cotangents.

    Raises:
        NoGradientError: the reference has no gradient, or the kernel none at all.
    """
    wanted = tuple(number for number, tensor in inputs.tensors() if _is_continuous(tensor))
    given = inputs.copied()
    expected, own = (_differentiable(function, inputs.copied(), wanted) for function in (reference, kernel))
    if not any(each.requires_grad for each in expected):
        raise NoGradientError("the reference has no gradient: no floating-point input leads to a result")
    outputs = [number for number, each in enumerate(expected) if each.requires_grad]
    lacking = [number for number in outputs if number >= len(own) or not own[number].requires_grad]
    if len(lacking) == len(outputs):
        raise NoGradientError(
            "no result of the kernel has a gradient, those of the reference have: "
            "wrap it in a torch.autograd.Function with a backward, or leave out backward=True"
        )
    outputs = [number for number in outputs if number not in lacking]
    names = inputs.names()
    remarks = [
        f"result {number} of the kernel has no gradient, that of the reference has: its part was left out"
        for number in lacking
    ]
    discrete = [names[number] for number, tensor in inputs.tensors() if not _is_continuous(tensor)]
    if discrete:
        remarks.append(f"no gradient: {', '.join(discrete)} (integers or bools)")
    generator = torch.Generator().manual_seed(seed)
    cotangents = tuple(_drawn(expected[number], generator) for number in outputs)
    args, kwargs = given.arguments()
    places = ["output"] if len(expected) == 1 else [f"output.{number}" for number in outputs]
    labels = (*names, *(f"gradient of {place}" for place in places))
    combined = replace(KernelInputs.of((args, kwargs, cotangents), {}), labels=labels)
    chosen = tuple(f"gradient of {names[number]}" for number in wanted)
    return Gradients(combined, chosen, wanted, tuple(outputs), tuple(remarks))


def gradient_of(function: Function, wanted: Sequence[int], outputs: Sequence[int]) -> Function:
    """Return a function of ``(args, kwargs, cotangents)`` that returns the gradients of the wanted leaves.

    A gradient that is ``None`` is zeros.
    """

    def gradient(args: Any, kwargs: Any, cotangents: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        args, kwargs, inputs = _requiring((args, kwargs), wanted)
        with torch.enable_grad():
            results = tensors_in(function(*args, **kwargs))
            pairs = [
                (results[number], cotangent)
                for number, cotangent in zip(outputs, cotangents, strict=True)
                if number < len(results) and results[number].requires_grad
            ]
            if not pairs:
                raise NoGradientError("no result has a gradient")
            found = torch.autograd.grad(
                [result for result, _ in pairs], inputs, [cotangent for _, cotangent in pairs], allow_unused=True
            )
        return tuple(
            torch.zeros_like(leaf) if gradient is None else gradient
            for leaf, gradient in zip(inputs, found, strict=True)
        )

    return gradient


def _is_continuous(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _requiring(given: Any, wanted: Sequence[int]) -> tuple[Any, Any, list[torch.Tensor]]:
    """Return arguments whose wanted leaves require a gradient, and these leaves."""
    numbers, found = set(wanted), []
    counted = iter(range(10**9))

    def change(leaf: Any) -> Any:
        if next(counted) not in numbers:
            return leaf
        # A clone goes through the modes that compute in float64.
        new = leaf.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        found.append(new)
        return new

    args, kwargs = mapped(given, change)
    return args, kwargs, found


def _differentiable(function: Function, inputs: KernelInputs, wanted: Sequence[int]) -> list[torch.Tensor]:
    args, kwargs, _ = _requiring(inputs.arguments(), wanted)
    with torch.enable_grad():
        return tensors_in(function(*args, **kwargs))


def _drawn(result: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    shape = (*result.shape, 2) if result.is_complex() else result.shape
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (torch.view_as_complex(values) if result.is_complex() else values).to(result.device, result.dtype)
