"""Sweeps with real processes; the models are stand-ins without torch. However a model ends, it has one row."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from sweep_helpers import (
    SCRIPT,
    NoExecutor,
    OutOfTimeOnce,
    OwnTimes,
    alive,
    child_pids,
    names_in_csv,
    sweep,
    wait_until,
)
from sweep_targets import ran, spec

from hashbench.core.errors import HashbenchError
from hashbench.core.records import RunOptions
from hashbench.core.results.rows import read_rows
from hashbench.core.suites.registry import catalog
from hashbench.core.sweep.executors.local import LocalExecutor
from hashbench.core.sweep.run import DEFAULT_TARGET, ModelFinished, ModelStarted, SweepOpened

# ---------------------------------------------------------------------------------- the ordinary sweep


def test_a_sweep_leaves_one_row_a_model_in_the_order_of_the_selection(output):
    names = ["zebra", "ape", "cat"]
    result = sweep([spec(name) for name in names], output)
    assert [row.name for row in result.rows] == names
    assert read_rows(output / "accuracy.csv") == list(result.rows)
    assert sorted(path.name for path in output.iterdir()) == [
        ".lock",
        "accuracy.csv",
        "environment.json",
        "logs",
        "rows",
        "sweep.json",
        "traces",
    ]
    assert json.loads((output / "environment.json").read_text()) == {"key": "e1"}
    assert {row.env for row in result.rows} == {"e1"}


def test_two_jobs_run_two_models_at_once_and_the_csv_keeps_the_order_of_the_selection(output):
    """The first model ends last."""
    models = [spec("first", "meet"), spec("second", "meet"), *[spec(f"n{i}") for i in range(3)]]
    result = sweep(models, output, jobs=2, timeout=120)
    assert [row.accuracy for row in result.rows] == ["pass"] * 5
    assert names_in_csv(output) == ["first", "second", "n0", "n1", "n2"]


@pytest.mark.slow
def test_one_job_runs_one_model_at_a_time(output):
    """The first one waits in vain for another; the second one finds the first one's mark."""
    only_the_first = OwnTimes({"a": 1.0})
    result = sweep([spec("a", "meet"), spec("b", "meet")], output, timeout=120, executor=only_the_first)
    assert [row.accuracy for row in result.rows] == ["timeout", "pass"]


@pytest.mark.parametrize(
    ("asked", "jobs", "cores", "given"),
    [
        pytest.param(None, 1, 8, "None", id="one job keeps torch's own choice"),
        pytest.param(None, 2, 8, "4", id="two jobs share the cores"),
        pytest.param(None, 16, 8, "1", id="never fewer than one"),
        pytest.param(3, 2, 8, "3", id="what was asked for wins"),
    ],
)
def test_threads(output, monkeypatch, asked, jobs, cores, given):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(cores)))
    result = sweep([spec("a")], output, options=RunOptions(threads=asked), jobs=jobs)
    assert result.rows[0].detail.endswith(f"threads {given}")


def test_overhead_is_what_the_row_does_not_count_itself(output):
    class Slow(LocalExecutor):
        def wait(self):
            return tuple(replace(ended, wall_seconds=10.0) for ended in super().wait())

    row = sweep([spec("a")], output, executor=Slow(preload=())).rows[0]
    assert row.overhead_seconds == round(10.0 - row.seconds, 3)
    assert (
        json.loads((output / "rows" / "fake.inference.a.json").read_text())["overhead_seconds"] == row.overhead_seconds
    )


def test_the_executor_measures_from_the_start_of_a_worker_to_its_end(output):
    began = time.monotonic()
    row = sweep([spec("a", "nap")], output).rows[0]
    assert row.seconds > 0.2
    assert 0 < row.overhead_seconds < time.monotonic() - began - row.seconds


def test_what_a_model_prints_goes_into_its_log_alone(output, capfd):
    sweep([spec("chatty", "print"), spec("quiet")], output)
    assert (output / "logs" / "fake.inference.chatty.log").read_text() == "from a shell\nfrom Python\n"
    assert [path.name for path in (output / "logs").iterdir()] == ["fake.inference.chatty.log"]
    assert capfd.readouterr() == ("", "")


def test_events_tell_the_story_in_order(output):
    events = []
    sweep([spec("a"), spec("b", skip_inference="needs a GPU")], output, on_event=events.append)
    opened, started, *rest = events
    assert opened == SweepOpened(total=2, done=0)
    assert started == ModelStarted(name="a")
    finished = {event.row.name: event for event in rest}
    assert {name: event.done for name, event in finished.items()} in ({"a": 2, "b": 1}, {"a": 1, "b": 2})
    assert all(isinstance(event, ModelFinished) and event.total == 2 and event.eta_seconds >= 0 for event in rest)
    assert rest[-1].eta_seconds == 0


def test_what_a_worker_is_doing_is_known_while_it_runs_and_a_killed_one_leaves_nothing_of_it(output):
    started = []

    def told():
        return [event.phase() for event in started if isinstance(event, ModelStarted)]

    executor = OutOfTimeOnce(lambda: told() == ["slot_memory: run 2"])
    result = sweep([spec("a", "tell")], output, executor=executor, on_event=started.append)
    assert [row.accuracy for row in result.rows] == ["timeout"]
    assert told() == [""]
    sweep([spec("a", "pass")], output.with_name("other"))
    left, other = ({path.name for path in folder.rglob("*")} for folder in (output, output.with_name("other")))
    assert left - other == set()


def test_a_model_that_cannot_run_here_is_skipped_without_a_process(output):
    models = [
        spec("a", skip_training="no loss", skip_inference="needs a GPU"),
        spec("b", devices=("cuda", "xpu")),
        spec("c", devices=("cuda",), skip_inference="no eval"),
    ]
    result = sweep(models, output, executor=NoExecutor())
    assert [row.error for row in result.rows] == ["needs a GPU", "needs cuda or xpu", "needs cuda"]
    assert {row.accuracy for row in result.rows} == {"pass_due_to_skip"}
    assert names_in_csv(output) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("device", "reason"), [("cpu", "needs cuda"), ("cuda", ""), ("cuda:1", ""), ("cudax", "needs cuda")]
)
def test_a_device_of_the_kind_that_a_model_is_for_will_do(device, reason):
    assert spec("a", devices=("cuda",)).skip_reason("training", device=device) == reason


def test_the_skip_reason_is_that_of_the_mode(output):
    result = sweep([spec("a", skip_inference="no")], output, options=RunOptions(mode="training"))
    assert result.rows[0].accuracy == "pass"


def test_the_same_model_twice_is_refused_before_anything_is_written(output):
    with pytest.raises(HashbenchError, match="holds a of fake twice"):
        sweep([spec("a"), spec("a")], output)
    assert not output.exists()


# ----------------------------------------------------------------------------------------- bad endings

ENDINGS = [
    ("segfault", "crashed", ["killed by SIGSEGV", "Fatal Python error: Segmentation fault"]),
    ("kill9", "crashed", ["killed by SIGKILL", "most likely the kernel was out of memory"]),
    ("exit3", "crashed", ["exit code 3", "giving up"]),
    ("exit0", "crashed", ["exit code 0 and no result"]),
    ("raise", "crashed", ["exit code 1", "RuntimeError: the harness itself is broken"]),
    ("hang", "timeout", ["no result after 1 s", "logs/fake.inference.hang.log"]),
    ("hang_with_lock", "timeout", ["no result after 1 s"]),
    ("leave_thread", "pass", []),
    ("leave_child", "pass", []),
    ("pass", "pass", []),
]


@pytest.fixture(scope="module")
def endings(tmp_path_factory):
    output = tmp_path_factory.mktemp("endings") / "results"
    models = [spec(do, do) for do, _, _ in ENDINGS]
    executor = OwnTimes({"hang": 1.0, "hang_with_lock": 1.0}, jobs=2)
    return output, {row.name: row for row in sweep(models, output, timeout=300, retries=0, executor=executor).rows}


@pytest.mark.slow
def test_a_row_that_no_worker_wrote_has_the_backend_of_its_sweep(tmp_path):
    (row,) = sweep([spec("exit3", "exit3")], tmp_path / "out", options=RunOptions(backend="inductor"), retries=0).rows
    assert (row.accuracy, row.backend) == ("crashed", "inductor")


@pytest.mark.slow
@pytest.mark.parametrize(("do", "accuracy", "words"), ENDINGS, ids=[do for do, _, _ in ENDINGS])
def test_however_a_worker_ends_its_model_has_a_row(endings, do, accuracy, words):
    _, rows = endings
    assert rows[do].accuracy == accuracy
    assert (rows[do].dev, rows[do].suite, rows[do].mode, rows[do].env) == ("cpu", "fake", "inference", "e1")
    for word in words:
        assert word in rows[do].error


def test_no_ending_disturbs_the_others(endings):
    output, rows = endings
    assert names_in_csv(output) == [do for do, _, _ in ENDINGS] == list(rows)
    assert sorted(ran(output)) == sorted(rows)


def test_the_log_of_a_model_that_is_nearly_too_slow_shows_where_it_hangs(output):
    log = output / "logs" / "fake.inference.a.log"
    executor = OutOfTimeOnce(lambda: log.exists() and "do_hang" in log.read_text())
    assert sweep([spec("a", "hang")], output, timeout=0.5, executor=executor).rows[0].accuracy == "timeout"
    assert "sweep_targets.py" in log.read_text()


def test_a_thread_that_a_model_left_behind_keeps_nobody_waiting(endings):
    _, rows = endings
    assert rows["leave_thread"].accuracy == "pass"
    assert rows["leave_thread"].overhead_seconds < 250  # its time limit is 300


def test_what_a_finished_model_left_running_is_ended(endings):
    output, _ = endings
    wait_until(lambda: not any(map(alive, child_pids(output))))


def test_a_time_limit_ends_the_processes_that_a_model_started(output):
    executor = OutOfTimeOnce((output.parent / "children.txt").exists)
    assert sweep([spec("a", "hang_with_children")], output, executor=executor).rows[0].accuracy == "timeout"
    assert len(child_pids(output)) == 2
    wait_until(lambda: not any(map(alive, child_pids(output))))


def test_a_row_that_was_written_before_the_worker_was_killed_counts(output):
    """As when a worker hangs after its work: the row is read whatever the worker's end was."""
    executor = OutOfTimeOnce((output / "rows" / "fake.inference.a.json").exists)
    assert sweep([spec("a")], output, executor=executor).rows[0].accuracy == "pass"


# ------------------------------------------------------------------------------------------ the parent


def test_the_parent_never_imports_torch(tmp_path):
    code = (
        "import sys; from pathlib import Path; import hashbench.cli.sweep, sweep_targets\n"
        "assert sweep_targets.main([sys.argv[1], 'a=pass']) == 0\n"
        "loaded = {'torch', 'torchvision', 'numpy', 'pandas'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "results"], check=True, cwd=SCRIPT.parent)


def test_a_script_without_a_main_guard_is_not_run_again_in_the_workers(tmp_path):
    script = tmp_path / "unguarded.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r})\n"
        "import sweep_targets\n"
        "print('once')\n"
        "sys.exit(sweep_targets.main([sys.argv[1], 'a=pass']))\n"
    )
    done = subprocess.run([sys.executable, script, tmp_path / "results"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "once\n", "")


def test_a_sweep_runs_outside_the_main_thread_too(output):
    with ThreadPoolExecutor() as threads:
        assert len(threads.submit(sweep, [spec("a")], output).result().rows) == 1


def test_the_handler_of_ctrl_c_is_put_back(output):
    before = signal.getsignal(signal.SIGINT)
    sweep([spec("a")], output)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_target_that_cannot_be_imported_is_one_error_and_no_row(output):
    with pytest.raises(HashbenchError, match=r"cannot import no_such_module: ModuleNotFoundError.*no model was run"):
        sweep([spec("a")], output, target="no_such_module:run")
    assert names_in_csv(output) == []
    assert names_in_csv(output) != [row.name for row in sweep([spec("a")], output, resume=True).rows]


@pytest.mark.slow
def test_a_real_model_goes_through_the_real_runner(output):
    models = [model for model in catalog("torchvision") if model.name == "mobilenet_v3_small"]
    row = sweep(models, output, options=RunOptions(threads=1), target=DEFAULT_TARGET, executor=LocalExecutor()).rows[0]
    assert (row.name, row.accuracy, row.error) == ("mobilenet_v3_small", "pass", "")
    assert row.ops > 100
    assert 0 < row.overhead_seconds < 8  # about 0.1 on an idle machine; an interpreter without the server takes 8
