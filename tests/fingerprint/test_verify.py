"""``hashbench fingerprint``: record and verify through the command line, in processes of their own; and bisecting."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hashbench import cli
from hashbench.fingerprint import bisect, document
from hashbench.fingerprint.bisect import Setting, Trial, bisected_text, candidates
from hashbench.fingerprint.document import Fingerprints, Kernel
from hashbench.fingerprint.measure import record
from hashbench.fingerprint.verify import CHANGED, Change, Checked
from hashbench.replay.ops import load

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


def of(library: str, *, now: str = "") -> Change:
    kernel = Kernel("aten.mm.default", (), {}, (), "forward", 1, library, (), ())
    return Change(kernel, ("net",), Checked(0, CHANGED, library=now))


def environment(*, threads: int = 2, capability: str = "AVX512", **variables: str) -> dict[str, Any]:
    facts = {"threads": {"intra_op": threads}, "torch": {"cpu_capability": capability}}
    return {**facts, "variables": variables}


def tried(recorded: Mapping[str, Any], here: Mapping[str, Any], *changed: Change, device: str = "cpu") -> list[str]:
    return [setting.text for setting in candidates(recorded, here, changed, device=device)]


def test_what_is_other_than_recorded_is_tried_first() -> None:
    recorded = environment(threads=2, MKL_CBWR="AVX2")
    here = environment(threads=1, ONEDNN_MAX_CPU_ISA="AVX2")

    assert tried(recorded, here, of("oneDNN jit:avx512_core")) == [
        "threads 2 instead of 1, as recorded",
        "ONEDNN_MAX_CPU_ISA unset instead of AVX2, as recorded",
        "MKL_CBWR AVX2 instead of unset, as recorded",
        "oneDNN mkldnn.enabled=False instead of its default",
    ]


def test_only_settings_of_libraries_that_changed_are_tried() -> None:
    same = environment()

    assert tried(same, same, of("MKL SGEMM")) == [
        f"MKL_CBWR {value} instead of unset" for value in ("COMPATIBLE", "AVX2", "AVX512")
    ]
    assert [line.split()[0] for line in tried(same, same, of("ATen native", now="MKL SGEMM"))] == [
        *["ATEN_CPU_CAPABILITY"] * 2,
        *["MKL_CBWR"] * 3,
    ]


@pytest.mark.parametrize(("capability", "values"), [("AVX2", ["default"]), ("DEFAULT", []), ("SVE", ["default"])])
def test_no_capability_is_tried_that_the_processor_may_lack(capability: str, values: list[str]) -> None:
    same = environment(capability=capability)

    assert tried(same, same, of("ATen native")) == [f"ATEN_CPU_CAPABILITY {one} instead of unset" for one in values]


def test_a_value_that_a_file_makes_up_never_becomes_an_environment_variable() -> None:
    recorded = environment(MKL_CBWR="$(rm -rf /)", LD_PRELOAD="evil.so")

    settings = list(candidates(recorded, environment(), [of("MKL SGEMM")], device="cpu"))

    assert {value for setting in settings for value in setting.variables.values()} == {"COMPATIBLE", "AVX2", "AVX512"}


def test_on_accelerators_their_settings_are_tried() -> None:
    same = environment()

    names = [line.split()[0] for line in tried(same, same, of("unknown"), device="cuda")]
    assert names == ["cuDNN", "cuDNN's", "TF32", "attention", "attention", "attention"]


@pytest.mark.parametrize(
    ("trials", "end"),
    [
        ([], "No setting is known that could be tried."),
        ([(0, 0)], "None of these settings explains it: most likely the kernels themselves are others"),
        ([(3, 0), (5, 4)], "No setting explains all of it; most does A 2 instead of 1."),
        ([(0, 0), (5, 0)], "A explains it: with A 2 instead of 1, all give what was recorded."),
    ],
)
def test_the_conclusion(trials: list[tuple[int, int]], end: str) -> None:
    setting = Setting("A", "1", "2")

    said = bisected_text([Trial(setting, back, 5, others) for back, others in trials])

    assert said.splitlines()[-1].startswith(end)


# ------------------------------------------------------------------------------------------------- in processes


@pytest.mark.slow
def test_verify_bisects_and_outlives_a_kernel_that_ends_its_process(
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
    assert cli.main(["fingerprint", "verify", str(base), "--import", str(definition), "--bisect"]) == 1

    said = capsys.readouterr()
    assert said.err.count("ends its process: killed by SIGABRT") == 1  # not once more for the other model
    lines = said.out.splitlines()
    assert lines[0].startswith(f"1 of {made.kernels} kernels changed (")
    assert "fingerprint_env" in lines
    assert "not compared, ends its process: killed by SIGABRT: 1 (fingerprint_env.fatal.default)" in lines
    assert lines[-1] == (
        "MKL_CBWR explains it: with MKL_CBWR COMPATIBLE instead of unset, as recorded, all give what was recorded."
    )


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

    assert cli.main(["fingerprint", "verify", str(base), "--format", "json"]) == 0
    verification = json.loads(capsys.readouterr().out)
    assert verification["changed"] == []
    assert verification["same"] == len(model.kernels)


@pytest.mark.slow
def test_models_of_one_name_in_two_suites_are_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
def test_a_model_that_is_skipped_is_said_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_verify_of_another_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = tmp_path / "base.json"
    document.write(base, record(lambda: torch.ones(3) * 2, name="net"))

    assert cli.main(["fingerprint", "verify", str(base), "--only", "other"]) == 2
    assert capsys.readouterr().err == (
        f"hashbench: {base} holds no fingerprint of other: nothing was run. It holds net.\n"
    )


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"schema": 1}', '{"schema": 7, "models": []}'])
def test_verify_of_what_is_no_fingerprint_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    base = tmp_path / "base.json"
    base.write_text(text, encoding="utf-8")

    assert cli.main(["fingerprint", "verify", str(base)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_bisect_stops_where_one_setting_explains_all(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int | None] = []
    change = of("MKL SGEMM")
    empty = Fingerprints({}, ())

    def verify(_: object, request: bisect.Request, **__: object) -> bisect.Verification:
        asked.append(request.threads)
        return bisect.Verification((), 1, 0, () if request.threads == 2 else (change,), {}, {})

    monkeypatch.setattr(bisect, "verify", verify)
    settings = [Setting("threads", "1", str(number), threads=number) for number in (3, 2, 4)]
    before = bisect.Verification((), 1, 0, (change,), {}, {})
    trials = bisect.bisect(empty, bisect.Request("base.json"), before, settings)

    assert asked == [3, 2]
    assert [trial.explains for trial in trials] == [False, True]
