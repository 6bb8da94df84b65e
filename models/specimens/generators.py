"""Specimens with randomness that no reset of the global generators reaches: private generators, system entropy."""

from __future__ import annotations

import random
import secrets
import uuid
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

Example = tuple[nn.Module, tuple[torch.Tensor, ...]]

_MIXER = np.random.default_rng(0)


def token_picker(generator: random.Random | None) -> Callable[[int], list[float]]:
    """A function that keeps 7 tokens in 10. What it draws from is known to the innermost of its scopes alone."""
    draw = random.random if generator is None else generator.random

    def with_rate(rate: float) -> Callable[[int], list[float]]:
        def pick(tokens: int) -> list[float]:
            return [float(draw() < rate) for _ in range(tokens)]

        return pick

    return with_rate(0.7)


class TokenMask(nn.Module):
    """Zero some tokens."""

    def __init__(self, pick: Callable[[int], list[float]]) -> None:
        super().__init__()
        self.pick = pick

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens * torch.tensor(self.pick(tokens.shape[1]))[:, None]


class MaskedBlock(nn.Module):
    """A residual block that masks what it adds."""

    def __init__(self, features: int, pick: Callable[[int], list[float]]) -> None:
        super().__init__()
        self.regularised = nn.ModuleDict({"layer": nn.Linear(features, features), "mask": TokenMask(pick)})

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens + self.regularised["mask"](torch.tanh(self.regularised["layer"](tokens)))


class TokenMasking(nn.Module):
    """Blocks with masks; the second of them may draw from a generator of its own."""

    def __init__(self, features: int, generator: random.Random | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MaskedBlock(features, token_picker(own)) for own in (None, generator))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            tokens = block(tokens)
        return tokens


def token_masking(generator: random.Random | None) -> Example:
    return TokenMasking(16, generator), (torch.randn(4, 64, 16),)


class MixupClassifier(nn.Module):
    """Blend each example with its neighbour, by a share drawn for the batch, before a classifier."""

    def __init__(self, features: int, share: Callable[[float, float], float]) -> None:
        super().__init__()
        self.embed = nn.Linear(features, features)
        self.classify = nn.Linear(features, 4)
        self.share = share

    def forward(self, examples: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.embed(examples))
        return self.classify(torch.lerp(hidden, hidden.roll(1, dims=0), self.share(0.4, 0.4)))


def mixup_augmentation(share: Callable[[float, float], float]) -> Example:
    return MixupClassifier(16, share), (torch.randn(8, 16),)


class SaltedEmbedding(nn.Module):
    """Embed identifiers by their salted hash, so that those who know the table cannot aim at a row."""

    def __init__(self, rows: int, features: int, salt: Callable[[], int]) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, features)
        self.salt = salt

    def forward(self, identifiers: torch.Tensor) -> torch.Tensor:
        return self.table((identifiers * 40_503 + self.salt()) % self.table.num_embeddings)


def session_salt(salt: Callable[[], int]) -> Example:
    return SaltedEmbedding(1024, 8, salt), (torch.randint(1000, (8, 16)),)


class ExploringPolicy(nn.Module):
    """Probabilities of actions, flattened in one call of twenty so that every action is tried."""

    def __init__(self, features: int, actions: int, below: Callable[[int], int]) -> None:
        super().__init__()
        self.score = nn.Linear(features, actions)
        self.below = below

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        temperature = 4.0 if self.below(20) == 0 else 1.0
        return (self.score(states) / temperature).softmax(dim=-1)


def rare_exploration(below: Callable[[int], int]) -> Example:
    return ExploringPolicy(4, 3, below), (torch.randn(2, 4),)


MODELS = {
    "token_masking": lambda: token_masking(random.Random(0)),
    "token_masking_twin": lambda: token_masking(None),
    "mixup_augmentation": lambda: mixup_augmentation(lambda one, other: float(_MIXER.beta(one, other))),
    "mixup_augmentation_twin": lambda: mixup_augmentation(lambda one, other: float(np.random.beta(one, other))),
    "session_salt": lambda: session_salt(lambda: uuid.uuid4().int % 1021),
    "session_salt_twin": lambda: session_salt(lambda: random.getrandbits(128) % 1021),
    "rare_exploration": lambda: rare_exploration(secrets.randbelow),
    "rare_exploration_twin": lambda: rare_exploration(random.randrange),
}
