"""A call of a Python function, copied afresh for every run: what one run changes, the next must not see."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hashbench.errors import HashbenchError
from hashbench.run.inputs import clone_inputs
from hashbench.trace.arguments import named_tensors

_CARRIES_STATE = (
    torch.Tensor,
    torch.nn.Module,
    torch.optim.Optimizer,
    torch.Generator,
    np.ndarray,
    np.random.Generator,
    np.random.RandomState,
    random.Random,
)

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A function with its arguments by name, positional ones by their place (``0``).

    ``wholly``: everything among the arguments is copied for a run. Otherwise, as for fixtures of a test, only
    tensors, modules, optimizers, arrays and random generators are, also those in lists, tuples and dictionaries.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    wholly: bool = True

    @classmethod
    def of(
        cls, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, wholly: bool = True
    ) -> FunctionCall:
        """A call whose function is no ``functools.partial``: what that has bound is among the arguments."""
        if isinstance(function, functools.partial):
            args, kwargs = (*function.args, *args), {**function.keywords, **kwargs}
            function = function.func
        return cls(function, tuple(args), kwargs, wholly)

    def named(self) -> dict[str, Any]:
        """The arguments by name, and the function itself where it is a module, or its method."""
        owner = getattr(self.function, "__self__", None)
        module = self.function if isinstance(self.function, torch.nn.Module) else owner
        found = {"<function>": module} if isinstance(module, torch.nn.Module) else {}
        return found | {str(place): value for place, value in enumerate(self.args)} | dict(self.kwargs or {})

    def __call__(self) -> Any:
        return self.function(*self.args, **(self.kwargs or {}))


def fresh_copy(call: FunctionCall) -> FunctionCall:
    """A copy of a call in which whatever shared memory or referred to each other still does.

    Raises:
        HashbenchError: an argument cannot be copied.
    """
    memo: dict[int, Any] = {}
    for _, tensor in named_tensors(call.named()):
        # torch copies leaves only, so that the gradient ends here, and none whose rows or columns are compressed
        if tensor.grad_fn is not None or tensor.layout in _COMPRESSED:
            memo[id(tensor)] = clone_inputs(tensor)
    copied = {name: _copy(value, memo, name, wholly=call.wholly) for name, value in call.named().items()}
    function = _copy_function(call.function, memo)
    args = tuple(copied[str(place)] for place in range(len(call.args)))
    return FunctionCall(function, args, {name: copied[name] for name in call.kwargs or {}}, call.wholly)


def _copy_function(function: Callable[..., Any], memo: dict[int, Any]) -> Callable[..., Any]:
    """Modules and their methods are copied; other functions are what they are."""
    owner = getattr(function, "__self__", None)
    if isinstance(function, torch.nn.Module) or isinstance(owner, torch.nn.Module):
        return _copy(function, memo, "the function", wholly=True)  # type: ignore[no-any-return]
    return function


def _copy(value: Any, memo: dict[int, Any], name: str, *, wholly: bool) -> Any:
    if wholly or isinstance(value, _CARRIES_STATE):
        try:
            return copy.deepcopy(value, memo)
        except Exception as error:
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            raise HashbenchError(
                f"cannot copy argument {name}, a {kind} ({type(error).__name__}: {error})",
                consequence="a second run would see what the first one changed in it",
                tip="Make it inside the function.",
            ) from error
    if type(value) in (list, tuple):
        return type(value)(_copy(item, memo, f"{name}.{place}", wholly=False) for place, item in enumerate(value))
    if type(value) is dict:
        return {key: _copy(item, memo, f"{name}.{key}", wholly=False) for key, item in value.items()}
    return value


def parts_of(call: FunctionCall) -> Iterator[tuple[str, Any]]:
    """The modules and optimizers among the arguments, with their place (``0``, ``nets.1``)."""
    for name, value in call.named().items():
        yield from _parts(value, name)


def _parts(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (torch.nn.Module, torch.optim.Optimizer)):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _parts(item, f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for place, item in enumerate(value):
            yield from _parts(item, f"{name}.{place}")
