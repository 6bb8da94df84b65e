"""Getting past a known difference: what one run left is put in place in the next."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hashbench.diagnose.driver import Recorder, Replacer
from hashbench.divergence import find as find_divergence
from hashbench.records import Trace
from hashbench.trace.api import HashDebugTrace
from hashbench.trace.callbacks import TraceCallback

Program = Callable[[int], dict[str, torch.Tensor]]


def traced(program: Program, run: int, watcher: TraceCallback | None = None) -> Trace:
    with HashDebugTrace(watcher=watcher) as trace:
        found = program(run)
    for name, tensor in found.items():
        trace.add_result(name, tensor)
    return trace.finish()


def source(first: Trace, second: Trace) -> str:
    found = find_divergence(first, second).divergence
    return "" if found is None else found.node


def next_source(program: Program, known: list[str]) -> str:
    recorder = Recorder(known)
    first = traced(program, 1, recorder)
    return source(first, traced(program, 2, Replacer(recorder.contents)))


@torch.library.custom_op("patching::noise", mutates_args=())
def noise(like: torch.Tensor, run: int) -> torch.Tensor:
    return like + run


@torch.library.custom_op("patching::noise_in_place", mutates_args=("target",))
def noise_in_place(target: torch.Tensor, run: int) -> None:
    target.add_(run)


@torch.library.custom_op("patching::noise_undeclared", mutates_args=())
def noise_undeclared(target: torch.Tensor, run: int) -> torch.Tensor:
    target.add_(run)
    return torch.zeros(1)


START = torch.arange(6.0)


def two_ops(run: int) -> dict[str, torch.Tensor]:
    one = noise(START, run).exp()
    two = noise(one.sum()[None], run)
    return {"one": one, "two": two}


def in_place(run: int) -> dict[str, torch.Tensor]:
    target = START.clone()
    noise_in_place(target, run)
    return {"target": target * 2}


def drawn(run: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(run)
    return {"drawn": START + torch.rand(6, generator=generator)}


def from_outside(run: int) -> dict[str, torch.Tensor]:
    return {"made": torch.tensor([float(run)]) * 2}


@pytest.mark.parametrize("program", [in_place, drawn, from_outside], ids=lambda program: program.__name__)
def test_a_source_that_is_replaced_differs_no_more(program: Program) -> None:
    found = source(traced(program, 1), traced(program, 2))
    assert found
    assert next_source(program, [found]) == ""


def test_the_next_source_is_found_behind_the_first() -> None:
    first = source(traced(two_ops, 1), traced(two_ops, 2))
    second = next_source(two_ops, [first])
    assert second not in ("", first)
    assert next_source(two_ops, [first, second]) == ""


def test_an_undeclared_write_is_replaced_too() -> None:
    target = START.clone()
    recorder = Recorder({"forward.0//patching.noise_undeclared.default#0"})
    traced(lambda run: {"x": noise_undeclared(target, run)}, 1, recorder)
    other = START.clone()
    traced(lambda run: {"x": noise_undeclared(other, run)}, 2, Replacer(recorder.contents))
    assert torch.equal(target, other)


def test_an_expanded_argument_that_was_only_read_is_left_alone() -> None:
    def program(run: int) -> dict[str, torch.Tensor]:
        return {"sum": noise(START[:1].expand(6), run)}

    found = source(traced(program, 1), traced(program, 2))
    assert next_source(program, [found]) == ""


def test_ids_told_to_a_watcher_are_those_of_the_records() -> None:
    class Listener(TraceCallback):
        def __init__(self) -> None:
            self.nodes: list[str] = []
            self.leaves: list[str] = []

        def before(self, node: str, *_: object) -> None:
            self.nodes.append(node)

        def leaf(self, node: str, tensor: torch.Tensor) -> None:  # noqa: ARG002 – as a watcher has it
            self.leaves.append(node)

    listener = Listener()
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Dropout(), torch.nn.BatchNorm1d(6))
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)

    def program(_: int) -> dict[str, torch.Tensor]:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(4, 6)).square().mean().backward()
            optimizer.step()
        return {"weight": model[0].weight}

    with HashDebugTrace(model=model, watcher=listener) as trace:
        program(1)
    finished = trace.finish()
    assert listener.nodes == [record.id for record in finished.records]
    assert {leaf.id for leaf in finished.leaves} <= set(listener.leaves)
