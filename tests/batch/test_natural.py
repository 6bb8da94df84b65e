"""Torch's own kernels, of which this machine decides whether an item's rows depend on the number of items: torch alone
says first in which batches they do, and exactly that is the verdict. Twins have numbers of which every sum is exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn import functional

from hashbench.check.function import FunctionCall, check_batches
from hashbench.records import BATCH_INVARIANCE, RunOptions
from hashbench.run.outputs import bitwise_equal

BATCH, HALVES = 8, (4, 2, 1)
OPTIONS = RunOptions(mode=BATCH_INVARIANCE, deterministic="off", threads=1, diagnose_budget=10.0)


def numbers(*shape: int, whole: bool) -> torch.Tensor:
    return torch.randint(-3, 4, shape).float() if whole else torch.randn(shape)


class Kernel(nn.Module):
    """One kernel between two ops that are exact."""

    def __init__(self, *weights: torch.Tensor) -> None:
        super().__init__()
        self.weights = nn.ParameterList(weights)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -self.computed(x * 2 if x.is_floating_point() else x)

    def computed(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class MatrixVector(Kernel):
    """One row is a product of a matrix and a vector; few rows and many are tiled in other ways."""

    def computed(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, *self.weights)


class SplitReduction(Kernel):
    """A sum over a dimension that is not the last, of which several columns are added at once, and the rest one by
    one."""

    def computed(self, x: torch.Tensor) -> torch.Tensor:
        return x.t().contiguous().sum(0)


class FusedAttention(Kernel):
    def computed(self, x: torch.Tensor) -> torch.Tensor:
        keys, values = (x * weight for weight in self.weights)
        return functional.scaled_dot_product_attention(x, keys, values)


class Convolution(Kernel):
    """Another algorithm for one image."""

    def computed(self, x: torch.Tensor) -> torch.Tensor:
        return functional.conv2d(x, *self.weights, stride=2)


class RecurrentStep(Kernel):
    def computed(self, x: torch.Tensor) -> torch.Tensor:
        return torch.gru_cell(x, x, *self.weights)


class EmbeddingBag(Kernel):
    def computed(self, x: torch.Tensor) -> torch.Tensor:
        return functional.embedding_bag(x, *self.weights, mode="sum")


def attention(*, whole: bool) -> tuple[Kernel, torch.Tensor]:
    """The twin gives each of 64 keys the same weight, a power of two."""
    scale = torch.zeros(()) if whole else torch.ones(())
    return FusedAttention(scale, torch.ones(())), numbers(BATCH, 4, 64, 32, whole=whole)


NATURAL: dict[str, tuple[str, Callable[..., tuple[Kernel, torch.Tensor]]]] = {
    "matrix-vector": (
        "addmm mm",
        lambda whole: (
            MatrixVector(numbers(1000, 512, whole=whole), numbers(1000, whole=whole)),
            numbers(BATCH, 512, whole=whole),
        ),
    ),
    "split reduction": ("sum", lambda whole: (SplitReduction(), numbers(BATCH, 1000, whole=whole))),
    "fused attention": ("_scaled_dot_product_flash_attention_for_cpu bmm _softmax", attention),
    "convolution": (
        "convolution",
        lambda whole: (Convolution(numbers(16, 8, 3, 3, whole=whole)), numbers(BATCH, 8, 16, 16, whole=whole)),
    ),
    "gru step": (
        "addmm mm sigmoid_ sigmoid tanh_ tanh",
        lambda whole: (
            RecurrentStep(*(numbers(192, 64, whole=whole) for _ in range(2))),
            numbers(BATCH, 64, whole=whole),
        ),
    ),
    "embedding_bag": (
        "_embedding_bag _embedding_bag_forward_only",
        lambda whole: (EmbeddingBag(numbers(97, 33, whole=whole)), torch.randint(0, 97, (BATCH, 50))),
    ),
}


@contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def differs_at(kernel: Kernel, x: torch.Tensor) -> int | None:
    """The largest half of the batch whose items torch alone computes otherwise."""
    with one_thread(), torch.no_grad():
        whole = kernel(x)
        return next((size for size in HALVES if not bitwise_equal(kernel(x[:size].clone()), whole[:size])), None)


@pytest.mark.parametrize("whole", [False, True], ids=["natural", "twin"])
@pytest.mark.parametrize("name", NATURAL)
def test_the_verdict_is_what_torch_alone_does_on_this_machine(name: str, *, whole: bool) -> None:
    ops, make = NATURAL[name]
    torch.manual_seed(0)
    kernel, x = make(whole=whole)
    size = differs_at(kernel, x)
    row = check_batches(FunctionCall.of(kernel, [x], {}), name, OPTIONS)
    if size is None:
        assert (row.accuracy, row.kernel) == ("pass", "")
        return
    assert not whole, "every sum of these numbers is exact"
    assert row.accuracy == f"fail_batch_invariance_at_{size}"
    assert row.kernel.split(".")[1] in ops.split(), row.kernel
    assert (row.cause, row.origin) == ("shape_dependent_kernel", "kernel"), row.because
