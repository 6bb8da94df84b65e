"""The four workloads: one training step each, with real kernels of very different size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """A model, an input and an optimizer; calling it makes one step."""

    model: nn.Module
    example: torch.Tensor
    optimizer: torch.optim.Optimizer

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.example).float().mean().backward()
        self.optimizer.step()


class TransformerLayer(nn.Module):
    """Attention and a feed-forward part as most implementations write them; ``causal`` hides what comes later."""

    def __init__(self, width: int, *, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.output = nn.Linear(width, width), nn.Linear(width, width)
        self.norm_attention, self.norm_feed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.norm_attention(hidden + self.dropout(self.output(self.attend(hidden))))
        feed = self.contract(nn.functional.gelu(self.expand(hidden)))
        return self.norm_feed(hidden + self.dropout(feed))

    def attend(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = hidden.shape
        shape = batch, tokens, self.heads, width // self.heads
        query, key, value = (part(hidden).view(shape).transpose(1, 2) for part in (self.query, self.key, self.value))
        scores = query @ key.transpose(-1, -2) / shape[-1] ** 0.5
        if self.causal:
            later = torch.ones(tokens, tokens, dtype=torch.bool, device=hidden.device).triu(1)
            scores = scores.masked_fill(later, float("-inf"))
        weights = self.dropout(scores.softmax(-1))
        return (weights @ value).transpose(1, 2).reshape(batch, tokens, width)


class Transformer(nn.Module):
    """Token and position embeddings, four layers, a projection on the vocabulary."""

    def __init__(self, width: int, *, heads: int, causal: bool, vocabulary: int = 1000) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(512, width)
        self.layers = nn.Sequential(*[TransformerLayer(width, heads=heads, causal=causal) for _ in range(4)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.layers(hidden)))


def step_of(model: nn.Module, example: torch.Tensor) -> TrainingStep:
    """A step of SGD."""
    return TrainingStep(model, example, torch.optim.SGD(model.parameters(), lr=0.001))


def resnet18() -> TrainingStep:
    """Batch 8, 3×224×224: few and large kernels, so the speed of the hash decides."""
    import torchvision

    return step_of(torchvision.models.resnet18(), torch.randn(8, 3, 224, 224))


def mobilenet_v3_small() -> TrainingStep:
    """Batch 4, 3×224×224: many ops of middle size."""
    import torchvision

    return step_of(torchvision.models.mobilenet_v3_small(), torch.randn(4, 3, 224, 224))


def gpt2_like() -> TrainingStep:
    """4 layers, 256 wide, 2×128 tokens, causal."""
    return step_of(Transformer(256, heads=4, causal=True), torch.randint(0, 1000, (2, 128)))


def bert_like() -> TrainingStep:
    """4 layers, 128 wide, 1×32 tokens: many tiny ops, so the Python code for each op decides."""
    return step_of(Transformer(128, heads=2, causal=False), torch.randint(0, 1000, (1, 32)))


WORKLOADS: Mapping[str, Callable[[], TrainingStep]] = {
    "resnet18, batch 8": resnet18,
    "mobilenet_v3_small, batch 4": mobilenet_v3_small,
    "GPT-2-like, 4 layers, 256 wide, 2x128": gpt2_like,
    "BERT-like, 4 layers, 128 wide, 1x32": bert_like,
}
