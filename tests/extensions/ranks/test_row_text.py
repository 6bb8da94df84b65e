"""A row of a model with ranks, as a failed test shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hashbench.core.extensions import failure_lines
from tests.flat_rows import made

HERE = Path("kept")
RANKED = {"world_size": 2, "differing_results": "rank 0: loss", "origin": "kernel", "kernel": "aten.mm.default"}


def test_the_rank_and_the_way_to_the_others_are_named() -> None:
    row = made(
        "cpu", "net", 1, "eager_two_runs_differ", **RANKED, rank=1, through="rank 1 -> rank 0", detail="it differs"
    )
    assert failure_lines(row, folder=HERE).splitlines() == [
        "net: runs differ in rank 0: loss; how often is not known",
        "first divergence: aten.mm.default (on rank 1 of 2): it differs",
        "came to other ranks: rank 1 -> rank 0",
        "cause: not looked for",
        "evidence: none gathered; seen again in a further pair: not tried",
        "to do: let the diagnosis run (diagnose=True).",
    ]


@pytest.mark.parametrize(
    ("accuracy", "first"),
    [
        ("replicas_differ", "net: runs agree, and replicas differ between its 2 ranks: rank 0: loss"),
        ("crashed", "net: its process died: no"),
    ],
)
def test_what_is_wrong_comes_first(accuracy: str, first: str) -> None:
    row = made("cpu", "net", 1, accuracy, **RANKED, error="no")
    assert failure_lines(row, folder=HERE).splitlines()[0] == first
