"""Specimens in which something outlives the deep copy of a run: a shared buffer, a setting changed only once."""

from __future__ import annotations

import copy
from typing import Any

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


MODELS = {
    "clustered_head": lambda: clustered_head(shared=True),
    "clustered_head_twin": lambda: clustered_head(shared=False),
    "position_encoder": lambda: position_encoder(once=True),
    "position_encoder_twin": lambda: position_encoder(once=False),
}
