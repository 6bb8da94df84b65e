"""The native tracer changes nothing, over samples of what ``tests.core.trace.native.parity`` runs in full; see
there."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from hashbench import HashDebugTrace
from hashbench.core.trace.tracer import native_unavailable

pytestmark = pytest.mark.skipif(native_unavailable() is not None, reason="the native tracer cannot be built here")


def parity(*arguments: str) -> str:
    """What a run of ``tests.core.trace.native.parity`` in a process of its own printed; it must have found nothing."""
    command = [sys.executable, "-m", "tests.core.trace.native.parity", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.mark.slow
def test_op_database_has_untraced_results() -> None:
    assert "examples" in parity("op_db", "--samples", "1", "--start", "68", "--step", "80")


@pytest.mark.slow
def test_random_programs_match_untraced_and_python_tracer() -> None:
    assert "50 examples" in parity("programs", "--stop", "50")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_random_programs_match_untraced_under_signals() -> None:
    printed = parity("programs", "--signals", "--stop", "12")
    assert "12 examples" in printed
    recorded = [line for line in printed.splitlines() if "ops of signal handlers recorded" in line]
    assert len(recorded) == 2
    assert not any(line.startswith("0 ") for line in recorded)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_ops_on_lists_without_their_data_give_what_they_give_untraced() -> None:
    assert "3 on fake tensors" in parity("lists", "--start", "3", "--step", "36")


@pytest.mark.slow
def test_training_has_untraced_bits_and_ops() -> None:
    pytest.importorskip("torchvision")
    assert "tensors of vit_b_16 compared" in parity("models", "--start", "3")


@pytest.mark.parametrize("function", [torch.nn.functional.silu, torch.nn.functional.mish])
def test_decomposing_op_with_a_cpu_kernel_is_recorded(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    x = torch.rand(3, requires_grad=True)
    with HashDebugTrace(tracer="native") as trace:
        function(x).sum().backward()
        assert x.grad is not None
        x.grad + 1
    *_, backward, _, added = trace.finish().records
    assert backward.op == f"aten.{function.__name__}_backward.default"
    assert added.inputs[0].source == backward.id
