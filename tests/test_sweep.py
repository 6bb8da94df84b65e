"""Sweeps with real processes, real signals and a really full disk; the models are stand-ins without torch."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import sweep_targets
from sweep_targets import ran, spec

from hashbench.executors.local import LocalExecutor
from hashbench.records import HashbenchError, RunOptions
from hashbench.report.csvfile import read_rows
from hashbench.results_folder import ResultsFolder, file_key
from hashbench.sweep import ModelFinished, ModelStarted, SweepOpened, describe_differences, run_sweep

SCRIPT = Path(sweep_targets.__file__)


def sweep(specs, output, *, options=RunOptions(), jobs=1, environment=None, **arguments):  # noqa: B008 – frozen
    """``run_sweep`` with the stand-ins and a fork server that starts at once."""
    return run_sweep(
        specs,
        options,
        output=output,
        environment={"key": "e1"} if environment is None else environment,
        jobs=jobs,
        target="sweep_targets:run_model",
        executor=arguments.pop("executor", None) or LocalExecutor(jobs=jobs, preload=()),
        **arguments,
    )


def names_in_csv(output: Path) -> list[str]:
    return [row.name for row in read_rows(output / "accuracy.csv")]


def wait_until(condition, *, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def child_pids(output: Path) -> list[int]:
    return [int(pid) for pid in (output.parent / "children.txt").read_text().split()]


@pytest.fixture
def output(tmp_path) -> Path:
    return tmp_path / "results"


# ------------------------------------------------------------------------------------------- the ordinary sweep


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


def test_the_order_of_the_csv_is_that_of_the_selection_even_when_the_first_model_ends_last(output):
    sweep([spec("first", "meet"), spec("second", "meet"), *[spec(f"n{i}") for i in range(3)]], output, jobs=2)
    assert names_in_csv(output) == ["first", "second", "n0", "n1", "n2"]


def test_two_jobs_run_two_models_at_once(output):
    result = sweep([spec("a", "meet"), spec("b", "meet")], output, jobs=2, timeout=10)
    assert [row.accuracy for row in result.rows] == ["pass", "pass"]


def test_one_job_runs_one_model_at_a_time(output):
    result = sweep([spec("a", "meet"), spec("b", "meet")], output, jobs=1, timeout=0.5)
    # The second one finds the first one's mark.
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
    row = sweep([spec("a")], output).rows[0]
    assert row.seconds < 0.05 < row.seconds + row.overhead_seconds + 0.05
    assert 0 < row.overhead_seconds < 5
    assert json.loads((output / "rows" / "fake.inference.a.json").read_text())["overhead_seconds"] > 0


def test_what_a_model_prints_goes_into_its_log_alone(output, capfd):
    sweep([spec("chatty", "print"), spec("quiet")], output)
    assert (output / "logs" / "fake.inference.chatty.log").read_text() == "from a shell\nfrom Python\n"
    assert [path.name for path in (output / "logs").iterdir()] == ["fake.inference.chatty.log"]
    assert capfd.readouterr() == ("", "")


def test_events_tell_the_story_in_order(output):
    events = []
    sweep([spec("a"), spec("b", skip_inference="needs a GPU")], output, on_event=events.append)
    opened, started, *rest = events
    assert opened == SweepOpened(total=2, done=0, damaged=0)
    assert started == ModelStarted(name="a")
    finished = {event.row.name: event for event in rest}
    assert {name: event.done for name, event in finished.items()} in ({"a": 2, "b": 1}, {"a": 1, "b": 2})
    assert all(isinstance(event, ModelFinished) and event.total == 2 and event.eta_seconds >= 0 for event in rest)
    assert rest[-1].eta_seconds == 0


class NoExecutor(LocalExecutor):
    def start(self, *, target):
        raise AssertionError(f"nothing has to run, yet workers for {target} were started")


def test_a_model_that_cannot_run_is_skipped_without_a_process(output):
    result = sweep([spec("a", skip_training="no loss", skip_inference="needs a GPU")], output, executor=NoExecutor())
    assert (result.rows[0].accuracy, result.rows[0].error) == ("pass_due_to_skip", "needs a GPU")
    assert names_in_csv(output) == ["a"]


def test_the_skip_reason_is_that_of_the_mode(output):
    result = sweep([spec("a", skip_inference="no")], output, options=RunOptions(mode="training"))
    assert result.rows[0].accuracy == "pass"


def test_the_same_model_twice_is_refused_before_anything_is_written(output):
    with pytest.raises(HashbenchError, match="holds a of fake twice"):
        sweep([spec("a"), spec("a")], output)
    assert not output.exists()


# -------------------------------------------------------------------------------------------------- bad endings

ENDINGS = [
    ("segfault", "crashed", ["killed by SIGSEGV", "Fatal Python error: Segmentation fault"]),
    ("kill9", "crashed", ["killed by SIGKILL", "most likely the kernel was out of memory"]),
    ("exit3", "crashed", ["exit code 3", "giving up"]),
    ("exit0", "crashed", ["exit code 0 and no result"]),
    ("raise", "crashed", ["exit code 1", "RuntimeError: the harness itself is broken"]),
    ("hang", "timeout", ["no result after 1.5 s", "logs/fake.inference.hang.log"]),
    ("hang_with_lock", "timeout", ["no result after 1.5 s"]),
    ("leave_thread", "pass", []),
    ("leave_child", "pass", []),
    ("pass", "pass", []),
]


@pytest.fixture(scope="module")
def endings(tmp_path_factory):
    output = tmp_path_factory.mktemp("endings") / "results"
    models = [spec(do, do) for do, _, _ in ENDINGS]
    return output, {row.name: row for row in sweep(models, output, jobs=2, timeout=1.5).rows}


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


def test_the_log_of_a_model_that_was_too_slow_shows_where_it_hung(endings):
    output, _ = endings
    log = (output / "logs" / "fake.inference.hang.log").read_text()
    assert "sweep_targets.py" in log
    assert "do_hang" in log


def test_a_thread_that_a_model_left_behind_keeps_nobody_waiting(endings):
    _, rows = endings
    assert rows["leave_thread"].overhead_seconds < 1  # its time limit is 1.5


def test_what_a_finished_model_left_running_is_ended(endings):
    output, _ = endings
    wait_until(lambda: not any(map(alive, child_pids(output))))


def test_a_time_limit_ends_the_processes_that_a_model_started(output):
    assert sweep([spec("a", "hang_with_children")], output, timeout=1).rows[0].accuracy == "timeout"
    assert len(child_pids(output)) == 2
    wait_until(lambda: not any(map(alive, child_pids(output))))


def test_a_row_that_was_written_before_the_worker_was_killed_counts(output):
    """As when a worker hangs after its work: the row is read whatever the worker's end was."""

    class Impatient(LocalExecutor):
        def wait(self):
            wait_until((output / "rows" / "fake.inference.a.json").exists)
            return tuple(self._reap(running, timed_out=True) for running in list(self._running))

    assert sweep([spec("a")], output, executor=Impatient(preload=())).rows[0].accuracy == "pass"


# ------------------------------------------------------------------------------------------------------- resume


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in sorted(folder.rglob("*"))
    }


def test_a_folder_with_results_is_refused_and_not_touched(output):
    sweep([spec("a")], output)
    before = snapshot(output)
    with pytest.raises(HashbenchError, match=r"already holds the results of a sweep.*--resume"):
        sweep([spec("a")], output)
    assert snapshot(output) == before


@pytest.mark.parametrize("name", ["accuracy.csv", "sweep.json", "rows/fake.inference.a.json"])
def test_somebody_elses_results_are_refused_and_get_no_lock_file(output, name):
    (output / name).parent.mkdir(parents=True)
    (output / name).write_text("dev,name\n")
    before = snapshot(output)
    with pytest.raises(HashbenchError, match="already holds"):
        sweep([spec("a")], output)
    assert snapshot(output) == before


def test_resume_without_a_sweep_json_is_refused(output):
    output.mkdir()
    (output / "accuracy.csv").write_text("dev,name\n")
    with pytest.raises(HashbenchError, match=r"sweep\.json is missing"):
        sweep([spec("a")], output, resume=True)
    assert (output / "accuracy.csv").read_text() == "dev,name\n"


def test_resume_in_a_new_folder_simply_starts(output):
    assert len(sweep([spec("a")], output, resume=True).rows) == 1


def test_resume_of_a_complete_sweep_runs_nothing(output):
    first = sweep([spec("a"), spec("b")], output)
    again = sweep([spec("a"), spec("b")], output, resume=True, executor=NoExecutor())
    assert (again.rows, again.resumed) == (first.rows, 2)


def cut(path):
    path.write_bytes(path.read_bytes()[:-20])


def drop_a_field(path):
    row = json.loads(path.read_text())
    del row["kernel"]
    path.write_text(json.dumps(row))


@pytest.mark.parametrize(
    ("damage", "damaged"),
    [
        pytest.param(cut, 1, id="cut off"),
        pytest.param(lambda path: path.write_bytes(b""), 1, id="empty"),
        pytest.param(lambda path: path.write_bytes(b"\xff\xfe\x00"), 1, id="not text"),
        pytest.param(lambda path: path.write_text("[" * 100_000), 1, id="nested without end"),
        pytest.param(lambda path: path.write_text("[]"), 1, id="not an object"),
        pytest.param(drop_a_field, 1, id="a field is missing"),
        pytest.param(lambda path: shutil.copy(path.with_name("fake.inference.a.json"), path), 1, id="of another model"),
        pytest.param(lambda path: path.unlink(), 0, id="gone"),
    ],
)
def test_a_damaged_row_is_made_again(output, damage, damaged):
    models = [spec("a"), spec("b"), spec("c")]
    sweep(models, output)
    row_file = output / "rows" / "fake.inference.b.json"
    damage(row_file)
    events = []

    def note(event):
        events.append(event)
        assert not (isinstance(event, SweepOpened) and row_file.exists()), "somebody could trust it"

    again = sweep(models, output, resume=True, on_event=note)
    assert ran(output) == ["a", "b", "c", "b"]
    assert [row.name for row in again.rows] == names_in_csv(output) == ["a", "b", "c"]
    assert (again.resumed, again.damaged) == (2, damaged)
    assert events[0] == SweepOpened(total=3, done=2, damaged=again.damaged)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda path: path.unlink(), id="gone"),
        pytest.param(cut, id="cut off"),
        pytest.param(lambda path: path.write_text(path.read_text() * 2), id="doubled"),
    ],
)
def test_the_csv_is_rebuilt_from_the_rows(output, damage):
    first = sweep([spec("a"), spec("b")], output)
    damage(output / "accuracy.csv")
    sweep([spec("a"), spec("b")], output, resume=True)
    assert read_rows(output / "accuracy.csv") == list(first.rows)


def test_a_row_that_vanishes_while_the_sweep_runs_is_missed(output):
    def remove_row(event):
        if isinstance(event, ModelFinished) and event.row.name == "a":
            (output / "rows" / "fake.inference.a.json").unlink()

    with pytest.raises(HashbenchError, match=r"1 files in .*rows were damaged or removed"):
        sweep([spec("a"), spec("b")], output, on_event=remove_row)
    assert names_in_csv(output) == ["b"]


def test_leftovers_of_killed_workers_are_cleared_away(output):
    sweep([spec("a")], output)
    leftover = output / "rows" / ".fake.inference.b.json.123.tmp"
    leftover.write_text("{")
    sweep([spec("a")], output, resume=True)
    assert not leftover.exists()


def test_resume_of_another_sweep_says_what_differs(output):
    sweep([spec("a"), spec("b")], output)
    before = snapshot(output)
    with pytest.raises(HashbenchError, match=r"mode was 'inference' and is 'training'.*no longer b, now c"):
        sweep([spec("a"), spec("c")], output, options=RunOptions(mode="training"), resume=True)
    assert snapshot(output) == before


MANIFEST = {"schema": 1, "suites": ["s"], "options": {"seed": 1}, "models": [["s", "a"], ["s", "b"]]}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param({}, [], id="the same"),
        pytest.param({"schema": 2}, ["sweep.json has version 2, this hashbench writes 1"], id="another version"),
        pytest.param({"options": {"seed": 2}}, ["seed was 2 and is 1"], id="another option"),
        pytest.param(
            {"options": {"seed": 1, "threads": 4}}, ["threads was 4 and is None (--jobs sets it, too)"], id="jobs"
        ),
        pytest.param({"options": None}, ["seed was None and is 1"], id="damaged"),
        pytest.param({"suites": ["t"]}, ["suites were ['t'] and are ['s']"], id="another suite"),
        pytest.param({"models": [["s", "a"]]}, ["models: now b"], id="a model more"),
        pytest.param({"models": [["s", "b"], ["s", "a"]]}, ["the models come in another order"], id="another order"),
        pytest.param(
            {"models": [["s", x] for x in "abcdefg"]}, ["models: no longer c, d, e and 2 more"], id="fewer models"
        ),
    ],
)
def test_what_differs_between_two_sweeps(change, said):
    assert describe_differences({**MANIFEST, **change}, MANIFEST) == said


def test_a_resumed_sweep_keeps_the_environment_of_its_earlier_rows(output):
    models = [spec("a"), spec("b")]
    sweep(models, output, environment={"key": "e1", "torch": "2.15"})
    (output / "rows" / "fake.inference.b.json").unlink()
    for _ in range(2):
        again = sweep(models, output, environment={"key": "e2", "torch": "2.16"}, resume=True)
    assert [row.env for row in again.rows] == ["e1", "e2"]
    content = json.loads((output / "environment.json").read_text())
    assert (content["key"], content["previous"]) == ("e2", [{"key": "e1", "torch": "2.15"}])


# ------------------------------------------------------------------------------------------- sudden ends


@contextmanager
def sweep_process(output: Path, *arguments: str):
    """A sweep in a process group of its own, as a shell would start it."""
    process = subprocess.Popen(
        [sys.executable, SCRIPT, output, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def resume_process(output: Path, *arguments: str) -> None:
    done = subprocess.run([sys.executable, SCRIPT, output, "--resume", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def started(output: Path, count: int):
    """Whether ``count`` models have started."""
    return lambda: (output.parent / "ran.txt").exists() and len(ran(output)) >= count


HANGING = ["a=pass", "b=hang_with_children", "c=hang_with_lock", "d=pass"]


def assert_completed_by_resume(output: Path) -> None:
    """The two models that hung run again – now to their time limit's stand-in – and the others do not."""
    for key in ("b", "c"):
        assert not (output / "rows" / f"fake.inference.{key}.json").exists()
    resume_process(output, "a=pass", "b=pass", "c=pass", "d=pass")
    assert names_in_csv(output) == ["a", "b", "c", "d"]
    assert sorted(ran(output)) == ["a", "b", "b", "c", "c", "d"]


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
        wait_until(lambda: not [p for p in family if p.pid != own_session and alive(p.pid)], seconds=5)
        os.kill(own_session, signal.SIGKILL)
    assert names_in_csv(output) == ["a"]
    assert_completed_by_resume(output)


@pytest.mark.parametrize("whom", ["the whole process group", "the parent alone"])
def test_ctrl_c_ends_a_sweep_at_once_and_resume_completes(output, whom):
    with sweep_process(output, "--jobs", "2", *HANGING) as process:
        wait_until(started(output, 3))
        wait_until((output.parent / "children.txt").exists)
        family = psutil.Process(process.pid).children(recursive=True)
        began = time.monotonic()
        (os.killpg if whom == "the whole process group" else os.kill)(process.pid, signal.SIGINT)
        text, _ = process.communicate(timeout=10)
        assert time.monotonic() - began < 4
        assert (process.returncode, text) == (130, "1 of 4 rows written; continue with --resume\n")
        wait_until(lambda: not [p for p in family if alive(p.pid)], seconds=3)
    assert names_in_csv(output) == ["a"]
    assert_completed_by_resume(output)


def test_ctrl_c_at_any_moment_leaves_a_whole_sweep(output):
    """Signals at growing delays, over start, work and end; each time the CSV can be read and resume goes on."""
    models = [f"m{i}=pass" for i in range(20)]
    endings = []
    for delay in (0.3, 0.5, 0.7, 0.9):
        with sweep_process(output, "--resume", *models) as process:
            time.sleep(delay)
            os.killpg(process.pid, signal.SIGINT)
            process.communicate(timeout=10)
            endings.append(process.returncode)
        if (output / "accuracy.csv").exists():
            assert len(names_in_csv(output)) == len(list((output / "rows").glob("*.json")))
    resume_process(output, *models)
    assert names_in_csv(output) == [f"m{i}" for i in range(20)]
    assert 130 in endings


# -------------------------------------------------------------------------------------------------- full disks


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


def test_a_full_disk_under_the_runner_is_no_crash(output):
    with pytest.raises(HashbenchError, match=r"No space left on device; 1 of 2 rows are safe"):
        sweep([spec("a"), spec("b", "disk_full")], output)
    assert names_in_csv(output) == ["a"]


# ------------------------------------------------------------------------------------------- folders and locks


def test_two_sweeps_into_one_folder_the_second_is_refused(output):
    refused = []

    def start_another(event):
        if isinstance(event, ModelStarted):
            for resume in (False, True):
                with pytest.raises(HashbenchError, match="another sweep is writing into") as caught:
                    sweep([spec("a")], output, resume=resume)
                refused.append(caught)

    sweep([spec("a")], output, on_event=start_another)
    assert len(refused) == 2
    assert names_in_csv(output) == ["a"]


def test_the_lock_goes_with_the_parent_not_with_what_it_started(output):
    with sweep_process(output, "a=hang") as process:
        wait_until(started(output, 1))
        stopped = [p for p in psutil.Process(process.pid).children(recursive=True) if p.status() != "zombie"]
        for child in stopped:
            child.suspend()  # so that none of them can end before the folder is claimed
        process.kill()
        process.wait()
        with ResultsFolder(output).claimed(resume=True):
            pass
        for child in stopped:
            child.kill()


@pytest.mark.parametrize(
    "folder",
    [
        pytest.param("{tmp}/file", id="a file is in the way"),
        pytest.param("{tmp}/file/results", id="a parent is a file"),
        pytest.param("/dev/null/results", id="below a device"),
        pytest.param("/proc/hashbench/results", id="where nothing can be created"),
        pytest.param("{tmp}/" + "x" * 300, id="a name that is too long"),
    ],
)
def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path, folder):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(HashbenchError, match=r"cannot write results into .*nothing was run\. Choose another"):
        sweep([spec("a")], Path(folder.format(tmp=tmp_path)), executor=NoExecutor())
    assert (tmp_path / "file").read_text() == "mine"


def test_missing_parents_are_created(tmp_path):
    sweep([spec("a")], tmp_path / "one" / "two")
    assert names_in_csv(tmp_path / "one" / "two") == ["a"]


ODD_NAMES = [
    "A.b-c_1",
    "a/b",
    "a_b",
    "a b",
    "..",
    "../../up",
    "ü",
    "名前",
    "x" * 300,
    "x" * 299 + "y",
    "a\nb",
    "a~b",
    "-rf",
    "=1+1",
]


def test_names_that_are_no_file_names_work_and_do_not_collide(output):
    models = [spec(name) for name in ODD_NAMES]
    sweep(models, output)
    assert {path.name for path in output.parent.iterdir()} == {"results", "ran.txt"}
    assert len(list((output / "rows").iterdir())) == len(ODD_NAMES)
    again = sweep(models, output, resume=True, executor=NoExecutor())
    assert [row.name for row in again.rows] == ODD_NAMES


def test_a_suite_cannot_pass_for_another_suite_and_mode():
    twins = [("x", "y.training.z"), ("x.training.y", "z"), ("/zoo/x.py", "z"), ("_zoo_x_py", "z")]
    keys = {file_key(suite=suite, mode="training", name=name) for suite, name in twins}
    assert len(keys) == 4
    assert file_key(suite="torchvision", mode="training", name="vit_b_16") == "torchvision.training.vit_b_16"


# --------------------------------------------------------------------------------------------- the parent


def test_the_parent_never_imports_torch(tmp_path):
    code = (
        "import sys; from pathlib import Path; import hashbench.progress, sweep_targets\n"
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
        run_sweep(
            [spec("a")],
            RunOptions(),
            output=output,
            environment={},
            target="no_such_module:run",
            executor=LocalExecutor(preload=()),
        )
    assert names_in_csv(output) == []
    assert names_in_csv(output) != [row.name for row in sweep([spec("a")], output, resume=True).rows]
