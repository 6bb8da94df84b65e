"""Specimens whose graphs are wrong before any pass sees them: traced or partitioned wrongly."""

from __future__ import annotations

from typing import Any

import torch
from _planted import Patches, plant, plant_if, undo
from torch import nn
from torch.utils.checkpoint import checkpoint

Example = tuple[nn.Module, tuple[torch.Tensor, ...]]


def inverse_root(steps: torch.Tensor) -> torch.Tensor:
    """The learning rate's factor after so many steps (a tensor of one element)."""
    return (1.0 + steps).rsqrt()


@torch._dynamo.assume_constant_result
def inverse_root_as_constant(steps: torch.Tensor) -> float:
    """The same, of the first call for ever."""
    return float((1.0 + steps).rsqrt())


class Annealed(nn.Module):
    """Features that fade with every call."""

    steps: torch.Tensor

    def __init__(self, features: int, *, constant: bool) -> None:
        super().__init__()
        self.mix = nn.Linear(features, features)
        self.constant = constant
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        factor = inverse_root_as_constant(self.steps) if self.constant else inverse_root(self.steps)
        self.steps.add_(1)
        return torch.tanh(self.mix(rows)) * factor


@torch.library.custom_op("compiled_zoo::clip", mutates_args=())
def clip(rows: torch.Tensor) -> torch.Tensor:
    """Clip rows to 1 in place, which the declaration of this operator denies, and return how much was cut off."""
    before = rows.clone()
    return (before - rows.clamp_(-1, 1)).abs()


@torch.library.custom_op("compiled_zoo::clip_declared", mutates_args={"rows"})
def clip_declared(rows: torch.Tensor) -> torch.Tensor:
    """The same, declared."""
    before = rows.clone()
    return (before - rows.clamp_(-1, 1)).abs()


@clip.register_fake
@clip_declared.register_fake
def _(rows: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(rows)


class Clipped(nn.Module):
    """Clip the first features in place, and use all of them before and after it."""

    def __init__(self, features: int, *, declared: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(features, features)
        self.declared = declared

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(rows)
        first = hidden[:, :8]
        first.mul_(3)
        before = torch.tanh(hidden)
        lost = (clip_declared if self.declared else clip)(first)
        return torch.cat([before + torch.sin(hidden), lost], 1)


def turned(rows: torch.Tensor) -> torch.Tensor:
    """Copy rows column by column: the strides of the result are ``(1, rows)``."""
    return rows.t().contiguous().t()


@torch.library.custom_op("compiled_zoo::turn", mutates_args=())
def turn(rows: torch.Tensor) -> torch.Tensor:
    """Copy rows column by column."""
    return turned(rows)


@torch.library.custom_op("compiled_zoo::turn_described", mutates_args=())
def turn_described(rows: torch.Tensor) -> torch.Tensor:
    """Copy rows column by column."""
    return turned(rows)


@turn.register_fake
def _(rows: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(rows)  # contiguous, which it is not


@turn_described.register_fake
def _(rows: torch.Tensor) -> torch.Tensor:
    return turned(rows)


class Turned(nn.Module):
    """Work on rows that an operator stores column by column."""

    def __init__(self, features: int, *, described: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(features, features)
        self.described = described

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(rows)
        return torch.tanh((turn_described if self.described else turn)(hidden)) * 2 + rows


def without_asserts(patches: Patches) -> None:
    """Switch off the asserts of sizes and strides in generated code, as a user may for speed."""
    from torch._inductor import config

    patches.attribute(config, "size_asserts", False)


@torch.library.custom_op("compiled_zoo::keep", mutates_args=())
def keep(rows: int, features: int, seed: int, offset: int) -> torch.Tensor:
    """Return which elements dropout keeps, as 0 and 2: the same for the same seed and offset."""
    generator = torch.Generator().manual_seed(seed + offset)
    return 2 * torch.empty(rows, features).bernoulli_(0.5, generator=generator)


@keep.register_fake
def _(rows: int, features: int, seed: int, offset: int) -> torch.Tensor:  # noqa: ARG001
    return torch.empty(rows, features)


def other_offset(patches: Patches) -> None:
    """Count on the offset of random numbers in what the backward computes again."""
    from torch._functorch import partitioners

    right = partitioners._extract_fwd_bwd_modules

    def wrong(*args: Any, **kwargs: Any) -> Any:
        forward, backward = right(*args, **kwargs)
        for node in backward.graph.find_nodes(op="call_function", target=torch.ops.compiled_zoo.keep.default):
            *others, offset = node.args
            node.args = (*others, offset + 1)
        backward.recompile()
        return forward, backward

    patches.attribute(partitioners, "_extract_fwd_bwd_modules", wrong)


class Checkpointed(nn.Module):
    """A checkpointed block with dropout, whose random numbers are a function of seed and offset."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.embed = nn.Linear(features, features)
        self.classify = nn.Linear(features, 3)

    def block(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(rows)
        return torch.tanh(hidden * keep(hidden.shape[0], hidden.shape[1], 7, 0))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.classify(checkpoint(self.block, rows, use_reentrant=False)).exp()


def stale_constant(*, wrong: bool) -> Example:
    undo()
    return Annealed(24, constant=wrong), (torch.randn(16, 24),)


def undeclared_mutation(*, wrong: bool) -> Example:
    undo()
    return Clipped(24, declared=not wrong), (torch.randn(16, 24),)


def fake_strides(*, wrong: bool) -> Example:
    undo()
    return Turned(24, described=not wrong), (torch.randn(16, 24),)


def fake_strides_unchecked(*, wrong: bool) -> Example:
    plant(without_asserts)
    return Turned(24, described=not wrong), (torch.randn(16, 24),)


def dropout_offset(*, wrong: bool) -> Example:
    plant_if(wrong, other_offset)
    return Checkpointed(24), (2 * torch.randn(16, 24),)


MODELS = {
    "stale_constant": lambda: stale_constant(wrong=True),
    "stale_constant_twin": lambda: stale_constant(wrong=False),
    "undeclared_mutation": lambda: undeclared_mutation(wrong=True),
    "undeclared_mutation_twin": lambda: undeclared_mutation(wrong=False),
    "fake_strides": lambda: fake_strides(wrong=True),
    "fake_strides_twin": lambda: fake_strides(wrong=False),
    "fake_strides_unchecked": lambda: fake_strides_unchecked(wrong=True),
    "fake_strides_unchecked_twin": lambda: fake_strides_unchecked(wrong=False),
    "dropout_offset": lambda: dropout_offset(wrong=True),
    "dropout_offset_twin": lambda: dropout_offset(wrong=False),
}
