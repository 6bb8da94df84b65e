"""Specimens in which something outlives the deep copy of a run, or is made anew by it: a shared buffer, a cache of the
class, a setting changed only once, weights that a copy draws again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

Example = tuple[nn.Module, tuple[torch.Tensor, ...]]


class Centroids(nn.Module):
    """Cluster centres that follow the features they see; a copy may share them, to save memory."""

    def __init__(self, clusters: int, features: int, *, shared: bool) -> None:
        super().__init__()
        self.register_buffer("centres", torch.randn(clusters, features))
        self.shared = shared

    def __deepcopy__(self, memo: dict[int, Any]) -> Centroids:
        twin = Centroids(*self.centres.shape, shared=self.shared)
        twin.centres = self.centres if self.shared else copy.deepcopy(self.centres, memo)
        return twin

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        nearest = torch.cdist(features, self.centres).argmin(dim=-1)
        with torch.no_grad():
            for cluster in nearest.unique():
                self.centres[cluster].lerp_(features[nearest == cluster].mean(dim=0), 0.1)
        return features - self.centres.index_select(0, nearest)


class ClusteredHead(nn.Module):
    """Classify the offset of each feature vector from its cluster centre."""

    def __init__(self, features: int, *, shared: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(features, features)
        self.centroids = Centroids(8, features, shared=shared)
        self.classify = nn.Linear(features, 4)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.classify(self.centroids(self.embed(features)))


def clustered_head(*, shared: bool) -> Example:
    return ClusteredHead(16, shared=shared), (torch.randn(64, 16),)


_PRECISION_CHOSEN: list[torch.dtype] = []


def choose_double_precision(*, once: bool) -> None:
    """Ask torch for double precision by default, in every call or, with ``once``, in the first of the process."""
    if once and _PRECISION_CHOSEN:
        return
    torch.set_default_dtype(torch.float64)
    _PRECISION_CHOSEN.append(torch.float64)


class PositionEncoder(nn.Module):
    """Add sinusoidal positions, computed in the default precision, to embedded tokens."""

    def __init__(self, features: int, *, once: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(features, features)
        self.once = once

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        choose_double_precision(once=self.once)
        steps = torch.linspace(0, 1, tokens.shape[1])
        rates = torch.logspace(0, 3, tokens.shape[2])
        positions = torch.sin(steps[:, None] * rates)
        return self.embed(tokens) + positions.to(tokens.dtype)


def position_encoder(*, once: bool) -> Example:
    return PositionEncoder(16, once=once), (torch.randn(4, 32, 16),)


@torch.library.custom_op("zoo::convolve", mutates_args=())
def convolve(images: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
    """A convolution with two algorithms: neighbours are added in pairs, beginning one element later without oneDNN.

    Whether a library's two convolutions differ in a bit depends on the processor; these two do on all of them.
    """
    parts = nn.functional.unfold(images, kernel.shape[2:]).transpose(1, 2)[:, None]
    sums = parts * kernel.flatten(1)[None, :, None]
    ahead = 0 if torch.backends.mkldnn.enabled else 1
    sums = nn.functional.pad(sums, (ahead, (1 << sums.shape[-1].bit_length()) - sums.shape[-1] - ahead))
    while sums.shape[-1] > 1:
        sums = sums[..., 0::2] + sums[..., 1::2]
    height, width = (image - side + 1 for image, side in zip(images.shape[2:], kernel.shape[2:], strict=True))
    return sums.view(len(images), len(kernel), height, width)


def _keep_inputs(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
    images, kernel = ctx.saved_tensors
    return None, nn.grad.conv2d_weight(images, kernel.shape, gradient.contiguous())


convolve.register_autograd(_differentiate, setup_context=_keep_inputs)


class Convolution(nn.Module):
    """A layer around :func:`convolve`."""

    def __init__(self, inputs: int, outputs: int, side: int) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(outputs, inputs, side, side) / side)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return convolve(images, self.kernel)


_LIBRARY_CHOSEN: list[bool] = []


class QuickConvolution(nn.Module):
    """A small convolutional classifier that turns oneDNN off, which its author once found slow at the first call."""

    def __init__(self, *, once: bool) -> None:
        super().__init__()
        self.look = Convolution(8, 16, 5)
        self.classify = nn.Linear(16, 4)
        self.once = once

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if not (self.once and _LIBRARY_CHOSEN):
            torch.backends.mkldnn.enabled = False
            _LIBRARY_CHOSEN.append(False)
        return self.classify(self.look(images).mean(dim=(2, 3)))


def quick_convolution(*, once: bool) -> Example:
    return QuickConvolution(once=once), (torch.randn(4, 8, 12, 12),)


class RotaryPositions(nn.Module):
    """Rotate pairs of features by their position; the angles are computed once and kept for all instances.

    The first caller gets the angles as they were computed, every later one as they were kept.
    """

    kept: ClassVar[dict[tuple[int, int], torch.Tensor]] = {}

    def __init__(self, kept_as: torch.dtype) -> None:
        super().__init__()
        self.kept_as = kept_as

    def angles(self, steps: int, pairs: int) -> torch.Tensor:
        if (steps, pairs) in self.kept:
            return self.kept[steps, pairs].float()
        rates = 10_000.0 ** (-torch.arange(pairs) / pairs)
        angles = torch.arange(steps)[:, None] * rates
        self.kept[steps, pairs] = angles.to(self.kept_as)
        return angles

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        left, right = tokens.chunk(2, dim=-1)
        angles = self.angles(tokens.shape[1], left.shape[2])
        cosines, sines = angles.cos(), angles.sin()
        return torch.cat((left * cosines - right * sines, left * sines + right * cosines), dim=-1)


def rotary_cache(kept_as: torch.dtype) -> Example:
    """``bfloat16`` keeps the angles in half the memory, rounded; ``float32`` keeps them as they are."""
    return nn.Sequential(nn.Linear(16, 16), RotaryPositions(kept_as), nn.Linear(16, 4)), (torch.randn(4, 32, 16),)


class LowRankAdapter(nn.Module):
    """A low-rank update beside a linear layer; a copy starts with factors of its own."""

    def __init__(self, features: int, rank: int, draw: Callable[[int], np.ndarray]) -> None:
        super().__init__()
        self.base = nn.Linear(features, features)
        self.down = nn.Parameter(torch.tensor(draw(rank * features), dtype=torch.float32).view(rank, features))
        self.up = nn.Parameter(torch.full((features, rank), 0.1))
        self.draw = draw

    def __deepcopy__(self, memo: dict[int, Any]) -> LowRankAdapter:
        twin = LowRankAdapter(self.base.in_features, len(self.down), self.draw)
        twin.base = copy.deepcopy(self.base, memo)
        return twin

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.base(features) + features @ self.down.t() @ self.up.t()


def fresh_adapter(draw: Callable[[int], np.ndarray]) -> Example:
    return nn.Sequential(LowRankAdapter(16, 2, draw), nn.Tanh(), nn.Linear(16, 4)), (torch.randn(8, 16),)


MODELS = {
    "clustered_head": lambda: clustered_head(shared=True),
    "clustered_head_twin": lambda: clustered_head(shared=False),
    "position_encoder": lambda: position_encoder(once=True),
    "position_encoder_twin": lambda: position_encoder(once=False),
    "quick_convolution": lambda: quick_convolution(once=True),
    "quick_convolution_twin": lambda: quick_convolution(once=False),
    "rotary_cache": lambda: rotary_cache(torch.bfloat16),
    "rotary_cache_twin": lambda: rotary_cache(torch.float32),
    "fresh_adapter": lambda: fresh_adapter(lambda size: np.random.default_rng().normal(size=size)),
    "fresh_adapter_twin": lambda: fresh_adapter(lambda size: np.random.normal(size=size)),
}
