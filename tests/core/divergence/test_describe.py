"""The place in the program of a difference: of a record, a leaf, a setting, an opaque call. No torch here."""

from __future__ import annotations

import pytest

from hashbench.core.catalog import Origin
from hashbench.core.divergence.align import SECOND, pair
from hashbench.core.divergence.describe import divergence_at, early_divergence, unseen
from hashbench.core.divergence.introduce import Source
from hashbench.core.records import EarlyRead
from tests.core.divergence.runs import Run

LINES = """
x = relu input/0 -> a module=net.0 source=train.py:3
y = mul x -> m module=net.1 phase=backward source=train.py:4
2: z = sin y -> z
"""
RUNS = pair(Run(LINES).trace(), Run(LINES, second=True).trace())
RELU, MUL, SIN = RUNS.records


@pytest.mark.parametrize(
    ("origin", "node", "first_visible_at", "expected"),
    [
        (Origin.KERNEL, MUL, MUL, ("aten.mul.default", "net.1", "backward", "train.py:4")),
        (Origin.INPUT, "input/0", RELU, ("aten.relu.default", "net.0", "forward", "train.py:3")),
        (Origin.INPUT, "input/0", "", ("aten.relu.default", "net.0", "forward", "train.py:3")),
        (Origin.RANKS, MUL, MUL, ("", "net.1", "backward", "train.py:4")),
        ("setting", "setting:threads", MUL, ("aten.mul.default", "net.1", "backward", "train.py:4")),
    ],
)
def test_the_place_is_that_of_the_record_where_it_is_felt(
    origin: str, node: str, first_visible_at: str, expected: tuple[str, ...]
) -> None:
    found = divergence_at(
        RUNS, Source(origin, node, RUNS.position.get(node, 1), "why", "a", "b", first_visible_at=first_visible_at)
    )
    assert (found.kernel, found.module, found.phase, found.source) == expected
    assert (found.origin, found.node, found.detail, found.first, found.second) == (origin, node, "why", "a", "b")


def test_a_record_of_the_second_run_alone_has_its_id_there() -> None:
    assert SIN.startswith(SECOND)
    found = divergence_at(RUNS, Source(Origin.SEQUENCE, SIN, 1, "", "absent", "z"))
    assert (found.node, found.kernel) == (SIN.removeprefix(SECOND), "aten.sin.default")


def test_an_early_read_is_at_its_reader_or_for_a_result_at_the_collective() -> None:
    by_op = early_divergence(RUNS, EarlyRead(RELU, MUL, "train.py:9 step"), Origin.UNWAITED)
    assert (by_op.node, by_op.kernel, by_op.source) == (MUL, "aten.mul.default", "train.py:9 step")
    assert "aten.mul.default" in by_op.detail
    result = early_divergence(RUNS, EarlyRead(RELU, "loss", "", is_result=True), Origin.UNWAITED)
    assert (result.node, result.source) == (RELU, "train.py:3")
    assert "the result loss reads" in result.detail


def test_without_an_opaque_call_nothing_is_unseen() -> None:
    assert unseen(RUNS) == ""
