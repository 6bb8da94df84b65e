"""``--batch-invariant`` in the hands of the stand-in: its row and its words stay, and ours says which kernel it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hashbench.integrations.dynamo.harness import read_flags
from hashbench.integrations.dynamo.session import Note, collect, write_note
from hashbench.records import BATCH_INVARIANCE
from tests.integrations.dynamo.dynamo_helpers import Found, Standin, a_session


@pytest.fixture
def standin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Standin:
    return Standin(tmp_path / "csv", monkeypatch)


def with_us(standin: Standin, name: str, *flags: str, **session: Any) -> Found:
    ours = a_session(standin.folder.parent / "ours", mode=BATCH_INVARIANCE, **session)
    return standin.run(name, "--batch-invariant", *flags, session=ours)


MODELS = {
    "passes": ("doubled", "pass"),
    "differs": ("centred", "fail_batch_invariance_at_4"),
    "cannot run a part": ("half", "fail_to_run_at_batch_2"),
    "raises": ("failing", "fail_to_run"),
    "is in a list": ("huge", "pass_due_to_skip"),
}


@pytest.mark.parametrize(("name", "status"), MODELS.values(), ids=MODELS)
def test_row_of_the_harness_is_what_it_is_without_us(standin: Standin, name: str, status: str) -> None:
    alone = standin.run(name, "--batch-invariant").theirs
    found = with_us(standin, name)
    volatile = {"compilation_latency": ""}
    assert found.theirs | volatile == alone | volatile
    assert found.theirs["accuracy"] == found.row.harness_accuracy == found.row.accuracy == status
    assert (found.row.mode, found.row.batch_size) == (BATCH_INVARIANCE, 8)


def test_training_is_forward_only_as_there(standin: Standin) -> None:
    found = with_us(standin, "centred", "--training")
    assert (found.row.accuracy, found.row.mode) == ("fail_batch_invariance_at_4", BATCH_INVARIANCE)
    assert found.row.differing_results == "result"


def test_other_ops_for_another_number_of_items_are_a_choice_by_size(standin: Standin) -> None:
    row = with_us(standin, "routed", budget=20.0).row
    assert (row.accuracy, row.kernel) == ("fail_batch_invariance_at_4", "aten.mul.Tensor")
    assert (row.cause, row.confidence, row.smallest_batch) == ("shape_dependent_kernel", "proven", 5), row.because
    assert with_us(standin, "routedexactly").row.accuracy == "pass"


def test_what_a_compiler_made_is_left_to_the_harness_and_said_so(standin: Standin) -> None:
    found = with_us(standin, "centred", "--backend=aot_eager")
    assert found.row.accuracy == found.theirs["accuracy"] == "fail_batch_invariance_at_4"
    assert "only outputs were compared, by the harness" in found.row.error
    assert not found.row.kernel


def test_a_model_that_differs_from_itself_is_no_failure_of_the_batch(standin: Standin) -> None:
    found = with_us(standin, "noisy")
    assert found.theirs["accuracy"] == "fail_batch_invariance_at_4"
    assert found.row.accuracy == "pass_due_to_skip"
    assert "two runs of the same 8 items differ" in found.row.error
    assert "the harness wrote fail_batch_invariance_at_4" in found.row.error


def test_flags_tell_the_mode() -> None:
    assert read_flags(["--accuracy", "--batch-invariant", "--training"]).mode == BATCH_INVARIANCE


def test_a_row_that_only_the_harness_has_keeps_its_word(tmp_path: Path) -> None:
    session = a_session(tmp_path / "ours", mode=BATCH_INVARIANCE)
    session.prepare(anew=True)
    path = tmp_path / "a.csv"
    path.write_text("dev,name,batch_size,accuracy\ncpu,m,8,fail_to_run\n")
    write_note(session, Note("m", status="", csv=str(path)))
    (row,) = collect(session)
    assert (row.accuracy, row.harness_accuracy, row.batch_size) == ("fail_to_run", "fail_to_run", 8)
    assert "hashbench has not run it" in row.error
