"""Steps of small models under a backend of ``torch.compile``, for tests of compiled models."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch

from hashbench.core.inductor.graphs import CompiledGraph, KernelCall
from hashbench.extensions.compiled.observed import GraphObserver

Step = Callable[[Any, torch.dtype | None], dict[str, torch.Tensor]]


class Norms(torch.nn.Module):
    """Ops that TorchInductor decomposes, in modules with names."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(8, 16)
        self.norm = torch.nn.LayerNorm(16)
        self.outer = torch.nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.nn.functional.elu(self.norm(self.inner(x))))


class ZeroGradient(torch.nn.Module):
    """The gradient of the convolution's bias is zero in exact arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = torch.nn.Conv2d(3, 8, 3)
        self.norm = torch.nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.max_pool2d(torch.nn.functional.hardswish(self.norm(self.convolution(x))), 2)


class OnRounding(Norms):
    """Adds the sign of a number that is zero in exact arithmetic."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = self.norm(self.inner(x)).softmax(-1)
        return super().forward(x) + (shares.sum(-1, keepdim=True) - 1).sign()


class InFloat32(Norms):
    """Computes in float32, whatever the model is cast to."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.norm(self.inner(x)).float().softmax(-1).to(x.dtype))


def made(kind: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """Return a model whose parameters are the same each time."""
    torch.manual_seed(0)
    return kind()


def step_of(model: torch.nn.Module, inputs: Sequence[torch.Tensor], *, training: bool = True, times: int = 1) -> Step:
    """Return a step of the model: a forward, and in training a backward of the mean square of its output."""

    def step(backend: Any, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
        torch._dynamo.reset()
        own = copy.deepcopy(model)
        given = [tensor.clone() for tensor in inputs]
        if dtype is not None:
            own = own.to(dtype)
            given = [tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in given]
        called = own if backend is None else torch.compile(own, backend=backend)
        torch.manual_seed(1)
        found = {}
        for number in range(times):
            with torch.set_grad_enabled(training):
                output = called(*given)
            found[f"output {number}"] = output.detach()
            if training:
                output.square().mean().backward()
        found.update({f"gradient of {name}": p.grad for name, p in own.named_parameters() if p.grad is not None})
        found.update({f"buffer {name}": buffer for name, buffer in own.named_buffers()})
        return found

    return step


def show(
    observer: GraphObserver, graph: CompiledGraph, inputs: Sequence[Any], *calls: KernelCall
) -> Generator[None, KernelCall, None]:
    """Begin a call of a graph, show its first calls of kernels, and return what is shown the next."""
    observed = observer.observe(graph, inputs)
    next(observed)
    for call in calls:
        observed.send(call)
    return observed
