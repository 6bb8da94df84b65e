"""The command line: what it says, where it says it, and with which exit code. Sweeps are real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from command_helpers import CHECKOUT, Main, Said, run
from sweep_helpers import snapshot

from hashbench.cli import reading

NO_TORCH = """
import sys
from importlib.machinery import ModuleSpec
class Refuses:
    def find_spec(self, name, path=None, target=None):  # to ask whether a package is there is no import
        return ModuleSpec(name, self) if name.partition(".")[0] in ("torch", "torchvision") else None
    def create_module(self, spec):
        raise RuntimeError(f"{spec.name} is imported")
    def exec_module(self, module):
        pass
sys.meta_path.insert(0, Refuses())
"""


# ------------------------------------------------------------------------------------------------- without torch


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        "--help",
        "--version",
        "sweep --help",
        "list --suite torchvision specimens",
        "diff whole.log whole.log",
        "compare out out",
        "compare out out --format json",
        "sweep --inference --only nothing",
    ],
)
def test_torch_is_not_imported_for(arguments: str, folder: Path) -> None:
    (folder / "first").mkdir()
    (folder / "first" / "sitecustomize.py").write_text(NO_TORCH)
    done = run(*arguments.split(), cwd=folder, path=folder / "first")
    assert "is imported" not in done.stderr
    assert done.returncode == (2 if "nothing" in arguments else 0), done.stderr


def test_that_check_would_see_an_import(folder: Path) -> None:
    (folder / "sitecustomize.py").write_text(NO_TORCH)
    assert "torch is imported" in run(cwd=folder, path=folder, code="import hashbench.check.model").stderr


# --------------------------------------------------------------------------------------------------- bad input

SWEEP = "sweep --inference --output new"
OWN_ZOO = f"{SWEEP} --suite zoo.py"
BAD = {
    "unknown suite": (f"{SWEEP} --suite torchvison", "unknown suite 'torchvison'", "torchvision"),
    "unknown model": (f"{SWEEP} --only resnet81", "unknown model 'resnet81'", "resnet18"),
    "neither mode": ("sweep --output new", "--training --inference is required", "--help"),
    "both modes": (f"{SWEEP} --training", "not allowed with", "--help"),
    "a device that is not there": (f"{OWN_ZOO} -d cuda:99", "the device cuda:99 does not exist here", "--device"),
    "a device that never was": (f"{OWN_ZOO} -d nonsense", "'nonsense' is not a device", "--device"),
    "two dtypes": (f"{SWEEP} --amp --bfloat16", "not allowed with", "--help"),
    "partition 3 of 2": (f"{SWEEP} --total-partitions 2 --partition-id 3", "partition 3 of 2 does not exist", "0 to 1"),
    "batch size 0": (f"{SWEEP} --batch-size 0", "--batch-size: must be >= 1, got 0", "--help"),
    "batch size for a zoo file": (f"{OWN_ZOO} --batch-size 2", "--batch-size does not apply to", "Leave it out"),
    "one run": (f"{SWEEP} --runs 1", "--runs: must be >= 2, got 1", "--help"),
    "no thread": (f"{SWEEP} --threads 0", "--threads/-t: must be >= 1, got 0", "--help"),
    "no iteration": (f"{SWEEP} --iterations 0", "--iterations: must be >= 1, got 0", "--help"),
    "a negative time": (f"{SWEEP} --timeout -1", "--timeout: must be >= 0.1, got -1", "--help"),
    "a time for ever": (f"{SWEEP} --timeout inf", "--timeout: must be <= 1000000, got inf", "--help"),
    "a time that is no number": (f"{SWEEP} --timeout nan", "--timeout: must be >= 0.1, got nan", "--help"),
    "a seed that NumPy refuses": (
        f"{SWEEP} --seed 4294967296",
        "--seed: must be <= 4294967295, got 4294967296",
        "--help",
    ),
    "a word for a number": (f"{SWEEP} --runs many", "'many' is not a number", "--help"),
    "no regular expression": (f"{SWEEP} -k [", "'[' is not a regular expression", "backslash"),
    "no regular expression to exclude": (f"{SWEEP} -x *", "'*' is not a regular expression", "backslash"),
    "nothing selected": (f"{SWEEP} -k resnet -x .", "no model is selected", "hashbench list"),
    "a zoo file that raises": (f"{SWEEP} --suite raises.py", "RuntimeError: no licence", "Try: python"),
    "a zoo file that is missing": (f"{SWEEP} --suite none.py", "the file does not exist", "Check the path"),
    "a zoo twice": (f"{SWEEP} --suite zoo.py zoo.py", "twice", "Name it once"),
    "a results folder in use": (f"{OWN_ZOO} --output out", "out", "--resume"),
    "an output that is a file": (f"{OWN_ZOO} --output a_file", "a_file", "--output"),
    "a CSV that is none": ("compare a_file out", "a_file", ""),
    "a CSV that is missing": ("compare out none.csv", "none.csv", ""),
    "a CSV with duplicates": ("compare twice.csv out", "twice.csv", "drifting"),
    "results of another version": ("compare out future", "99", ""),
    "a trace that is none": ("diff whole.log a_file", "not a hashbench trace", "--keep-traces"),
    "a truncated trace": ("diff truncated.log whole.log", "truncated", "--keep-traces"),
    "a damaged trace": ("diff whole.log damaged.log", "damaged", "--keep-traces"),
    "a trace that is missing": ("diff whole.log none.log", "No such file", "--keep-traces"),
    "a trace that is a folder": ("diff whole.log out", "directory", "--keep-traces"),
    "a repro that is missing": ("replay none", "call.json: No such file", "hashbench sweep"),
    "a folder that is no repro": ("replay out", "cannot use the repro in out", "hashbench sweep"),
    "a definition that raises": ("replay out --import raises.py", "RuntimeError: no licence", "Give a Python file"),
    "one replay": ("replay out --replays 1", "--replays: must be >= 2, got 1", "--help"),
    "sweeps without a common row": ("compare out other.csv", "no row in common", "hashbench report"),
    "a misspelt command": ("swep", "unknown command 'swep'", "Did you mean sweep? See `hashbench --help`"),
    "an unknown command": ("frobnicate", "unknown command 'frobnicate' (choose from sweep, ", "`hashbench --help`"),
    "a misspelt command of two": ("pipeline chek", "unknown command 'chek'", "Did you mean check?"),
    "an unknown flag": ("compare out out --strict", "unknown flag --strict", "`hashbench compare --help`"),
    "a misspelt flag": ("sweep --inferense", "unknown flag --inferense", "Did you mean --inference?"),
    "a misspelt flag with a value": (f"{SWEEP} --runz=3", "unknown flag --runz. Did", "Did you mean --runs?"),
    "a misspelt flag of one letter": (f"{SWEEP} -q", "unknown flag -q", "`hashbench sweep --help`"),
    "a misspelt choice": ("list --format jsno", "(choose from table, csv, json). Did", "Did you mean json?"),
    "one argument too many": ("compare out out out", "unknown argument out", "`hashbench compare --help`"),
    "a flag of the sweep's": ("nightly --suite zoo.py --runs 3", "of `hashbench sweep` follow a --", "… -- --runs …"),
    "an unknown suite to list": ("list --suite timmm", "unknown suite 'timmm'", ""),
    "an executor that does not exist": (f"{SWEEP} --executor nonsense", "invalid choice: 'nonsense'", "--help"),
    "an address alone": (f"{SWEEP} --address auto", "--address requires --executor ray", "`hashbench sweep --help`"),
    "a flag of Ray alone": (f"{SWEEP} --ray-gpus 0", "--ray-gpus requires --executor ray", "--help"),
    "a resource of Ray's": (f"{SWEEP} --executor ray --ray-resource CPU", "a name of your own", "--help"),
    "a part of several": (f"{SWEEP} --executor ray --ray-resource a=1.5", "not whole", "--help"),
    "a limit for one machine": (
        f"{SWEEP} --executor ray --memory-limit 9",
        "--memory-limit cannot be combined with --executor ray",
        "--help",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "what", "tip"), BAD.values(), ids=BAD)
def test_bad_input_is_one_line_and_writes_nothing(
    arguments: str, what: str, tip: str, main: Main, folder: Path, recwarn: pytest.WarningsRecorder
) -> None:
    before = snapshot(folder)
    done = main(*arguments.split(), cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("hashbench")
    assert what in done.stderr
    assert tip in done.stderr
    assert list(recwarn) == []  # a process would have printed them
    assert snapshot(folder) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "bad",
    [
        *("unknown model", "a device that is not there", "a misspelt command"),
        pytest.param("a repro that is missing", marks=pytest.mark.exhaustive),  # imports torch, as the device's does
    ],
)
def test_a_real_process_says_it_in_the_same_words(bad: str, main: Main, folder: Path) -> None:
    arguments = BAD[bad][0].split()
    done = run(*arguments, cwd=folder)
    assert Said(done.returncode, done.stdout, done.stderr) == main(*arguments, cwd=folder)


@pytest.mark.parametrize("command", [(), ("pipeline",)], ids=str)
def test_without_a_command_help_is_shown_with_code_2(command: tuple[str, ...], main: Main, tmp_path: Path) -> None:
    done = main(*command, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == main(*command, "--help", cwd=tmp_path).stdout


# -------------------------------------------------------------------------------------------------- other endings


def test_fault_of_hashbench_shows_its_trace(main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_listed", lambda _: 1 / 0)
    done = main("list", cwd=tmp_path)
    assert done.returncode == 70
    assert "ZeroDivisionError" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("hashbench: this is a fault of hashbench")


def test_ctrl_c_is_no_fault(main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_listed", lambda _: signal.raise_signal(signal.SIGINT))
    done = main("list", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (130, "hashbench: stopped\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device here is always full")
@pytest.mark.parametrize(("command", "buffered"), [("list --suite torchvision", True), ("sweep --help", False)])
def test_full_output_is_an_error_of_one_line(command: str, buffered: bool, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), **({} if buffered else {"PYTHONUNBUFFERED": "1"})}
    with open("/dev/full", "w") as full:  # noqa: PTH123 – a device
        done = subprocess.run(
            [sys.executable, "-m", "hashbench", *command.split()],
            cwd=tmp_path,
            env=environment,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("hashbench: cannot write: No space left on device, so the output is not whole.")


@pytest.mark.parametrize("closed", ["1", "2"])
def test_a_standard_stream_that_is_closed_is_no_fault(closed: str, tmp_path: Path) -> None:
    command = f"{sys.executable} -m hashbench list --suite torchvison {closed}>&-"
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", int(closed == "1"))


def test_reader_that_goes_away_is_no_fault(tmp_path: Path) -> None:
    command = f"{sys.executable} -m hashbench list | head -n 1"
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(CHECKOUT)}, capture_output=True
    )
    assert done.stderr == b""


# ------------------------------------------------------------------------------------------------------ the work
