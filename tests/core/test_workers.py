"""A fork server that is killed or stopped says nothing of the models that ran: they run again, and no wait is without
end. Models are stand-ins without torch."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import psutil
import pytest
import sweep_targets
from sweep_helpers import alive, child_pids, names_in_csv, started, sweep, sweep_process, wait_until
from sweep_targets import ran, spec

from hashbench.core import workers
from hashbench.core.errors import HashbenchError
from hashbench.core.results.folder import ResultsFolder
from hashbench.core.sweep import run
from hashbench.core.sweep.executors import local
from hashbench.core.sweep.run import REPETITIONS_AFTER_LOSS, ModelFinished, ModelLost, ModelStarted

LOST = "the fork server ended before it reported how the worker ended"


def server() -> int:
    return workers.WORKERS.pid


def is_server(process):
    return "hashbench.core.workers:serve" in process.cmdline()


def worker_pids(output):
    return [int(line.split()[1]) for line in (output.parent / "ran.txt").read_text().splitlines()]


def assert_nothing_is_left(output):
    assert not [pid for pid in worker_pids(output) if alive(pid)]
    # A worker that is killed while it writes a file leaves that under a temporary name.
    assert not list((output / "rows").glob("[!.]*.[df]*")), "neither a draft nor a first attempt"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_server_that_is_gone_before_a_worker_is_forked_is_replaced(output, number, monkeypatch):
    monkeypatch.setattr(workers, "FORK_SECONDS", 0.5)
    events = []

    def act(event):
        events.append(event)
        if isinstance(event, ModelStarted) and event.name == "b":
            os.kill(server(), number)

    rows = sweep([spec("a"), spec("b"), spec("c")], output, on_event=act).rows
    assert [(row.name, row.accuracy, row.retried) for row in rows] == [(name, "pass", "") for name in "abc"]
    assert not [event for event in events if isinstance(event, ModelLost)]
    assert_nothing_is_left(output)


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["by itself", "killed"])
def test_server_and_tracker_end_with_the_sweep_whatever_a_model_leaves_behind(output, ends):
    with sweep_process(output, "a=leave_daemons", "b=hang_once", "c=pass") as process:
        wait_until(started(output, 2))
        (server,) = (child for child in psutil.Process(process.pid).children() if is_server(child))
        (tracker,) = (child.pid for child in server.children() if not is_server(child))
        if ends == "killed":
            process.kill()
        else:
            os.kill(worker_pids(output)[1], signal.SIGKILL)
        process.wait()
        try:
            # Of a sweep that is killed nobody can end the tracker before the forked daemon does.
            wait_until(lambda: not alive(server.pid) and (ends == "killed" or not alive(tracker)), seconds=30.0)
            assert all(map(alive, child_pids(output)))
        finally:
            for daemon in child_pids(output):
                os.kill(daemon, signal.SIGKILL)
        wait_until(lambda: not alive(tracker))


def test_a_worker_has_no_socket_of_its_server_nor_passes_on_the_pipe_of_the_tracker(output):
    """By the name of the attribute of multiprocessing that this rests on."""
    rows = sweep([spec("a", "meet"), spec("b", "tell_pipes")], output, jobs=2).rows
    assert [row.detail for row in rows] == ["", "tracker's inherited False, sockets []"]


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["by itself", "killed"])
def test_shared_memory_that_a_killed_model_leaves_goes_with_the_sweep(output, ends):
    with sweep_process(output, "a=leave_shared_memory", *(["b=hang"] if ends == "killed" else [])) as process:
        if ends == "killed":
            wait_until(started(output, 2))
            process.kill()
        process.wait()
    left = Path("/dev/shm", (output.parent / "shared.txt").read_text())
    wait_until(lambda: not left.exists(), seconds=30.0)


@pytest.mark.slow
def test_models_that_were_running_when_the_server_was_killed_run_again(output):
    def kill():
        wait_until(started(output, 2))
        os.kill(server(), signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    events = []
    models = [spec("a", "hang_once"), spec("b", "hang_once"), spec("c")]
    rows = sweep(models, output, jobs=2, on_event=events.append).rows
    thread.join()
    assert [(row.name, row.accuracy, row.retried) for row in rows] == [
        ("a", "pass", LOST),
        ("b", "pass", LOST),
        ("c", "pass", ""),
    ]
    assert sorted(event.name for event in events if isinstance(event, ModelLost) and event.again) == ["a", "b"]
    assert_nothing_is_left(output)


def test_a_row_that_was_written_before_the_server_was_killed_counts(output):
    def act(event):
        if isinstance(event, ModelStarted) and event.name == "a":
            threading.Thread(target=kill).start()

    def kill():
        wait_until(lambda: ResultsFolder(output).row_path("fake.inference.a").exists())
        os.kill(server(), signal.SIGKILL)

    rows = sweep([spec("a"), spec("b")], output, on_event=act).rows
    assert [(row.name, row.accuracy) for row in rows] == [("a", "pass"), ("b", "pass")]
    assert ran(output)[0] == "a"
    assert ran(output).count("a") == 1
    assert_nothing_is_left(output)


@pytest.mark.slow
def test_a_model_that_ends_its_server_each_time_is_left_out_in_one_sentence_and_no_other_is(output):
    events = []
    with pytest.raises(HashbenchError) as caught:
        sweep([spec("a", "kill_server"), spec("b", "nap"), spec("c", "nap")], output, jobs=2, on_event=events.append)
    assert str(caught.value) == (
        f"no result for 1 model: a: their worker or machine died every time ({LOST} (4 times)). "
        "Run the same command with --resume."
    )
    assert sorted(names_in_csv(output)) == ["b", "c"]
    assert ran(output).count("a") == 1 + REPETITIONS_AFTER_LOSS
    assert [event.again for event in events if isinstance(event, ModelLost) and event.name == "a"] == [
        *[True] * REPETITIONS_AFTER_LOSS,
        False,
    ]
    assert_nothing_is_left(output)
    rows = sweep([spec("a"), spec("b"), spec("c")], output, jobs=2, resume=True).rows
    assert [(row.name, row.accuracy) for row in rows] == [(name, "pass") for name in "abc"]


@pytest.mark.slow
def test_a_difference_that_was_seen_before_the_server_ended_is_kept(output, monkeypatch):
    monkeypatch.setattr(run, "REPETITIONS_AFTER_LOSS", 1)
    (row,) = sweep([spec("a", "differ_and_kill_server")], output).rows
    assert (row.accuracy, row.kernel) == ("eager_two_runs_differ", "aten.index_put.default")
    assert row.error == f"the diagnosis did not end: {LOST}"
    assert row.retried == f"{LOST} (2 times)"
    assert_nothing_is_left(output)


@pytest.mark.slow
def test_a_server_that_does_not_tell_of_an_end_is_replaced(output, monkeypatch):
    monkeypatch.setattr(local, "_REPORT_SECONDS", 0.1)
    rows = sweep([spec("a", "stop_server"), spec("b")], output).rows
    assert [(row.name, row.accuracy, row.retried) for row in rows] == [("a", "pass", LOST), ("b", "pass", "")]
    assert_nothing_is_left(output)


@pytest.mark.slow
def test_a_stopped_server_does_not_keep_a_sweep_from_ending(output, monkeypatch):
    """Its worker is out of time at the moment when nobody answers any more."""
    monkeypatch.setattr(local, "_LAST_WAIT", 0.1)

    def act(event):
        if isinstance(event, ModelFinished):
            wait_until(lambda: not alive(stopped[0]))

    def stop():
        wait_until(started(output, 1))
        stopped.append(server())
        os.kill(stopped[0], signal.SIGSTOP)

    stopped: list[int] = []
    thread = threading.Thread(target=stop)
    thread.start()
    (row,) = sweep([spec("a", "hang")], output, timeout=3.0, on_event=act).rows
    thread.join()
    assert row.accuracy == "timeout"
    assert_nothing_is_left(output)


@pytest.mark.slow
def test_how_a_worker_ends_by_itself_is_its_own_doing(output):
    rows = sweep([spec("a", "exit255"), spec("b", "kill9"), spec("c", "stop")], output, timeout=2.0).rows
    assert [(row.accuracy, row.error.partition(";")[0]) for row in rows] == [
        ("crashed", "ended with exit code 255 and no result"),
        ("crashed", "killed by SIGKILL, which hashbench did not send: most likely the kernel was out of memory"),
        ("timeout", "no result after 2 s"),
    ]


def test_an_import_that_hangs_is_refused_in_time(output, monkeypatch, tmp_path):
    (tmp_path / "hangs_on_import.py").write_text(f"import time; time.sleep({sweep_targets.FOR_EVER})")
    monkeypatch.syspath_prepend(tmp_path)
    sweep([spec("a")], output / "first")
    monkeypatch.setattr(local, "START_SECONDS", 0.5)
    with pytest.raises(HashbenchError, match=r"cannot import hangs_on_import: the import did not end within 0\.5 s"):
        sweep([spec("a")], output / "second", target="hangs_on_import:run")


def test_a_target_that_ends_the_server_is_refused(output, monkeypatch, tmp_path):
    (tmp_path / "ends_the_server.py").write_text(
        "import os, signal, time\nserver = os.getppid()\n"
        "while open(f'/proc/{server}/stat').read().rpartition(')')[2].split()[0] != 'S':\n"
        "    time.sleep(0.01)  # it has not yet told which process it has forked\n"
        "os.kill(server, signal.SIGKILL)\ntime.sleep(600)"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(HashbenchError, match=f"cannot import ends_the_server: {LOST}; no model was run"):
        sweep([spec("a")], output, target="ends_the_server:run")
