"""The benchmarks of the native tracer's parts: each is measured, and the tracer left whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hashbench
from hashbench import HashDebugTrace
from hashbench.core.native.library import is_recorded
from hashbench.core.trace import native

pytestmark = [
    pytest.mark.skipif(
        not (Path(hashbench.__file__).parents[1] / "benchmarks").exists(),
        reason="hashbench is installed, there are no benchmarks",
    ),
    pytest.mark.skipif(not isinstance(native.load(), tuple), reason="the native tracer cannot be used here"),
    pytest.mark.slow,
]


def test_every_piece_has_a_row_and_traces_are_whole_afterwards() -> None:
    from benchmarks import pieces

    def digests() -> list[str]:
        with HashDebugTrace(tracer="native") as trace:
            torch.arange(6.0).add(1)
        return [output.value for record in trace.finish().records for output in record.outputs]

    before = digests()
    table = pieces.measure(pieces.USUAL, seconds=0)
    assert [row[0] for row in table.rows] == [what for what, _, _ in pieces._PIECES] + ["native tracer"]
    assert digests() == before


def test_the_recorder_alone_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import calls

    monkeypatch.setattr(calls, "RECORDS", 2000)
    each, memory = calls.measure(seconds=0)
    assert [row[0] for row in each.rows] == ["add_ of 8 elements, in a row", "BERT-like step"]
    assert [row[0] for row in memory.rows] == ["memory a record", "largest memory of the process"]


def test_each_arm_takes_away_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import pieces
    from benchmarks.workloads import WORKLOADS

    loaded, make, made = native.load(), pieces._trace, []
    assert isinstance(loaded, tuple)
    monkeypatch.setattr(pieces, "_trace", lambda *args, **kwargs: made.append(make(*args, **kwargs)) or made[-1])
    step = WORKLOADS[pieces.USUAL]()
    seen = {}
    for name, arm in pieces._arms(step, loaded[0]).items():
        made.clear()
        with arm():
            step()
            boxed = is_recorded()
        for trace in made:
            known = len(trace._tracer.raw.modules.contexts.modules) > 1
            records = trace.finish().records
            values = {output.value for record in records for output in record.outputs if output.value}
            seen[name] = boxed, known, len(records) > 100, len(values) > 100
    assert seen == {
        "entered": (False, False, False, False),
        "followed": (False, True, False, False),
        "named": (False, True, False, False),
        "boxed": (True, False, False, False),
        "without digests": (True, True, True, False),
        "native": (True, True, True, True),
    }
