"""``make gpu``: every step's commands run on the CPU, a broken one is told and takes no other along."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

import hashbench
from benchmarks import gpu_hour
from benchmarks.gpu_fingerprints import SETTINGS
from benchmarks.gpu_hour import Step, run_all, run_step, steps_for
from benchmarks.gpu_page import page

CHECKOUT = Path(hashbench.__file__).parents[1]

MACHINE = {"card": "a card", "torch": "2.15.0"}
NAMES = ("tests", "audit", "compiled", "invariance", "fingerprints", "overhead", "specimens")
ON_CPU = {step.name: step for step in steps_for("cpu")}


@pytest.fixture(autouse=True)
def _in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CHECKOUT)


def python(code: str, *words: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code, *words)


WRITES = "import sys, pathlib; pathlib.Path(sys.argv[1], 'rows.csv').write_text('name\\nrow\\n')"


def step(name: str, *commands: tuple[str, ...], seconds: float = 60) -> Step:
    """A step that finds the rows of ``rows.csv``."""
    return Step(name, name, seconds, commands, lambda raw: gpu_hour._csv_rows([raw / "rows.csv"]))


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


# ------------------------------------------------------------------------------------------------------ the plan


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_steps_are_in_order_and_take_at_most_eight_minutes(device: str) -> None:
    steps = steps_for(device)
    assert tuple(step.name for step in steps) == NAMES
    assert sum(step.seconds for step in steps) <= 480


def test_a_gpu_runs_what_the_task_asks_for() -> None:
    steps = {step.name: " ".join(word for command in step.commands for word in command) for step in steps_for("cuda")}
    assert "-m gpu" in steps["tests"]
    marked = {
        str(path.relative_to(CHECKOUT))
        for path in (CHECKOUT / "tests").rglob("*.py")
        if "@pytest.mark.gpu" in path.read_text(encoding="utf-8") and path.name != Path(__file__).name
    }
    assert marked <= set(steps["tests"].split())
    assert "audit -d cuda" in steps["audit"]
    assert len(set(gpu_hour.OPS)) == 40
    assert "--suite compiled" in steps["compiled"]
    assert "--backend inductor" in steps["compiled"]
    assert "-d cuda" in steps["compiled"]
    assert "triton_gelu_constant triton_gelu_constant_twin" in steps["compiled"]
    assert "gelu_lowering" not in steps["compiled"]  # it needs no GPU
    assert "--invariance batch,decode --bfloat16" in steps["invariance"]
    assert len(set(gpu_hour.MODELS)) == 8
    assert all(name in steps["invariance"] for name in gpu_hour.MODELS)
    assert {"TF32", "cuDNN benchmark"} <= SETTINGS.keys()
    assert "GPT, 350M" in steps["overhead"]
    assert all(name in steps["specimens"] for name in ("late_prefetch", "host_statistics", "long_context"))


def test_the_ops_and_models_exist() -> None:
    listed = (  # apart: what it imports freezes the flags of torch's backends, for every test behind this one
        "from torch.testing._internal.common_methods_invocations import op_db;"
        "print(*('.'.join(filter(None, [op.name, op.variant_test_name])) for op in op_db))"
    )
    done = subprocess.run([sys.executable, "-c", listed], capture_output=True, text=True, check=True)
    assert set(gpu_hour.OPS) <= {*done.stdout.split()}
    assert set(gpu_hour.MODELS) <= {row["name"] for row in rows_of(CHECKOUT / "models" / "huggingface_tiny.csv")}
    specimens = {row["name"]: row for row in rows_of(CHECKOUT / "models" / "specimens.csv")}
    for mode, names in gpu_hour.OPEN.items():
        assert [specimens[name][f"skip_{mode}"] for name in names] == [""] * len(names)


# ------------------------------------------------------------------------------------------------- what goes wrong


def test_a_step_that_hangs_or_dies_takes_no_other_along(tmp_path: Path) -> None:
    hangs = python(
        "import os, signal, subprocess, sys, time; signal.signal(signal.SIGINT, signal.SIG_IGN);"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True);"
        f"{WRITES}; open(sys.argv[2], 'w').write(f'{{os.getpid()}} {{child.pid}}'); time.sleep(600)",
        "{raw}",
        str(tmp_path / "pids"),
    )
    steps = [
        step("hangs", hangs, seconds=5),
        step("dies", python("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")),
        step("silent", python("pass")),
        replace(step("garbled", python("pass")), found=lambda _: gpu_hour._rows_of_tables(tmp_path / "half.json")),
        step("absent", ("/nowhere/python",)),
        step("well", python(WRITES, "{raw}")),
    ]
    (tmp_path / "half.json").write_text('{"tables": [', encoding="utf-8")
    said: list[str] = []
    assert not run_all(steps, tmp_path, MACHINE, say=said.append)
    outcomes = {row["step"]: row for row in rows_of(tmp_path / "steps.csv")}
    assert outcomes["hangs"]["outcome"] == "stopped after 5 s"
    assert outcomes["hangs"]["rows"] == "1"  # what it had written is kept
    assert outcomes["dies"]["outcome"].startswith("failed: exit code -9")
    assert outcomes["silent"]["outcome"] == "failed: its commands ended well and wrote no rows"
    assert outcomes["garbled"]["outcome"].startswith("failed: its results cannot be read (JSONDecodeError")
    assert outcomes["absent"]["outcome"].startswith("failed: ")
    assert outcomes["well"]["outcome"] == "done"
    assert rows_of(tmp_path / "well.csv") == rows_of(tmp_path / "hangs.csv") == [{"name": "row"}]
    assert not [number for number in (tmp_path / "pids").read_text().split() if psutil.pid_exists(int(number))]
    assert [line.partition(":")[0] for line in said] == ["hangs", "dies", "silent", "garbled", "absent", "well"]


def test_the_whole_run_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_hour, "TOTAL_SECONDS", gpu_hour.LAST_WORDS_SECONDS)
    assert not run_all([step("late", python(WRITES, "{raw}"))], tmp_path, MACHINE, say=lambda _: None)
    assert rows_of(tmp_path / "steps.csv")[0]["outcome"].startswith("stopped after ")


def test_a_step_that_runs_again_replaces_its_row_alone(tmp_path: Path) -> None:
    broken, well = step("a", python("raise SystemExit('it broke')")), step("b", python(WRITES, "{raw}"))
    run_all([broken, well], tmp_path / "out", MACHINE, say=lambda _: None)
    assert [row["outcome"] for row in rows_of(tmp_path / "out" / "steps.csv")] == [
        "failed: exit code 1 (it broke)",
        "done",
    ]
    (tmp_path / "out" / "raw").rename(tmp_path / "raw")  # of the same second
    run_all([step("a", python(WRITES, "{raw}"))], tmp_path / "out", MACHINE, say=lambda _: None)
    assert [(row["step"], row["outcome"]) for row in rows_of(tmp_path / "out" / "steps.csv")] == [
        ("a", "done"),
        ("b", "done"),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "number"), [(name, number) for name in NAMES for number in range(len(ON_CPU[name].commands))]
)
def test_a_broken_command_fails_its_step(name: str, number: int, tmp_path: Path) -> None:
    """A flag that does not exist stands for whatever a command may come to lack."""
    broken = list(ON_CPU[name].commands)
    wrong = str(tmp_path / "no.json") if broken[number][2] == "benchmarks.gpu_fingerprints" else ""
    broken[number] = (*broken[number][:3], wrong, wrong) if wrong else (*broken[number], "--frobnicate")
    outcome, _ = run_step(replace(ON_CPU[name], commands=tuple(broken[number:])), tmp_path / "raw", seconds=600)
    assert outcome.outcome.startswith("failed: "), outcome
    assert outcome.rows == "0" or name == "fingerprints"


# ------------------------------------------------------------------------------------------------------- the page


def test_the_page_names_the_card_and_shows_what_differs(tmp_path: Path) -> None:
    outcomes = [
        {"step": "tests", "what": "tests marked `gpu`", "outcome": "done", "seconds": "3", "rows": "2"},
        {"step": "compiled", "what": "suite", "outcome": "stopped after 60 s", "seconds": "60", "rows": "0"},
    ]
    tests = [
        {"test": "test_a", "outcome": "passed", "seconds": "1", "why": ""},
        {"test": "test_b", "outcome": "failed", "seconds": "1", "why": "E  assert 1 | 2"},
    ]
    text = page({"card": "NVIDIA H100", "driver": "580"}, outcomes, {"tests": tests, "compiled": []})
    assert text.startswith("# One GPU: NVIDIA H100\n")
    assert "* driver: 580" in text
    assert "1 passed, 1 failed." in text
    assert "| test_b" in text
    assert "| test_a" not in text
    assert "assert 1 \\| 2" in text
    assert "stopped after 60 s" in text
    assert "## Suite" not in text
    gpu_hour.write_rows(tmp_path / "steps.csv", outcomes)
    gpu_hour.write_rows(tmp_path / "tests.csv", tests)
    gpu_hour.write_page(tmp_path, {"card": "NVIDIA H100", "driver": "580"})
    assert (tmp_path / "figures.md").read_text() == text


# ----------------------------------------------------------------------------------------------------- dry runs


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_step_runs_on_the_cpu(name: str, tmp_path: Path) -> None:
    assert run_all([ON_CPU[name]], tmp_path, MACHINE, say=lambda _: None, patience=gpu_hour.DRY_RUN_PATIENCE), (
        rows_of(tmp_path / "steps.csv"),
        [path.read_text()[-2000:] for path in tmp_path.glob("raw/*/*.log")],
    )
    rows = rows_of(tmp_path / f"{name}.csv")
    shown = (tmp_path / "figures.md").read_text(encoding="utf-8")
    match name:
        case "tests":
            assert len(rows) > 5
            outcomes = {row["outcome"] for row in rows}
            assert outcomes <= {"passed", "failed"} if torch.accelerator.is_available() else outcomes == {"skipped"}
            assert all(row["why"] for row in rows if row["outcome"] == "skipped")
        case "audit":
            assert {row["op"] for row in rows} == {"index_add"}
            assert {row["phase"] for row in rows} == {"forward", "backward"}
        case "compiled":
            verdicts = {row["name"]: row["accuracy"] for row in rows}
            assert verdicts == {"relu_injected": "fail_accuracy", "relu_injected_twin": "pass"}
        case "invariance":
            assert {row["mode"].partition("-")[0] for row in rows} == {"batch", "cached", "chunked"}
            assert {row["dtype"] for row in rows} == {"bfloat16"}
        case "fingerprints":
            assert [row["setting"] for row in rows] == list(SETTINGS)
            # Settings of CUDA change nothing on a CPU: only that all kernels ran can be seen here.
            assert {(row["changed"], row["error"]) for row in rows} == {("0", "")}
            assert all(int(row["same"]) > 10 for row in rows)
        case "overhead":
            figures = {row["what"]: row["figure"] for row in rows}
            assert float(figures["hashbench / no-op mode"]) > 0
            assert figures["hash on the host"] == "not measured"
        case "specimens":
            assert len(rows) == 6
            assert {row["truth_cause"] for row in rows} == {"external_mutation", "unknown", ""}
    assert f"[{name}]({name}.csv)" in shown


@pytest.mark.slow
@pytest.mark.parametrize("device", [(), ("-d", "mtia")], ids=["any", "one that is not there"])
def test_without_the_device_it_says_so_and_exits_with_2(device: tuple[str, ...], tmp_path: Path) -> None:
    if not device and torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    command = [sys.executable, "-m", "benchmarks.gpu_hour", *device, "--output", str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run(command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"make gpu: there is no {device[1] if device else 'accelerator'} here, so nothing was measured. Run it where "
        "`hashbench env -d cuda` works; `python -m benchmarks.gpu_hour -d cpu` shows that its commands do.\n"
    )
    assert not (tmp_path / "out").exists()
