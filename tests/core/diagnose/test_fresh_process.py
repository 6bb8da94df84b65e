"""Fresh processes: real ones, which run nothing but what they are told, and whose end in any way is a text."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from sweep_helpers import wait_until

from hashbench.core import processes
from hashbench.core.diagnose import fresh_process
from hashbench.core.diagnose.fresh_process import FreshRuns, fresh_traces, run_python
from hashbench.core.processes import Finished
from hashbench.core.records import ModelSpec, RunOptions
from hashbench.core.suites.registry import catalog


def fresh(do: str, *, processes: int = 1, runs: int = 1, fixed_order: bool = False, **settings: Any) -> FreshRuns:
    arguments = {"do": do, "list": [1, None, 2.5], **settings.pop("arguments", {})}
    spec = ModelSpec(suite="fake", name="some model", input_shape=(3, 8), arguments=arguments)
    return fresh_traces(
        spec,
        RunOptions(seed=99),
        level="warn",
        processes=processes,
        runs=runs,
        fixed_order=fixed_order,
        **{"timeout": 600.0, "target": "fresh_targets:Runner", **settings},
    )


def told(found: FreshRuns) -> list[list[str]]:
    """By process, what its runs say."""
    assert not found.failures
    return [[trace.records[0].arguments for trace in traces] for traces in found.processes]


def servers_of_fresh_processes() -> list[psutil.Process]:
    """Return those of this process; a sweep's server, which may be there too, imports something else."""
    imported = "hashbench.core.diagnose.fresh_process"
    return [child for child in psutil.Process().children() if imported in command_of(child)]


def command_of(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


def server_of_fresh_processes() -> psutil.Process:
    """Returns the one server. A child that is only just becoming another program has no command line yet."""
    wait_until(lambda: len(servers_of_fresh_processes()) == 1)
    (server,) = servers_of_fresh_processes()
    return server


@pytest.mark.slow
def test_each_process_makes_its_runs_and_knows_nothing_of_the_others() -> None:
    start = "some model (3, 8) [1, None, 2.5] 99 warn"
    assert told(fresh("tell", processes=3, runs=2)) == [[f"{start} 1", f"{start} 2"]] * 3


@pytest.mark.slow
def test_a_server_makes_single_processes_without_a_new_python(monkeypatch: pytest.MonkeyPatch) -> None:
    start = "some model (3, 8) [1, None, 2.5] 99 warn"
    with fresh_process.served("fresh_targets:Runner"):
        monkeypatch.setattr(fresh_process, "ServerProcess", None)
        for _ in range(3):
            assert told(fresh("tell", runs=2)) == [[f"{start} 1", f"{start} 2"]], "each is a fork of its own"
        with pytest.raises(TypeError):
            fresh("tell", processes=2)
    monkeypatch.undo()
    assert fresh_process.SERVER_VARIABLE not in os.environ
    assert told(fresh("tell")) == [[f"{start} 1"]]


def test_a_servers_process_ends_with_the_context(tmp_path: Path) -> None:
    spec = ModelSpec("fake", "some model", input_shape=(3, 8), arguments={"do": "hang", "folder": str(tmp_path)})
    wanted: dict[str, Any] = {"level": "warn", "processes": 1, "runs": 1, "fixed_order": False}
    with fresh_process.served("fresh_targets:Runner"):
        with fresh_process.begun(spec, RunOptions(seed=99), **wanted, target="fresh_targets:Runner"):
            pids = children_in(tmp_path, count=1)
        assert len(pids) == 2
        assert not wait_until_gone(pids)


def test_a_server_inside_of_another_leaves_that_one_as_it_was() -> None:
    with fresh_process.served("fresh_targets:Runner"):
        outer = os.environ[fresh_process.SERVER_VARIABLE]
        assert fresh_process.is_served()
        with fresh_process.served("fresh_targets:Runner", preload=("fresh_targets:preloaded", "json")):
            assert os.environ[fresh_process.SERVER_VARIABLE] != outer
            assert fresh_process.is_served("json", "fresh_targets:Runner")
            assert not fresh_process.is_served("json", "torch")
            assert not fresh("tell").failures
        assert os.environ[fresh_process.SERVER_VARIABLE] == outer
        assert not fresh_process.is_served("json")
        assert not fresh("tell").failures
    assert not fresh_process.is_served()
    assert not Path(outer).parent.exists()


def test_pool_processes_have_hash_seeds_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not fresh_process.is_pooled()
    with fresh_process.pooled("fresh_targets:Runner", preload=("fresh_targets:preloaded",)):
        assert fresh_process.is_pooled()
        monkeypatch.setattr(fresh_process, "ServerProcess", None)
        for _ in range(2):  # which find nothing of the first ones
            start = "some model (3, 8) [1, None, 2.5] 99 warn"
            assert told(fresh("tell", processes=4, runs=2)) == [[f"{start} 2", f"{start} 3"]] * 4
        orders = {text for (text,) in told(fresh("order", processes=4))}
        texts = {order.partition("] ")[2].partition("]")[0] for order in orders}
        assert len(orders) == 4
        assert len(texts) > 1, "five texts have one order in two processes once in 120 cases"
        with pytest.raises(TypeError):
            fresh("tell", processes=5)
    assert not fresh_process.is_pooled()


def test_fixed_order_pool_processes_are_forks_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with fresh_process.pooled("fresh_targets:Runner", preload=("fresh_targets:preloaded",)):
        monkeypatch.setattr(fresh_process, "ServerProcess", None)
        for number in (1, 4, 6):
            assert len(orders(fresh("order", processes=number, fixed_order=True))) == 1
        for _ in range(2):  # which find nothing of the first ones
            told_by_each = told(fresh("tell", processes=2, runs=2, fixed_order=True))
            assert told_by_each == [[f"some model (3, 8) [1, None, 2.5] 99 warn {number}" for number in (2, 3)]] * 2


@pytest.mark.slow
def test_a_new_python_replaces_a_dead_pool_server() -> None:
    with fresh_process.pooled("fresh_targets:Runner"):
        assert not fresh("tell", processes=4).failures
        assert len(orders(fresh("order", processes=4, fixed_order=True))) == 1
        servers = servers_of_fresh_processes()
        assert len(servers) == 5
        for ended in (servers[2], servers[4]):
            ended.kill()
            ended.wait()
        assert told(fresh("tell", processes=4)) == [["some model (3, 8) [1, None, 2.5] 99 warn 1"]] * 4
        assert len(orders(fresh("order", processes=4, fixed_order=True))) == 1


@pytest.mark.slow
def test_a_process_of_a_pool_that_dies_or_hangs_is_a_failure(tmp_path: Path) -> None:
    with fresh_process.pooled("fresh_targets:Runner"):
        assert len(fresh("killed", processes=3).failures) == 3
        hanging = fresh("hang", processes=2, timeout=3.0, arguments={"folder": str(tmp_path)})
        assert hanging.failures == ("it was out of time",) * 2


@pytest.mark.slow
def test_a_dead_fixed_order_process_is_a_failure(
    tmp_path: Path,
) -> None:
    with fresh_process.pooled("fresh_targets:Runner"):
        killed = fresh("killed", processes=3, fixed_order=True).failures
        assert killed == fresh("killed", processes=1).failures * 3
        hanging = fresh("hang", processes=2, fixed_order=True, timeout=3.0, arguments={"folder": str(tmp_path)})
        assert hanging.failures == ("it was out of time",) * 2
        assert not wait_until_gone(children_in(tmp_path, count=2))


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="nothing pins processes here")
def test_a_process_of_a_pool_has_the_processors_of_the_one_that_asks() -> None:
    before = os.sched_getaffinity(0)
    with fresh_process.pooled("fresh_targets:Runner"):
        try:
            os.sched_setaffinity(0, {min(before)})
            assert told(fresh("processors", processes=2)) == [[str([min(before)])]] * 2
        finally:
            os.sched_setaffinity(0, before)
        assert told(fresh("processors", processes=2)) == [[str(sorted(before))]] * 2


def test_a_dead_process_of_a_server_is_one_failure() -> None:
    with fresh_process.served("fresh_targets:Runner"):
        assert fresh("killed").failures
        assert not fresh("tell").failures


def test_a_dead_server_is_reported_and_not_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with fresh_process.served("fresh_targets:Runner"):
        monkeypatch.setattr(fresh_process, "ServerProcess", None)
        assert not fresh("tell").failures  # it has begun, by the name that it is known by
        server = server_of_fresh_processes()
        server.kill()
        server.wait()
        assert fresh("tell").failures == ("the server of fresh processes has ended",)


@pytest.mark.parametrize("given", [None, "ours"])
def test_a_server_has_a_workers_variables(given: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if given is not None:
        monkeypatch.setenv("FRESH_TEST", given)
    with fresh_process.served("fresh_targets:Runner", environment={"FRESH_TEST": "wanted"}):
        ((text,),) = told(fresh("where"))
    assert (given or "wanted") in text


def test_a_server_preloads_before_it_forks() -> None:
    with fresh_process.served("fresh_targets:Runner", preload=("no_such_module", "fresh_targets:preloaded")):
        assert told(fresh("tell")) == [["some model (3, 8) [1, None, 2.5] 99 warn 2"]]


def test_an_unused_server_imports_nothing() -> None:
    with fresh_process.served("fresh_targets:Runner", at_once=False):
        server = server_of_fresh_processes()
        while server.status() != psutil.STATUS_SLEEPING:
            time.sleep(0.01)
        assert processes._LAUNCHER in server.cmdline()
        for _ in range(2):
            assert not fresh("tell").failures
            assert processes._LAUNCHER not in server.cmdline()


@pytest.mark.parametrize("ends", [True, False])
def test_a_python_that_waits_to_be_asked_ends_with_its_parent(ends: bool) -> None:
    asked, asking = os.pipe()
    command = processes.python_calling("sys:exit", "7", dies_with_us=True, asked=asked)
    with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=(asked,)) as process:
        assert process.stdin is not None
        process.stdin.write(b"a task")
        process.stdin.flush()
        if ends:
            process.stdin.close()
        else:
            os.write(asking, b".")
        assert process.wait(timeout=300) == (0 if ends else 1), "it is asked: what is called exits with a text"
    os.close(asked)
    os.close(asking)


PROGRAMS = {
    "import sys; print(sys.argv, __name__, repr(sys.stdin.read())); print('ä', file=sys.stderr)": (
        Finished(0, "['-c', 'a', 'b c'] __main__ ''\n", "ä\n")
    ),
    "import os; print(os.environ['FRESH_TEST'], os.getcwd() == os.environ['HERE'])": Finished(
        0, "set since True\n", ""
    ),
    "import os; print(len(os.sched_getaffinity(0)))": Finished(0, "1\n", ""),
    "import sys; sys.exit(1)": Finished(1, "", ""),
    "import sys; sys.exit()": Finished(0, "", ""),
    "import sys; sys.exit('it needs an op')": Finished(1, "", "it needs an op\n"),
    "import os; os.system('echo from a shell'); os._exit(7)": Finished(7, "from a shell\n", ""),
    "import os; os.kill(os.getpid(), 9)": Finished(-9, "", ""),
    "first = 1\ndef g():\n    return first\nprint(g())": Finished(0, "1\n", ""),
}


@pytest.mark.parametrize("served", [True, False])
def test_a_program_ends_in_a_fork_of_a_server_as_in_a_new_python(
    served: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with fresh_process.served("fresh_targets:Runner") if served else contextlib.nullcontext():
        if served:
            monkeypatch.setattr(fresh_process, "new_python", None)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HERE", str(Path.cwd()))
        monkeypatch.setenv("FRESH_TEST", "set since")
        monkeypatch.setenv("PYTHONUTF8", "1")
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(cores)})
        try:
            assert {code: run_python(code, "a", "b c", seconds=600) for code in PROGRAMS} == PROGRAMS
            failed = run_python("1 / 0", seconds=600)
        finally:
            os.sched_setaffinity(0, cores)
    assert (failed.status, failed.last_line) == (1, "ZeroDivisionError: division by zero")
    assert "fresh_process" not in failed.stderr, "frames of ours"


WHERE = """
import importlib.util, sys
print(sys.path)
for name in ("fresh_targets", "of_the_sweep", "of_all", "torch", "psutil", "hashbench"):
    found = importlib.util.find_spec(name)
    print(name, found and found.origin)
try:
    import of_the_sweep
except ModuleNotFoundError as error:
    print(error)
"""
"""Tells where modules are found, and loads none of those that take long."""


@pytest.mark.parametrize("written", ["before", "after"])
def test_a_forked_program_finds_a_new_pythons_modules(
    written: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, of_all = tmp_path / "ours", tmp_path / "of all"
    monkeypatch.syspath_prepend(str(ours))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(of_all), os.environ.get("PYTHONPATH", "")]))
    of_all.mkdir()
    ours.mkdir()

    def write() -> None:
        """With the times of the folders as before: a clock need not have ticked since Python has listed them."""
        for file in (ours / "of_the_sweep.py", of_all / "of_all.py"):
            before = file.parent.stat()
            file.touch()
            os.utime(file.parent, ns=(before.st_atime_ns, before.st_mtime_ns))

    if written == "before":
        write()
    with fresh_process.served("fresh_targets:Runner", preload=("of_the_sweep",)):
        assert run_python("", seconds=600).status == 0
        write()
        known = processes.new_python(WHERE, seconds=600)
        monkeypatch.setattr(fresh_process, "new_python", None)
        assert run_python(WHERE, seconds=600) == known
    assert "of_the_sweep None\nof_all /" in known.stdout
    assert known.stdout.endswith("No module named 'of_the_sweep'\n")


def test_another_torch_or_path_needs_a_new_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "ours" / "torch"
    other.mkdir(parents=True)
    (other / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(other.parent))
    new = Finished(0, "a new Python", "")
    monkeypatch.setattr(fresh_process, "new_python", lambda *_, **__: new)
    with fresh_process.served("torch"):
        assert run_python("", seconds=600) == new
    with fresh_process.served("fresh_targets:Runner"):
        assert run_python("", seconds=600) != new
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        assert run_python("", seconds=600) == new


@pytest.mark.slow
def test_a_program_out_of_time_ends_with_its_children(tmp_path: Path) -> None:
    code = (
        "import os, subprocess, sys, time; child = subprocess.Popen(['sleep', '600'])\n"
        "open(sys.argv[1] + '.partial', 'w').write(f'{os.getpid()} {child.pid}')\n"
        "os.rename(sys.argv[1] + '.partial', sys.argv[1]); print('begun', flush=True); time.sleep(600)"
    )
    with fresh_process.served("fresh_targets:Runner"):
        for seconds in (1.0, 4.0, 16.0, 64.0):  # a busy machine needs longer until it has come so far
            done = run_python(code, str(tmp_path / "one.pids"), seconds=seconds)
            assert done.status is None
            if (tmp_path / "one.pids").exists():
                break
        assert done.stdout == "begun\n"
        assert not wait_until_gone(children_in(tmp_path, count=1))


def test_a_program_runs_in_a_new_python_where_the_server_has_ended() -> None:
    with fresh_process.served("fresh_targets:Runner"):
        assert run_python("", seconds=600).status == 0  # it has begun, by the name that it is known by
        server = server_of_fresh_processes()
        server.kill()
        server.wait()
        assert run_python("print('here')", seconds=600) == Finished(0, "here\n", "")


def orders(found: FreshRuns) -> set[str]:
    return {text for texts in told(found) for text in texts}


def test_with_fixed_order_sets_have_one_order_in_all_processes() -> None:
    assert len(orders(fresh("order", processes=4, fixed_order=True))) == 1


def test_fixed_order_survives_new_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))  # which every new Python lists
    found = fresh("order", processes=6, fixed_order=True, arguments={"written": str(tmp_path)})
    assert len(list(tmp_path.iterdir())) == 6 * 50
    assert len(orders(found)) == 1


def test_fixed_order_survives_a_module_to_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = [f"def unused_{number}(x, y=({number}, 'text')):\n    return [x + {number}, y]\n" for number in range(3000)]
    text = (Path(__file__).parents[2] / "fresh_targets.py").read_text()
    (tmp_path / "never_imported.py").write_text("\n".join([text, *more]))
    monkeypatch.syspath_prepend(str(tmp_path))
    for variable in ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"):
        monkeypatch.delenv(variable, raising=False)
    assert len(orders(fresh("order", processes=4, fixed_order=True, target="never_imported:Runner"))) == 1


@pytest.mark.slow
def test_without_fixed_order_sets_have_other_orders() -> None:
    assert len(orders(fresh("order", processes=4))) > 1


@pytest.mark.slow
@pytest.mark.parametrize("fixed_order", [True, False])
def test_order_of_a_set_is_random_as_long_as_it_is_not_fixed(fixed_order: bool) -> None:
    found = fresh("arranged", processes=4, fixed_order=fixed_order)
    assert (len(orders(found)) == 1) == fixed_order


def test_a_process_has_the_environment_and_module_path_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRESH_TEST", "inherited")
    monkeypatch.syspath_prepend("a folder of somebody's")
    [[text]] = told(fresh("where"))
    assert text.startswith(f"{sys.path} inherited '' ")


def test_what_a_process_prints_goes_nowhere(capfd: pytest.CaptureFixture[str]) -> None:
    assert told(fresh("loud")) == [["quiet"]]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("do", "text"),
    [
        ("fail", "RuntimeError: no such kernel"),
        ("error", "RuntimeError: the file has changed"),
        ("exit", "ended with exit code 7 and no result"),
        ("crash", "killed by SIGSEGV"),
        ("half", "cannot read the trace"),
        ("nothing of that name", "AttributeError: 'Runner' object has no attribute 'nothing of that name'"),
    ],
)
def test_a_process_that_fails_is_a_text(do: str, text: str) -> None:
    found = fresh(do, processes=2, runs=2)
    assert not found.processes
    assert len(found.failures) == 2
    assert found.failures[0].startswith(text)
    assert "\n" not in found.failures[0]


def test_a_target_that_is_not_there_is_a_text() -> None:
    (text,) = fresh("tell", target="no_such_module:Runner").failures
    assert text == "ModuleNotFoundError: No module named 'no_such_module'"


def test_arguments_that_are_not_plain_data_are_a_text() -> None:
    found = fresh("tell", processes=2, arguments={"function": len})
    assert found == FreshRuns(failures=("the model's arguments cannot be written as JSON",) * 2)


def test_two_processes_run_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fresh_process, "available_memory_mib", lambda: 1e9)
    assert told(fresh("meet", processes=2, arguments={"folder": str(tmp_path)})) == [["2"], ["2"]]


@pytest.mark.slow
@pytest.mark.parametrize("fixed_order", [False, True], ids=["random order", "fixed order"])
@pytest.mark.parametrize("pooled", [False, True], ids=["of new Pythons", "of a pool"])
def test_little_memory_runs_one_process_at_a_time(
    pooled: bool, fixed_order: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    returned: list[bool] = []
    one = 1.5 * processes.peak_memory_mib()
    monkeypatch.setattr(fresh_process, "available_memory_mib", lambda: one)
    monkeypatch.setattr(fresh_process, "return_free_memory", lambda: returned.append(True))
    with fresh_process.pooled("fresh_targets:Runner") if pooled else contextlib.nullcontext():
        found = fresh("count", processes=2, fixed_order=fixed_order, arguments={"folder": str(tmp_path)})
    assert told(found) == [["1"], ["1"]]
    assert returned


def test_memory_that_a_process_returns_lets_two_run_at_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    free: list[float] = [1.5 * processes.peak_memory_mib()]
    monkeypatch.setattr(fresh_process, "available_memory_mib", lambda: free[-1])
    monkeypatch.setattr(fresh_process, "return_free_memory", lambda: free.append(1e9))
    assert told(fresh("meet", processes=2, arguments={"folder": str(tmp_path)})) == [["2"], ["2"]]


def children_in(folder: Path, *, count: int) -> list[int]:
    ends = time.monotonic() + 300
    while len(list(folder.glob("*.pids"))) < count and time.monotonic() < ends:
        time.sleep(0.01)
    return [int(pid) for note in folder.glob("*.pids") for pid in note.read_text().split()]


def wait_until_gone(pids: list[int]) -> list[int]:
    ends = time.monotonic() + 120
    while (alive := [pid for pid in pids if is_running(pid)]) and time.monotonic() < ends:
        time.sleep(0.01)
    return alive


def is_running(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.slow
def test_what_takes_too_long_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    for seconds in (1.0, 4.0, 16.0, 64.0, 256.0):  # a busy machine needs longer until two have come so far
        found = fresh("hang", processes=3, timeout=seconds, arguments={"folder": str(tmp_path)})
        assert found.failures == ("it was out of time",) * 3
        notes = list(tmp_path.glob("*.pids"))
        pids = [int(pid) for note in notes for pid in note.read_text().split()]
        assert not wait_until_gone(pids)
        if len(notes) >= 2:
            break
        for note in notes:
            note.unlink()
    assert len(pids) == 4, "two processes and the child of each; the third was never begun"


@pytest.mark.slow
def test_processes_die_with_the_one_that_wants_them(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path[:0] = sys.argv[2:]\n"
        "from tests.core.diagnose.test_fresh_process import fresh\n"
        "fresh('hang', processes=2, arguments={'folder': sys.argv[1]})"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), *sys.path])
    pids = children_in(tmp_path, count=2)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert len(pids) == 4
    assert not wait_until_gone(pids)


def test_no_folder_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    fresh("tell")
    fresh("exit")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_specimen_runs_as_it_does_in_a_sweep() -> None:
    spec = next(spec for spec in catalog("specimens") if spec.name == "annealed_attention")
    found = fresh_traces(
        dataclasses.replace(spec), RunOptions(), level="on", processes=2, runs=2, fixed_order=False, timeout=600
    )
    assert not found.failures
    results = [[trace.results for trace in traces] for traces in found.processes]
    assert results[0][0] == results[1][0], "a counter starts again with the process"
    assert results[0][0] != results[0][1]
