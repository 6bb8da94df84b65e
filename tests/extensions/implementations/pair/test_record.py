"""Graphs of contents of small programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hashbench.core.divergence.content import Kind
from hashbench.extensions.implementations.pair.record import RecordedRun, record_run
from tests.core.run.one_dtype import drawn

X = drawn(4, 6, dtype=torch.float64)


def recorded(function: Callable[[torch.Tensor], Any], *, wide: bool = True, **options: Any) -> RecordedRun:
    x = X.clone()
    leaves = [(Kind.INPUT, "x", x)]
    return record_run(lambda: {"result": function(x)}, leaves, model=None, wide=wide, **options)


def behind(run: RecordedRun, node: str) -> set[str]:
    """Return the ops behind a node, with the names of leaves."""
    found, todo = set(), [node]
    while todo:
        each = run.graph.nodes[todo.pop()]
        found.add(each.op.removeprefix("aten.").partition(".")[0] or each.id)
        todo += each.reads
    return found


def result_of(function: Callable[[torch.Tensor], Any]) -> set[str]:
    run = recorded(function)
    return behind(run, run.graph.results["result"])


def test_an_op_in_place_reads_what_it_overwrites() -> None:
    assert result_of(lambda x: x.tanh().mul_(2).add_(x.cos())) == {"x", "tanh", "cos", "mul_", "add_"}


def test_a_copy_into_a_tensor_reads_nothing_of_it() -> None:
    assert result_of(lambda x: x.tanh().copy_(x.cos())) == {"x", "cos", "copy_"}


def test_an_output_argument_is_not_read() -> None:
    assert result_of(lambda x: torch.cos(x, out=x.tanh())) == {"x", "cos"}


def test_a_write_into_a_view_is_seen_by_the_whole() -> None:
    def into_a_cache(x: torch.Tensor) -> torch.Tensor:
        cache = torch.zeros(4, 6, dtype=torch.float64)
        cache[:2].copy_(x[:2].cos())
        cache[2:].copy_(x[2:].sin())
        return cache * 1.5

    assert result_of(into_a_cache) >= {"zeros", "cos", "sin", "copy_", "x", "mul"}


def test_a_write_into_the_whole_is_seen_by_a_view() -> None:
    def through_a_view(x: torch.Tensor) -> torch.Tensor:
        y = x.cos()
        part = y[:2]
        y.mul_(3.0)
        return part + 0.5

    assert result_of(through_a_view) == {"x", "cos", "mul_", "add", "part/4"}


def test_results_are_nodes_even_if_they_are_inputs() -> None:
    run = recorded(lambda x: x)
    assert run.graph.results == {"result": "x"}


def test_each_part_of_a_split_is_a_copy_of_the_whole() -> None:
    run = recorded(lambda x: x.cos().split(3, 1)[1])
    node = run.graph.nodes[run.graph.results["result"]]
    assert node.copies
    assert node.id.endswith(":1")
    assert behind(run, node.id) == {"split", "cos", "x"}


@pytest.mark.parametrize("kind", ["sparse", "meta", "empty"])
def test_what_holds_no_numbers_in_memory_has_no_moments(kind: str) -> None:
    made = {
        "sparse": lambda x: x.cos().to_sparse(),
        "meta": lambda _: torch.empty(2, device="meta") + 1,
        "empty": lambda x: x.cos()[:0],
    }
    run = recorded(made[kind])
    assert run.graph.nodes[run.graph.results["result"]].moments is None


def test_uninitialised_memory_has_no_content() -> None:
    run = recorded(lambda x: torch.empty(3).fill_(2.0) + x[0, 0])
    contents = {node.op: node.moments is not None for node in run.graph}
    assert contents["aten.empty.memory_format"] is False
    assert contents["aten.fill_.Scalar"] is True


def test_what_a_generator_gave_is_random_and_dropout_of_zero_is_not() -> None:
    run = recorded(lambda x: torch.rand(3) + torch.nn.functional.scaled_dot_product_attention(x, x, x)[0, :3])
    kinds = {node.op: node.kind for node in run.graph if node.op}
    assert kinds["aten.rand.default"] is Kind.RANDOM
    assert all(kind is Kind.COMPUTED for op, kind in kinds.items() if op not in {"aten.rand.default"})


def test_memory_that_is_used_again_is_another_tensor() -> None:
    def free_and_allocate(x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            x.cos()  # freed at once
        return torch.ones(4, 6, dtype=torch.float64) * 2

    assert result_of(free_and_allocate) == {"ones", "mul"}


def test_given_contents_replace_those_that_an_op_wrote() -> None:
    given = torch.full((24,), 0.25, dtype=torch.float64)
    run = recorded(lambda x: x.cos() + 1, given={"forward//aten.cos.default#0:0": given})
    assert run.results["result"].eq(1.25).all()


def test_a_tensor_of_the_caller_is_given_contents_during_the_run_only() -> None:
    table = torch.arange(3.0)
    run = recorded(lambda x: x[:3, :3] * 0 + table, given={"constant/1": torch.full((3,), 7.0)})
    assert run.results["result"].eq(7).all()
    assert table.tolist() == [0.0, 1.0, 2.0]


def test_calls_of_kept_nodes_can_be_repeated() -> None:
    run = recorded(lambda x: x.tanh().mul_(2.0), keep={"forward//aten.mul_.Tensor#0:0"})
    (call,) = run.calls.values()
    (again,) = call.outputs(torch.clone)
    assert torch.equal(again, run.results["result"])
    (moved,) = call.outputs(lambda tensor: tensor + 1.0)
    assert not torch.equal(moved, again)
