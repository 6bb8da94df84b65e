"""``hashbench pipeline``: check whether a training pipeline is reproducible, and name the first stage that differs.

A check runs the user's own loader, transforms, model and a few training steps in a fresh process and writes a folder;
two such folders, from two processes, days or machines, are compared. The functions of a pipeline are found in a file by
name, or marked by the decorators below.

>>> from hashbench.tools import pipeline
>>> @pipeline.loader
... def images(seed):
...     return torch.utils.data.DataLoader(...)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["forward", "loader", "loss", "model", "optimizer", "seeding"]

MARK = "__hashbench_pipeline__"
"""Attribute of a decorated function: its role, one of :data:`~hashbench.tools.pipeline.checking.NAMES`."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


def loader(function: _Function, /) -> _Function:
    """Mark the function that is called with the seed and returns the loader of batches."""
    return _marked(function, "make_loader")


def model(function: _Function, /) -> _Function:
    """Mark the function that is called without arguments and returns the model, on its device."""
    return _marked(function, "make_model")


def optimizer(function: _Function, /) -> _Function:
    """Mark the function that is called with the model's parameters and returns the optimizer."""
    return _marked(function, "make_optimizer")


def loss(function: _Function, /) -> _Function:
    """Mark the function that is called with the model's output and the batch and returns a scalar tensor."""
    return _marked(function, "loss")


def forward(function: _Function, /) -> _Function:
    """Mark the function that is called with the model and a batch and returns the output."""
    return _marked(function, "forward")


def seeding(function: _Function, /) -> _Function:
    """Mark the function that is called first, with the seed: it seeds what the training script seeds."""
    return _marked(function, "set_seed")


def _marked(function: _Function, part: str) -> _Function:
    setattr(function, MARK, part)
    return function
