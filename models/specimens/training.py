"""Specimens whose difference shows in one part of a run only: backward, the optimizer, the steps after the first."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

from hashbench.core.run.workload import Workload


class MonitoredSGD(torch.optim.SGD):
    """SGD that also sums the gradients' magnitudes by size class; the sums are for looking at, no step reads them."""

    classes = 4096

    def __init__(self, parameters: Iterable[nn.Parameter], *, by_index_put: bool) -> None:
        super().__init__(parameters, lr=0.01, momentum=0.9)
        self.by_index_put = by_index_put

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.observe(parameter)
        return super().step(closure)

    def observe(self, parameter: nn.Parameter) -> None:
        sizes = parameter.grad.abs().flatten()
        size_class = (sizes * 1e6).long() % self.classes
        sums = sizes.new_zeros(self.classes)
        if self.by_index_put:
            sums.index_put_((size_class,), sizes, accumulate=True)
        else:
            sums.index_add_(0, size_class, sizes)
        self.state[parameter]["sums_by_size"] = sums


def monitored_training(*, by_index_put: bool) -> Workload:
    """A wide two-layer network trained by :class:`MonitoredSGD`."""
    return Workload(
        nn.Sequential(nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 8)),
        inputs=(torch.randn(16, 2048),),
        make_optimizer=lambda parameters: MonitoredSGD(parameters, by_index_put=by_index_put),
    )


class RunningCodebook(nn.Module):
    """A codebook whose first batch gives each sample a code of its own; later, samples of one bin share a code.

    So no code is written twice in the first step, and from the second on most are.
    """

    def __init__(self, features: int, samples: int, *, write: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.embed = nn.Linear(features, features)
        self.register_buffer("codes", torch.zeros(samples, features))
        self.register_buffer("batches_seen", torch.zeros((), dtype=torch.long))
        self.write = write

    def chosen_codes(self, samples: torch.Tensor) -> torch.Tensor:
        if self.batches_seen == 0:
            return torch.arange(len(samples))
        return (samples[:, 0].sigmoid() * len(self.codes) / 8).long()

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(samples)
        chosen = self.chosen_codes(samples)
        with torch.no_grad():
            self.batches_seen += 1
            self.codes = self.write(self.codes, chosen, hidden)
        return hidden + self.codes.index_select(0, chosen)


def last_writer(codes: torch.Tensor, chosen: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
    return codes.index_put((chosen,), samples)


def largest_sample(codes: torch.Tensor, chosen: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
    return codes.scatter_reduce(0, chosen[:, None].expand_as(samples), samples, "amax", include_self=False)


def running_codebook(write: Callable[..., torch.Tensor]) -> Workload:
    samples, features = 2**19, 4
    return Workload(RunningCodebook(features, samples, write=write), inputs=(torch.randn(samples, features),))


@torch.library.custom_op("zoo::look_up", mutates_args=())
def look_up(table: torch.Tensor, codes: torch.Tensor, *, in_order: bool) -> torch.Tensor:  # noqa: ARG001 – for backward
    """The rows of ``table`` that ``codes`` name."""
    return table.index_select(0, codes)


@torch.library.custom_op("zoo::look_up_backward", mutates_args=())
def look_up_backward(gradient: torch.Tensor, codes: torch.Tensor, rows: int, *, in_order: bool) -> torch.Tensor:
    """The gradient of the table: the sum over all codes of a row, added in their order or in any."""
    total = gradient.new_zeros(rows, gradient.shape[1])
    if in_order:
        return total.index_add_(0, codes, gradient)
    return total.index_put_((codes,), gradient, accumulate=True)


def _keep_codes(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:  # noqa: ARG001
    table, codes = inputs
    ctx.save_for_backward(codes)
    ctx.rows, ctx.in_order = len(table), keyword_only_inputs["in_order"]


def _differentiate(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    (codes,) = ctx.saved_tensors
    return look_up_backward(gradient, codes, ctx.rows, in_order=ctx.in_order), None


look_up.register_autograd(_differentiate, setup_context=_keep_codes)


class CodebookLookup(nn.Module):
    """Decode a picture from the codes of its patches, and light it, with an operator that brings its own backward."""

    def __init__(self, codes: int, features: int, *, in_order: bool) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(codes, features))
        self.decode = nn.Linear(features, 3)
        self.in_order = in_order

    def forward(self, codes: torch.Tensor, light: torch.Tensor) -> torch.Tensor:
        return light * torch.sigmoid(self.decode(look_up(self.table, codes, in_order=self.in_order)))


def codebook_lookup(*, in_order: bool) -> Workload:
    codes, patches = 1000, 300_000
    inputs = torch.randint(codes, (patches,)), torch.rand(patches, 1)
    return Workload(CodebookLookup(codes, 8, in_order=in_order), inputs=inputs)


_ROUNDING = np.random.default_rng(0)


@torch.library.custom_op("zoo::rounded_step", mutates_args={"weights"})
def rounded_step(weights: torch.Tensor, gradient: torch.Tensor, rate: float, *, private: bool) -> None:
    """A step of gradient descent, rounded at random up or down to a multiple of 1/1024."""
    draw = _ROUNDING.random if private else np.random.random
    noise = torch.from_numpy(draw(weights.numel())).view_as(weights).float()
    weights.copy_(torch.floor((weights - rate * gradient) * 1024 + noise) / 1024)


class RoundingSGD(torch.optim.Optimizer):
    """Gradient descent on weights of few bits, with a kernel written by hand."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, private: bool) -> None:
        super().__init__(parameters, {"lr": 0.01})
        self.private = private

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # noqa: ARG002 – as every optimizer has it
        for group in self.param_groups:
            for weights in group["params"]:
                rounded_step(weights, weights.grad, group["lr"], private=self.private)


def rounded_training(*, private: bool) -> Workload:
    return Workload(
        nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)),
        inputs=(torch.randn(8, 16),),
        make_optimizer=lambda parameters: RoundingSGD(parameters, private=private),
    )


MODELS = {
    "monitored_training": lambda: monitored_training(by_index_put=True),
    "monitored_training_twin": lambda: monitored_training(by_index_put=False),
    "running_codebook": lambda: running_codebook(last_writer),
    "running_codebook_twin": lambda: running_codebook(largest_sample),
    "codebook_lookup": lambda: codebook_lookup(in_order=False),
    "codebook_lookup_twin": lambda: codebook_lookup(in_order=True),
    "rounded_training": lambda: rounded_training(private=True),
    "rounded_training_twin": lambda: rounded_training(private=False),
}
