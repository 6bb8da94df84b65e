"""A row of a model with ranks, as a failed test shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hashbench.core.extensions import failure
from tests.flat_rows import made

HERE = Path("kept")
RANKED = {"world_size": 2, "differing_results": "rank 0: loss", "origin": "kernel", "kernel": "aten.mm.default"}


def test_the_rank_and_the_way_to_the_others_are_named() -> None:
    row = made(
        "cpu", "net", 1, "eager_two_runs_differ", **RANKED, rank=1, through="rank 1 -> rank 0", detail="it differs"
    )
    found = failure(row, folder=HERE)
    assert found.headline == "net: runs differ in rank 0: loss; how often is not known"
    assert list(dict(found.facts)) == ["first divergence", "through", "cause", "evidence", "to do"]
    assert dict(found.facts)["first divergence"] == "aten.mm.default (on rank 1 of 2): it differs"
    assert dict(found.facts)["through"] == "rank 1 -> rank 0"


@pytest.mark.parametrize(
    ("accuracy", "first", "commands"),
    [
        ("eager_two_runs_differ", "net: runs differ in rank 0: loss; how often is not known", ["diff kept/a kept/b"]),
        ("replicas_differ", "net: runs agree, and replicas differ between its 2 ranks: rank 0: loss", ["check kept/a"]),
        ("crashed", "net: its process died: no", []),
    ],
)
def test_what_is_wrong_comes_first(accuracy: str, first: str, commands: list[str]) -> None:
    traces = "a" if accuracy == "replicas_differ" else "a b"
    found = failure(made("cpu", "net", 1, accuracy, **RANKED, error="no", traces=traces), folder=HERE)
    assert found.headline == first
    assert list(found.next) == [f"hashbench ranks {command}" for command in commands]
