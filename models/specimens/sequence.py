"""Specimens in which the operations themselves change: which run, or in which order (origin ``sequence``)."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import nn

Example = tuple[nn.Module, tuple[torch.Tensor, ...]]

_COINS = torch.Generator().manual_seed(0)


class RandomActivation(nn.Module):
    """A deep residual network that picks each layer's activation by a coin, read back with ``.item()``."""

    def __init__(self, features: int, layers: int, *, private: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(features, features) for _ in range(layers))
        self.private = private

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        coins = torch.rand(len(self.layers), generator=_COINS if self.private else None)
        for coin, layer in zip(coins, self.layers, strict=True):
            activation = torch.relu if coin.item() < 0.5 else torch.tanh
            features = features + activation(layer(features))
        return features


def random_activation(*, private: bool) -> Example:
    return RandomActivation(16, 32, private=private), (torch.randn(8, 16),)


def time_budget() -> float:
    """Milliseconds within the current second: as good as any number between 0 and 1000."""
    return time.perf_counter() * 1000 % 1000


class AnytimeRefinement(nn.Module):
    """Refine an estimate by as many binary choices as fit a time budget: each bit of it chooses a branch."""

    def __init__(self, features: int, bits: int, *, clocked: bool) -> None:
        super().__init__()
        self.refine = nn.Linear(features, features)
        self.correct = nn.Linear(features, features)
        self.bits, self.clocked = bits, clocked

    def forward(self, estimate: torch.Tensor) -> torch.Tensor:
        budget = torch.tensor(time_budget() if self.clocked else 500.0, dtype=torch.float64)
        for _ in range(self.bits):
            budget = budget * 2 % 1000
            branch = self.refine if budget.item() < 500 else self.correct
            estimate = estimate + torch.tanh(branch(estimate))
        return estimate


def anytime_refinement(*, clocked: bool) -> Example:
    return AnytimeRefinement(16, 24, clocked=clocked), (torch.randn(8, 16),)


class CameraFusion(nn.Module):
    """Fuse the views of many cameras: each branch joins as soon as its camera's picture has been decoded."""

    def __init__(self, features: int, cameras: int, *, in_order: bool) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(features, features) for _ in range(cameras))
        self.in_order = in_order

    def decoded(self) -> list[int]:
        """The cameras, in their own order or in that in which eight workers come to an end with their pictures."""
        finished: list[int] = []

        def work(camera: int) -> None:
            decode()
            finished.append(camera)

        with ThreadPoolExecutor(max_workers=8) as pool:
            list(pool.map(work, range(len(self.branches))))
        return sorted(finished) if self.in_order else finished

    def forward(self, *views: torch.Tensor) -> torch.Tensor:
        fused = torch.zeros_like(views[0])
        for camera in self.decoded():
            fused = torch.tanh(fused + self.branches[camera](views[camera]))
        return fused


def decode() -> None:
    """Stand for a camera that sends its picture within 2 ms, as /dev/urandom says: no experiment holds that still, and
    on no machine do pictures come in the order of the cameras."""
    with Path("/dev/urandom").open("rb", buffering=0) as noise:
        time.sleep(noise.read(1)[0] / 128_000)


def camera_fusion(*, in_order: bool) -> Example:
    cameras = 32
    return CameraFusion(16, cameras, in_order=in_order), tuple(torch.randn(8, 16) for _ in range(cameras))


class NodeGraph(nn.Module):
    """A chain of nodes that are all ready and wait in a set, hence run in the order of their addresses."""

    def __init__(self, features: int, nodes: int, *, in_order: bool) -> None:
        super().__init__()
        self.nodes = nn.ModuleList(nn.Linear(features, features) for _ in range(nodes))
        self.in_order = in_order

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        ready = set(self.nodes)
        for node in self.nodes if self.in_order else ready:
            features = torch.tanh(node(features) + features)
        return features


def node_graph(*, in_order: bool) -> Example:
    return NodeGraph(16, 32, in_order=in_order), (torch.randn(8, 16),)


class AdaptiveDepth(nn.Module):
    """Apply each layer as often as a byte from a hardware source says, which no experiment can hold still."""

    def __init__(self, features: int, layers: int, *, source: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(features, features) for _ in range(layers))
        self.source = source

    def depth(self) -> int:
        with Path(self.source).open("rb", buffering=0) as source:
            return 1 + source.read(1)[0] % 16

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            for _ in range(self.depth()):
                features = torch.tanh(features + layer(features))
        return features


def adaptive_depth(*, source: str) -> Example:
    return AdaptiveDepth(16, 3, source=source), (torch.randn(8, 16),)


MODELS = {
    "random_activation": lambda: random_activation(private=True),
    "random_activation_twin": lambda: random_activation(private=False),
    "anytime_refinement": lambda: anytime_refinement(clocked=True),
    "anytime_refinement_twin": lambda: anytime_refinement(clocked=False),
    "camera_fusion": lambda: camera_fusion(in_order=False),
    "camera_fusion_twin": lambda: camera_fusion(in_order=True),
    "node_graph": lambda: node_graph(in_order=False),
    "node_graph_twin": lambda: node_graph(in_order=True),
    "adaptive_depth": lambda: adaptive_depth(source="/dev/urandom"),
    "adaptive_depth_twin": lambda: adaptive_depth(source="/dev/zero"),
}
