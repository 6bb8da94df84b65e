"""What a call of a kernel leaves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hashbench.core.diagnose.replay.controls.memory import POISONS
from hashbench.extensions.kernels.calls import Caller, leaving
from hashbench.extensions.kernels.inputs import KernelInputs

X = torch.arange(6.0).view(2, 3)


def inputs(*args: Any, **kwargs: Any) -> KernelInputs:
    return KernelInputs.of(args, kwargs)


def test_results_are_copies_and_named_by_place() -> None:
    called = Caller(lambda x, *, scale: {"a": x * scale, "b": (x + 1,)}, seed=0)(inputs(X, scale=2.0))
    assert called.names == ("output.a", "output.b.0")
    assert torch.equal(called.results[0], X * 2)
    assert called.written == called.aliased == frozenset()


def test_inputs_are_copied_and_what_is_written_is_seen() -> None:
    given = X.clone()
    called = Caller(lambda x, y: x.mul_(2) + y, seed=0)(inputs(given, torch.ones(3)))
    assert torch.equal(given, X)
    assert called.written == {0}


def test_a_result_in_the_memory_of_an_input_is_seen() -> None:
    assert Caller(lambda _, y: y[1:], seed=0)(inputs(X, X)).aliased == {1}


def test_a_result_that_is_written_later_is_seen() -> None:
    room = torch.empty(2, 3)
    caller = Caller(lambda x: room.copy_(x), seed=0)
    first = caller(inputs(X))
    assert first.overwritten() == ()
    caller(inputs(X + 1))
    assert first.overwritten() == ("output",)
    assert torch.equal(first.results[0], X)


def test_each_call_begins_with_the_same_random_state() -> None:
    caller = Caller(lambda x: x + torch.rand(()), seed=3)
    assert caller(inputs(X)).same_bits(caller(inputs(X)))


def test_an_error_is_kept() -> None:
    def kernel(x: torch.Tensor) -> torch.Tensor:
        raise ValueError(f"{x.dim()} dimensions")

    assert str(Caller(kernel, seed=0)(inputs(X)).error) == "2 dimensions"


def numpy_softmax(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if not isinstance(x, np.ndarray):
        raise TypeError("arrays only")
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def test_a_kernel_that_raises_on_tensors_gets_arrays() -> None:
    caller = Caller(numpy_softmax, seed=0)
    called = caller(inputs(X))
    assert caller.takes_arrays
    assert torch.allclose(called.results[0], X.softmax(-1))
    assert caller(inputs(X + 1)).error is None


def test_arrays_stay_arrays() -> None:
    called = Caller(numpy_softmax, seed=0)(inputs(X.numpy()))
    assert torch.allclose(called.results[0], X.softmax(-1))


def test_a_kernel_that_writes_an_array_is_seen() -> None:
    def kernel(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        x *= 2
        return x

    called = Caller(kernel, seed=0)(inputs(X.numpy()))
    assert called.written == called.aliased == {0}


def test_an_error_on_tensors_and_arrays_is_that_of_tensors() -> None:
    def kernel(x: Any) -> Any:
        raise TypeError(type(x).__name__)

    caller = Caller(kernel, seed=0)
    assert str(caller(inputs(X)).error) == "Tensor"
    assert not caller.takes_arrays


@pytest.mark.parametrize("poison", POISONS)
def test_fresh_memory_holds_the_poison(poison: int) -> None:
    called = Caller(lambda x: torch.empty_like(x), seed=0)(inputs(X), poison=poison)
    assert bool((called.results[0].view(torch.uint8) == poison).all())


def test_what_is_left_in_inputs_is_a_result() -> None:
    def kernel(x: torch.Tensor, room: torch.Tensor) -> None:
        room.copy_(x * 2)

    called = Caller(leaving(kernel, [1], returns=False), seed=0)(inputs(X, torch.zeros(2, 3)))
    assert torch.equal(called.results[0], X * 2)
    assert len(called.results) == 1
