"""What a resumed run did not restore."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from extensions.watch.test_compare import recording, with_begin
from extensions.watch.watch_texts import shifted

from hashbench.core.errors import HashbenchError
from hashbench.core.finding import as_json
from hashbench.extensions.watch import resume
from hashbench.extensions.watch.file import Batch, Recording, Step
from hashbench.extensions.watch.resume import began_anew, judge, judge_folders, restored_at

SCRIPT = Path(__file__).parent / "resumable.py"

Run = Callable[[str, int, str], Path]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the script in this process: in a folder, up to a step, with what it loses; return the recording."""

    def train(name: str, stop: int, loses: str = "") -> Path:
        folder = tmp_path / name.partition("-")[0]
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        watched = tmp_path / f"{name}.watch"
        for variable, value in (("WATCH", watched), ("WATCH_EVERY", 1), ("STOP_AT", stop)):
            monkeypatch.setenv(f"HASHBENCH_{variable}", str(value))
        monkeypatch.setenv("LOSES", loses)
        with pytest.raises(SystemExit):
            runpy.run_path(str(SCRIPT))
        return watched

    return train


def resumed(run: Run, loses: str) -> tuple[Path, Path]:
    whole = run("whole", 14, "")
    run("other-stopped", 10, "")
    return whole, run("other-resumed", 14, loses)


LOST = {
    "": [],
    "generator": ["generator torch: its state"],
    "optimizer": [
        "optimizer state step, exp_avg and 1 more, which is absent, of 6 parameters (0.weight, 0.bias and 4 more)"
    ],
    "scheduler": [
        "scheduler: the learning rate is 0.05 instead of 0.00625",
        "scheduler: StepLR.last_epoch is 0 instead of 10",
    ],
    "scaler": ["gradient scaler: scale is 8.0 instead of 256.0"],
    "position": ["data position: the batch has samples of different steps (sampler, its generator, or workers)"],
    "model": ["6 parameters (0.weight, 0.bias and 4 more)"],
}


@pytest.mark.slow
@pytest.mark.parametrize("loses", LOST)
def test_what_a_script_does_not_restore_is_named(run: Run, loses: str) -> None:
    verdict = judge_folders(*resumed(run, loses))
    words = resume.lost_of(verdict)
    assert verdict.equal == (not loses)
    assert [word for word in words if "buffers (" not in word] == LOST[loses]
    assert verdict.at == 10
    assert not verdict.unread


@pytest.mark.slow
def test_all_that_is_lost_is_named_at_once(run: Run) -> None:
    verdict = judge_folders(*resumed(run, "generator,optimizer,position"))
    assert {one.part for one in verdict.lost} == {"generator", "state", "batch"}
    assert json.loads(as_json(resume.finding_of(verdict)))["not_restored"] == resume.lost_of(verdict)


# --------------------------------------------------------------------------------------------- on recordings by hand


def changed(step: Step, part: str) -> Step:
    return replace(
        step, parts={**step.parts, part: {name: f"other {value}" for name, value in step.parts[part].items()}}
    )


TOLD = replace(recording("b").header, start=5)


def test_a_run_that_does_not_tell_its_step_is_shifted() -> None:
    verdict = shifted(5)
    assert (verdict.equal, verdict.at, verdict.steps) == (True, 5, tuple(range(5, 12)))


def test_a_step_must_be_known() -> None:
    with pytest.raises(HashbenchError, match="has no start step"):
        judge(recording("a"), recording("b"))


def test_a_step_that_was_told_is_not_given_otherwise() -> None:
    told = recording("b", header=replace(recording("b").header, start=5))
    with pytest.raises(HashbenchError, match="begins with step 5, not 6"):
        judge(recording("a"), told, at=6)


def test_the_state_before_the_step_is_compared_with_the_uninterrupted_runs_after_it() -> None:
    whole = recording("a")
    before = replace(whole.steps[4], parts={**whole.steps[4].parts, "state": {}}, number=4)
    steps = {number: changed(step, "state") for number, step in whole.steps.items() if number > 4}
    verdict = judge(whole, recording("b", steps=steps, before=before, header=replace(whole.header, start=5)))
    assert [(one.part, one.second) for one in verdict.lost] == [("state", "")]
    assert verdict.unread


def test_what_a_program_changes_between_steps_is_no_loss() -> None:
    """An average, or a clamp of the weights, after the optimizer's step."""
    whole = recording("a")
    clamped = {**whole.steps[4].parts, "parameter": dict.fromkeys(("a.weight", "b.weight"), "clamped")}
    steps = {number: step for number, step in whole.steps.items() if number > 4}
    resumed = recording("b", steps=steps, before=replace(whole.steps[4], parts=clamped), header=TOLD)
    assert judge(whole, resumed).equal, "they agree after the step"
    seen = judge(whole, replace(resumed, steps={number: changed(step, "parameter") for number, step in steps.items()}))
    assert [one.part for one in seen.lost] == ["parameter"]
    read = replace(whole, steps={**whole.steps, 5: replace(whole.steps[5], begin=clamped)})
    assert judge(read, resumed).equal
    assert [one.names for one in judge(read, replace(resumed, before=whole.steps[4])).lost] == [
        ("a.weight", "b.weight")
    ]


def test_a_generator_that_is_not_drawn_from_is_not_lost() -> None:
    idle = {number: {"generator": {"numpy": "other"}} for number in range(12)}
    assert judge(recording("a"), recording("b", idle), at=0).equal
    both = {number: {"generator": {"numpy": "other", "torch": "other"}} for number in range(12)}
    verdict = judge(recording("a"), recording("b", both), at=0)
    assert list(map(resume.lost_words, verdict.lost)) == ["generator torch: its state"]
    drawn = {number: {"generator": {"numpy": f"n{number}"}} for number in range(12)}
    verdict = judge(recording("a", drawn), recording("b", idle), at=0)
    assert list(map(resume.lost_words, verdict.lost)) == ["generator numpy: its state"]


def test_a_later_difference_is_no_loss() -> None:
    verdict = judge(recording("a"), recording("b", {8: {"loss": {"0": "x"}}}), at=0)
    assert (verdict.lost, verdict.then, verdict.later) == ((), (), 8)


def test_a_generator_that_the_program_seeds_before_it_draws_is_no_loss() -> None:
    first = {0: {"generator": {"torch": "x"}}}
    verdict = judge(recording("a"), recording("b", first), at=0)
    assert (verdict.equal, verdict.idle) == (True, ("torch",))
    assert judge(recording("a"), recording("b", {**first, 5: {"loss": {"0": "x"}}}), at=0).lost
    assert judge(recording("a"), recording("b", {**first, 11: first[0]}), at=0).lost, "it may act later"


def test_an_average_that_is_lost_is_seen_as_the_next_step_begins() -> None:
    verdict = judge(with_begin("a", {}), with_begin("b", {1: "x"}), at=0)
    assert (verdict.lost, verdict.later) == ((), 1)


def test_a_scheduler_that_acts_later_is_named_at_once() -> None:
    whole, anew = (
        {number: {"scheduler": {"StepLR.last_epoch": str(number - lost)}} for number in range(12)} for lost in (0, 5)
    )
    verdict = judge(recording("a", whole), recording("b", anew), at=0)
    assert resume.lost_of(verdict) == ["scheduler: StepLR.last_epoch is -5 instead of 0"]
    assert judge(recording("a", whole), recording("b", whole), at=0).equal


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ((1, 2), "data order: the batch has the same samples in a different order, or different labels"),
        ((8, 9), "data position: the batch has samples of different steps (sampler, its generator, or workers)"),
        ((70, 71), "data content: no sample of the batch is in the uninterrupted run (random transforms"),
        ((), "data position, or random transforms: the first batch differs"),
        ((8,), "data position, or its batches: 1 batch a step (1x6) instead of 1 batch a step (2x6)"),
    ],
)
def test_another_batch_is_told_by_its_samples(samples: tuple[int, ...], words: str) -> None:
    def run(name: str, first: tuple[int, ...], changes: dict[int, dict[str, dict[str, str]]]) -> Recording:
        made = recording(name, changes)
        batches = {number: Batch((2, 6), (2 * number + 1, 2 * number + 2)) for number in made.steps}
        batches[0] = Batch((len(first) or 2, 6), first)
        return replace(made, steps={at: replace(one, batches=(batches[at],)) for at, one in made.steps.items()})

    first = run("a", (2, 1), {})

    def short(made: Recording) -> Recording:
        return replace(made, steps={0: made.steps[0]})

    verdict = judge(first, short(run("b", samples, {0: {"batch": {"0": "x"}}})), at=0)
    assert resume.lost_of(verdict)[0].startswith(words)
    drawn = {0: {"batch": {"0": "x"}, "generator": {"torch": "x"}}}
    said = resume.lost_of(judge(first, short(run("b", samples, drawn)), at=0))
    assert said[0] == "generator torch: its state, the likely source of the different batch"


@pytest.mark.parametrize("ended", ["cut", "ValueError: mine"])
def test_what_did_not_end_is_no_clearance(ended: str) -> None:
    verdict = judge(recording("a"), recording("b", ended=ended), at=0)
    assert (verdict.differs, verdict.equal) == (False, False)


def test_a_loss_that_nothing_explains_is_no_loss_of_a_state() -> None:
    assert judge(recording("a"), recording("b", {0: {"loss": {"0": "x"}}}), at=0).lost == ()


def test_a_run_that_counts_from_0_is_known_by_its_parameters() -> None:
    whole = recording("a")
    assert restored_at(whole, replace(whole, before=whole.steps[4])) == 5
    begun = {**whole.steps[4].parts, "parameter": dict.fromkeys(("a.weight", "b.weight"), "clamped")}
    clamped = replace(whole, steps={**whole.steps, 5: replace(whole.steps[5], begin=begun)})
    assert restored_at(clamped, replace(whole, before=replace(whole.steps[4], parts=begun))) == 5
    assert restored_at(whole, replace(whole, before=replace(whole.steps[4], parts=begun))) is None
    assert restored_at(whole, whole) is None


def test_a_run_that_began_anew_is_known_by_its_state() -> None:
    whole = recording("a")
    before = replace(whole.steps[0], number=-1)
    assert began_anew(replace(whole, before=before), replace(whole, before=before))
    assert not began_anew(replace(whole, before=before), replace(whole, before=whole.steps[4]))
    assert not began_anew(whole, whole)
