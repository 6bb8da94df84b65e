"""Which of several differences reached the results; ``test_introduce.py`` has the table of verdicts."""

from __future__ import annotations

import pytest

from hashbench.core.divergence.align import pair
from hashbench.core.divergence.choose import ChosenSource, choose_source
from hashbench.core.divergence.introduce import find_differences
from hashbench.core.records import op_of
from tests.core.divergence.runs import Run


def chosen(lines: str, *differing: str) -> ChosenSource:
    runs = pair(*(Run(lines, second=second).trace() for second in (False, True)))
    return choose_source(find_differences(runs), differing)


def told(choice: ChosenSource) -> tuple[str, str, str]:
    source = choice.source
    reached = sorted(op_of(node) or node for node in choice.reached)
    return (source.origin, op_of(source.first_visible_at or source.node), " ".join(reached)) if source else ("", "", "")


RELU, NEG, ADD, COPY, MINE = "aten.relu.default", "aten.neg.default", "aten.add.Tensor", "aten.clone.default", "my.op"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        pytest.param(
            f"x = {RELU} input/0 -> r|R\ny = {ADD} x -> s|S\nresult y s|S",
            ("kernel", RELU, f"{ADD} {RELU}"),
            id="the first on the way",
        ),
        pytest.param(
            f"x = {RELU} input/0 -> r|R\ny = {ADD} input/0 -> s|S\nresult y s|S",
            ("kernel", ADD, ADD),
            id="not one beside it",
        ),
        pytest.param(
            f"x = {RELU} input/0 -> r|R\ny = {ADD} x -> s\nresult y s|S", ("outside", ADD, ""), id="none on the way"
        ),
        pytest.param(
            f"i = {COPY} input/0 in={MINE} -> c|C\ny = {MINE} input/0 inside=i -> m\nresult y m|M",
            ("outside", MINE, ""),
            id="not what an op did inside that agrees",
        ),
        pytest.param(
            f"mark start det=0|1\nx = {RELU} input/0 -> r|R\n2: y = {NEG} input/0 -> n\n"
            f"1: z = {ADD} x => s\n2: z = {ADD} x y => S",
            ("settings", RELU, f"{ADD} {NEG} {RELU}"),
            id="of two at one place the first in order",
        ),
    ],
)
def test_the_difference_that_reached_the_result(lines: str, expected: tuple[str, str, str]) -> None:
    assert told(chosen(lines, "output")) == expected


def test_a_result_that_agrees_has_none() -> None:
    assert chosen(f"x = {RELU} input/0 -> r|R\ny = {ADD} x -> s\nresult y s") == ChosenSource()
