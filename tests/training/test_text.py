"""What ``hashbench watch diff`` prints."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from training.test_compare import HEADER, recording

from hashbench.training.compare import compare
from hashbench.training.file import Recording
from hashbench.training.text import as_json, as_text, headline, next_look
from hashbench.training.traced import FurtherRun, LoopVerdict, TracedSteps

COMMAND = replace(HEADER, command=("python", "train.py", "--name", "my run"))


def verdict(first: Recording, second: Recording, **more: object) -> LoopVerdict:
    folders = first.path.parent, second.path.parent
    return LoopVerdict(folders, (compare(first, second),), recordings=(first, second), **more)  # type: ignore[arg-type]


RACE = verdict(
    recording("runs/a", header=COMMAND),
    recording("runs/b", {10: {"gradient": {"c.weight": "x"}, "parameter": {"c.weight": "x"}}}, header=COMMAND),
)

EXPECTED = """\
first difference: step 10 (equal until step 9)
what differs:     gradient of c.weight
it came about:    in one of steps 9 to 10: not all tensors are read in each
then also:        parameter of c.weight
agreed before:    batch, generator, loss, buffer, gradient, learning rate, options of the optimizer, parameter and \
optimizer state (step 9)

step  batch  generator  loss  buffer  gradient  lr  options  parameter  state
7     =      =          =     =       =         =   =        =          =
8     =      =          =     =       =         =   =        =          =
9     =      =          =     =       =         =   =        =          =
10    =      =          =     =       ≠         =   =        ≠          =
11    =      =          =     =       =         =   =        =          =

Next look, at the kernels:
  HASHBENCH_WATCH=runs/a.steps9-10 HASHBENCH_TRACE_STEP=9:11 python train.py --name 'my run'
  HASHBENCH_WATCH=runs/b.steps9-10 HASHBENCH_TRACE_STEP=9:11 python train.py --name 'my run'
  hashbench watch diff runs/a.steps9-10 runs/b.steps9-10"""


def test_a_difference_that_kernels_make_has_a_next_look() -> None:
    assert as_text(RACE) == EXPECTED


@pytest.mark.parametrize(
    ("change", "what", "advice", "command"),
    [
        ({"batch": {"1": "x"}}, "batch 2 of 2", "The data differ", ""),
        ({"batch": {"2": "x"}}, "batch 3 of 3, which only the second run has", "a step was skipped", "TRACE_STEP=5 "),
        ({"lr": {"0": "0.2"}}, "learning rate", "The scheduler is at another position", ""),
        ({"options": {"momentum.0": "0.9"}}, "options of the optimizer momentum.0", "configured differently", ""),
        (
            {"generator": {"torch": "x"}, "batch": {"0": "x"}},
            "generator torch",
            "or was seeded differently. They are the likely source of the other batch",
            "TRACE_STEP=4:6",
        ),
        ({"parameter": {"b.weight": "x"}}, "parameter of b.weight", "The gradients read in this step agree", "STEP=5 "),
    ],
)
def test_the_first_part_says_where_to_look(change: object, what: str, advice: str, command: str) -> None:
    text = as_text(verdict(recording("a"), recording("b", {5: change})))  # type: ignore[dict-item]
    assert f"what differs:     {what}\n" in text
    assert advice in text
    assert ("Next look" in text) == bool(command)
    assert command in text


def test_values_that_people_read_are_shown() -> None:
    text = as_text(verdict(recording("a"), recording("b", {5: {"lr": {"0": "0.2"}}})))
    assert "first run:        0.1\nsecond run:       0.2\n" in text


def test_equal_runs_are_one_line() -> None:
    assert as_text(verdict(recording("a"), recording("b"))) == "The runs agree in steps 0 to 11."


def test_the_rank_that_differs_first_is_named() -> None:
    rank = compare(recording("a"), recording("b", {4: {"loss": {"0": "x"}}}))
    other = replace(compare(recording("a"), recording("b", {4: {"batch": {"0": "x"}}})), rank=1)
    two = LoopVerdict((Path("a"), Path("b")), (rank, other), recordings=(recording("a"), recording("b")))
    assert headline(two) == "The runs differ from step 4 on, first on rank 1: batch"
    assert "on other ranks:   rank 0: step 4, loss" in as_text(two)


def test_a_headline_is_short() -> None:
    short = replace(recording("b"), steps={number: step for number, step in recording("b").steps.items() if number < 7})
    said = "The runs agree in steps 0 to 6; not all was compared: a has steps 0 to 11, b steps 0 to 6"
    assert headline(verdict(recording("a"), short)).startswith(said)
    longer = recording("b", {4: {"batch": {"2": "x"}}})
    assert headline(verdict(recording("a"), longer)) == "The runs differ from step 4 on: batch that one run lacks"


# --------------------------------------------------------------------------------------------------- the second look


def test_a_difference_that_did_not_come_again_names_no_kernel() -> None:
    from hashbench.divergence import find
    from hashbench.records import Result, Trace
    from hashbench.trace.file import parse_digest

    trace = Trace((), (), (Result("loss", parse_digest("float32[]:00")),))
    traced = (TracedSteps(0, 9, 10, find(trace, trace)),)
    further = (
        FurtherRun(Path("c"), 10, differs=True, equal=False),
        FurtherRun(Path("d"), None, differs=False, equal=True),
    )
    text = as_text(verdict(recording("a"), recording("b"), traced=traced, further=further))
    assert "trace of steps 9 to 10: equal" in text
    assert "c: differs from step 10 on\nd: agrees with the first\n1 of 3 runs differ from a (33 %)." in text
    assert "did not come again. Run them more often" in text
    assert "memory or hardware. No kernel is named." in text


def test_records_that_differ_without_reaching_a_result_are_named() -> None:
    from hashbench.divergence import find
    from hashbench.records import Result, Trace
    from hashbench.trace.file import parse_digest

    trace = Trace((), (), (Result("loss", parse_digest("float32[]:00")),))
    traced = (TracedSteps(0, 9, 10, replace(find(trace, trace), benign=("forward.9//aten.add.Tensor#0",))),)
    said = as_text(verdict(recording("a"), recording("b"), traced=traced))
    words = "nothing that differs reaches a result\nthese differ:     forward.9//aten.add.Tensor#0"
    assert f"trace of steps 9 to 10: {words}" in said


def test_a_trace_that_cannot_be_judged_says_why() -> None:
    traced = (TracedSteps(0, 9, 10, None, "cannot read it."),)
    found = verdict(recording("a"), recording("b"), traced=traced)
    assert "trace of steps 9 to 10: cannot read it." in as_text(found)
    assert not found.equal


def test_no_command_is_invented_for_several_ranks() -> None:
    header = replace(COMMAND, world_size=2)
    change = {5: {"loss": {"0": "x"}}}
    commands = next_look(verdict(recording("a", header=header), recording("b", change, header=header)))
    assert commands[0] == "HASHBENCH_WATCH=a.steps4-5 HASHBENCH_TRACE_STEP=4:6 <the same command>"


def test_no_trace_is_proposed_of_a_model_that_is_not_called() -> None:
    first, second = recording("a"), recording("b", {6: {"gradient": {"c.weight": "x"}}})
    for one in (first, second):
        for step in one.steps.values():
            del step.parts["batch"]  # type: ignore[attr-defined]
    assert next_look(verdict(first, second)) == []


def test_a_trace_begins_with_a_step_in_which_the_model_is_called() -> None:
    """Optimizers that step within the backward pass make several steps of one call."""
    first, second = recording("a"), recording("b", {6: {"gradient": {"c.weight": "x"}}})
    for one in (first, second):
        for number in (5, 6):
            del one.steps[number].parts["batch"]  # type: ignore[attr-defined]
    assert "HASHBENCH_TRACE_STEP=4:7" in next_look(verdict(first, second))[0]


@pytest.mark.parametrize(
    ("traced", "command"),
    [
        (None, "TRACE_STEP=9:11"),
        ((2, 3), "TRACE_STEP=9:11"),
        ((9, 10), "TRACE_STEP=8:11"),
        ((8, 10), ""),
    ],
)
def test_a_look_is_not_proposed_twice(traced: tuple[int, int] | None, command: str) -> None:
    """A trace of other steps helps nothing; after one that named no kernel the step before them is traced as well."""
    looked = () if traced is None else (TracedSteps(0, *traced, None, "it names none"),)
    commands = next_look(replace(RACE, traced=looked))
    assert bool(commands) == bool(command)
    assert command in "".join(commands)


def test_json_has_the_same() -> None:
    document = json.loads(as_json(RACE))
    assert (document["equal"], document["step"], document["since"], document["rank"]) == (False, 10, 9, 0)
    assert [one["part"] for one in document["differing"]] == ["gradient", "parameter"]
    assert document["steps"] == [0, 11]
    assert len(document["next"]) == 3


# ----------------------------------------------------------------------------------------------------------- settings


def _with(one: Recording, threads: str, environment: dict[str, str]) -> Recording:
    header = replace(COMMAND, settings={"num_threads": threads}, environment=environment)
    steps = {number: replace(step, settings=header.settings) for number, step in one.steps.items()}
    return replace(one, header=header, steps=steps)


LOSS = recording("b", {10: {"loss": {"0": "x"}}})


def test_settings_that_differ_are_named_before_a_kernel_and_repeated_in_the_next_look() -> None:
    found = verdict(_with(recording("a"), "1", {"MKL_CBWR": "AVX2,STRICT"}), _with(LOSS, "2", {"OMP_NUM_THREADS": "2"}))
    said = as_text(found)
    differ = "settings differ:  num_threads (1, 2), MKL_CBWR (AVX2,STRICT, not set), OMP_NUM_THREADS (not set, 2)\n"
    assert f"(equal until step 9)\n{differ}what differs: " in said
    assert "\nSet them alike first: " in said
    named = "settings differ: num_threads, MKL_CBWR, OMP_NUM_THREADS"
    assert headline(found) == f"The runs differ from step 10 on: loss; {named}"
    first, second, _ = next_look(found)
    assert first.startswith("MKL_CBWR=AVX2,STRICT OMP_NUM_THREADS=1 HASHBENCH_WATCH=a.steps")
    assert second.startswith("OMP_NUM_THREADS=2 HASHBENCH_WATCH=b.steps")
    assert [one["name"] for one in json.loads(as_json(found))["settings"]][:1] == ["num_threads"]


def test_settings_that_nothing_follows_are_a_note() -> None:
    found = verdict(_with(recording("a"), "1", {}), _with(recording("b"), "2", {}))
    assert as_text(found) == (
        "The runs agree in steps 0 to 11.\n\n"
        "Settings differ, and nothing that was compared follows them: num_threads (1, 2)."
    )
    assert found.equal


def test_settings_are_no_advice_where_the_program_handed_over_other_data() -> None:
    found = verdict(_with(recording("a"), "1", {}), _with(recording("b", {5: {"batch": {"0": "x"}}}), "2", {}))
    assert "settings differ:  num_threads (1, 2)\n" in as_text(found)
    assert "Set them alike first" not in as_text(found)
