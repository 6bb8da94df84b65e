"""Training steps of several kinds, and a count of everything that may wait for a device."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

SYNCHRONIZING = frozenset(
    f"aten::{name}"
    for name in (
        *("_local_scalar_dense", "item", "is_nonzero", "equal", "_to_copy", "copy_", "_copy_from", "nonzero"),
        *("masked_select", "_unique2", "unique_dim", "repeat_interleave.Tensor", "_assert_async"),
    )
)
"""Ops that wait for a device, or copy between devices. A copy within one device would not wait, but the trace has no
need of any."""

METHODS = ("item", "tolist", "numpy", "cpu", "to", "__bool__", "__int__", "__float__", "__index__", "__array__")


class Waits(TorchDispatchMode):
    """Counts ops that wait for a device, whoever calls them: it is entered before the trace, so it sees the ops of the
    trace's own code as well as those of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in SYNCHRONIZING:
            self.count[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def counting() -> Iterator[Counter[str]]:
    """How often anything inside may wait: ops, methods of tensors, and plain synchronization."""
    with Waits() as waits, pytest.MonkeyPatch.context() as patch:

        def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def call(*args: Any, **kwargs: Any) -> Any:
                waits.count[name] += 1
                return function(*args, **kwargs)

            return call

        for name in METHODS:
            patch.setattr(torch.Tensor, name, counted(name, getattr(torch.Tensor, name)))
        for module in (torch.accelerator, torch.cuda, torch.cpu):
            patch.setattr(module, "synchronize", counted("synchronize", module.synchronize))
        yield waits.count


def training(optimizer: str, *, reentrant: bool | None, device: str = "cpu") -> Callable[[], list[torch.Tensor]]:
    """A step with convolution, normalization, dropout and an embedding, the first part checkpointed where asked. It
    returns its loss and parameters."""
    torch.manual_seed(0)
    first = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Dropout())
    last, words = torch.nn.Linear(4, 5), torch.nn.Embedding(7, 4)
    parameters = [*first.to(device).parameters(), *last.to(device).parameters(), *words.to(device).parameters()]
    made = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[optimizer](parameters, lr=0.1, foreach=True)
    images = torch.randn(2, 3, 8, 8).to(device).requires_grad_()
    tokens, classes = torch.tensor([[1, 2], [3, 4]]).to(device), torch.tensor([1, 2]).to(device)

    def step() -> list[torch.Tensor]:
        made.zero_grad()
        features = first(images) if reentrant is None else checkpoint(first, images, use_reentrant=reentrant)
        pooled = features.mean((2, 3)) + words(tokens).sum(1)
        loss = torch.nn.functional.cross_entropy(last(pooled), classes)
        loss.backward()
        made.step()
        return [loss.detach(), *parameters]

    return step


STEPS: dict[str, Callable[[str], Callable[[], list[torch.Tensor]]]] = {
    "SGD, foreach": lambda device: training("sgd", reentrant=None, device=device),
    "Adam, foreach": lambda device: training("adam", reentrant=None, device=device),
    "a checkpoint": lambda device: training("sgd", reentrant=False, device=device),
    "a reentrant checkpoint": lambda device: training("sgd", reentrant=True, device=device),
}
