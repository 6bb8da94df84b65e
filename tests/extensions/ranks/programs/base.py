"""What the programs share: how a run is told to them, faults that they plant, what is true of them, small models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

RACY, OTHER_RACY, SUMS = "ranked.racy.default", "ranked.other_racy.default", "ranked.scatter_add_.default"
"""The ops that faults are planted in, as traces name them."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a program on one rank.

    Attributes:
        rank: global rank.
        world_size: number of ranks.
        planted: plant the fault; otherwise run the clean twin.
        number: of the run, from 0. A fault that differs from run to run follows from it.
        folder: empty at the start, the same for all ranks of the run.
    """

    rank: int
    world_size: int
    planted: bool
    number: int
    folder: Path

    def arm(self, *, rank: int, call: int = 0, op: str = RACY) -> None:
        """Let the call after the next ``call`` ones of an op on ``rank`` be the racy one, if the fault is planted."""
        _FAULTS.calls[op] = 0
        _FAULTS.due[op] = call if self.planted and self.rank == rank else -1
        _FAULTS.amount = self.number + 1

    def disarm(self) -> None:
        """Let no call be racy."""
        _FAULTS.due.clear()


@dataclass(slots=True)
class _Faults:
    """Which call of each op is racy in this process, and how much its outcome is off; an op has no other way to know
    the run that it is part of."""

    calls: Counter[str] = field(default_factory=Counter)
    due: dict[str, int] = field(default_factory=dict)
    amount: int = 0

    def off(self, op: str) -> int:
        """Count a call and return how much it is off."""
        self.calls[op] += 1
        return self.amount if self.calls[op] - 1 == self.due.get(op, -1) else 0


_FAULTS = _Faults()


def _copied(x: torch.Tensor, off: int) -> torch.Tensor:
    """Return a copy that is off; NumPy makes it, so that no recorded op computes inside the one that calls this."""
    ramp = np.arange(x.numel(), dtype=np.float32).reshape(x.shape) / max(1, x.numel())
    return torch.from_numpy(np.ascontiguousarray(x.detach().numpy() + off / 4 * (ramp + 0.125), dtype=np.float32))


@torch.library.custom_op("ranked::racy", mutates_args=())
def racy(x: torch.Tensor) -> torch.Tensor:
    """The identity, but for the call that is armed."""
    return _copied(x, _FAULTS.off(RACY))


@torch.library.custom_op("ranked::other_racy", mutates_args=())
def other_racy(x: torch.Tensor) -> torch.Tensor:
    """The same with a fault of its own."""
    return _copied(x, _FAULTS.off(OTHER_RACY))


@torch.library.custom_op("ranked::scatter_add_", mutates_args=("into",))
def scatter_add_(into: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> None:
    """``into.index_put_((index,), values, accumulate=True)``, in an order of its own where it is armed, as of threads
    that come in another order in each run."""
    first = _FAULTS.off(SUMS) % len(values)
    order = [*range(first, len(values)), *range(first)]
    np.add.at(into.numpy(), index.numpy()[order], values.detach().numpy()[order])


for _op in (racy, other_racy):
    _op.register_autograd(lambda _context, gradient: gradient)
    _op.register_fake(torch.empty_like)


class Racy(nn.Module):
    """A layer that calls :func:`racy`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return racy(x)


class OtherRacy(nn.Module):
    """A layer that calls :func:`other_racy`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return other_racy(x)


Results = Mapping[str, Any]
"""What a run is judged by: tensors and Python values, by name."""


@dataclass(frozen=True, slots=True)
class Truth:
    """What is true of two runs of a planted program.

    Attributes:
        rank: where the difference enters; ``None``: nowhere, both variants are clean.
        origin: how, a word of ``catalog.Origin``, or any of several where data made outside torch enter.
        kernel: the op that is to blame; empty where none is.
        module: path of its module; ``None``: not judged.
        iteration: of that op; ``None``: not judged.
        beside: rank and kernel of further sources that no exchange orders with this one.
        later: rank and kernel of further independent sources behind it.
        missing: ranks whose trace ends early.
    """

    rank: int | None = None
    origin: tuple[str, ...] = ("kernel",)
    kernel: str = RACY
    module: str | None = None
    iteration: int | None = None
    beside: tuple[tuple[int, str], ...] = ()
    later: tuple[tuple[int, str], ...] = ()
    missing: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Replicas:
    """What is true of the replicas in one run of a planted program.

    Attributes:
        names: results that differ between ranks that must agree; the first in the order of the program.
        step: after which they differ first, from 0.
        minority: the ranks that are apart from most; empty where there is no majority.
        kernel: op where the ranks diverge; empty: not one op.
        origin: how they diverge; empty: not judged.
    """

    names: tuple[str, ...]
    step: int = 0
    minority: tuple[int, ...] = ()
    kernel: str = ""
    origin: str = ""


@dataclass(frozen=True, slots=True)
class Program:
    """A program of several ranks, its planted fault and what is true of it.

    Attributes:
        run: what every rank runs; returns the results.
        ranks: number of ranks.
        truth: of two planted runs. Two clean runs agree.
        replicas: of one planted run; ``None``: replicas agree. They agree in every clean run.
        before: what every rank runs before it is recorded.
    """

    run: Callable[[Run], Results]
    ranks: int = 2
    truth: Truth = Truth()
    replicas: Replicas | None = None
    before: Callable[[Run], None] | None = None


def at(rank: int, **facts: Any) -> Truth:
    """Return the truth of a race on ``rank``, of :func:`racy` in iteration 1 unless ``facts`` say otherwise."""
    return Truth(rank, **{"iteration": 1, **facts})


ITERATIONS = 2
WIDE, HIDDEN, NARROW = 8, 16, 4


def network(*between: nn.Module, seed: int = 0) -> nn.Sequential:
    """A network of two layers with others between."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDE, HIDDEN), *between, nn.ReLU(), nn.Linear(HIDDEN, NARROW))


def batch(rank: int = 0, iteration: int = 0, *, rows: int = 4) -> torch.Tensor:
    """The examples of a rank in an iteration."""
    return torch.randn(rows, WIDE, generator=torch.Generator().manual_seed(100 * iteration + rank))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The mean square of a model's output."""
    return model(x).square().mean()


def sgd(parameters: Iterable[torch.Tensor], lr: float = 0.1) -> torch.optim.SGD:
    """An optimizer of one op for each parameter."""
    return torch.optim.SGD(parameters, lr=lr, foreach=False)


def trained(model: nn.Module, rank: int, *, iterations: int = ITERATIONS) -> Results:
    """Train a model on a rank's batches; return its parameters."""
    optimizer = sgd(model.parameters())
    for iteration in range(iterations):
        optimizer.zero_grad()
        loss_of(model, batch(rank, iteration)).backward()
        optimizer.step()
    return parameters_of(model)


def parameters_of(model: nn.Module) -> Results:
    """The parameters by name, without the prefix of DDP."""
    return {name.removeprefix("module."): parameter for name, parameter in model.named_parameters()}
