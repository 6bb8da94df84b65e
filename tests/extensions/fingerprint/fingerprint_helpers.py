"""A small model, its step, and planted kernels, for tests of fingerprints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hashbench.extensions.fingerprint.checking import check
from hashbench.extensions.fingerprint.document import Fingerprints
from hashbench.extensions.fingerprint.verify import Verification, summary


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.first = torch.nn.Embedding(50, 8), torch.nn.Linear(8, 16)
        self.conv, self.norm = torch.nn.Conv1d(16, 4, 3), torch.nn.BatchNorm1d(4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.silu(self.first(self.embedding(tokens)))
        return self.norm(self.conv(hidden.transpose(1, 2))).softmax(-1)


def step() -> None:
    """Forward, backward and an optimizer's step."""
    torch.manual_seed(1)
    net, tokens = Net(), torch.arange(24).reshape(2, 12) % 7
    net(tokens).square().sum().backward()
    torch.optim.Adam(net.parameters(), lr=0.01, foreach=True).step()


def verified(fingerprints: Fingerprints) -> Verification:
    return summary(fingerprints, list(check(fingerprints)))


@contextmanager
def planted(op: str, kernel: Callable[..., Any]) -> Iterator[None]:
    """Another implementation of an op of torch's on the CPU, in this process."""
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl(op, kernel, "CPU")
        yield
    finally:
        library._destroy()


PLANTED: dict[str, Callable[..., Any]] = {
    "silu": lambda x: torch.ops.aten.mul(torch.sigmoid(x), x) * 2,
    "_softmax": lambda x, _dim, _half: torch.zeros_like(x),
    "silu_backward": lambda grad, _x: grad * 2,
    "pow.Tensor_Scalar": lambda x, _exponent: x * 3,
}
