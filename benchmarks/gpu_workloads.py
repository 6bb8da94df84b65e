"""What is traced on an accelerator: the four workloads of ``workloads.py``, ResNet-50, and a GPT of 350M parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks import workloads as on_cpu
from benchmarks.workloads import TrainingStep, Transformer

Make = Callable[[torch.device], TrainingStep]

GPT, SMALL_GPT = "GPT, 350M parameters, bf16", "GPT, small, bf16"


@dataclass(frozen=True, slots=True)
class GptSize:
    """The defaults are those of GPT-2 medium: 354 million parameters."""

    layers: int = 24
    width: int = 1024
    heads: int = 16
    vocabulary: int = 50257
    tokens: int = 1024
    batch: int = 8


class Block(nn.Module):
    """Attention and feed-forward, each after a norm and beside a residual."""

    def __init__(self, size: GptSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm_attention, self.norm_feed = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.project, self.output = nn.Linear(size.width, 3 * size.width), nn.Linear(size.width, size.width)
        self.expand, self.contract = nn.Linear(size.width, 4 * size.width), nn.Linear(4 * size.width, size.width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = hidden.shape
        query, key, value = (
            part.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
            for part in self.project(self.norm_attention(hidden)).split(width, dim=2)
        )
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.output(attended.transpose(1, 2).reshape(batch, tokens, width))
        return hidden + self.contract(nn.functional.gelu(self.expand(self.norm_feed(hidden)), approximate="tanh"))


class Gpt(nn.Module):
    """A decoder whose last projection is its token embedding."""

    def __init__(self, size: GptSize) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(size.vocabulary, size.width), nn.Embedding(size.tokens, size.width)
        self.blocks = nn.Sequential(*[Block(size) for _ in range(size.layers)])
        self.norm = nn.LayerNorm(size.width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return nn.functional.linear(self.norm(self.blocks(hidden)), self.tokens.weight)


class LanguageStep(TrainingStep):
    """One step towards the next token."""

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        found = self.model(self.example[:, :-1]).flatten(0, 1)
        nn.functional.cross_entropy(found, self.example[:, 1:].flatten()).backward()
        self.optimizer.step()


def gpt(device: torch.device, size: GptSize = GptSize()) -> TrainingStep:
    """Random weights and tokens, bfloat16, AdamW."""
    with torch.device(device):
        model = Gpt(size).to(torch.bfloat16)
        tokens = torch.randint(0, size.vocabulary, (size.batch, size.tokens))
    return LanguageStep(model, tokens, torch.optim.AdamW(model.parameters(), lr=1e-4))


def vision(name: str, *, batch: int, side: int = 224) -> Make:
    """A model of torchvision with random weights."""

    def make(device: torch.device) -> TrainingStep:
        import torchvision

        with torch.device(device):
            model, example = getattr(torchvision.models, name)(), torch.randn(batch, 3, side, side)
        return TrainingStep(model, example, torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9))

    return make


def workloads(*, small: bool) -> Mapping[str, Make]:
    """By name: what makes the step on a device. Small ones have the same kinds of ops."""
    if small:
        size = GptSize(layers=2, width=32, heads=2, vocabulary=50, tokens=8, batch=2)
        return {
            "SqueezeNet, small": vision("squeezenet1_1", batch=1, side=32),
            "BERT-like, small": lambda device: _moved(
                on_cpu.step_of(Transformer(16, heads=2, causal=True), torch.randint(0, 1000, (1, 8))), device
            ),
            SMALL_GPT: lambda device: gpt(device, size),
        }
    four: dict[str, Make] = {
        name: lambda device, make=make: _moved(make(), device)  # type: ignore[misc]
        for name, make in on_cpu.WORKLOADS.items()
    }
    return {**four, "ResNet-50, batch 64": vision("resnet50", batch=64), GPT: gpt}


def _moved(step: TrainingStep, device: torch.device) -> TrainingStep:
    """The optimizer has no state yet and keeps its parameters, which are moved in place."""
    return TrainingStep(step.model.to(device), step.example.to(device), step.optimizer)
