"""The row of an outcome: numbers, traces, benign ops."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hashbench.core.check.model import BenchmarkRunner
from hashbench.core.diagnose.replay.controls.memory import POISONS, poisoned_memory
from hashbench.core.records import ROW_COLUMNS, RowEvidence, RunOptions
from hashbench.core.results.rows import ROWS, read_rows
from hashbench.core.run.workload import Workload
from hashbench.core.suites import registry
from hashbench.core.trace import file
from tests.core.check.model_helpers import INFERENCE, RUNS, TRAINING, _in_second_run, no_optimizer, row_of, workload
from tests.flat_rows import flat


def test_numbers_of_a_row_have_no_digits_that_mean_nothing(tmp_path: Path) -> None:
    def a_third(model, out):
        return out + _in_second_run(model) / 3

    row = row_of(lambda: workload(a_third, make_optimizer=no_optimizer), replace(TRAINING, runs=4))
    decimals = {"seconds": 3, "peak_memory_mib": 1, "rate": None}
    numbers = {name: value for name in ROW_COLUMNS if isinstance(value := getattr(row, name), float)}
    assert numbers.keys() >= {"rate", "rate_low", "rate_high", "max_abs_diff", "count_variability", *decimals}
    for name, value in numbers.items():
        places = decimals.get(name, 0)
        assert value == (float(f"{value:.{6 if places is None else 4}g}") if not places else round(value, places)), name
    assert (row.rate, row.rate_low) == (0.666667, 0.0943)
    (tmp_path / "accuracy.csv").write_text(ROWS.text([row]))
    assert read_rows(tmp_path / "accuracy.csv") == [replace(row, evidence=RowEvidence(row.evidence.text))]


@pytest.mark.parametrize("keep", [False, True], ids=["only those of a difference", "all of them"])
def test_traces_are_kept(keep: bool, tmp_path: Path) -> None:
    options = replace(INFERENCE, output=str(tmp_path), keep_traces=keep)
    passing = row_of(workload, options)
    assert len(passing.traces.split()) == (2 if keep else 0)
    row = row_of(lambda: workload(lambda model, out: out + model.run), options)
    first, second = (file.read(tmp_path / name) for name in row.traces.split())
    assert [record.op for record in first.records] == [record.op for record in second.records]
    assert first.results != second.results
    assert len(list((tmp_path / "traces").iterdir())) == 2


def test_without_a_folder_no_trace_is_written(tmp_path: Path) -> None:
    with contextlib.chdir(tmp_path):
        assert row_of(lambda: workload(lambda model, out: out + model.run)).traces == ""
    assert list(tmp_path.iterdir()) == []


def test_harmless_garbage_is_counted_and_passes() -> None:
    class Reader(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = torch.nn.LSTM(16, 16)

        def forward(self, x):
            RUNS[0] += 1
            with poisoned_memory(POISONS[RUNS[0] % 2]):  # memory that nobody wrote has different content in each run
                return self.lstm(x)[0]

    def build() -> Workload:
        return Workload(module=Reader(), inputs=(torch.randn(5, 2, 16),))

    row = row_of(build, replace(TRAINING, deterministic="off", runs=4, iterations=1))
    assert row.accuracy == "pass"
    assert row.benign
    assert "mkldnn_rnn_layer" in row.benign_ops


def test_row_of_torchvisions_cheapest_model_says_all() -> None:
    spec = next(spec for spec in registry.catalog("torchvision") if spec.name == "squeezenet1_1")
    options = RunOptions(mode="inference", batch_size=1, iterations=1)
    row = BenchmarkRunner(options).run_model(spec)
    assert (row.accuracy, row.batch_size, row.runs, row.distinct, row.benign) == ("pass", 1, 2, 1, 0)
    assert row.ops
    assert row.seconds
    assert row.peak_memory_mib


def test_a_row_of_a_sweep_with_a_backend_has_it_whatever_happened() -> None:
    """Also one that failed before anything was compiled: else it would be compared with eager rows."""

    def broken(_model, _out):
        raise ValueError("no")

    row = row_of(lambda: workload(broken), replace(INFERENCE, backend="aot_eager"))
    assert (row.accuracy, row.backend) == ("eager_1st_run_fail", "aot_eager")


def test_a_backend_that_this_machine_lacks_is_a_row() -> None:
    pytest.importorskip("hashbench.extensions.compiled")
    row = row_of(workload, replace(INFERENCE, backend="inductr"))
    assert (row.accuracy, flat(row).stage, row.backend) == ("fail_to_run", "dynamo", "inductr")
    assert row.error == "torch.compile has no backend 'inductr': nothing was run. Did you mean inductor?"
