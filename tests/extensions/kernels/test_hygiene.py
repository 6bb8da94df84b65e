"""Memory that a kernel does not write, state that it keeps, inputs that it writes: each beside a clean twin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hashbench.extensions.kernels.calls import Called, Caller
from hashbench.extensions.kernels.hygiene import Habits, repeated, unwritten, written_inputs
from hashbench.extensions.kernels.inputs import KernelInputs
from hashbench.extensions.kernels.verdict import FaultKind

X = torch.randn(64, 48, generator=torch.Generator().manual_seed(0))
ONE, OTHER = KernelInputs.of((X,), {}), KernelInputs.of((X.flip(0),), {})


def habits(kernel: Callable[..., Any]) -> Habits:
    caller = Caller(kernel, seed=0)

    def right(called: Called, inputs: KernelInputs) -> bool:
        return torch.allclose(called.results[0], inputs.leaves[0] * 2)

    return repeated(caller, caller(ONE), ONE, OTHER, right)


def partly_written(x: torch.Tensor, rows: int = 60) -> torch.Tensor:
    made = torch.empty_like(x)
    made[:rows] = x[:rows] * 2
    return made


def test_elements_that_were_not_written_are_named() -> None:
    (fault,) = unwritten(Caller(partly_written, seed=0), ONE, "given").faults
    assert fault.kind is FaultKind.UNWRITTEN
    assert fault.where == "the last 4 rows"
    assert fault.share == 4 / 64
    assert fault.detail.startswith("elements hold")


def test_what_is_computed_from_unwritten_memory_follows_it() -> None:
    (fault,) = unwritten(Caller(lambda x: x * 2 + torch.empty_like(x), seed=0), ONE, "given").faults
    assert fault.detail.startswith("elements follow")
    assert fault.share == 1


@pytest.mark.parametrize(
    "kernel", [lambda x: partly_written(x, 64), lambda x: torch.empty_like(x).zero_() + x], ids=["written", "zeroed"]
)
def test_written_memory_is_none(kernel: Callable[..., Any]) -> None:
    assert unwritten(Caller(kernel, seed=0), ONE, "given") == Habits()


def test_what_every_other_call_returns_follows_no_memory() -> None:
    calls: list[None] = []

    def kernel(x: torch.Tensor) -> torch.Tensor:
        calls.append(None)
        return x * len(calls[::2]) - x * len(calls[1::2])

    assert unwritten(Caller(kernel, seed=0), ONE, "given") == Habits()


def test_a_workspace_that_is_kept_is_stale() -> None:
    kept: dict[torch.Size, torch.Tensor] = {}

    def kernel(x: torch.Tensor) -> torch.Tensor:
        return kept.setdefault(x.shape, x * 2).clone()

    (fault,) = habits(kernel).faults
    assert fault.kind is FaultKind.STALE
    assert "returns the result of the call before" in fault.detail


def test_a_result_that_does_not_depend_on_the_inputs_is_not_stale() -> None:
    caller = Caller(torch.ones_like, seed=0)
    assert repeated(caller, caller(ONE), ONE, OTHER, lambda called, _: bool((called.results[0] == 1).all())) == Habits()
    assert habits(torch.ones_like) == Habits()  # nor where it is wrong: no call before it was right


def test_a_result_that_the_next_call_overwrites_is_stale() -> None:
    room = torch.empty_like(X)
    (fault,) = habits(lambda x: torch.mul(x, 2, out=room)).faults
    assert fault.kind is FaultKind.STALE
    assert "writes over" in fault.detail


def test_a_sum_that_is_not_cleared_differs_on_the_second_call() -> None:
    total = torch.zeros_like(X)

    def kernel(x: torch.Tensor) -> torch.Tensor:
        return total.add_(x * 2).clone()

    (fault,) = habits(kernel).faults
    assert fault.kind is FaultKind.CALLS_DIFFER
    assert "the second call with the same inputs is not" in fault.detail


def test_bits_that_differ_within_rounding_are_a_remark() -> None:
    factors = iter([1.0, 1 + 2e-7, 1.0, 1.0, 1.0])
    found = habits(lambda x: x * 2 * next(factors))
    assert found.faults == ()
    (remark,) = found.remarks
    assert "differs in bits from the first; both are within rounding" in remark


def test_a_clean_kernel_has_no_remarks() -> None:
    assert habits(lambda x: x * 2) == Habits()


def written(kernel: Callable[..., Any], reference: Callable[..., Any], *, ignores: bool = False) -> Habits:
    calls = (Caller(function, seed=0)(ONE) for function in (kernel, reference))
    return written_inputs(*calls, lambda _: ignores)


def test_an_input_that_only_the_kernel_writes_is_a_fault() -> None:
    (fault,) = written(lambda x: x.mul_(2), lambda x: x * 2).faults
    assert fault.kind is FaultKind.WRITES_INPUT
    assert fault.output == "input 0"


def test_a_place_for_the_result_is_a_remark() -> None:
    assert "does not read" in written(lambda x: x.mul_(2), lambda x: x * 2, ignores=True).remarks[0]


def test_an_input_that_both_write_is_a_remark() -> None:
    found = written(lambda x: x.mul_(2), lambda x: x.add_(x))
    assert found.faults == ()
    assert "both write input 0" in found.remarks[0]


def test_a_view_of_an_input_is_a_remark_unless_the_reference_returns_one() -> None:
    assert "in the memory of input 0" in written(lambda x: x.view(-1), lambda x: x.clone()).remarks[0]
    assert written(lambda x: x.view(-1), lambda x: x.view(-1)) == Habits()
