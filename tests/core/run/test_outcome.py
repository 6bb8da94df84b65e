"""Runs from the reset state: addresses, traces that are built on demand, copies that are prepared twice."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch

from hashbench.core.records import RunOptions
from hashbench.core.run import outcome
from hashbench.core.run.outcome import Prepared, Run, attempt, traces_of
from hashbench.core.trace.api import HashDebugTrace, Recording
from hashbench.core.trace.callbacks import TraceCallback


def test_addresses_are_arranged_before_each_run(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(outcome, "arranged_addresses", lambda: done.append("arranged") or [])  # type: ignore[func-returns-value]

    def prepare() -> Prepared:
        done.append("copied")
        raise RuntimeError("enough")

    assert len(traces_of(prepare, RunOptions(), runs=2)) == 2
    assert done == ["arranged", "copied"] * 2


@pytest.mark.parametrize("tracer", ["auto", "python"])
def test_trace_of_watched_run_is_built_on_demand(tracer: str) -> None:
    watching = TraceCallback()

    def prepare() -> Prepared:
        model = torch.nn.Identity()

        def execute(trace: HashDebugTrace | None) -> dict[str, torch.Tensor]:
            with trace or nullcontext():
                return {"output": torch.ones(2) + 1}

        return Prepared(model, (), execute)

    run = attempt(prepare, RunOptions(tracer=tracer), watcher=watching)
    assert isinstance(run, Run)
    assert isinstance(run.recorded, Recording)
    assert run.recorded._trace._finished is None
    assert run.trace is not None
    assert len(run.trace.records) == 2


PREPARED = """
import torch
from hashbench.core.records import RunOptions
from hashbench.core.run.outcome import Prepared, traces_of

drawn = []

def prepare():
    drawn.append(float(torch.rand(())))
    return Prepared(torch.nn.Linear(2, 2), (), lambda trace: {})

traces_of(prepare, RunOptions(), runs=1)
print(len(drawn), drawn[-1])
"""


@pytest.mark.slow
def test_fixed_addresses_use_the_second_copy() -> None:
    def prepared(seed: str) -> tuple[str, str]:
        command = [sys.executable, "-c", PREPARED]
        made = subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": seed}, stdout=subprocess.PIPE, check=True)
        copies, drawn = made.stdout.decode().split()
        return copies, drawn

    (once, drawn), (twice, again) = prepared("random"), prepared("0")
    assert (once, twice) == ("1", "2")
    assert drawn == again
