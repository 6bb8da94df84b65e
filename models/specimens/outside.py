"""Specimens whose results depend on a generator, a clock, a counter or a write that torch knows nothing of."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from hashbench.core.run.workload import Workload

Example = tuple[nn.Module, tuple[torch.Tensor, ...]]

_NOISE = torch.Generator().manual_seed(0)
_STEPS = itertools.count()


class NoisySampler(nn.Module):
    """Draw an action from logits by the Gumbel trick, with a generator of the module's own or torch's."""

    def __init__(self, features: int, actions: int, generator: torch.Generator | None) -> None:
        super().__init__()
        self.score = nn.Linear(features, actions)
        self.noise = GumbelNoise(generator)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return (self.score(states) + self.noise(len(states), self.score.out_features)).softmax(dim=-1)


class GumbelNoise(nn.Module):
    """Gumbel noise; the generator stays out of the module's attributes so that copies of the module share it."""

    def __init__(self, generator: torch.Generator | None) -> None:
        super().__init__()
        self.draw = lambda *shape: torch.rand(shape, generator=generator)

    def forward(self, rows: int, columns: int) -> torch.Tensor:
        return -torch.log(-torch.log(self.draw(rows, columns).clamp(1e-6, 1 - 1e-6)))


def noisy_sampler(generator: torch.Generator | None) -> Example:
    return NoisySampler(16, 6, generator), (torch.randn(32, 16),)


class JitteredFeatures(nn.Module):
    """Augment features with noise from NumPy before a classifier."""

    def __init__(self, features: int, noise: Callable[[int], np.ndarray]) -> None:
        super().__init__()
        self.classify = nn.Linear(features, 10)
        self.noise = noise

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        jitter = torch.from_numpy(self.noise(features.numel())).view_as(features)
        return self.classify(features + 0.1 * jitter.to(features.dtype))


def jittered_features(noise: Callable[[int], np.ndarray]) -> Example:
    return JitteredFeatures(16, noise), (torch.randn(32, 16),)


class AgeEncoding(nn.Module):
    """Scale an event's embedding by how long ago it was, measured from ``now``."""

    def __init__(self, features: int, now: Callable[[], float]) -> None:
        super().__init__()
        self.embed = nn.Linear(features, features)
        self.now = now

    def forward(self, events: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.embed(events) * (1 + self.now() % 1))


def age_encoding(now: Callable[[], float]) -> Example:
    return AgeEncoding(16, now), (torch.randn(32, 16),)


class AnnealedAttention(nn.Module):
    """Attention whose temperature falls with every step that ``steps`` counts."""

    def __init__(self, features: int, steps: itertools.count[int] | None) -> None:
        super().__init__()
        self.project = nn.Linear(features, 3 * features)
        self.count = (lambda: next(steps)) if steps is not None else (lambda: 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        query, key, value = self.project(tokens).chunk(3, dim=-1)
        temperature = torch.tensor(1.0 + self.count())
        return (query @ key.transpose(-1, -2) / temperature).softmax(dim=-1) @ value


def annealed_attention(steps: itertools.count[int] | None) -> Example:
    return AnnealedAttention(16, steps), (torch.randn(4, 12, 16),)


class StochasticRounding(nn.Module):
    """Round activations up or down at random, in place, through a NumPy view of the tensor's memory."""

    def __init__(self, features: int, noise: Callable[[int], np.ndarray]) -> None:
        super().__init__()
        self.first = nn.Linear(features, features)
        self.second = nn.Linear(features, features)
        self.noise = noise

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden = self.first(features)
        memory = hidden.detach().numpy()
        chance = self.noise(memory.size).reshape(memory.shape)
        memory[...] = np.floor(memory * 16 + chance) / 16
        return self.second(hidden)


def stochastic_rounding(noise: Callable[[int], np.ndarray]) -> Example:
    return StochasticRounding(32, noise), (torch.randn(64, 32),)


def unseeded(size: int) -> np.ndarray:
    return np.random.default_rng().random(size)


def seeded_globally(size: int) -> np.ndarray:
    return np.random.random(size)


def denoiser(noise: Callable[[int], np.ndarray]) -> Workload:
    """A denoising autoencoder whose noisy inputs are drawn for every run."""
    module = nn.Sequential(nn.Linear(16, 4), nn.Tanh(), nn.Linear(4, 16))
    return Workload(module, make_inputs=lambda: (torch.tensor(noise(32 * 16), dtype=torch.float32).view(32, 16),))


MODELS = {
    "noisy_sampler": lambda: noisy_sampler(_NOISE),
    "noisy_sampler_twin": lambda: noisy_sampler(None),
    "jittered_features": lambda: jittered_features(unseeded),
    "jittered_features_twin": lambda: jittered_features(seeded_globally),
    "age_encoding": lambda: age_encoding(time.perf_counter),
    "age_encoding_twin": lambda: age_encoding(lambda: 0.25),
    "annealed_attention": lambda: annealed_attention(_STEPS),
    "annealed_attention_twin": lambda: annealed_attention(None),
    "stochastic_rounding": lambda: stochastic_rounding(unseeded),
    "stochastic_rounding_twin": lambda: stochastic_rounding(seeded_globally),
    "denoiser": lambda: denoiser(unseeded),
    "denoiser_twin": lambda: denoiser(seeded_globally),
}
