"""``hashbench sweep``: its results, the command of a row, and the devices of workers."""

from __future__ import annotations

import csv
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_helpers import Main
from command_helpers import run as process

from hashbench.cli import _parser, main
from hashbench.cli.sweep import command_for, request_of
from hashbench.core.diagnose.fresh_process import (
    DEFAULT_TARGET,
    LOADED_VARIABLE,
    POOL_VARIABLE,
    SERVER_VARIABLE,
    TORCH_ALONE,
)
from hashbench.core.processes import variables
from hashbench.core.records import ROW_COLUMNS, RunOptions
from hashbench.core.results.rows import ROWS, read_rows
from hashbench.core.suites.selection import Selection
from hashbench.core.sweep.executors.local import LocalExecutor
from hashbench.core.sweep.request import SweepRequest, diagnosis_servers
from hashbench.core.sweep.run import SweepResult
from tests.cli.cli_helpers import ZOO_SWEEP
from tests.core.report.rows import DIFFERING, row

pytestmark = pytest.mark.xdist_group("cli swept")

TWO = {"torch": {"hip_build": None}, "device": {"type": "cuda", "each": [{"name": "H200", "memory_mib": 1000}] * 2}}
UNLIKE = {**TWO, "device": {"type": "cuda", "each": [{"name": "H200"}, {"name": "T400"}]}}


class Sweeps:
    """Stands in for ``run_sweep`` and for the child process, and notes what each was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, output: Path, told: dict[str, Any]) -> None:
        self.output = output
        self.told = told
        self.asked: list[str] = []
        self.options = RunOptions()
        self.executor: LocalExecutor | None = None
        monkeypatch.setattr("hashbench.core.run.environment.collect_in_child", self.collect)
        monkeypatch.setattr("hashbench.core.sweep.request.run_sweep", self.sweep)

    def collect(self, *, device: str, **_: object) -> dict[str, Any]:
        self.asked.append(device)
        return dict(self.told)

    def sweep(self, _specs: object, options: RunOptions, **arguments: Any) -> SweepResult:
        self.options, self.executor = options, arguments["executor"]
        return SweepResult(rows=(), output=self.output)

    @property
    def visible(self) -> list[str]:
        assert self.executor is not None
        return [share.variables["CUDA_VISIBLE_DEVICES"] for share in self.executor.resources.devices]


def run(*flags: str) -> int:
    return main(["sweep", "--inference", "--only", "squeezenet1_1", *flags])


@pytest.mark.parametrize(
    ("flags", "given", "visible"),
    [
        pytest.param("-d cuda --jobs 4", None, ["0", "1"], id="all"),
        pytest.param("-d cuda", None, ["0", "1"], id="one worker"),
        pytest.param("-d cuda:1 --jobs 4", None, ["1"], id="one by number"),
        pytest.param("-d cuda --jobs 4", "GPU-8932f937,GPU-1c5e9a02", ["GPU-8932f937", "GPU-1c5e9a02"], id="by UUID"),
        pytest.param("-d cuda:1 --jobs 4", "5,7", ["7"], id="one of those that are visible"),
    ],
)
def test_workers_get_devices_of_one_kind(
    flags: str, given: str | None, visible: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    sweeps = Sweeps(monkeypatch, tmp_path, TWO)
    assert run(*flags.split()) == 0
    assert sweeps.asked == [flags.split()[1]]
    assert sweeps.visible == visible
    assert sweeps.options.device == "cuda"
    assert sweeps.executor is not None
    assert sweeps.executor.capacity == (4 if "--jobs" in flags else 1)


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ("", [(TORCH_ALONE, False)]),
        ("--diagnose-budget 0", []),
        ("--batch-invariant", [(TORCH_ALONE, False)]),
        ("--batch-invariant --invariance position", [(TORCH_ALONE, False)]),
        ("--stress", [(DEFAULT_TARGET, True)]),
    ],
)
def test_repros_fork_from_one_server(
    flags: str, wanted: list[tuple[str, bool]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Sweeps(monkeypatch, tmp_path, {"device": {"type": "cpu"}})
    servers = []

    def served(
        target: str = DEFAULT_TARGET, *, preload: Sequence[str] = (), at_once: bool = True, **_: object
    ) -> AbstractContextManager[None]:
        servers.append((target, at_once))
        return variables({SERVER_VARIABLE: "/somewhere", LOADED_VARIABLE: " ".join((target, *preload))})

    monkeypatch.setattr("hashbench.core.diagnose.fresh_process.served", served)
    assert run(*flags.split()) == 0
    assert servers == wanted


def test_sweeps_inside_a_context_share_its_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Sweeps(monkeypatch, tmp_path, {"device": {"type": "cpu"}})
    begun, free = [], [6400.0]

    @contextmanager
    def served(target: str = DEFAULT_TARGET, preload: Sequence[str] = (), **_: object) -> Iterator[None]:
        begun.append(target)
        with variables({SERVER_VARIABLE: "/somewhere", LOADED_VARIABLE: " ".join((target, *preload))}):
            yield

    @contextmanager
    def pooled(**more: object) -> Iterator[None]:
        begun.append(f"a pool with {', '.join(more['preload'])}")
        with variables({POOL_VARIABLE: "/elsewhere"}):
            yield

    monkeypatch.setattr("hashbench.core.diagnose.fresh_process.served", served)
    monkeypatch.setattr("hashbench.core.diagnose.fresh_process.pooled", pooled)
    monkeypatch.setattr("hashbench.core.sweep.request.available_memory_mib", lambda: free[0])
    ours = SweepRequest(Selection(()), RunOptions(), tmp_path)
    without = replace(ours, options=RunOptions(diagnose_budget=0))
    both = [TORCH_ALONE, "a pool with hashbench.core.trace.native:load"]
    with diagnosis_servers([without]):
        assert begun == []
    with diagnosis_servers([without, ours]):
        assert (run(), run()) == (0, 0)
        assert begun == both
        assert run("--stress") == 0
        assert begun == [*both, DEFAULT_TARGET], "which has more than torch"
    assert run("--tracer", "python") == 0
    assert begun == [*both, DEFAULT_TARGET, TORCH_ALONE, "a pool with "]
    begun.clear()
    stressed = replace(ours, options=RunOptions(stress=True, tracer="python"))
    with diagnosis_servers([ours, stressed]):
        assert (run(), run("--stress", "--tracer", "python")) == (0, 0)
        assert begun == [DEFAULT_TARGET, both[1]], "one for both"
        assert run("--stress") == 0
        assert begun == [DEFAULT_TARGET, both[1], DEFAULT_TARGET], "which has the native tracer, too"
    begun.clear()
    with diagnosis_servers([replace(without, options=RunOptions(diagnose_budget=0, stress=True)), stressed]):
        assert (run("--stress"), run("--stress", "--tracer", "python")) == (0, 0)
        assert begun[0] == DEFAULT_TARGET
        assert DEFAULT_TARGET not in begun[1:]
    begun.clear()
    free[0] = 6399.0
    assert run() == 0
    assert begun == [TORCH_ALONE], "no memory for more"


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_devices_without_assignment_stay_unassigned(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweeps = Sweeps(monkeypatch, tmp_path, {"device": {"type": device, "each": [{"name": "M3"}]}})
    assert run("-d", device) == 0
    assert (sweeps.options.device, sweeps.visible) == (device, [])


def test_unused_devices_and_variables_are_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    Sweeps(monkeypatch, tmp_path, UNLIKE)
    assert run("-d", "cuda") == 0
    assert capsys.readouterr().err.splitlines() == [
        "hashbench: only devices like H200 are used, not T400: sweep those by number, as cuda:1",
        "hashbench: CUBLAS_WORKSPACE_CONFIG=:0:0 lets cuBLAS differ from call to call: :4096:8 is in force instead",
    ]


# ------------------------------------------------------------------------------------------------- its results


@pytest.mark.slow
def test_without_ray_the_extra_is_named(main: Main, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    done = main(*ZOO_SWEEP, "--executor", "ray", cwd=folder)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "pip install 'hashbench[ray]'" in done.stderr


def test_strict_sweep_with_a_difference_exits_with_1(swept: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = swept
    assert done.returncode == 1, done.stderr
    rows = {row.name: row for row in read_rows(folder / "out" / "accuracy.csv")}
    assert {name: row.accuracy for name, row in rows.items()} == {
        "drifting": "eager_two_runs_differ",
        "steady": "pass",
    }
    assert rows["drifting"].env == json.loads((folder / "out" / "environment.json").read_text())["key"]


def test_csv_begins_with_the_columns_of_dynamo(swept: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    with (swept[0] / "out" / "accuracy.csv").open(newline="") as file:
        header = next(csv.reader(file))
    assert header[:4] == ["dev", "name", "batch_size", "accuracy"]
    assert header == [column for column in ROW_COLUMNS if column in header]
    assert {*ROWS.written([])} <= {*header}


def test_sweep_prints_table_and_results_path(
    swept: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    lines = swept[1].stdout.splitlines()
    assert any("drifting" in line and "eager_two_runs_differ" in line for line in lines)
    assert lines[-1].startswith("Results: ")
    assert (swept[0] / lines[-1].removeprefix("Results: ")).samefile(swept[0] / "out" / "accuracy.csv")


@pytest.mark.slow
def test_finished_sweep_resumes_to_the_same_rows(
    swept: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    csv_file = swept[0] / "out" / "accuracy.csv"
    before = csv_file.read_bytes()
    done = process(*ZOO_SWEEP, "--output", "out", "--resume", cwd=swept[0])
    assert done.returncode == 0, done.stderr
    assert csv_file.read_bytes() == before


# ------------------------------------------------------------------------------------------ the command of a row


@pytest.mark.parametrize(
    "flags",
    [
        "--training",
        "--inference --amp --batch-size 4 --runs 3 --threads 2 --seed 0 --deterministic off",
        "--training --cotangent random --hash-inputs --untraced-pair --replays 5 --diagnose-budget 7.5 -d cuda",
        "--training --backend inductor --compilations 3 --threads 2",
        "--training --jobs 4 --output elsewhere -k other -x more --total-partitions 2",
    ],
)
def test_command_of_a_row_repeats_the_flags(flags):
    asked = _parser().parse_args(["sweep", "--suite", "zoos/my zoo.py", "torchvision", *flags.split()])
    request = request_of(asked, suites=asked.suite, output=Path("out"))
    line = command_for(request, row("a b", "crashed", suite="my zoo", threads=1))
    again = _parser().parse_args(shlex.split(line)[1:])
    made = request_of(again, suites=again.suite, output=Path("out"))
    assert (made.selection.suites, made.selection.only) == (("zoos/my zoo.py",), ("a b",))
    threads = 1 if "--jobs" in flags else request.options.threads
    assert made.options == replace(request.options, threads=threads)


def test_command_of_an_undiagnosed_row_diagnoses():
    asked = _parser().parse_args(["sweep", "--training", "--diagnose-budget", "0"])
    request = request_of(asked, suites=asked.suite, output=Path("out"))
    line = command_for(request, DIFFERING)
    assert "--diagnose-budget" not in line
    assert _parser().parse_args(shlex.split(line)[1:]).diagnose_budget == RunOptions().diagnose_budget
    assert command_for(request, replace(DIFFERING, repro="repro/a b")) == "hashbench replay 'out/repro/a b'"
