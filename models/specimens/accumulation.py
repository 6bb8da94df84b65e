"""Specimens whose sums are added up by several threads in whatever order they arrive (origin ``kernel``).

Floating-point addition is not associative, so every order of more than two addends may round differently. The
kernels here add with atomic operations unless ``torch.use_deterministic_algorithms`` is on.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

Example = tuple[nn.Module, tuple[torch.Tensor, ...]]


class Gather(nn.Module):
    """The rows of a table; the backward of this indexing adds up the gradients of rows taken more than once."""

    def forward(self, table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return table[rows]


class MessagePassing(nn.Module):
    """A point cloud's graph: each point hears what its neighbours differ by from itself."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.encode = nn.Linear(features, features)
        self.gather = Gather()
        self.update = nn.Linear(features, features)

    def forward(self, points: torch.Tensor, neighbours: torch.Tensor) -> torch.Tensor:
        hidden = self.encode(points)
        heard = torch.tanh(self.gather(hidden, neighbours) - hidden[:, None])
        return hidden + self.update(heard.mean(dim=1))


def message_passing() -> Example:
    points, neighbours, features = 10_000, 20, 16
    return MessagePassing(features), (torch.randn(points, features), torch.randint(points, (points, neighbours)))


class CombineByIndexPut(nn.Module):
    """Sum the experts' outputs per token with ``index_put(accumulate=True)``."""

    def forward(self, outputs: torch.Tensor, token_of: torch.Tensor, tokens: int) -> torch.Tensor:
        return outputs.new_zeros(tokens, outputs.shape[1]).index_put_((token_of,), outputs, accumulate=True)


class CombineByIndexAdd(nn.Module):
    """The same sum with ``index_add``, which adds in the order of the index on a CPU."""

    def forward(self, outputs: torch.Tensor, token_of: torch.Tensor, tokens: int) -> torch.Tensor:
        return outputs.new_zeros(tokens, outputs.shape[1]).index_add_(0, token_of, outputs)


class ExpertMixture(nn.Module):
    """A mixture of experts in which each expert chooses the half of the tokens that suits it best."""

    def __init__(self, features: int, experts: int, combine: nn.Module) -> None:
        super().__init__()
        self.router = nn.Linear(features, experts)
        self.experts = nn.ModuleList(nn.Linear(features, features) for _ in range(experts))
        self.combine = combine

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(tokens).softmax(dim=-1).topk(len(tokens) // 2, dim=0)
        outputs = [
            expert(tokens.index_select(0, chosen[:, number])) * weights[:, number, None]
            for number, expert in enumerate(self.experts)
        ]
        return tokens + self.combine(torch.cat(outputs), chosen.t().flatten(), len(tokens))


def expert_mixture(combine: Callable[[], nn.Module]) -> Example:
    tokens, features, experts = 32_768, 16, 8
    return ExpertMixture(features, experts, combine()), (torch.randn(tokens, features),)


class SoftHistogram(nn.Module):
    """A bag of visual words: each pixel adds a learned weight to the bin of its word."""

    def __init__(self, bins: int, *, by_put: bool) -> None:
        super().__init__()
        self.weigh = nn.Linear(2, 1)
        self.classify = nn.Linear(bins, 10)
        self.bins, self.by_put = bins, by_put

    def forward(self, pixels: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        weights = torch.sigmoid(self.weigh(pixels)).flatten()
        empty = weights.new_zeros(self.bins)
        if self.by_put:
            histogram = empty.put_(words, weights, accumulate=True)
        else:
            histogram = empty.scatter_add_(0, words, weights)
        return self.classify(histogram)


def soft_histogram(*, by_put: bool) -> Example:
    pixels, bins = 2_000_000, 65_536
    return SoftHistogram(bins, by_put=by_put), (torch.rand(pixels, 2), torch.randint(bins, (pixels,)))


class ToneCurve(nn.Module):
    """A learned brightness curve, looked up for every 16-bit level of an image that darkens towards one side."""

    def __init__(self, width: int, *, by_take: bool) -> None:
        super().__init__()
        self.curve = nn.Parameter(torch.linspace(0, 1, 65_536))
        self.register_buffer("shade", torch.linspace(0.1, 1, width))
        self.by_take = by_take

    def forward(self, levels: torch.Tensor) -> torch.Tensor:
        if self.by_take:
            brightness = self.curve.take(levels)
        else:
            brightness = self.curve.index_select(0, levels.flatten()).view_as(levels)
        return brightness * self.shade


def tone_curve(*, by_take: bool) -> Example:
    width = 1536
    return ToneCurve(width, by_take=by_take), (torch.randint(65_536, (1, 1, 1536, width)),)


class FrozenTeacher(nn.Module):
    """Learn from a teacher that is never trained, and pools its points in inference mode."""

    def __init__(self, features: int, cells: int, *, in_order: bool) -> None:
        super().__init__()
        self.teacher = nn.Linear(features, features)
        self.student = nn.Linear(features, features)
        self.cells, self.in_order = cells, in_order

    def target(self, points: torch.Tensor, cells: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            hidden = self.teacher(points)
            pooled = hidden.new_zeros(self.cells, hidden.shape[1])
            if self.in_order:
                return pooled.index_add_(0, cells, hidden)
            return pooled.index_put_((cells,), hidden, accumulate=True)

    def forward(self, points: torch.Tensor, cells: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        return self.student(image) - self.target(points, cells).clone()


def frozen_teacher(*, in_order: bool) -> Example:
    points, cells = 800_000, 1000  # enough for two threads to meet on a busy machine, too
    inputs = torch.randn(points, 8), torch.randint(cells, (points,)), torch.randn(cells, 8)
    return FrozenTeacher(8, cells, in_order=in_order), inputs


MODELS = {
    "frozen_teacher": lambda: frozen_teacher(in_order=False),
    "frozen_teacher_twin": lambda: frozen_teacher(in_order=True),
    "message_passing": message_passing,
    "message_passing_twin": message_passing,
    "expert_mixture": lambda: expert_mixture(CombineByIndexPut),
    "expert_mixture_twin": lambda: expert_mixture(CombineByIndexAdd),
    "soft_histogram": lambda: soft_histogram(by_put=True),
    "soft_histogram_twin": lambda: soft_histogram(by_put=False),
    "tone_curve": lambda: tone_curve(by_take=True),
    "tone_curve_twin": lambda: tone_curve(by_take=False),
}
