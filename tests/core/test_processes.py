"""Child processes: what they are given, how they end, and that nothing of them stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from sweep_helpers import alive, wait_until

from hashbench.core import processes
from hashbench.core.processes import Child, Interrupts, last_line_of_user, python_calling, run

FOREVER = "import time; time.sleep(600)"
PARENT_OF_ONE = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {FOREVER!r}], start_new_session=SESSION)
open(sys.argv[1], "w").write(str(child.pid))
{FOREVER}
"""


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, *arguments]


def written(path: Path) -> int:
    wait_until(lambda: path.exists() and path.read_text())
    return int(path.read_text())


def test_run_returns_status_and_output() -> None:
    done = run(python("import sys; print('out'); print('first\\nlast', file=sys.stderr); sys.exit(3)"), seconds=60)
    assert (done.status, done.stdout, done.stderr, done.last_line) == (3, "out\n", "first\nlast\n", "last")


def test_silent_command_is_described_by_exit_code() -> None:
    assert run(python("raise SystemExit(3)"), seconds=60).last_line == "exit code 3"


def test_command_gets_variables_and_no_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OURS", "inherited")
    code = "import os, sys; print(sys.stdin.read(), os.environ['OURS'], os.environ['GIVEN'])"
    assert run(python(code), seconds=60, environment={"GIVEN": "given"}).stdout == " inherited given\n"


@pytest.mark.parametrize("session", [True, False], ids=["a session of its own", "our session"])
@pytest.mark.parametrize("own", [True, False], ids=["own session", "shared session"])
def test_when_time_is_over_nothing_of_a_command_stays(tmp_path: Path, session: bool, own: bool) -> None:
    note = tmp_path / "pid"
    code = PARENT_OF_ONE.replace("SESSION", str(session))
    with Child(python(code, str(note)), own_session=own) as child:
        pid = written(note)
        assert child.wait(0.01) is None
    wait_until(lambda: not alive(pid))


def test_orphans_do_not_block() -> None:
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {FOREVER!r}]); print('done')"
    began = time.monotonic()
    assert run(python(code), seconds=60).stdout == "done\n"
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("dies_with_us", [False, True])
def test_a_python_calls_a_function_of_this_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, dies_with_us: bool
) -> None:
    (tmp_path / "hashbench.py").write_text("raise RuntimeError('a file of somebody else')")
    monkeypatch.chdir(tmp_path)
    done = run(
        python_calling("hashbench.core.errors:first_line", "\nwords\nmore", dies_with_us=dies_with_us), seconds=60
    )
    assert (done.status, done.last_line) == (1, "words")


def test_child_ends_with_its_input(tmp_path: Path) -> None:
    note = tmp_path / "told"
    code = (
        "import sys, time\n"
        "from hashbench.core.processes import end_with_input\n"
        "line = sys.stdin.readline()\n"
        "end_with_input()\n"
        "assert sys.stdin.read() == ''\n"
        "open(sys.argv[1], 'w').write(line)\n"
        "time.sleep(600)\n"
    )
    with Child(python(code, str(note)), task="123\n") as child:
        assert written(note) == 123
        assert child.status() is None
        child._process.stdin.close()  # as when this process is killed
        child._process.stdin = None
        assert child.wait(20) == -9


# ------------------------------------------------------------------------------------------------------ Ctrl-C


def press_ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)


def test_unread_task_does_not_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hashbench.core.processes.PIPE_SECONDS", 0.01)
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with Child(command, task="x" * 2**21) as child:
        assert child.wait(0.01) is None


def test_ctrl_c_is_raised_where_it_is_allowed():
    with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt), interrupts.allowed():
        press_ctrl_c()


def test_ctrl_c_elsewhere_waits_until_it_is_allowed():
    done = []
    with Interrupts() as interrupts:
        press_ctrl_c()
        done.append("a file is whole")
        with pytest.raises(KeyboardInterrupt), interrupts.allowed():
            done.append("never")
        press_ctrl_c()
        done.append("the clean-up is whole")
    assert done == ["a file is whole", "the clean-up is whole"]


def test_ignored_ctrl_c_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts, interrupts.allowed():
            press_ctrl_c()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_quiet_budget_excludes_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, computed = [100.0], [7.0]
    monkeypatch.setattr(processes, "monotonic", lambda: clock[0])
    monkeypatch.setattr(processes, "process_time", lambda: computed[0])
    budget = processes.QuietBudget(5.0, most=50.0)
    assert budget.left() == 5.0
    clock[0], computed[0] = 130.0, 8.0  # it waited for a processor
    assert budget.left() == 4.0
    clock[0], computed[0] = 149.0, 8.0
    assert budget.left() == 1.0, "of the most that the clock may show"
    budget = processes.QuietBudget(5.0, most=50.0)
    clock[0], computed[0] = 151.0, 18.0  # with several threads
    assert budget.left() == 3.0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the C library is glibc on Linux")
def test_freed_memory_is_returned() -> None:
    code = """
        import psutil
        from hashbench.core.processes import return_free_memory

        def taken():
            return psutil.Process().memory_info().rss / 2**20

        blocks = [bytearray(65536) for _ in range(4000)]  # too small for pages of their own
        del blocks[: len(blocks) - 1]  # the last one keeps what lies before it
        before = taken()
        return_free_memory()
        print(before, taken())
    """
    before, after = map(float, run(python(textwrap.dedent(code)), seconds=60).stdout.split())
    assert before > 250
    assert after < before - 200


# ------------------------------------------------------------------------------------------------------ a guard

_OWNER = """
import pathlib, sys
from hashbench.core.processes import Child
with Child([sys.executable, "-c", *sys.argv[1:]], guarded=True, own_session=OWN) as child:
    child.wait()
"""
_TREE = """
import os, pathlib, signal, subprocess, sys, time
below = [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"]
pids = [subprocess.Popen(below, start_new_session=own).pid for own in (True, False)]
if not os.fork():
    os.setsid()
    pids.append(subprocess.Popen(below, start_new_session=True).pid)  # its parent ends: an orphan
    pathlib.Path(sys.argv[1] + ".new").write_text(" ".join(map(str, [os.getppid(), *pids])))
    os.rename(sys.argv[1] + ".new", sys.argv[1])
    os._exit(0)
while sys.argv[2] != "ends" or not os.path.exists(sys.argv[1]):  # the end of the command is that of all
    time.sleep(0.01)
"""


@pytest.mark.parametrize("own", [True, False], ids=["own session", "shared session"])
@pytest.mark.parametrize("how", ["owner terminated", "owner killed", "command killed", "ends", "time is over"])
def test_nothing_of_a_guarded_command_survives(tmp_path: Path, how: str, own: bool) -> None:
    note = tmp_path / "pids"
    owner = subprocess.Popen(python(_OWNER.replace("OWN", str(own)), _TREE, str(note), how), start_new_session=True)
    wait_until(note.exists)
    tree = [int(pid) for pid in note.read_text().split()]
    if how.startswith("owner"):
        os.kill(owner.pid, signal.SIGKILL if "killed" in how else signal.SIGTERM)
    elif how == "command killed":
        os.kill(tree[0], signal.SIGKILL)
    elif how == "time is over":
        os.kill(owner.pid, signal.SIGINT)
    owner.wait(60)
    wait_until(lambda: not any(map(alive, tree)), seconds=30.0)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("", 0),
        ("raise SystemExit(5)", 5),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("import os; os.kill(os.getpid(), 11)", -11),
        ("import os; os.kill(os.getpid(), 15)", -15),
        ("import signal, sys; sys.exit(signal.getsignal(signal.SIGTERM) != signal.SIG_DFL)", 0),
    ],
    ids=["well", "exit code", "SIGKILL", "SIGSEGV", "SIGTERM", "signals have their defaults"],
)
def test_a_guard_ends_as_its_command(code: str, status: int) -> None:
    with Child(python(code), guarded=True) as child:
        assert child.wait(60) == status


@pytest.mark.parametrize("own", [True, False], ids=["own session", "shared session"])
def test_a_guarded_command_gets_the_signals_that_it_is_sent(tmp_path: Path, own: bool) -> None:
    note = tmp_path / "pid"
    code = (
        "import os, pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        "pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))\n"
        "time.sleep(600)\n"
    )
    with Child(python(code, str(note)), guarded=True, own_session=own) as child:
        written(note)
        child.interrupt(signal.SIGTERM)
        assert child.wait(60) == 7
        child.interrupt(signal.SIGTERM)  # nobody is there


def test_a_guarded_command_that_cannot_be_started_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Child([str(tmp_path / "absent")], guarded=True)


DIES = """
import faulthandler, os, random
faulthandler.enable(open("log", "w"))

def forward():
    random.random = os.abort
    random.random()

forward()
"""


def test_a_dump_names_the_innermost_line_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "zoo.py").write_text(DIES)
    done = subprocess.run([sys.executable, tmp_path / "zoo.py"], cwd=tmp_path, check=False)
    assert done.returncode == -signal.SIGABRT
    assert last_line_of_user(tmp_path / "log") == "zoo.py:7 forward"


@pytest.mark.parametrize(
    ("log", "line"),
    [
        pytest.param(
            f'{{}}  File "{os.__file__}", line 1 in abort\n  File "/a/zoo.py", line 2 in f\n', "zoo.py:2 f", id="inner"
        ),
        pytest.param(f'{{}}  File "{os.__file__}", line 1 in abort\n', "", id="none of the user"),
        pytest.param('  File "/a/zoo.py", line 2, in f\nValueError\n', "", id="an exception"),
        pytest.param("", "", id="nothing"),
    ],
)
def test_lines_of_libraries_are_left_out(log: str, line: str, tmp_path: Path) -> None:
    head = "Fatal Python error: Aborted\n\nCurrent thread 0x01 (most recent call first):\n"
    (tmp_path / "log").write_text(log.format(head))
    assert last_line_of_user(tmp_path / "log") == line
    assert last_line_of_user(tmp_path / "none") == ""
