"""The first step and part that differ, on recordings written by hand."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from hashbench.core.errors import HashbenchError
from hashbench.extensions.watch.compare import BEGIN, compare
from hashbench.extensions.watch.file import Recording, Step, WatchHeader

NAMES = ("a.weight", "b.weight", "c.weight", "d.weight")
HEADER = WatchHeader(1, 0, 1, None, 4, "Net", "cpu", NAMES, ("norm.mean",))


def step(number: int, changes: Mapping[str, Mapping[str, str]] | None = None) -> Step:
    """A step of a model of four tensors, of which each step reads one, and all in every fourth."""
    read = NAMES if number % 4 == 0 else (NAMES[number % 4],)
    parts = {
        "batch": {"0": f"batch {number}", "1": f"second batch {number}"},
        "generator": {"torch": f"torch {number}", "numpy": "n", "python": "p"},
        "loss": {"0": f"loss {number}", "1": f"second loss {number}"},
        "buffer": {"norm.mean": f"mean {number}"},
        "gradient": dict.fromkeys(read, f"gradient {number}"),
        "lr": {"0": "0.1"},
        "options": {"momentum.0": "0"},
        "parameter": dict.fromkeys(read, f"parameter {number}"),
        "state": {f"{name}: exp_avg": f"state {number}" for name in read},
    }
    for part, values in (changes or {}).items():
        parts[part] = {**parts.get(part, {}), **values}
    return Step(number, parts, (float(number), float(number)), complete=number % 4 == 0)


def recording(
    name: str, changes: Mapping[int, Mapping[str, Mapping[str, str]]] | None = None, **more: object
) -> Recording:
    steps = {number: step(number, (changes or {}).get(number)) for number in range(12)}
    return replace(Recording(Path(name) / "rank0.jsonl", HEADER, steps), **more)  # type: ignore[arg-type]


def test_equal_recordings_agree() -> None:
    verdict = compare(recording("a"), recording("b"))
    assert verdict.equal
    assert verdict.steps == tuple(range(12))
    assert all(all(parts.values()) for parts in verdict.seen.values())
    assert verdict.notes == ()


@pytest.mark.parametrize(
    ("changes", "part", "since"),
    [
        ({"batch": {"0": "x"}}, "batch", 10),
        ({"lr": {"0": "0.2"}}, "lr", 10),
        ({"options": {"momentum.0": "0.9"}}, "options", 10),
        # a.weight was last read in step 8, c and d before that: any of them may differ since
        ({"loss": {"0": "x"}}, "loss", 9),
        ({"gradient": {"c.weight": "x"}}, "gradient", 9),
        ({"parameter": {"c.weight": "x"}}, "parameter", 9),
        ({"state": {"c.weight: exp_avg": "x"}}, "state", 9),
        ({"buffer": {"norm.mean": "x"}}, "buffer", 9),
    ],
)
def test_one_part_that_differs_is_named(changes: Mapping[str, Mapping[str, str]], part: str, since: int) -> None:
    verdict = compare(recording("a"), recording("b", {10: changes}))
    assert (verdict.step, [one.part for one in verdict.differing], verdict.since) == (10, [part], since)


@pytest.mark.parametrize("kept", [set(), {"loss"}, {"loss", "gradient"}, {"loss", "gradient", "parameter"}])
def test_parts_are_in_the_order_of_a_step(kept: set[str]) -> None:
    every = {
        "state": {"c.weight: exp_avg": "x"},
        "parameter": {"c.weight": "x"},
        "gradient": {"c.weight": "x"},
        "loss": {"0": "x"},
        "batch": {"0": "x"},
        "generator": {"torch": "x"},
    }
    changes = {part: values for part, values in every.items() if part not in kept}
    verdict = compare(recording("a"), recording("b", {10: changes}))
    assert [one.part for one in verdict.differing] == [part for part in reversed(every) if part not in kept]


def test_the_loss_of_a_micro_batch_precedes_the_next_batch() -> None:
    changes = {"batch": {"1": "x"}, "loss": {"0": "x", "1": "x"}, "lr": {"0": "x"}}
    verdict = compare(recording("a"), recording("b", {3: changes}))
    assert [one.part for one in verdict.differing] == ["loss", "batch", "lr"]


def test_a_batch_that_one_run_lacks_has_no_value() -> None:
    longer = {"batch": {"2": "third"}, "loss": {"2": "third"}}
    lead, then = compare(recording("a"), recording("b", {3: longer})).differing
    assert (lead.part, lead.names, lead.first, lead.second) == ("batch", ("2",), "", "third")
    assert (then.part, then.first, then.second) == ("loss", "", "third")


def test_a_loss_that_is_not_finite_is_no_absent_one() -> None:
    changed = recording("b", {3: {"loss": {"0": "x"}}})
    steps = {**changed.steps, 3: replace(changed.steps[3], losses=(None, 3.0))}
    (lead,) = compare(recording("a"), replace(changed, steps=steps)).differing
    assert (lead.first, lead.second) == ("3.0", "not finite")


def test_a_difference_is_as_old_as_what_was_not_read_since() -> None:
    """d.weight is read in steps 4 k + 3: in step 11 it may differ since step 9, for b and c were read in 9 and 10."""
    verdict = compare(recording("a"), recording("b", {11: {"parameter": {"d.weight": "x"}}}))
    assert verdict.since == 9
    assert verdict.differing[0].equal_at == 8
    with_later = {4: {"parameter": {"d.weight": "x"}}}
    assert compare(recording("a"), recording("b", with_later)).since == 1


def test_parts_that_a_run_did_not_read_are_not_compared() -> None:
    short = recording("b")
    steps = {number: replace(one, parts={"loss": one.parts["loss"]}) for number, one in short.steps.items()}
    verdict = compare(recording("a"), replace(short, steps=steps))
    assert (verdict.step, verdict.equal) == (None, False)
    assert "Only a recorded the part gradient of a step." in verdict.gaps
    assert {part for parts in verdict.seen.values() for part in parts} == {"loss"}


def test_state_that_one_run_lacks_differs() -> None:
    lost = recording("b")
    steps = {number: replace(one, parts={**one.parts, "state": {}}) for number, one in lost.steps.items()}
    verdict = compare(recording("a"), replace(lost, steps=steps))
    assert [one.part for one in verdict.differing] == ["state"]
    assert (verdict.differing[0].first, verdict.differing[0].second) == ("state 0", "")


def test_a_generator_that_was_never_seeded_is_no_difference_of_its_own() -> None:
    changed = {number: {"generator": {"numpy": f"x{number}"}} for number in range(12)}
    verdict = compare(recording("a"), recording("b", {**changed, 9: {**changed[9], "loss": {"0": "x"}}}))
    assert [one.part for one in verdict.differing] == ["loss"]
    verdict = compare(recording("a"), recording("b", {**changed, 9: {**changed[9], "batch": {"0": "x"}}}))
    assert [one.part for one in verdict.differing] == ["batch", "generator"]
    assert verdict.notes == (
        "The generator of numpy differs from the first step on (not seeded alike), and is drawn from.",
    )
    verdict = compare(recording("a"), recording("b", {**changed, 9: {**changed[9], "batch": {"1": "x"}}}))
    assert [one.part for one in verdict.differing] == ["batch"], "it is read before the first micro-batch"


def test_an_unseeded_generator_that_is_not_drawn_from_made_no_batch_another_one() -> None:
    idle = {number: {"generator": {"python": "x"}} for number in range(12)}
    verdict = compare(recording("a"), recording("b", {**idle, 9: {**idle[9], "batch": {"0": "x"}}}))
    assert ([one.part for one in verdict.differing], verdict.notes) == (["batch"], ())
    verdict = compare(recording("a"), recording("b", {**idle, 0: {**idle[0], "batch": {"0": "x"}}}))
    assert [one.part for one in verdict.differing] == ["batch", "generator"], "the data may have been shuffled before"


def test_steps_in_which_the_model_was_not_called_have_no_generators() -> None:
    first, second = recording("a"), recording("b", {number: {"generator": {"numpy": "x"}} for number in range(12)})
    for one in (first, second):
        for number in range(1, 12, 2):
            del one.steps[number].parts["generator"]  # type: ignore[attr-defined]
    assert compare(first, second).notes == ()


def test_a_generator_that_begins_to_differ_is_one() -> None:
    changes = {5: {"generator": {"numpy": "x"}}, 8: {"loss": {"0": "x"}}}
    verdict = compare(recording("a"), recording("b", changes))
    assert verdict.step == 5
    assert [(one.part, one.names) for one in verdict.differing] == [("generator", ("numpy",))]


def test_the_initial_state_is_compared() -> None:
    before = Step(-1, {"parameter": dict.fromkeys(NAMES, "p")}, complete=True)
    other = Step(-1, {"parameter": {**dict.fromkeys(NAMES, "p"), "b.weight": "q"}}, complete=True)
    verdict = compare(recording("a", before=before), recording("b", before=other))
    assert verdict.initial
    assert (verdict.step, verdict.differing[0].names) == (-1, ("b.weight",))


def test_another_order_of_parameters_is_the_first_difference() -> None:
    order = [[list(NAMES)]], [[list(reversed(NAMES))]]
    changes = {2: {"parameter": {"c.weight": "x"}}}
    first, second = recording("a", optimizers=order[0]), recording("b", changes, optimizers=order[1])
    verdict = compare(first, second)
    assert (verdict.step, [one.part for one in verdict.differing]) == (0, ["order"])
    assert (verdict.differing[0].first, verdict.differing[0].second) == ("a.weight", "d.weight")


def test_shorter_runs_are_compared_as_far_as_both_go() -> None:
    short = recording("b")
    short = replace(short, steps={number: one for number, one in short.steps.items() if number < 7})
    verdict = compare(recording("a"), replace(short, ended="cut"))
    assert verdict.step is None
    assert not verdict.equal
    assert "b has no end: its run was killed after step 6, or goes on, or its disk was full." in verdict.gaps
    assert "a has steps 0 to 11, b steps 0 to 6; compared: steps 0 to 6." in verdict.gaps
    verdict = compare(recording("a"), short)
    assert verdict.lengths_differ
    assert not verdict.equal


def test_a_model_that_is_not_called_is_told() -> None:
    runs = recording("a"), recording("b")
    for run in runs:
        for step in run.steps.values():
            step.parts.update({"batch": {}, "generator": {}})  # type: ignore[attr-defined]
    (gap,) = compare(*runs).gaps
    assert gap.startswith("The watched model was not called: batches and generators are not compared")


def test_models_are_compared_in_what_they_share() -> None:
    header = replace(HEADER, parameter=("a.weight", "b.weight", "other"))
    changes = {4: {"parameter": {"c.weight": "x"}, "gradient": {"d.weight": "x"}}}
    verdict = compare(recording("a"), recording("b", changes, header=header))
    assert (verdict.step, verdict.equal) == (None, False)
    assert "Only a has the parameter c.weight and 1 more." in verdict.gaps
    assert "Only b has the parameter other." in verdict.gaps


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"header": replace(HEADER, device="cuda")}, "other|different functions"),
        ({"header": replace(HEADER, parameter=("x",), buffer=())}, "no parameter in common"),
        ({"steps": {}}, "has no step: its run ended before its first one.* A step is one of an optimizer of torch"),
        ({"steps": {}, "ended": "ValueError: x"}, "its run ended with ValueError: x before its first one"),
        ({"steps": {}, "ended": "cut"}, "its run was killed, or goes on, before its first one"),
        ({"steps": {number: step(number) for number in range(20, 22)}}, "steps 20 to 21"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_line(change: Mapping[str, object], words: str) -> None:
    with pytest.raises(HashbenchError, match=words) as raised:
        compare(recording("a"), recording("b", **change))  # type: ignore[arg-type]
    assert "\n" not in str(raised.value)


def test_steps_are_shifted() -> None:
    resumed = recording("b")
    steps = {number: replace(step(number + 5), number=number) for number in range(4)}
    verdict = compare(recording("a"), replace(resumed, steps=steps), shift=5)
    assert verdict.steps == (5, 6, 7, 8)
    assert verdict.step is None


# ---------------------------------------------------------------------------------- what was not compared, and the end


@pytest.mark.parametrize(
    ("change", "gap"),
    [
        ({"ended": "cut"}, "b has no end: its run was killed after step 11, or goes on, or its disk was full."),
        ({"ended": "ValueError: mine"}, "b ended after step 11 with ValueError: mine."),
        ({"missed": ("the state at the end",)}, "b did not record the state at the end."),
    ],
)
def test_what_was_not_compared_is_no_equal_run(change: Mapping[str, object], gap: str) -> None:
    """Also where both runs have it: two that were killed, or ended by the same exception, agree until then alone."""
    for first, gaps in ((recording("a"), (gap,)), (recording("a", **change), ("a" + gap[1:], gap))):
        verdict = compare(first, recording("b", **change))
        assert (verdict.step, verdict.equal, verdict.gaps) == (None, False, gaps)


def final(**values: str) -> Step:
    parts = {"parameter": {name: values.get(name[0], "p") for name in NAMES}, "buffer": {"norm.mean": "m"}}
    return Step(11, parts, complete=True)


def test_what_differs_at_the_end_alone_is_found() -> None:
    """a.weight and b.weight were last read in steps 8 and 9: with b, it may be as old as what was read before."""
    verdict = compare(recording("a", final=final()), recording("b", final=final(b="x")))
    assert verdict.at_end
    assert (verdict.step, verdict.since, verdict.differing[0].names) == (12, 9, ("b.weight",))
    assert compare(recording("a", final=final()), recording("b", final=final())).equal
    assert compare(recording("a", final=final()), recording("b")).equal, "there was nothing to compare with"


def test_what_was_changed_after_the_last_step_is_told_so() -> None:
    runs = [recording(name, final=final(**more)) for name, more in (("a", {}), ("b", {"b": "x"}))]
    whole = {11: {part: dict.fromkeys(NAMES, "p") for part in ("parameter", "gradient")}}
    whole[11]["state"] = {f"{name}: exp_avg": "s" for name in NAMES}
    runs = [replace(recording(one.path.parent.name, whole), final=one.final) for one in runs]
    verdict = compare(*runs)
    assert (verdict.step, verdict.since) == (12, 12)


# -------------------------------------------------------------------------- what is changed between steps, generators


def with_begin(
    name: str, begun: Mapping[int, str], changes: Mapping[int, Mapping[str, Mapping[str, str]]] | None = None
) -> Recording:
    """A recording of which each step has the state that it began with."""
    made = recording(name, changes)
    steps = {
        number: replace(one, begin={"parameter": {"b.weight": begun.get(number, f"p{number}")}})
        for number, one in made.steps.items()
    }
    return replace(made, steps=steps)


def test_what_is_changed_between_steps_is_blamed_on_no_step() -> None:
    later = {10: {"loss": {"0": "x"}, "parameter": {"c.weight": "x"}}}
    verdict = compare(with_begin("a", {}), with_begin("b", {10: "other"}, later))
    assert (verdict.step, verdict.since) == (10, 10)
    assert [(one.part, one.begun) for one in verdict.differing] == [
        ("parameter", True),
        ("loss", False),
        ("parameter", False),
    ]
    assert verdict.seen[9][BEGIN]
    assert not verdict.seen[10][BEGIN]
    twin = compare(with_begin("a", {}), with_begin("b", {}, later))
    assert [one.part for one in twin.differing] == ["loss", "parameter"]


def test_a_state_that_is_put_back_before_the_step_ends_differs_all_the_same() -> None:
    verdict = compare(with_begin("a", {}), with_begin("b", {4: "-0"}))
    assert (verdict.step, [one.begun for one in verdict.differing]) == (4, [True])


def test_a_generator_that_reaches_nothing_makes_no_other_run() -> None:
    changes = {number: {"generator": {"torch": "x"}} for number in range(7, 12)}
    verdict = compare(recording("a"), recording("b", changes))
    assert (verdict.step, verdict.equal, verdict.idle_at) == (None, True, 7)
    assert verdict.idle is not None
    assert verdict.idle.names == ("torch",)
    reaches = compare(
        recording("a"), recording("b", {**changes, 11: {**changes[11], "state": {"d.weight: exp_avg": "x"}}})
    )
    assert (reaches.step, reaches.differing[0].part, reaches.idle) == (7, "generator", None)
    unknown = compare(recording("a"), recording("b", changes, ended="cut"))
    assert not unknown.equal, "it may reach what comes later"


def test_every_single_change_is_found_where_it_is_read() -> None:
    """All places of one change: the step is never before it, and later only where it is not read."""
    for number, part in itertools.product(range(12), ("batch", "loss", "gradient", "parameter", "state")):
        name = next(iter(step(number).parts[part]))
        verdict = compare(recording("a"), recording("b", {number: {part: {name: "x"}}}))
        assert (verdict.step, verdict.differing[0].part) == (number, part)
        assert verdict.since is not None
        assert verdict.since <= number


USUAL = {"num_threads": "1", "autocast_cpu": "False"}

SETTINGS: dict[str, tuple[int, dict[str, str], dict[str, dict[str, str]], list[tuple[str, str, str, int]]]] = {
    "a setting from the first step on": (0, {"num_threads": "2"}, {}, [("num_threads", "1", "2", 0)]),
    "from a later one on": (2, {"autocast_cpu": "True"}, {}, [("autocast_cpu", "False", "True", 2)]),
    "from one after the difference on": (7, {"autocast_cpu": "True"}, {}, []),
    "a variable": (0, {}, {"environment": {"MKL_CBWR": "AVX2"}}, [("MKL_CBWR", "", "AVX2", 0)]),
    "the processor": (0, {}, {"machine": {"cpu_capability": "AVX2"}}, [("cpu_capability", "AVX512", "AVX2", 0)]),
    "none": (0, {}, {}, []),
}


@pytest.mark.parametrize(("at", "changed", "header", "found"), SETTINGS.values(), ids=SETTINGS)
def test_settings_that_differ_up_to_the_first_difference_are_found(
    at: int, changed: dict[str, str], header: dict[str, dict[str, str]], found: list[tuple[str, str, str, int]]
) -> None:
    described = replace(HEADER, settings=USUAL, machine={"cpu_capability": "AVX512"})
    first, second = recording("a"), recording("b", {6: {"loss": {"0": "other"}}})
    changes = ({}, changed)
    first, second = (
        replace(
            one,
            header=replace(described, **(header if number else {})),
            steps={
                step: replace(content, settings=USUAL | (changes[number] if step >= at else {}))
                for step, content in one.steps.items()
            },
        )
        for number, one in enumerate((first, second))
    )
    verdict = compare(first, second)
    assert verdict.step == 6
    assert [(one.name, one.first, one.second, one.at) for one in verdict.settings] == found
