"""The model built again by the harness in a fresh process."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hashbench.cli import main
from hashbench.core.diagnose.fresh_process import fresh_traces
from hashbench.core.records import ModelSpec, RunOptions
from hashbench.core.run.outcome import Prepared
from hashbench.integrations.dynamo import fresh, harness, model_check
from hashbench.integrations.dynamo.model_check import FRESH_TARGET
from tests.integrations.dynamo.command_helpers import read
from tests.integrations.dynamo.dynamo_helpers import SCRIPT, a_session

MODEL_OF_A_FILE = """
import numpy
import torch


class Counted(torch.nn.Module):
    COPIES = 0

    def __init__(self):
        super().__init__()
        self.linear = self.make_linear()
        self.register_buffer("number", torch.tensor(0.0))

    def make_linear(self):
        return torch.nn.Linear(4, 3)

    def __deepcopy__(self, memo):
        Counted.COPIES += 1
        copied = type(self)()
        copied.load_state_dict(self.state_dict())
        copied.number.fill_(Counted.COPIES)
        return copied

    def get_example_inputs(self):
        return (torch.randn(2, 4),)

    def forward(self, x):
        return self.linear(x) + self.number


class CountedOtherwise(Counted):
    def make_linear(self):
        made = super().make_linear()
        made.bias.data.fill_(numpy.random.default_rng().random())
        return made
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "decided", "arm"),
    [
        pytest.param(
            "Counted",
            ("surviving_state", "proven"),
            "process/fresh_process 0/3",
            id="weights of the global generators",
        ),
        pytest.param(
            "CountedOtherwise",
            ("initial_state", "likely"),
            "process/fresh_process not run (its model has other weights)",
            id="weights of the system's entropy",
            marks=pytest.mark.exhaustive,  # tests/core/diagnose/test_driver.py has one of a zoo
        ),
    ],
)
def test_file_model_has_equal_weights_in_fresh_processes(
    tmp_path: Path, name: str, decided: tuple[str, str], arm: str
) -> None:
    """The harness builds it before it seeds anything."""
    (tmp_path / "model.py").write_text(MODEL_OF_A_FILE)
    only = f"--only=path:{tmp_path / 'model.py'},class:{name}"
    flags = ["--accuracy", "--inference", only, f"--output={tmp_path / 'a.csv'}"]
    assert main(["dynamo", "--diagnose-budget", "1000", str(SCRIPT), *flags]) == 0
    (row,) = read(tmp_path / "a.hashbench" / "hashbench.csv").values()
    assert (row["cause"], row["confidence"]) == decided, row["evidence"]
    assert arm in row["evidence"]


@pytest.mark.slow
def test_fresh_process_uses_harness_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the environment of the harness's process that wants it: our hook is loaded there too."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(harness.SITE), *sys.path)))
    for variable, value in a_session(tmp_path).environment().items():
        monkeypatch.setenv(variable, value)
    output = tmp_path / "a.csv"
    arguments = {"script": str(SCRIPT), "arguments": ["--accuracy", f"--output={output}"], "only": "steady"}
    found = fresh_traces(
        ModelSpec("zoo", "steady", arguments=arguments),
        RunOptions(),
        level="on",
        processes=1,
        runs=2,
        fixed_order=False,
        timeout=600,
        target=FRESH_TARGET,
    )
    assert found.failures == ()
    ((first, second),) = found.processes
    assert first.records == second.records != ()
    assert not output.exists()


def test_fresh_runs_have_the_sweeps_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    class Runner:
        args = SimpleNamespace(training=False)

        def pick_grad(self, *_: Any) -> Any:
            return contextlib.nullcontext()

    def execute(_: Any) -> dict[str, Any]:
        threads.append(torch.get_num_threads())
        return {}

    prepared = Prepared(torch.nn.ReLU(), (), execute)
    monkeypatch.setattr(model_check, "preparing", lambda *_: lambda: prepared)
    module, before = SimpleNamespace(BenchmarkRunner=Runner), torch.get_num_threads()
    for wanted in (before + 1, None):
        fresh._prepare_harness(module, RunOptions(), 1, wanted, {})
        with pytest.raises(fresh._Done):
            Runner().check_accuracy("model", None, ())
    assert threads == [before + 1, before]
