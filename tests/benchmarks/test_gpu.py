"""``python -m benchmarks.gpu``: its whole code runs on the CPU in small sizes; without an accelerator it says so."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hashbench

CHECKOUT = Path(hashbench.__file__).parents[1]

pytestmark = [
    pytest.mark.skipif(
        not (CHECKOUT / "benchmarks").exists(), reason="hashbench is installed, there are no benchmarks"
    ),
    pytest.mark.slow,
]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    return subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False, timeout=600)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict]:
    """What a small run prints, and its JSON document."""
    file = tmp_path_factory.mktemp("bench") / "figures.json"
    done = bench("--device", "cpu", "--small", "--seconds", "0", "--json", str(file))
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, json.loads(file.read_text(encoding="utf-8"))


def table(document: dict, start: str) -> dict[str, dict[str, object]]:
    """The rows of a table by their first cell."""
    found = next(one for one in document["tables"] if one["title"].startswith(start))
    return {row[0]: dict(zip(found["headers"], row, strict=False)) for row in found["rows"]}


@pytest.mark.exhaustive
def test_it_says_what_was_measured_on_what(small: tuple[str, dict]) -> None:
    printed, document = small
    for name in ("date", "processor", "torch", "device", "CUDA, HIP", "Triton", "digests made by"):
        assert f"{name}: {document['machine'][name]}\n" in printed
    assert document["machine"]["torch"] == torch.__version__


@pytest.mark.exhaustive
def test_every_arm_is_measured_on_every_workload(small: tuple[str, dict]) -> None:
    steps = table(small[1], "One training step")
    assert len(steps) == 3
    for row in steps.values():
        assert float(str(row["no mode"]).removesuffix(" ms")) > 0
        for arm in ("no-op mode", "hashbench", "hashbench + finish", "DebugMode", "hash on the host"):
            assert float(str(row[arm])) > 0
    goals = table(small[1], "Goals of tracing")
    assert goals.keys() == steps.keys()
    assert goals["GPT, small, bf16"]["hashbench / no-op mode"]
    found = next(one for one in small[1]["tables"] if one["title"] == "Goals of tracing")
    assert {row[-1] for row in found["rows"]} <= {"met", "missed"}
    assert {row[2] for row in found["rows"]} == {"", "≤ 1.3"}


@pytest.mark.exhaustive
def test_digests_stand_beside_a_plain_read_and_a_copy(small: tuple[str, dict]) -> None:
    rows = table(small[1], "Digests, GB/s")
    assert list(rows) == ["1 KiB", "16 KiB", "256 KiB"]
    for row in rows.values():
        assert float(str(row["digest"])) / float(str(row["plain read"])) == pytest.approx(
            float(str(row["digest / plain read"])), rel=0.02
        )
        assert float(str(row["copy"])) > 0


@pytest.mark.exhaustive
def test_memory_is_that_of_the_buffers(small: tuple[str, dict]) -> None:
    rows = table(small[1], "Memory on the device for a trace of 2000 records")
    assert rows["buffers of digests"] == {
        "what": "buffers of digests",
        "figure": "0.131 MB",
        "goal": "≤ 16 MB",
        "reached": "met",
    }
    assert "goals: " in small[0].lower()
    assert small[0].rstrip().endswith("(of a small run: they mean nothing).")


def test_the_gpt_has_as_many_parameters_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(CHECKOUT)
    workloads = importlib.import_module("benchmarks.gpu_workloads")
    with torch.device("meta"):
        model = workloads.Gpt(workloads.GptSize())
    assert 350e6 < sum(parameter.numel() for parameter in model.parameters()) < 360e6


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(
            (), marks=pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator"), id="any"
        ),
        pytest.param(("--device", "mtia"), id="one that is not there"),
    ],
)
def test_without_the_device_it_is_one_line_and_exit_2(arguments: tuple[str, ...]) -> None:
    done = bench(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"benchmarks.gpu: there is no {arguments[1] if arguments else 'accelerator'} here, so nothing was measured. "
        "Run it where `hashbench env -d cuda` works; "
        "`python -m benchmarks.gpu --device cpu --small` shows that the benchmark itself does.\n"
    )
