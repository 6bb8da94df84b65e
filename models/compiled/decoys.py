"""Models whose compiled results differ, or seem to, though the compiler made no mistake."""

from __future__ import annotations

from typing import Any

import torch
from _planted import Patches, plant, undo
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Example = tuple[nn.Module, tuple[torch.Tensor, ...]]


class NormalisedImage(nn.Module):
    """A convolution with a bias, whose gradient is zero in exact arithmetic, a batch norm and a classifier."""

    def __init__(self, channels: int, *, bias: bool) -> None:
        super().__init__()
        self.look = nn.Conv2d(3, channels, 3, bias=bias)
        self.norm = nn.BatchNorm2d(channels)
        self.classify = nn.Linear(channels, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classify(functional.gelu(self.norm(self.look(images))).mean((2, 3)))


class Quantised(nn.Module):
    """Normalise features, round them, and look up what each number stands for: a last bit may choose another one."""

    levels: torch.Tensor

    def __init__(self, features: int, levels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(features)
        self.register_buffer("levels", torch.randn(levels))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        codes = torch.round(self.norm(rows) * 3000).long() % len(self.levels)
        return self.levels[codes]


class Nearest(nn.Module):
    """A value for the group of readings with the largest mean, of groups that are nearly equal."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.value = nn.Embedding(groups, 4)

    def forward(self, readings: torch.Tensor) -> torch.Tensor:
        return self.value(torch.exp(readings).mean(2).argmax(1))


class GatedHalf(nn.Module):
    """Elementwise work in bfloat16, which generated code does in float32 between load and store."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.embed = nn.Linear(features, features)
        self.scale = nn.Parameter(torch.randn(features))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(rows)
        return functional.silu(hidden * self.scale) * torch.sigmoid(hidden) + rows


class Offset(nn.Module):
    """Add a large number in bfloat16 and take it away again: eager rounds in between, generated code does not."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(features))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.tanh((rows * self.scale + 100.0) - 100.0)


class Dropped(nn.Module):
    """Dropout, whose random numbers Inductor draws in its own way unless ``fallback_random`` is set."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.embed = nn.Linear(features, features)
        self.dropout = nn.Dropout(0.5)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.dropout(self.embed(rows)))


class CheckpointedDropout(nn.Module):
    """A checkpointed block with dropout: dynamo's backend ``eager`` draws it anew in backward, the others do not."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.embed = nn.Linear(features, features)
        self.dropout = nn.Dropout(0.5)

    def block(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.dropout(self.embed(rows)))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, rows, use_reentrant=False).exp()


@torch.library.custom_op("compiled_zoo::softmax_with_workspace", mutates_args=())
def softmax_with_workspace(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the softmax of rows, and a workspace that nobody wrote."""
    return torch.softmax(rows, -1), torch.empty(rows.numel() + 4096, dtype=rows.dtype)


@softmax_with_workspace.register_fake
def _(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(rows), rows.new_empty(rows.numel() + 4096)


class Workspace(nn.Module):
    """Use one of the two results of an operator."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.score = nn.Linear(features, features)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        weights, _ = softmax_with_workspace(self.score(rows))
        return torch.tanh(weights * rows)


def other_names(patches: Patches) -> None:
    """Give generated kernels names that differ from process to process, as the seed of hashes does."""
    from torch._inductor.codegen import cpp

    right = cpp.get_fused_kernel_name

    def named(*args: Any, **kwargs: Any) -> str:
        return f"{right(*args, **kwargs)}_{hash('kernel') & 0xFFFF:x}"

    patches.attribute(cpp, "get_fused_kernel_name", named)


class Gated(nn.Module):
    """A linear layer behind a layer norm, and a softmax."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(features)
        self.score = nn.Linear(features, features)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.score(self.norm(rows)), -1) * rows


def long_variance() -> Example:
    undo()
    return NormalisedImage(4, bias=False), (torch.randn(16, 3, 50, 50) + 3,)


def zero_gradient() -> Example:
    undo()
    return NormalisedImage(4, bias=True), (torch.randn(4, 3, 12, 12),)


def rounded() -> Example:
    undo()
    return Quantised(64, 97), (torch.randn(512, 64),)


def near_ties() -> Example:
    undo()
    readings = torch.randn(256, 1, 64).expand(-1, 8, -1).contiguous()
    order = torch.rand_like(readings).argsort(2)
    return Nearest(8), (readings.gather(2, order) + 1e-7 * torch.randn_like(readings),)


def bfloat16_kept_wide() -> Example:
    undo()
    return GatedHalf(24).bfloat16(), (torch.randn(16, 24).bfloat16(),)


def eager_less_exact() -> Example:
    undo()
    return Offset(24).bfloat16(), (torch.randn(16, 24).bfloat16(),)


def own_random() -> Example:
    undo()
    return Dropped(24), (torch.randn(16, 24),)


def checkpointed_dropout() -> Example:
    undo()
    return CheckpointedDropout(24), (torch.randn(16, 24),)


def unread_workspace() -> Example:
    undo()
    return Workspace(24), (torch.randn(16, 24),)


def kernel_names() -> Example:
    plant(other_names)
    return Gated(24), (torch.randn(16, 24),)


MODELS = {
    "long_variance": long_variance,
    "zero_gradient": zero_gradient,
    "rounded": rounded,
    "near_ties": near_ties,
    "bfloat16_kept_wide": bfloat16_kept_wide,
    "eager_less_exact": eager_less_exact,
    "own_random": own_random,
    "checkpointed_dropout": checkpointed_dropout,
    "unread_workspace": unread_workspace,
    "kernel_names": kernel_names,
}
