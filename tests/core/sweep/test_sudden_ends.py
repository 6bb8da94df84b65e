"""Killed, interrupted, out of disk space: the CSV stays valid, and resume completes the sweep."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import sweep_targets
from sweep_helpers import (
    OutOfTimeOnce,
    alive,
    child_pids,
    names_in_csv,
    resume_process,
    started,
    sweep,
    sweep_process,
    wait_until,
)
from sweep_targets import FOR_EVER, ran, spec

from hashbench.core.errors import HashbenchError
from hashbench.core.records import RunOptions
from hashbench.core.results.folder import ResultsFolder
from hashbench.core.sweep.run import SweepOpened

# ----------------------------------------------------------------------------------------- sudden ends


HANGING = ["a=pass", "b=hang_with_children", "c=hang_with_lock", "d=pass"]


def assert_completed_by_resume(output: Path) -> None:
    """The two models that hung run again – now to their time limit's stand-in – and the others do not."""
    for key in ("b", "c"):
        assert not (output / "rows" / f"fake.inference.{key}.json").exists()
    resume_process(output, "a=pass", "b=pass", "c=pass", "d=pass")
    assert names_in_csv(output) == ["a", "b", "c", "d"]
    assert sorted(ran(output)) == ["a", "b", "b", "c", "c", "d"]


@pytest.mark.slow
def test_when_the_parent_is_killed_no_process_survives_and_resume_completes(output):
    with sweep_process(output, "--jobs", "2", *HANGING) as process:
        wait_until(started(output, 3))
        wait_until((output.parent / "children.txt").exists)
        family = psutil.Process(process.pid).children(recursive=True)
        own_session = child_pids(output)[1]
        assert len(family) >= 5  # tracker, server, two workers, a child
        process.send_signal(signal.SIGKILL)
        process.wait()
        # A process that left its worker's session is out of reach once nobody is there to look for it.
        wait_until(lambda: not [p for p in family if p.pid != own_session and alive(p.pid)])
        os.kill(own_session, signal.SIGKILL)
    assert names_in_csv(output) == ["a"]
    assert_completed_by_resume(output)


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["the whole process group", "the parent alone"])
def test_ctrl_c_ends_a_sweep_at_once_and_resume_completes(output, whom):
    with sweep_process(output, "--jobs", "2", *HANGING) as process:
        wait_until(started(output, 3))
        wait_until((output.parent / "children.txt").exists)
        family = psutil.Process(process.pid).children(recursive=True)
        (os.killpg if whom == "the whole process group" else os.kill)(process.pid, signal.SIGINT)
        text, _ = process.communicate(timeout=FOR_EVER / 2)  # it waits for none of the models that hang
        assert (process.returncode, text) == (130, "1 of 4 rows written; continue with --resume\n")
        wait_until(lambda: not [p for p in family if alive(p.pid)])
    assert names_in_csv(output) == ["a"]
    assert_completed_by_resume(output)


@pytest.mark.slow
def test_ctrl_c_at_any_moment_leaves_a_whole_sweep(output):
    """Signals at growing delays over its start, then over its work, which goes on until the signal; each time the CSV
    can be read and resume goes on."""
    models = [f"m{i}=pass" for i in range(19)]
    for more, delay in ((0, 0.3), (1, 0.0), (4, 0.01), (5, 0.02)):
        before = len(ran(output)) if (output.parent / "ran.txt").exists() else 0  # by the sweeps before this one
        with sweep_process(output, "--resume", *models, "last=hang") as process:
            wait_until(lambda count=before + more: count == 0 or started(output, count)())
            time.sleep(delay)
            os.killpg(process.pid, signal.SIGINT)
            process.communicate(timeout=FOR_EVER / 2)
        assert process.returncode == 130 or more == 0, "only while Python itself starts, it ends otherwise"
        if (output / "accuracy.csv").exists():
            assert len(names_in_csv(output)) == len(list((output / "rows").glob("*.json")))
    resume_process(output, *models, "last=pass")
    assert names_in_csv(output) == [*(f"m{i}" for i in range(19)), "last"]


# ------------------------------------------------------------------------------------------ full disks


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_full_disk_stops_the_sweep_with_all_rows_safe_and_resume_completes(small_disk):
    output = small_disk / "results"
    models = [spec("a"), spec("b", "fill_disk"), spec("c")]
    with pytest.raises(HashbenchError, match=r"No space left on device; 1 of 3 rows are safe\. Free space.*--resume"):
        sweep(models, output)
    assert names_in_csv(output) == ["a"]
    (small_disk / "ballast").unlink()
    models[1] = spec("b")
    sweep(models, output, resume=True)
    assert names_in_csv(output) == ["a", "b", "c"]
    assert ran(output) == ["a", "b", "b", "c"]


def test_a_disk_that_fills_up_under_the_parent_is_no_crash_either(small_disk):
    """Skipped models have no worker: the parent alone writes."""
    output = small_disk / "results"
    models = [spec(f"m{i}", skip_inference="x" * 3000) for i in range(400)]
    with pytest.raises(HashbenchError, match="rows are safe"):
        sweep(models, output)
    rows = len(list((output / "rows").glob("*.json")))
    assert 20 < rows < 400
    assert rows - 1 <= len(names_in_csv(output)) <= rows


def test_a_line_that_does_not_fit_is_taken_back(small_disk):
    folder = ResultsFolder(small_disk)
    row = sweep([spec("a")], small_disk.parent / "elsewhere").rows[0]
    folder.rebuild_csv([row])
    before = folder.csv.read_bytes()
    sweep_targets.do_fill_disk(None, RunOptions(output=str(small_disk / "results")))
    with pytest.raises(OSError, match="No space"):
        folder.append_to_csv(replace(row, name="b", error="x" * 8000))
    assert folder.csv.read_bytes() == before


# ------------------------------------------------------------------------------------------ named pipes


def test_a_pipe_in_the_place_of_a_row_is_thrown_away_as_damaged(output):
    sweep([spec("a"), spec("b")], output)
    row = output / "rows" / "fake.inference.a.json"
    row.unlink()
    os.mkfifo(row)
    os.mkfifo(row.with_suffix(".draft"))
    os.mkfifo(row.with_suffix(".first"))
    sweep([spec("a"), spec("b")], output, resume=True)
    assert (names_in_csv(output), ran(output)) == (["a", "b"], ["a", "b", "a"])


def test_a_pipe_in_the_place_of_the_environment_is_set_aside_and_said(output):
    sweep([spec("a"), spec("b")], output)
    (output / "rows" / "fake.inference.a.json").unlink()
    (output / "environment.json").unlink()
    os.mkfifo(output / "environment.json")
    said = []
    sweep([spec("a"), spec("b")], output, resume=True, on_event=said.append)
    assert [event.unreadable for event in said if isinstance(event, SweepOpened)] == [("environment.json.unreadable",)]
    assert (output / "environment.json.unreadable").is_fifo()
    assert (names_in_csv(output), ran(output)) == (["a", "b"], ["a", "b", "a"])


@pytest.mark.parametrize("name", ["sweep.json", "accuracy.csv", ".lock", "logs/fake.inference.a.log"])
def test_a_pipe_in_the_place_of_another_file_is_said_at_once(output, name):
    sweep([spec("a")], output)
    (output / "rows" / "fake.inference.a.json").unlink()
    (output / name).unlink(missing_ok=True)
    os.mkfifo(output / name)
    told = "sweep.json is missing or damaged" if name == "sweep.json" else f"{Path(name).name} is a named pipe"
    with pytest.raises(HashbenchError, match=told):
        sweep([spec("a")], output, resume=True)


# ----------------------------------------------------------------------------------- while the cause is looked for


def draft_in(output: Path):
    """Whether the only model has left what it knew before its diagnosis."""
    return lambda: list((output / "rows").glob("*.draft"))


@pytest.mark.parametrize(
    ("do", "end"),
    [("segfault_in_diagnosis", "killed by SIGSEGV"), ("hang_in_diagnosis", "no result after 300 s")],
    ids=["killed by an experiment", "too slow"],
)
def test_what_was_known_before_the_diagnosis_is_kept(output, do, end):
    executor = OutOfTimeOnce(draft_in(output)) if "hang" in do else None
    (row,) = sweep([spec("a", do)], output, timeout=300, executor=executor).rows
    assert (row.accuracy, row.kernel) == ("eager_two_runs_differ", "aten.index_put.default")
    assert row.error.startswith(f"the diagnosis did not end: {end}")
    assert not list((output / "rows").glob("*.draft"))


def test_a_draft_of_another_model_is_not_taken(output):
    (row,) = sweep([spec("a", "draft_of_another")], output).rows
    assert row.accuracy == "crashed"


def test_a_diagnosis_that_ends_leaves_no_draft(output):
    (row,) = sweep([spec("a", "diagnose")], output).rows
    assert (row.accuracy, row.detail) == ("pass", "diagnosed")
    assert not list((output / "rows").glob("*.draft"))
