"""Models for a sweep whose kernels are Triton's: one right, one with torch's own planted mistake."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch._inductor.config

from tests.core.inductor import interpreted


class Gated(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(16, 32), torch.nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gated: torch.Tensor = self.b((self.a(x) * 1.5).relu())
        return gated


Built = tuple[torch.nn.Module, tuple[torch.Tensor, ...]]


def right() -> Built:
    if os.environ.get("TRITON_INTERPRET"):
        interpreted.prepare("cpu")
    return Gated(), (torch.randn(8, 16),)


def wrong() -> Built:
    torch._inductor.config.triton.inject_relu_bug_TESTING_ONLY = "accuracy"
    return right()


MODELS: dict[str, Callable[[], Built]] = {"right": right, "wrong": wrong}
