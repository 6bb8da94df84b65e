"""The column of stressed pairs: read back as it was written, and refused where it cannot be."""

from __future__ import annotations

import pytest

from hashbench.core.records import ExperimentResult
from hashbench.extensions.stress.facts import StressedPairs, StressFacts, is_stressed

RESULTS = (
    ExperimentResult("threads", "pair", 4, 1),
    ExperimentResult("load", "pair", 6, 0),
    ExperimentResult("process", "pair", note="out of time; load 1/2\nwas killed"),
)


def test_pairs_are_read_back_as_they_were_written() -> None:
    pairs = StressedPairs.of(RESULTS)
    assert str(pairs) == "threads 1/4; load 0/6; process not run (out of time, load 1/2 was killed)"
    assert StressedPairs.parse(str(pairs)) == pairs
    assert pairs.counts == StressFacts(str(pairs)).counts == {"threads": (1, 4), "load": (0, 6)}
    assert StressedPairs.parse("") == StressedPairs({})


@pytest.mark.parametrize("text", ["threads 5/4", "threads 0/0", "thread 0/4", "load 0/1; load 0/1", "load", "load ½"])
def test_counts_that_cannot_be_are_refused(text: str) -> None:
    assert not is_stressed(text)
    assert is_stressed("load 0/1")
