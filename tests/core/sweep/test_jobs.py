"""Several models at once: who starts when, on which cores, and who is believed that ended badly beside others."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace

import pytest
from sweep_helpers import NoExecutor, names_in_csv, resume_process, started, sweep, sweep_process, wait_until
from sweep_targets import ran, spec

from hashbench.core import processes
from hashbench.core.catalog import Status
from hashbench.core.records import Row
from hashbench.core.results.rows import read_rows
from hashbench.core.sweep.executors import Task, local
from hashbench.core.sweep.executors.local import LocalExecutor
from hashbench.core.sweep.run import (
    ModelFinished,
    ModelRequeued,
    ModelStarted,
    SweepPlanned,
    believed,
    wants_repetition,
)
from hashbench.core.sweep.schedule import EarlierSweep


def earlier(**seconds):
    return EarlierSweep("last night", seconds={("fake", name): value for name, value in seconds.items()})


def needing(**mib):
    return EarlierSweep("last night", memory_mib={("fake", name): value for name, value in mib.items()})


# ------------------------------------------------------------------------------------------- cores, threads


needs_affinity = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system pins no processes")


@needs_affinity
def test_each_worker_has_cores_of_its_own_and_as_many_threads(output, monkeypatch):
    mine = sorted(os.sched_getaffinity(0))
    cores = (mine * 2)[:2]
    monkeypatch.setattr(local, "cores", lambda: tuple(cores))
    rows = sweep([spec("a", "cores"), spec("b", "cores")], output, jobs=2).rows
    assert sorted(row.detail for row in rows) == sorted(f"cores [{core}], threads 1" for core in cores)


@needs_affinity
def test_one_worker_has_all_cores(output):
    detail = sweep([spec("a", "cores")], output).rows[0].detail
    assert detail == f"cores {sorted(os.sched_getaffinity(0))}, threads None"


def test_cores_that_are_gone_are_no_reason_to_fail(output, monkeypatch):
    monkeypatch.setattr(local, "cores", lambda: (100_000, 100_001))
    rows = sweep([spec("a")], output, jobs=2).rows
    assert rows[0].accuracy == "pass"
    assert "cannot keep to the cores 100000" in (output / "logs" / "fake.inference.a.log").read_text()


@pytest.mark.parametrize(
    ("cores", "workers", "each"),
    [
        pytest.param((0, 1, 2, 3), 2, ((0, 1), (2, 3)), id="evenly"),
        pytest.param((0, 1, 2, 3, 4), 2, ((0, 1), (2, 3)), id="the same number for all"),
        pytest.param((4, 6), 3, ((4,), (6,), (4,)), id="more workers than cores"),
    ],
)
def test_how_cores_are_divided(cores, workers, each):
    assert local.divided(cores, workers=workers) == each


def test_memory_is_what_a_container_leaves_if_that_is_less(tmp_path, monkeypatch):
    for name, text in (
        ("limit", "3145728"),
        ("current", "2097152"),
        ("memory.stat", "anon 9\ninactive_file 1048576\n"),
    ):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(
        processes, "_CONTROL_GROUPS", ((str(tmp_path / "limit"), str(tmp_path / "current"), "inactive_file"),)
    )
    assert processes.available_memory_mib() == 2.0
    (tmp_path / "limit").write_text("max\n")
    assert processes.available_memory_mib() > 50


# ---------------------------------------------------------------------------------------------- order, memory


def test_the_longest_start_first_and_the_csv_keeps_the_order_of_the_selection(output):
    names = ["a", "b", "c", "d"]
    seen = []
    sweep([spec(name) for name in names], output, jobs=2, earlier=earlier(a=1, b=4, c=3), on_event=seen.append)
    assert [event.name for event in seen if isinstance(event, ModelStarted)] == ["d", "b", "c", "a"]
    assert names_in_csv(output) == names


def test_one_worker_keeps_the_order_of_the_selection(output):
    sweep([spec(name) for name in "ab"], output, earlier=earlier(a=1, b=4))
    assert ran(output) == ["a", "b"]


def test_two_that_do_not_fit_together_do_not_run_together(output):
    seen = []
    sweep(
        [spec("a", "nap"), spec("b", "nap"), spec("c", "nap")],
        output,
        jobs=2,
        earlier=needing(a=60, b=60, c=30),
        memory_mib=100,
        on_event=seen.append,
    )
    running, together = set(), []
    for event in seen:
        if isinstance(event, ModelStarted):
            running.add(event.name)
            together.append("".join(sorted(running)))
        elif isinstance(event, ModelFinished):
            running.remove(event.row.name)
    assert together[:2] == ["a", "ac"]
    assert not any({"a", "b"} <= set(names) for names in together)


def test_without_an_earlier_sweep_the_parameters_tell_of_memory(output):
    tasks: list[Task] = []

    class Noting(LocalExecutor):
        def submit(self, task):
            tasks.append(task)
            super().submit(task)

    models = [spec("small", parameters=2**20), spec("unknown"), spec("giant", parameters=2**32)]
    sweep(models, output, executor=Noting(jobs=2, preload=(), memory_mib=50_000))
    assert [(task.spec.name, task.memory_mib, task.alone) for task in tasks] == [
        ("giant", 66136.0, True),
        ("small", 616.0, False),
        ("unknown", None, False),
    ]


def test_the_plan_is_told(output):
    seen = []
    sweep([spec("a"), spec("b")], output, jobs=2, earlier=earlier(b=1.0), memory_mib=100, on_event=seen.append)
    (plan,) = [event for event in seen if isinstance(event, SweepPlanned)]
    assert (plan.workers, len(plan.resources.slots), plan.resources.memory_mib) == (2, 2, 100)
    assert (plan.waiting, plan.known, plan.times_from) == (2, 1, "last night")


# --------------------------------------------------------------------------------------------------- retries


@pytest.mark.parametrize(
    ("do", "first"),
    [("die_once", "crashed: killed by SIGKILL"), ("out_of_memory_once", "eager_1st_run_OOM")],
    ids=["killed", "out of memory"],
)
def test_what_ended_badly_beside_others_runs_again_alone(output, do, first):
    seen = []
    rows = sweep([spec("a", do), spec("b", "nap"), spec("c", "nap")], output, jobs=2, on_event=seen.append).rows
    assert [row.accuracy for row in rows] == ["pass", "pass", "pass"]
    assert rows[0].retried.startswith(first)
    assert rows[0].detail == "beside 0 others"
    assert (sorted(ran(output)[:3]), ran(output)[3:]) == (["a", "b", "c"], ["a"])
    assert [event.row.name for event in seen if isinstance(event, ModelRequeued)] == ["a"]
    assert [event.done for event in seen if isinstance(event, ModelFinished)] == [1, 2, 3]
    assert read_rows(output / "accuracy.csv") == list(rows)
    assert sorted(path.name for path in (output / "rows").iterdir()) == [f"fake.inference.{x}.json" for x in "abc"]


def test_what_crashes_alone_as_well_is_believed_and_the_first_log_is_kept(output):
    rows = sweep([spec("a", "segfault"), spec("b", "nap")], output, jobs=2).rows
    assert rows[0].accuracy == "crashed"
    assert rows[0].retried.startswith("crashed: killed by SIGSEGV")
    assert rows[0].source.startswith("sweep_targets.py:")
    assert sorted(ran(output)) == ["a", "a", "b"]
    assert sorted(path.name for path in (output / "logs").iterdir()) == [
        "fake.inference.a.log",
        "fake.inference.a~1.log",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("do", "fields"),
    [
        pytest.param("kill9", {"jobs": 1}, id="it was alone"),
        pytest.param("kill9", {"jobs": 2, "retries": 0}, id="nobody wants it"),
        pytest.param("hang", {"jobs": 2, "timeout": 1.5}, id="it was too slow"),
    ],
)
def test_what_is_believed_at_once(output, do, fields):
    rows = sweep([spec("a", do), spec("b", "nap")], output, **fields).rows
    assert sorted(ran(output)) == ["a", "b"]
    assert [row.retried for row in rows] == ["", ""]


def test_retries_go_on_as_often_as_asked_for(output):
    rows = sweep([spec("a", "out_of_memory"), spec("b", "nap")], output, jobs=2, retries=3).rows
    assert sorted(ran(output)) == ["a", "a", "a", "a", "b"]
    assert (rows[0].accuracy, rows[0].retried) == ("eager_1st_run_OOM", "eager_1st_run_OOM")


@pytest.mark.parametrize(
    ("do", "second"), [("differ_and_die_once", "pass"), ("differ_and_die_then_die", "crashed: killed by SIGKILL")]
)
def test_a_difference_that_was_seen_before_a_sudden_end_is_neither_taken_back_nor_the_second_attempts(
    output, do, second
):
    rows = sweep([spec("a", do), spec("b", "nap")], output, jobs=2).rows
    assert (rows[0].accuracy, rows[0].kernel) == ("eager_two_runs_differ", "aten.index_put.default")
    assert rows[0].retried.startswith(f"alone it ended with {second}")


def test_a_model_that_waits_for_its_second_attempt_has_no_row(output):
    def look(event):
        if isinstance(event, ModelRequeued):
            waiting.append(sorted(path.name for path in (output / "rows").glob("*a.*")))

    waiting: list[list[str]] = []
    sweep([spec("a", "out_of_memory_once"), spec("b", "nap")], output, jobs=2, on_event=look)
    assert waiting == [["fake.inference.a.first"]]


@pytest.mark.slow
def test_killed_in_the_middle_of_a_retry_nothing_is_lost_or_doubled(output):
    with sweep_process(output, "--jobs", "2", "a=die_once_then_hang", "b=nap", "c=pass") as process:
        wait_until(started(output, 4))
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert sorted(names_in_csv(output)) == ["b", "c"]
    resume_process(output, "--jobs", "2", "a=pass", "b=pass", "c=pass")
    rows = read_rows(output / "accuracy.csv")
    assert [row.name for row in rows] == ["a", "b", "c"]
    assert rows[0].retried.startswith("crashed: killed by SIGKILL")
    assert ran(output)[3:] == ["a", "a"]
    assert not list((output / "rows").glob("*.first"))


def rewritten(output, name, **fields):
    path = output / "rows" / f"fake.inference.{name}.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_a_row_out_of_memory_that_nobody_judged_before_the_end_is_made_again(output):
    models = [spec("a"), spec("b")]
    sweep(models, output)
    rewritten(output, "a", accuracy="eager_1st_run_OOM", overhead_seconds=None)
    rewritten(output, "b", accuracy="eager_1st_run_OOM")
    assert [row.accuracy for row in sweep(models, output, resume=True).rows] == ["pass", "eager_1st_run_OOM"]
    assert ran(output) == ["a", "b", "a"]


def test_a_second_attempt_that_nobody_judged_before_the_end_is_joined_with_the_first(output):
    sweep([spec("a")], output)
    row_file = output / "rows" / "fake.inference.a.json"
    row_file.with_suffix(".first").write_text(
        json.dumps({**json.loads(row_file.read_text()), "accuracy": "crashed", "error": "killed"})
    )
    (row,) = sweep([spec("a")], output, resume=True, executor=NoExecutor()).rows
    assert (row.accuracy, row.retried) == ("pass", "crashed: killed")
    assert read_rows(output / "accuracy.csv") == [row]
    assert not row_file.with_suffix(".first").exists()


def test_a_second_attempt_after_a_sudden_end_counts(output):
    sweep([spec("a"), spec("b")], output)
    row_file = output / "rows" / "fake.inference.a.json"
    row_file.rename(row_file.with_suffix(".first"))
    (row, _) = sweep([spec("a", "out_of_memory"), spec("b")], output, resume=True).rows
    assert (row.accuracy, row.retried) == ("eager_1st_run_OOM", "pass")
    assert ran(output) == ["a", "b", "a"]


# --------------------------------------------------------------------- two attempts at one model: which is believed


def attempt(accuracy, **fields):
    return Row("cpu", "a", 1, accuracy, **fields)


@pytest.mark.parametrize("accuracy", Status)
def test_what_its_neighbours_may_have_caused(accuracy):
    assert wants_repetition(attempt(accuracy), died=False) == ("OOM" in accuracy)
    assert wants_repetition(attempt(accuracy), died=True)


@pytest.mark.parametrize(
    ("first", "second", "accuracy", "retried"),
    [
        pytest.param("crashed", "pass", "pass", "crashed: killed", id="alone it works"),
        pytest.param("crashed", "crashed", "crashed", "crashed: killed", id="alone it crashes, too"),
        pytest.param("eager_1st_run_OOM", "timeout", "timeout", "eager_1st_run_OOM: killed", id="alone it is slow"),
        pytest.param(
            "eager_two_runs_differ",
            "pass",
            "eager_two_runs_differ",
            "alone it ended with pass: second",
            id="a difference that was seen is not taken back",
        ),
        pytest.param(
            "eager_two_runs_differ",
            "eager_two_runs_differ",
            "eager_two_runs_differ",
            "eager_two_runs_differ: killed",
            id="the diagnosis came to its end alone",
        ),
    ],
)
def test_two_attempts(first, second, accuracy, retried):
    row = believed(attempt(first, error="killed"), attempt(second, error="second"))
    assert (row.accuracy, row.retried) == (accuracy, retried)
    assert row.error == ("killed" if retried.startswith("alone") else "second")


def test_what_an_executor_repeated_by_itself_stays_known():
    row = believed(attempt("crashed"), attempt("pass", retried="its machine was lost"))
    assert row.retried == "crashed; its machine was lost"


def test_a_long_error_is_shortened():
    assert len(believed(attempt("crashed", error="word " * 1000), attempt("pass")).retried) <= 300


# ------------------------------------------------------------------------------------------ other machines


def test_the_environment_of_another_machine_is_kept_once(output):
    class Elsewhere(LocalExecutor):
        def wait(self):
            return tuple(replace(ended, environment={"key": "e2", "cpu": "other"}) for ended in super().wait())

    rows = sweep([spec("a"), spec("b")], output, executor=Elsewhere(preload=())).rows
    assert [row.env for row in rows] == ["e2"] * 2
    assert json.loads((output / "environment.json").read_text()) == {
        "key": "e1",
        "previous": [{"key": "e2", "cpu": "other"}],
    }
