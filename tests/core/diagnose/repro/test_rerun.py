"""The experiments of a repro made again: what they find, beside what was recorded, here and on another machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from repro_helpers import adding_rows, aten, captured, document_in, said_of, signed_again

from hashbench import cli
from hashbench.core.diagnose.repro import call_file, rerun, rerun_finding, write_repro
from hashbench.core.errors import HashbenchError
from hashbench.core.finding import as_json
from hashbench.core.records import ExperimentResult

THREADS = ExperimentResult("one_thread", "call", trials=20, differing=0, distinct=1)


@pytest.fixture
def racing(tmp_path: Path) -> Path:
    """The repro of a call that differs."""
    write_repro(tmp_path / "racing", adding_rows(), said_of(THREADS))
    return tmp_path / "racing"


@pytest.fixture
def steady(tmp_path: Path) -> Path:
    """The repro of a call that agrees whatever is done to it."""
    call = captured(aten.sort.default, torch.randn(100))
    write_repro(tmp_path / "steady", call, said_of(THREADS))
    return tmp_path / "steady"


@pytest.mark.slow
def test_call_that_differs_is_reproduced(racing: Path) -> None:
    made = rerun(racing, replays=20, budget=300.0)
    assert made.reproduced
    assert made.evidence.arm("repeat", "call").differing
    assert made.op == "aten.index_put_.default"
    assert made.recorded.arms == (THREADS,)
    found = rerun_finding(made)
    assert found.table is not None
    assert "0 of 20" in next(row for row in found.table.rows if row[0] == "one_thread")
    facts = dict(found.facts)
    assert facts["cause"] == f"{made.decision.cause}, {made.decision.confidence}"
    assert made.decision.advice in facts["advice"]


def test_call_that_agrees_is_not(steady: Path) -> None:
    made = rerun(steady, replays=3, budget=60.0)
    assert not made.reproduced
    found = rerun_finding(made)
    assert dict(found.facts)["recorded cause"] == "accumulation_order, likely: 20 of 20 replays differ"
    assert (found.equal, found.differs) == (True, False)


def test_json_has_all_of_it(steady: Path) -> None:
    found = json.loads(as_json(rerun_finding(rerun(steady, replays=2, budget=5.0))))
    assert (found["reproduced"], found["op"]) == (False, "aten.sort.default")
    assert found["recorded"]["arms"][0]["name"] == "one_thread"
    assert found["recorded"]["environment"]["torch"] == torch.__version__


def test_machine_with_other_threads_and_another_torch_says_so(steady: Path) -> None:
    found = document_in(steady)
    found["threads"] = 7
    found["settings"]["num_threads"] = "7"
    found["recorded"]["environment"]["torch"] = "2.11.0"
    signed_again(steady, found)
    here = torch.get_num_threads()
    made = rerun(steady, replays=2, budget=5.0)
    assert made.elsewhere == (
        f"torch: 2.11.0 there, {torch.__version__} here",
        f"threads: 7 there, {here} here; the call was replayed with 7",
    )
    assert torch.get_num_threads() == here
    assert rerun_finding(made).notes[1:] == made.elsewhere


def test_a_missing_device_is_replaced_by_the_first(steady: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_file, "devices_here", lambda: {"cpu": 1})
    found = document_in(steady)
    for memory in found["memories"]:
        memory["device"] = "cpu:3"
    found["settings"]["default_device"] = "cpu:3"
    signed_again(steady, found)
    assert call_file.read(steady).call.settings["default_device"] == "cpu:0"
    made = rerun(steady, replays=2, budget=5.0)
    assert made.evidence.arm("repeat", "call").ran
    said = "device: cpu:3, which is not here; the call was replayed on cpu:0, the first of its kind"
    assert [line for line in made.elsewhere if line.startswith("device")] == [said]
    assert said in rerun_finding(made).notes


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_missing_kind_of_device_is_refused(steady: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = document_in(steady)
    found["memories"][0]["device"] = "cuda:3"
    signed_again(steady, found)
    assert cli.main(["replay", str(steady)]) == 2
    [line] = capfd.readouterr().err.splitlines()
    assert "the device 'cuda:3' is not here" in line


FORGED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no evidence": (lambda recorded: recorded.pop("evidence"), "evidence is 'None'"),
    "arms that are none": (lambda recorded: recorded["evidence"].update(arms=[3]), "which is not dict"),
    "a count that is none": (
        lambda recorded: recorded["evidence"]["arms"][0].update(trials="many"),
        "trials is 'many'",
    ),
    "a decision without a cause": (lambda recorded: recorded["decision"].pop("cause"), "lacks the fields cause"),
}


@pytest.mark.parametrize(("forge", "words"), FORGED.values(), ids=FORGED)
def test_evidence_that_is_none_is_refused(forge: Callable[[dict[str, Any]], object], words: str, steady: Path) -> None:
    found = document_in(steady)
    forge(found["recorded"])
    signed_again(steady, found)
    with pytest.raises(HashbenchError, match=words):
        rerun(steady, replays=2, budget=5.0)
