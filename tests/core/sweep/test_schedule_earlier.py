"""What an earlier sweep tells of times and memory, and which one is taken."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from hashbench.core.errors import HashbenchError
from hashbench.core.records import Row
from hashbench.core.sweep.request import newest_before
from hashbench.core.sweep.request import read_estimates as read
from hashbench.core.sweep.schedule import CONTEXT_MIB, EarlierSweep, Job
from tests.core.report.rows import write_rows


def row(name, **fields):
    return Row("cpu", name, 1, fields.pop("accuracy", "pass"), suite="zoo", mode="training", dtype="float32", **fields)


def left(folder: Path, *rows: Row, when=0, models="ab", mode="training", device="cpu") -> Path:
    folder.mkdir(parents=True)
    write_rows(folder / "accuracy.csv", rows)
    asked = {"mode": mode, "device": device, "dtype": ""}
    manifest = {"schema": 1, "options": asked, "models": [["zoo", name] for name in models]}
    (folder / "sweep.json").write_text(json.dumps(manifest))
    os.utime(folder / "sweep.json", (when, when))
    return folder


def newest(output):
    return newest_before(output, models={("zoo", name) for name in "abcd"}, mode="training", device="cpu")


def test_seconds_count_from_the_start_of_the_process_and_a_row_out_of_memory_tells_no_peak(tmp_path):
    folder = left(
        tmp_path / "one",
        row("a", seconds=3.0, overhead_seconds=0.5, peak_memory_mib=700.0),
        row("b", accuracy="eager_1st_run_OOM", seconds=9.0, peak_memory_mib=800.0),
        row("c", accuracy="crashed"),
    )
    estimates = read(folder, mode="training", device="cpu")
    assert estimates == EarlierSweep(str(folder), {("zoo", "a"): 3.5, ("zoo", "b"): 9.0}, {("zoo", "a"): 700.0})
    assert read(folder / "accuracy.csv", mode="training", device="cpu").seconds == estimates.seconds


def test_of_an_accelerator_both_memories_are_told(tmp_path):
    def on_device(name, **fields):
        return replace(row(name, seconds=3.0, **fields), dev="cuda")

    folder = left(
        tmp_path / "one",
        on_device("a", peak_memory_mib=3000.0, device_memory_mib=700.0),
        on_device("b", peak_memory_mib=3000.0, device_memory_mib=900.0, accuracy="eager_1st_run_OOM"),
        device="cuda",
    )
    estimates = read(folder, mode="training", device="cuda")
    assert estimates.memory_mib == {("zoo", "a"): 3000.0}
    assert estimates.device_memory_mib == {("zoo", "a"): 700.0}
    job = estimates.job("k", ("zoo", "a"), parameters=None, mode="training", device="cuda")
    assert job == Job("k", 3.0, 3000.0, device_memory_mib=700.0 + CONTEXT_MIB)


@pytest.mark.parametrize(("mode", "device"), [("inference", "cpu"), ("training", "cuda")])
def test_times_of_another_mode_or_device_are_none(tmp_path, mode, device):
    folder = left(tmp_path / "one", row("a", seconds=3.0))
    with pytest.raises(HashbenchError, match=f"has no times for {mode} on {device}: it has no timings"):
        read(folder, mode=mode, device=device)


@pytest.mark.parametrize(
    ("model", "parameters", "device", "job"),
    [
        pytest.param(("zoo", "a"), None, "cpu", Job("k", 3.0, 700.0), id="known"),
        pytest.param(("zoo", "b"), 2**20, "cpu", Job("k", None, 1040.0, 2**20), id="estimated"),
        pytest.param(("zoo", "b"), 2**20, "cuda", Job("k", parameters=2**20), id="not on a GPU"),
        pytest.param(("other", "a"), None, "cpu", Job("k"), id="of another suite"),
    ],
)
def test_what_is_expected_of_a_model(model, parameters, device, job):
    known = EarlierSweep("x", {("zoo", "a"): 3.0}, {("zoo", "a"): 700.0})
    assert known.job("k", model, parameters=parameters, mode="training", device=device) == job


def test_the_newest_sweep_of_the_same_kind_is_taken(tmp_path):
    left(tmp_path / "old", row("a", seconds=1.0), when=1)
    left(tmp_path / "new", row("a", seconds=2.0), when=2)
    left(tmp_path / "other mode", row("a", seconds=3.0), when=3, mode="inference")
    left(tmp_path / "other models", row("a", seconds=4.0), when=4, models="axyz")
    left(tmp_path / "other device", row("a", seconds=5.0), when=5, device="cuda")
    left(tmp_path / "no times", row("a"), when=6)
    (left(tmp_path / "damaged", row("a", seconds=7.0), when=7) / "accuracy.csv").write_text("dev,na")
    (left(tmp_path / "nonsense", row("a", seconds=8.0), when=8) / "sweep.json").write_text("[")
    left(tmp_path / "tonight", row("a", seconds=9.0), when=9)
    assert newest(tmp_path / "tonight") == EarlierSweep(str(tmp_path / "new"), {("zoo", "a"): 2.0}, {})


def test_of_a_nightly_folder_it_is_that_of_the_night_before(tmp_path):
    for night, seconds in (("2026-11-18", 1.0), ("2026-11-19", 2.0)):
        left(tmp_path / night / "zoo_training", row("a", seconds=seconds), when=seconds)
    (tmp_path / "2026-11-20").mkdir()
    assert newest(tmp_path / "2026-11-20" / "zoo_training").seconds == {("zoo", "a"): 2.0}


@pytest.mark.parametrize("output", ["nowhere/at/all", "/", "/nowhere"])
def test_where_nothing_lies_nothing_is_known(tmp_path, output):
    assert newest(tmp_path / output) == EarlierSweep()


def test_times_of_another_backend_are_none(tmp_path):
    left(tmp_path / "eager", row("a", seconds=1.0), row("b", seconds=1.0))
    compiled = left(tmp_path / "compiled", row("a", seconds=9.0), row("b", seconds=9.0), when=-1)
    manifest = json.loads((compiled / "sweep.json").read_text())
    manifest["options"]["backend"] = "inductor"
    (compiled / "sweep.json").write_text(json.dumps(manifest))
    models = {("zoo", "a"), ("zoo", "b")}

    def times(**of):
        return newest_before(tmp_path / "of_a_backend", models=models, mode="training", device="cpu", **of).seconds

    assert set(times().values()) == {1.0}
    assert set(times(backend="inductor").values()) == {9.0}
    assert not times(backend="aot_eager")
