"""Specimens whose difference shows in one part of a run only: the optimizer's state, or from the second step on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from hashbench.workload import Workload


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
    samples, features = 2**20, 4
    return Workload(RunningCodebook(features, samples, write=write), inputs=(torch.randn(samples, features),))


MODELS = {
    "monitored_training": lambda: monitored_training(by_index_put=True),
    "monitored_training_twin": lambda: monitored_training(by_index_put=False),
    "running_codebook": lambda: running_codebook(last_writer),
    "running_codebook_twin": lambda: running_codebook(largest_sample),
}
