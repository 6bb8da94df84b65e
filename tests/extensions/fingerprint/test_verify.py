"""``hashbench fingerprint record`` and ``verify`` through the command line, in processes of their own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hashbench import cli
from hashbench.core.diagnose.calls.ops import load
from hashbench.extensions.fingerprint import document
from hashbench.extensions.fingerprint.document import Fingerprints
from hashbench.extensions.fingerprint.measure import record
from hashbench.extensions.fingerprint.verify import CHANGED, Checked, summary

OPS = """
import os
import torch

library = torch.library.Library("{namespace}", "DEF")
library.define("chosen(Tensor x) -> Tensor")
library.define("fatal(Tensor x) -> Tensor")


def fatal(x):
    if "FINGERPRINT_TEST_FATAL" in os.environ:
        os.abort()
    return x + 1


library.impl("chosen", lambda x: x + (os.environ.get("MKL_CBWR") == "COMPATIBLE"), "CPU")
library.impl("fatal", fatal, "CPU")
"""


ZOO = """
import torch


class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x).relu()


class Fails(Small):
    def forward(self, x):
        raise RuntimeError("no such luck")


MODELS = {"small": lambda: (Small(), torch.ones(2, 4)), "fails": lambda: (Fails(), torch.ones(2, 4))}
"""


@pytest.mark.slow
def test_verify_survives_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    definition, base = tmp_path / "ops.py", tmp_path / "base.json"
    definition.write_text(OPS.format(namespace="fingerprint_env"), encoding="utf-8")
    load(str(definition))
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")

    def run() -> None:
        torch.ops.fingerprint_env.fatal(torch.ones(3))
        torch.ops.fingerprint_env.chosen(torch.ones(3))
        torch.ones(3) * 2

    made = record(run, name="net")
    twice = (made.models[0], replace(made.models[0], name="twin"))
    document.write(base, replace(made, environment={"variables": {"MKL_CBWR": "COMPATIBLE"}}, models=twice))
    assert cli.main(["fingerprint", "verify", str(base), "--import", str(definition)]) == 0
    assert f"0 of {made.kernels} kernels changed" in capsys.readouterr().out

    monkeypatch.delenv("MKL_CBWR")
    monkeypatch.setenv("FINGERPRINT_TEST_FATAL", "1")
    assert cli.main(["fingerprint", "verify", str(base), "--import", str(definition)]) == 1

    said = capsys.readouterr()
    assert said.err.count("ends its process: killed by SIGABRT") == 1  # not once more for the other model
    lines = said.out.splitlines()
    assert lines[0] == f"1 of {made.kernels} kernels changed"
    assert "fingerprint_env" in lines
    text = " ".join(said.out.split())
    assert "not compared: 1 (fingerprint_env.fatal.default): ends its process: killed by SIGABRT" in text
    assert lines[-1] == f"Next: hashbench fingerprint verify {base}"


@pytest.mark.slow
def test_record_and_verify_a_zoo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    zoo, base = tmp_path / "zoo.py", tmp_path / "base.json"
    zoo.write_text(ZOO, encoding="utf-8")

    assert cli.main(["fingerprint", "record", "--training", "--suite", str(zoo), "-o", str(base)]) == 0
    said = capsys.readouterr()
    assert "fails: " in said.err
    assert "no such luck" in said.err
    (model,) = document.read(base).models
    assert (model.suite, model.name, model.mode) == ("zoo", "small", "training")
    assert {kernel.phase for kernel in model.kernels} == {"forward", "backward", "optimizer"}

    assert cli.main(["fingerprint", "verify", str(base), "--json"]) == 0
    verification = json.loads(capsys.readouterr().out)
    assert verification["changed"] == []
    assert verification["same"] == len(model.kernels)


@pytest.mark.slow
def test_equal_names_in_two_suites_are_distinct(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, zoos = tmp_path / "base.json", [tmp_path / "first.py", tmp_path / "second.py"]
    for width, zoo in enumerate(zoos, start=3):
        text = ZOO.replace("Linear(4, 3)", f"Linear(4, {width})")
        zoo.write_text(text, encoding="utf-8")
    record = ["fingerprint", "record", "--inference", "--suite", *map(str, zoos), "--only", "small", "fails", "-o"]

    assert cli.main([*record, str(base)]) == 0
    said = capsys.readouterr().err
    models = document.read(base).models
    assert [(model.suite, model.name) for model in models] == [("first", "small"), ("second", "small")]
    assert models[0].kernels != models[1].kernels
    assert "] second/small: recorded" in said
    assert "[4/4]" in said
    assert all(f"] {suite}/fails: RuntimeError: no such luck" in said for suite in ("first", "second"))


@pytest.mark.slow
def test_skipped_model_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    zoo, base = tmp_path / "zoo.py", tmp_path / "base.json"
    marked = """
import hashbench


@hashbench.model(skip_training="has nothing to learn")
def frozen():
    return Small(), (torch.ones(2, 4),)
"""
    zoo.write_text(ZOO + marked, encoding="utf-8")
    arguments = ["fingerprint", "record", "--training", "--suite", str(zoo), "--only", "small", "frozen"]

    assert cli.main([*arguments, "-o", str(base)]) == 0
    assert "[1/2] frozen: has nothing to learn" in capsys.readouterr().err


def test_verify_of_unknown_model_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = tmp_path / "base.json"
    document.write(base, record(lambda: torch.ones(3) * 2, name="net"))

    assert cli.main(["fingerprint", "verify", str(base), "--only", "other"]) == 2
    assert capsys.readouterr().err == (
        f"hashbench: {base} holds no fingerprint of other: nothing was run. It holds net.\n"
    )


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"schema": 1}', '{"schema": 7, "models": []}'])
def test_verify_of_invalid_file_fails_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    base = tmp_path / "base.json"
    base.write_text(text, encoding="utf-8")

    assert cli.main(["fingerprint", "verify", str(base)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_equal_kernels_of_models_are_merged(base: Fingerprints) -> None:
    two = replace(base, models=(base.models[0], replace(base.models[0], name="other")))
    results = [Checked(number, CHANGED) for number in range(two.kernels)]

    verification = summary(two, results)

    assert len(verification.changed) == base.kernels == verification.kernels
    assert verification.changed[0].models == ("net", "other")
