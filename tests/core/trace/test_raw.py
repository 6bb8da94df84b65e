"""What the records of a trace share: iterations, and the phases of closures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as optimizer_module

from hashbench import HashDebugTrace
from hashbench.core.divergence import find
from hashbench.core.records import Trace
from hashbench.core.trace import file
from tests.core.trace.mode_helpers import iterations, trained

pytestmark = pytest.mark.usefixtures("seeded", "each_tracer")


def test_iterations_are_counted_by_the_optimizers_steps() -> None:
    trace = trained(HashDebugTrace(), 50)
    assert iterations(trace, "aten.addmm.default") == [None, *range(1, 50)]
    updates = [record for record in trace.records if record.phase == "optimizer"]
    assert [record.iteration for record in updates[::2]] == [None, *range(1, 50)]
    assert trace.records[-1].id == "forward.50//aten.ones.default#0"
    assert file.loads(file.dumps(trace)) == trace


def test_alternating_optimizers_count_once() -> None:
    trace = trained(HashDebugTrace(), 3, optimizers=2)
    assert trace.records[-1].iteration == 3


def test_hooks_of_the_optimizers_are_gone_after_the_trace() -> None:
    before = len(optimizer_module._global_optimizer_post_hooks)
    with HashDebugTrace():
        assert len(optimizer_module._global_optimizer_post_hooks) == before + 1
    assert len(optimizer_module._global_optimizer_post_hooks) == before


def noisy(steps: int, at: int, seed: int, *, train: bool) -> Trace:
    """A loop in which one step draws other numbers."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with HashDebugTrace() as trace:
        for number in range(steps):
            if number == at:
                torch.manual_seed(seed)
            loss = (weight * torch.rand(2)).sum()
            if train:
                loss.backward()
                optimizer.step()
        trace.add_result("loss", loss)
    return trace.finish()


@pytest.mark.parametrize(("at", "train", "expected"), [(0, True, 0), (2, True, 2), (2, False, None)])
def test_verdict_names_the_counted_iteration(at: int, train: bool, expected: int | None) -> None:
    verdict = find(*(noisy(3, at, seed, train=train) for seed in (1, 2)))
    assert verdict.divergence is not None
    assert verdict.divergence.iteration == expected
    shown = [line for line in str(verdict).splitlines() if line.startswith("phase:")]
    assert shown == [f"phase:            forward{'' if expected is None else f', iteration {expected}'}"]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, max_iter=3),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "adam, foreach": lambda parameters: torch.optim.Adam(parameters, foreach=True),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("by_name", [False, True], ids=["position", "keyword"])
@pytest.mark.parametrize("hash_inputs", [False, True], ids=["plain", "hashed inputs"])
def test_a_closure_has_the_phases_of_what_it_runs(make: Any, by_name: bool, hash_inputs: bool) -> None:
    def run() -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = make(model.parameters())

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(2, 3)).square().mean()
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure=closure) if by_name else optimizer.step(closure)
        return model.weight

    expected = run()
    with HashDebugTrace(hash_inputs=hash_inputs) as trace:
        found = run()
    assert torch.equal(found, expected)
    phases: dict[str, set[str]] = {}
    for made in trace.finish().records:
        phases.setdefault(made.op, set()).add(made.phase)
        if made.op == "aten.addmm.default":
            assert made.module == "Linear"
    assert phases["aten.addmm.default"] == phases["aten.mean.default"] == {"forward"}
    assert phases["aten.mm.default"] == {"backward"}
    assert "optimizer" in set().union(*phases.values())
    updates = [
        phases[op] for op in phases if op.startswith(("aten._foreach_add", "aten.add_.", "aten._foreach_addcdiv"))
    ]
    assert {"optimizer"} in updates or {"optimizer", "backward"} in updates


def test_raising_closure_restores_the_phase() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def failing() -> float:
        weight.detach().sin()
        raise ValueError("closure")

    with HashDebugTrace() as trace:
        with pytest.raises(ValueError, match="closure"):
            optimizer.step(failing)
        weight.grad = torch.ones(2)
        optimizer.step()
        weight.detach().cos()
    phases = {made.op: made.phase for made in trace.finish().records}
    assert phases["aten.sin.default"] == phases["aten.cos.default"] == "forward"
    assert "optimizer" in phases.values()
