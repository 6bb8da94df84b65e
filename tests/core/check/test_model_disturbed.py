"""Models that change the clocks of their process, or raise errors of any length, have rows that can be read."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable

import pytest
import torch
from runner_helpers import FunctionRunner

from hashbench.core.diagnose.replay.controls.system import constant_entropy, ticking_clocks
from hashbench.core.errors import LONGEST_TEXT, bounded, first_line, last_line
from hashbench.core.records import ModelSpec, Row, RunOptions
from hashbench.core.results.rows import row_from_json, row_to_json
from hashbench.core.run.workload import Workload

CLOCKS = ("time", "monotonic", "perf_counter", "process_time", "thread_time")


def row_of(forward: Callable[[torch.Tensor], object], options: RunOptions) -> Row:
    """The row of a model with this ``forward``, as a sweep reads it from its file."""

    class Model(torch.nn.Module):
        def forward(self, x):
            return forward(x)

    class Runner(FunctionRunner):
        build = staticmethod(lambda: Workload(Model(), torch.ones(2)))

    return row_from_json(json.loads(json.dumps(row_to_json(Runner(options).run_model(ModelSpec("fake", "model"))))))


@pytest.fixture
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts back the clocks and the source of entropy that a model replaces."""
    for name in CLOCKS:
        monkeypatch.setattr(time, name, getattr(time, name))
    monkeypatch.setattr(os, "urandom", os.urandom)


def replace_clocks(how: str) -> None:
    earlier = itertools.count(-1.0, -1.0)
    for name in CLOCKS if how != "none" else ():
        setattr(time, name, (lambda: 5.0) if how == "stopped" else lambda: next(earlier))


@pytest.mark.slow
@pytest.mark.usefixtures("forget")
@pytest.mark.parametrize("drifts", [False, True], ids=["steady", "drifts"])
@pytest.mark.parametrize("how", ["stopped", "backwards", "none"])
def test_a_model_may_replace_the_clocks_of_its_process(how: str, drifts: bool) -> None:
    runs = itertools.count()

    def forward(x):
        replace_clocks(how)
        return x + next(runs) * drifts

    row = row_of(forward, RunOptions(diagnose_budget=12.0 if drifts else 0.0))
    assert row.accuracy == ("eager_two_runs_differ" if drifts else "pass")
    assert row.seconds is not None
    assert row.seconds >= 0.0
    assert "failed" not in row.because
    assert row.evidence.result("clocks", "pair").trials == (5 if drifts else 0)


@pytest.mark.usefixtures("forget")
def test_clocks_and_entropy_are_frozen_unless_replaced() -> None:
    replace_clocks("stopped")
    os.urandom = bytes
    with ticking_clocks(), constant_entropy():
        assert time.perf_counter() == 5.0
        assert os.urandom(2) == b"\0\0"
        exec("first, second = clock(), clock()", held := {"__name__": "model", "clock": time.time_ns})
        assert held["second"] - held["first"] == 1_000_000


@pytest.mark.slow
@pytest.mark.parametrize("long", [False, True], ids=["short", "long"])
@pytest.mark.parametrize("text", ["x", "a line\n", "\n"], ids=["one line", "lines", "blank lines"])
def test_of_a_long_error_text_as_much_is_kept_as_a_row_can_hold(text: str, long: bool) -> None:
    whole = "begin " + text * (30_000_000 // len(text) if long else 3) + " out of memory"

    def forward(_):
        raise RuntimeError(whole)

    began = time.process_time()
    row = row_of(forward, RunOptions(diagnose_budget=0.0))
    assert time.process_time() - began < 10.0
    assert row.accuracy == "eager_1st_run_OOM"
    assert row.error.startswith("RuntimeError: begin ")
    assert row.error.endswith(" out of memory")
    assert (len(row.error) < 1.01 * LONGEST_TEXT, "characters left out" in row.error) == (True, long)


def test_texts_are_cut_in_their_middle_and_no_shorter_one_is() -> None:
    whole = "a" * (LONGEST_TEXT - 1) + "b"
    assert bounded(whole) == whole
    cut = bounded(f"{whole}c")
    assert cut == f"{'a' * 5000} … (1 characters left out) … {'a' * 4998}bc"
    assert first_line("\n words \n" + whole) == last_line(whole + "\n words \n") == "words"
