"""``hashbench dynamo``: what it refuses, what it starts, and what it makes of what the harness leaves."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hashbench.cli import main, tools
from hashbench.diagnose.fresh_process import fresh_traces
from hashbench.integrations.dynamo import fresh, harness, model_check
from hashbench.integrations.dynamo.model_check import FRESH_TARGET
from hashbench.integrations.dynamo.session import (
    Note,
    Session,
    chosen_model,
    collect,
    name_of,
    read_harness_rows,
    write,
    write_note,
)
from hashbench.records import HarnessRow, ModelSpec, RunOptions
from hashbench.results.load import load_sweep
from hashbench.run import environment
from hashbench.run.outcome import Prepared
from tests.integrations.dynamo.dynamo_helpers import NOISY, SCRIPT, STANDIN, a_session

MINIATURE = """
import glob, json, multiprocessing, os, signal, subprocess, sys, time

class BenchmarkRunner:
    def run_n_iterations(self): ...
    def deepcopy_and_maybe_parallelize(self): ...
    def init_optimizer(self): ...
    def pick_grad(self): ...
    def check_accuracy(self):
        reset_rng_state(), reset_rng_state(), reset_rng_state(), same(), clone_inputs(), self.run_n_iterations()

def main(runner):
    if "--help" in sys.argv:
        sys.exit(0)
    output = next(a.removeprefix("--output=") for a in sys.argv if a.startswith("--output="))
    only = [a.removeprefix("--only=") for a in sys.argv if a.startswith("--only=")]
    if not only:
        for name in ("slow", "killed", "absent"):
            try:
                subprocess.check_call([sys.executable, *sys.argv, f"--only={name}"])
            except subprocess.CalledProcessError as error:
                print("Run failed with return code: ", error.returncode, file=sys.stderr)
        sys.exit(7)
    if only[0] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if only[0] == "spawning":
        (note,) = glob.glob(json.loads(os.environ["HASHBENCH_DYNAMO"])["folder"] + "/notes/*.json")
        before = os.stat(note).st_ino
        worker = multiprocessing.get_context("spawn").Process(target=print)
        worker.start(), worker.join()
        sys.exit(0 if os.stat(note).st_ino == before else 8)
    if only[0] == "interrupted":
        with open(json.loads(os.environ["HASHBENCH_DYNAMO"])["folder"] + "/machine.json", "w") as file:
            json.dump({"key": "e1"}, file)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        open(os.environ["READY"], "w").close()
        signal.sigwait([signal.SIGINT])
        sys.exit(6 if signal.sigtimedwait([signal.SIGINT], 0.5) is None else 9)
    while only[0] == "slow" and "WAIT_FOR" in os.environ and not os.path.exists(os.environ["WAIT_FOR"]):
        time.sleep(0.01)
    if only[0] == "slow":
        with open(output, "w") as file:
            file.write("dev,name,batch_size,accuracy\\ncpu,slow,0,timeout\\n")
"""


@pytest.fixture
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is not described, which would start a process that imports torch."""
    monkeypatch.setattr(tools, "_write_environment", lambda _: "")


@pytest.fixture
def miniature(tmp_path: Path, no_environment: None) -> Path:  # noqa: ARG001
    """A harness without torch: its parts have the right names, and one of its children is killed."""
    folder = tmp_path / "miniature"
    folder.mkdir()
    (folder / "common.py").write_text(MINIATURE)
    (folder / "zoo.py").write_text(
        "from common import BenchmarkRunner, main\nif __name__ == '__main__':\n    main(BenchmarkRunner())\n"
    )
    return folder / "zoo.py"


def read(path: Path) -> dict[str, dict[str, str]]:
    with path.open() as file:
        return {line["name"]: line for line in csv.DictReader(file)}


# ------------------------------------------------------------------------------------------------------ refusals


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["dynamo", *map(str, arguments)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("absent.py", "does not exist"),
        (__file__, "is not a suite"),
        (STANDIN / "common.py", "is not a suite"),
        (STANDIN / "standin_ops.py", "is not a suite"),
        (STANDIN, "does not exist"),
        ("garbage.py", "it is not Python"),
    ],
)
def test_what_is_no_suite_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, script: str | Path, said: str
) -> None:
    (tmp_path / "garbage.py").write_bytes(b"\x00\xff")
    error = refusal(capsys, tmp_path / script, "--accuracy")
    assert said in error
    assert "nothing was run" in error


@pytest.mark.parametrize(
    ("old", "new", "missing"),
    [
        ("class BenchmarkRunner", "class Runner", "class BenchmarkRunner"),
        ("def check_accuracy", "def check_it", "BenchmarkRunner.check_accuracy"),
        ("def run_n_iterations", "def run_n_times", "BenchmarkRunner.run_n_iterations"),
        ("def deepcopy_and_maybe", "def maybe", "BenchmarkRunner.deepcopy_and_maybe_parallelize"),
        ("reset_rng_state()\n", "reset()\n", "call of reset_rng_state"),
        ("not same(", "not alike(", "call of same"),
    ],
)
def test_harness_that_has_moved_on_is_refused_by_the_name_of_what_is_missing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, old: str, new: str, missing: str
) -> None:
    folder = shutil.copytree(STANDIN, tmp_path / "newer")
    source = (folder / "common.py").read_text()
    assert old in source
    (folder / "common.py").write_text(source.replace(old, new))
    error = refusal(capsys, folder / "zoo.py", "--accuracy", "--output", tmp_path / "a.csv")
    assert f"has no {missing}" in error
    assert not (tmp_path / "a.hashbench").exists()


def test_folder_that_cannot_be_written_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot write" in refusal(capsys, "--results", tmp_path / "file", SCRIPT, "--accuracy")


# --------------------------------------------------------------------------------------------------------- flags


@pytest.mark.usefixtures("no_environment")
def test_flags_of_the_harness_are_passed_through_and_ours_are_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[Session] = []

    def run_harness(session: Session, **_: Any) -> int:
        seen.append(session)
        return 5

    monkeypatch.setattr(harness, "run_harness", run_harness)
    ours = ["--tracer", "python", "--stress", "--fingerprints", "--trace", "on-demand", "--diagnose-budget", "3"]
    theirs = ["--accuracy", "--training", "-d", "cpu", "--trace", "x", "-k", "a b", "--output", str(tmp_path / "a.csv")]
    assert main(["dynamo", *ours, str(SCRIPT), *theirs]) == 5
    (session,) = seen
    assert session.arguments == tuple(theirs)
    assert (session.trace, session.tracer, session.budget) == ("on-demand", "python", 3.0)
    assert session.stress
    assert session.fingerprints
    assert session.mode == "training"
    assert session.folder == str(tmp_path / "a.hashbench")
    assert Session.of(session.environment()) == session


def test_a_run_of_the_harness_says_once_why_the_python_mode_traces(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = {"key": "e1", "tracer": "python", "tracer_reason": "no C++ compiler was found"}
    asked: list[str] = []
    monkeypatch.setattr(environment, "collect_in_child", lambda **more: asked.append(more["tracer"]) or dict(told))
    ours = Session(folder=str(tmp_path), script=str(SCRIPT), tracer="auto")
    assert tools._write_environment(ours) == "e1"
    assert asked == ["auto"]
    assert capsys.readouterr().err.count("no C++ compiler was found") == 1
    assert json.loads(ours.results.environment.read_text())["tracer"] == "python"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--output", "/x/a.csv"], "/x/a.csv"),
        (["--output=a.csv", "--output-directory=/x"], "/x/a.csv"),
        (["--output", "a.csv"], ""),  # in a folder of torch's, which only the harness knows
        (["--output", "/x/a.csv", "--disable-output"], ""),
        (["--output"], ""),
        ([], ""),
    ],
)
def test_place_of_the_harness_csv_is_read_off_its_flags(arguments: list[str], expected: str) -> None:
    assert harness.read_flags(arguments).csv == expected


@pytest.mark.parametrize(
    ("chosen", "name"), [("path:/x/m.py,class:Net", "Net"), ("class:Net,path:/x", "Net"), ("a:b", "a:b"), ("", "")]
)
def test_model_of_a_file_is_called_by_its_class(chosen: str, name: str) -> None:
    assert name_of(chosen) == name


@pytest.mark.parametrize(
    ("arguments", "model"), [("x.py --only a --only=b", "b"), ("x.py --only=a --only b", "b"), ("x.py --only", "")]
)
def test_last_model_named_counts(arguments: str, model: str) -> None:
    assert chosen_model(arguments.split()) == model


# --------------------------------------------------------------------------------------- real processes


def test_dead_child_has_a_row_of_ours_and_the_exit_code_is_the_harness_own(
    miniature: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    users = tmp_path / "users"
    users.mkdir()
    (users / "sitecustomize.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'a').write('x')\nimport os\nassert 'HASHBENCH_DYNAMO' in os.environ\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(users))
    assert main(["dynamo", str(miniature), "--accuracy", f"--output={tmp_path / 'a.csv'}"]) == 7
    rows = read(tmp_path / "a.hashbench" / "hashbench.csv")
    words = {name: (row["accuracy"], row["harness_accuracy"]) for name, row in rows.items()}
    assert words == {"slow": ("timeout", "timeout"), "killed": ("crashed", ""), "absent": ("crashed", "")}
    assert "killed by SIGKILL" in rows["killed"]["error"]
    assert "ended without a row" in rows["absent"]["error"]
    assert (tmp_path / "ran").read_text() == "xxxx"
    assert "ended without a row" in capsys.readouterr().out


def test_row_of_a_dead_model_is_not_written_anew_by_a_later_command(miniature: Path, tmp_path: Path) -> None:
    flags = [str(miniature), "--accuracy", f"--output={tmp_path / 'a.csv'}"]
    main(["dynamo", *flags])
    before = read(tmp_path / "a.hashbench" / "hashbench.csv")
    assert len(before) == 3
    assert main(["dynamo", *flags, "--only=slow"]) == 0
    assert read(tmp_path / "a.hashbench" / "hashbench.csv") == before


def test_help_of_the_harness_leaves_nothing(miniature: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(miniature.parent)
    before = sorted(tmp_path.rglob("*.csv")), sorted(miniature.parent.glob("results"))
    assert main(["dynamo", str(miniature), "--accuracy", f"--output={tmp_path / 'a.csv'}", "--help"]) == 0
    assert main(["dynamo", str(miniature), "--help"]) == 0
    assert (sorted(tmp_path.rglob("*.csv")), sorted(miniature.parent.glob("results"))) == before
    assert not (tmp_path / "a.hashbench").exists()


def test_rows_are_collected_where_hashbench_was_killed(miniature: Path, tmp_path: Path) -> None:
    go, ours = tmp_path / "go", tmp_path / "a.hashbench"
    command = [
        sys.executable,
        "-m",
        "hashbench",
        "dynamo",
        str(miniature),
        "--accuracy",
        f"--output={tmp_path / 'a.csv'}",
    ]
    killed = subprocess.Popen(command, env={**os.environ, "WAIT_FOR": str(go)}, stdout=subprocess.DEVNULL)
    wait_for(lambda: any(ours.glob("notes/*.json")))
    killed.kill()
    killed.wait()
    go.touch()
    wait_for(lambda: (ours / "hashbench.csv").exists() and len(read(ours / "hashbench.csv")) == 3)
    rows = read(ours / "hashbench.csv")
    assert {name: row["accuracy"] for name, row in rows.items()} == {
        "slow": "timeout",
        "killed": "crashed",
        "absent": "crashed",
    }
    assert "killed by SIGKILL" in rows["killed"]["error"]


def test_workers_of_a_model_leave_what_is_known_of_it(miniature: Path, tmp_path: Path) -> None:
    assert main(["dynamo", str(miniature), "--accuracy", f"--output={tmp_path / 'a.csv'}", "--only=spawning"]) == 0


@pytest.mark.parametrize(("number", "to_all", "code"), [(signal.SIGINT, True, 6), (signal.SIGTERM, False, 143)])
def test_signal_ends_the_harness_as_it_does_without_us(
    miniature: Path, tmp_path: Path, number: int, to_all: bool, code: int
) -> None:
    """Ctrl-C reaches all processes of a terminal, and the harness not a second time while it ends."""
    stop_model(miniature, tmp_path, number=number, to_all=to_all, code=code)
    assert not (tmp_path / "a.hashbench").exists()


def stop_model(
    miniature: Path, tmp_path: Path, *, number: int = signal.SIGINT, to_all: bool = True, code: int = 6
) -> None:
    flags = ["--accuracy", f"--output={tmp_path / 'a.csv'}", "--only=interrupted"]
    command = [sys.executable, "-m", "hashbench", "dynamo", str(miniature), *flags]
    environment = {**os.environ, "READY": str(tmp_path / "ready")}
    ours = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    wait_for((tmp_path / "ready").exists)
    (os.killpg if to_all else os.kill)(ours.pid, number)
    assert ours.communicate(timeout=300)[1] == "hashbench: stopped\n"
    assert ours.returncode == code


@pytest.mark.slow
@pytest.mark.parametrize("named", [(), ("hashbench", "dynamo")], ids=["the harness alone", "hashbench"])
def test_ctrl_c_in_an_eager_run_has_the_exit_code_of_the_harness(tmp_path: Path, named: tuple[str, ...]) -> None:
    """With ``torch._dynamo`` CPython ends with 1 after an unhandled ``KeyboardInterrupt``, not by SIGINT: tabulate,
    which torch imports at its exit, makes namedtuples by ``eval``."""
    flags = ["--accuracy", "--inference", "--only=waiting", f"--output={tmp_path / 'a.csv'}"]
    command = [sys.executable, *(["-m", *named] if named else []), str(SCRIPT), *flags]
    environment = {**os.environ, "READY": str(tmp_path / "ready")}
    started = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    wait_for((tmp_path / "ready").exists)
    os.killpg(started.pid, signal.SIGINT)
    told = started.communicate(timeout=300)[1]
    assert "KeyboardInterrupt" in told
    assert started.returncode == 1
    assert [path.name for path in tmp_path.iterdir()] == ["ready"]


def test_ctrl_c_leaves_what_is_known_and_no_more(miniature: Path, tmp_path: Path) -> None:
    ours = tmp_path / "a.hashbench"
    assert main(["dynamo", str(miniature), "--accuracy", f"--output={tmp_path / 'a.csv'}", "--only=slow"]) == 0
    before = (ours / "hashbench.csv").read_text()
    stop_model(miniature, tmp_path)
    assert sorted(path.name for path in ours.iterdir()) == [
        ".lock",
        "accuracy.csv",
        "environment.json",
        "hashbench.csv",
        "notes",
    ]
    assert {name: row["env"] for name, row in read(ours / "hashbench.csv").items()} == {"slow": "e1"}
    assert main(["dynamo", str(miniature), "--accuracy", f"--output={tmp_path / 'a.csv'}", "--only=slow"]) == 0
    assert (ours / "hashbench.csv").read_text() == before


def test_processes_that_are_not_the_harness_load_next_to_nothing_of_ours(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; print(*sys.modules)"]
    standard = set(sys.stdlib_module_names)
    loaded = []
    for path in ("", str(harness.SITE)):
        variables = {**os.environ, **a_session(tmp_path).environment(), "PYTHONPATH": path}
        printed = subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout
        loaded.append({name for name in printed.split() if name.partition(".")[0] not in standard})
    package = ["hashbench", "hashbench.imports", "hashbench.integrations", "hashbench.integrations.dynamo"]
    assert loaded[1] - loaded[0] == {"sitecustomize", *package} - loaded[0]


def wait_for(there: Callable[[], bool]) -> None:
    ends = time.monotonic() + 300
    while not there():
        assert time.monotonic() < ends
        time.sleep(0.01)


def test_death_of_the_one_model_asked_for_is_described(miniature: Path, tmp_path: Path) -> None:
    command = ["dynamo", str(miniature), "--accuracy", f"--output={tmp_path / 'a.csv'}", "--only=killed"]
    assert main(command) == 128 + signal.SIGKILL
    (row,) = read(tmp_path / "a.hashbench" / "hashbench.csv").values()
    assert row["accuracy"] == "crashed"
    assert "killed by SIGKILL" in row["error"]


def test_run_for_speed_leaves_no_model_that_looks_dead(
    miniature: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dynamo", str(miniature), "--performance", f"--output={tmp_path / 'b.csv'}", "--only=absent"]) == 0
    assert "ran no accuracy check" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong",
    [["--accuracy", "--inferense", "--only=steady"], ["--only=steady", "--iterations=x"], ["--accuracy", "--nosuch"]],
    ids=" ".join,
)
def test_flag_that_the_harness_refuses_begins_no_model(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], wrong: list[str]
) -> None:
    ours = tmp_path / "a.hashbench"
    session = a_session(ours, run="an earlier one")
    session.prepare(anew=True)
    write_note(session, Note("noisy", status="eager_two_runs_differ", run=session.run))
    write(session, collect(session))
    before = {path: path.read_bytes() for path in ours.rglob("*") if path.is_file()}
    assert main(["dynamo", str(SCRIPT), *wrong, f"--output={tmp_path / 'a.csv'}"]) == 2
    told = capfd.readouterr()
    assert "usage:" in told.err
    assert told.err.endswith("hashbench: the harness ran no model (exit code 2): no results.\n")
    assert told.out == ""
    after = {path: path.read_bytes() for path in ours.rglob("*") if path.is_file()}
    assert after == {**before, ours / ".lock": b""}

    assert main(["dynamo", str(SCRIPT), *wrong, f"--output={tmp_path / 'b.csv'}"]) == 2
    assert not (tmp_path / "b.hashbench").exists()


@pytest.mark.slow
def test_model_whose_process_dies_while_it_is_loaded_has_begun(tmp_path: Path) -> None:
    flags = ["--accuracy", "--inference", "--only=dying", f"--output={tmp_path / 'a.csv'}"]
    assert main(["dynamo", str(SCRIPT), *flags]) == 128 + signal.SIGKILL
    (row,) = read(tmp_path / "a.hashbench" / "hashbench.csv").values()
    assert (row["name"], row["accuracy"]) == ("dying", "crashed")


@pytest.mark.slow
def test_sweep_of_the_harness_names_the_kernel_in_its_children(tmp_path: Path) -> None:
    flags = ["--accuracy", "--inference", "-k", "^noisy$", f"--output={tmp_path / 'a.csv'}"]
    command = [sys.executable, "-m", "hashbench", "dynamo", "--diagnose-budget", "0", str(SCRIPT), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (theirs,), (ours,) = (read(tmp_path / path).values() for path in ("a.csv", "a.hashbench/hashbench.csv"))
    assert theirs["name"] == ours["name"] == "noisy"
    assert theirs["accuracy"] == ours["accuracy"] == ours["harness_accuracy"] == "eager_two_runs_differ"
    assert (ours["kernel"], ours["module"]) == (NOISY, "Noisy.noise")
    sweep = load_sweep(tmp_path / "a.hashbench")
    assert sweep.kind == "hashbench"
    assert [(row.suite, row.env in sweep.environments) for row in sweep.rows] == [("zoo", True)]


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
        ("Counted", ("surviving_state", "proven"), "process/fresh_process 0/3"),
        (
            "CountedOtherwise",
            ("initial_state", "likely"),
            "process/fresh_process not run (its model has other weights)",
        ),
    ],
    ids=["weights of the global generators", "weights of the system's entropy"],
)
def test_model_of_a_file_has_the_same_weights_in_fresh_processes(
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
def test_fresh_process_builds_the_model_by_the_harness_own_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_runs_in_a_fresh_process_have_the_threads_of_the_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
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


# ------------------------------------------------------------------------------------------------ both tables


def collected(tmp_path: Path, note: Note, theirs: str, *, ended: str = "") -> list[HarnessRow]:
    session = a_session(tmp_path / "ours")
    session.prepare(anew=True)
    path = tmp_path / "a.csv"
    path.write_text("dev,name,batch_size,accuracy\n" + theirs)
    write_note(session, Note(note.name, status=note.status, csv=str(path), problem=note.problem))
    return collect(session, ended=ended)


@pytest.mark.parametrize(
    ("word", "ours"),
    [
        ("pass", "pass"),
        ("fail_accuracy", "pass"),
        ("fail_to_run", "pass"),
        ("OOM", "pass"),
        ("timeout", "timeout"),
        ("model_fail_to_load", "model_fail_to_load"),
        ("infra_error", "crashed"),
        ("fail_to_run_at_batch_4", "pass_due_to_skip"),
    ],
)
def test_word_of_a_row_that_only_the_harness_has(tmp_path: Path, word: str, ours: str) -> None:
    (row,) = collected(tmp_path, Note("m"), f"cpu,m,0,{word}\n")
    assert (row.accuracy, row.harness_accuracy, row.batch_size) == (ours, word, None)


def test_model_that_timed_out_after_its_row_shows_both_words(tmp_path: Path) -> None:
    (row,) = collected(tmp_path, Note("m", status="pass"), "cpu,m,4,pass\ncpu,m,0,timeout\n")
    assert (row.accuracy, row.harness_accuracy) == ("pass", "pass, timeout")


def test_status_that_lands_in_the_column_of_a_tag_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("dev,name,batch_size,tag,accuracy\ncpu,m,0,eager_fail_to_run,0\ncpu,n,4,t,pass\n")
    found = read_harness_rows(tmp_path / "a.csv")
    assert [(row.name, row.accuracy) for row in found] == [("m", "eager_fail_to_run"), ("n", "pass")]


def test_model_that_still_runs_is_not_called_dead(tmp_path: Path) -> None:
    assert collected(tmp_path, Note("m"), "") == []
    (row,) = collected(tmp_path, Note("m"), "", ended="it died")
    assert (row.accuracy, row.error) == ("crashed", "it died")


def test_texts_of_models_are_defused(tmp_path: Path) -> None:
    rows = collected(tmp_path, Note("=cmd()", status="=evil()"), "")
    path = write(a_session(tmp_path / "ours"), rows)
    assert "'=cmd()" in path.read_text()
    assert path.read_text().splitlines()[1].endswith(",'=evil()")


def test_new_sweep_begins_anew_and_one_model_is_added(tmp_path: Path) -> None:
    session = a_session(tmp_path / "ours")
    session.prepare(anew=True)
    write_note(session, Note("m", status="pass"))
    session.prepare(anew=False)
    assert len(collect(session)) == 1
    session.prepare(anew=True)
    assert collect(session) == []
