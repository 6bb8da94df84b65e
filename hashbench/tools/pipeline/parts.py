"""The decorators by which a file's functions become the parts of its pipeline, and the names that do without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_MARK = "__hashbench_pipeline__"
_Function = TypeVar("_Function", bound=Callable[..., Any])

NAMES = ("make_loader", "make_model", "make_optimizer", "loss", "forward", "set_seed")
"""What a file's functions may be called; only ``make_loader`` must be there."""


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
    """Mark the function that is called first, with the seed: what the training script does to seed itself."""
    return _marked(function, "set_seed")


def _marked(function: _Function, part: str) -> _Function:
    setattr(function, _MARK, part)
    return function


def part_of(value: Any) -> str:
    """Which part a function was marked to be; empty where it was not."""
    found = getattr(value, _MARK, "") if callable(value) else ""
    return found if isinstance(found, str) else ""
