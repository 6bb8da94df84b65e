"""Which stage differs, and why: decided on values written by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hashbench.core.errors import HashbenchError
from hashbench.core.finding import as_text
from hashbench.core.records import Leaf, Ref, TensorDigest, Trace
from hashbench.tools.pipeline.comparing import PipelineVerdict, compare, finding_of
from hashbench.tools.pipeline.loading import NOT_LOADER
from hashbench.tools.pipeline.observed import (
    IMPORT,
    MOMENTS,
    BatchRecord,
    BatchRecords,
    Listing,
    LoaderWorker,
    Observed,
    Outputs,
    RandomState,
    RepeatResult,
    Surroundings,
    TransformStep,
    Weights,
)
from hashbench.tools.pipeline.stages import STAGES
from tests.tools.pipeline.pipeline_helpers import FILES, GENERATORS, batches, check, loader, sample, seen, trace

OTHER = {**GENERATORS, "torch": "t1"}


def compared(second: Observed, first: Observed | None = None) -> PipelineVerdict:
    return compare(check(first), check(second))


def said(verdict: PipelineVerdict) -> str:
    return as_text(finding_of(verdict, names=("a", "b"), folders=(Path("a"), Path("b"))), width=1000)


def statuses(verdict: PipelineVerdict) -> dict[str, str]:
    return {stage.name: stage.status for stage in verdict.stages}


def test_equal_checks_agree_in_every_stage() -> None:
    verdict = compared(seen())
    assert verdict.repeats
    assert statuses(verdict) == dict.fromkeys(STAGES, "equal")


def in_another_order() -> BatchRecords:
    return batches(*(sample(place) for place in (2, 0, 3, 1)))


STAGE_CASES: dict[str, tuple[dict[str, Any], str]] = {
    "a file is missing": ({"loader": loader(listing=Listing("dataset.files", "/images", FILES[:3]))}, "file list"),
    "the files were seen in one check alone": (
        {"loader": loader(listing=None), "batches": batches(*map(sample, range(4)), exhausted=False)},
        "file list",
    ),
    "the same files in another order": (
        {"loader": loader(listing=Listing("dataset.files", "/images", FILES[::-1]))},
        "order",
    ),
    "the sampler asks for others": ({"batches": in_another_order()}, "order"),
    "a file holds other bytes": (
        {"batches": batches(sample(0, file_digests=("others",)), *map(sample, (1, 2, 3)))},
        "before transform",
    ),
    "a sample is read otherwise": (
        {"batches": batches(sample(0, before="others"), *map(sample, (1, 2, 3)))},
        "before transform",
    ),
    "what a transform got was seen in one check alone": (
        {"batches": batches(sample(0, before=None), *map(sample, (1, 2, 3)))},
        "before transform",
    ),
    "a sample is transformed otherwise": (
        {"batches": batches(sample(0, after="others"), *map(sample, (1, 2, 3)))},
        "after transform",
    ),
    "a batch less": ({"batches": batches(sample(0), sample(1))}, "order"),
    "another weight": ({"weights": Weights({"weight": "float32[2]:w1"}, {})}, "initial weights"),
    "another buffer": ({"weights": Weights({"weight": "float32[2]:w0"}, {"mean": "float32[]:m"})}, "initial weights"),
    "no model in one check": ({"weights": Weights(None, None, {})}, "initial weights"),
    "another output": ({"outputs": Outputs({"output": "float32[2]:o1"}, {}, ("0.25",))}, "first output"),
    "another layer": ({"layers": ()}, "first output"),
    "no layers in one check": ({"layers": None}, "first output"),
    "another kernel's output": ({"trace": trace("o1")}, "kernel"),
    "no trace in one check": ({"trace": None}, "kernel"),
    "an empty trace in one check": ({"trace": Trace(())}, "kernel"),
    "only the losses": ({"outputs": Outputs({"output": "float32[2]:o0"}, {}, ("0.5",))}, "kernel"),
}


@pytest.mark.parametrize("case", STAGE_CASES)
@pytest.mark.parametrize("swapped", [False, True], ids=["as it is", "the other way round"])
def test_the_first_stage_that_differs(case: str, swapped: bool) -> None:
    changes, expected = STAGE_CASES[case]
    pair = (seen(**changes), seen()) if swapped else (seen(), seen(**changes))
    verdict = compare(*map(check, pair))
    assert verdict.first == expected
    assert verdict.findings[0].reasons


def test_what_one_check_alone_saw_of_the_model_is_said_of_that_check() -> None:
    other = seen(outputs=Outputs({"output": "float32[2]:o1"}, {}, ("0.25",)))
    verdict = compared(other, seen(layers=None))
    assert {stage.name: stage.detail for stage in verdict.stages}["first output"] == "only the second check saw it"


def test_traces_of_different_tracers_are_not_compared_and_the_rest_is() -> None:
    verdict = compared(seen(trace=replace(trace("o1"), tracer="native"), weights=Weights({"weight": "w1"}, {})))
    kernel = next(stage for stage in verdict.stages if stage.name == "kernel")
    assert (kernel.status, verdict.first) == ("unseen", "initial weights")
    assert kernel.detail.startswith("not compared: the traces are of python and native, and the Python dispatch mode")


def test_an_environment_that_differs_is_said_first_and_stops_nothing() -> None:
    around = Surroundings({"python": "3.12"}, {"num_threads": "2"}, "5", "user", ("training",))

    alone = compared(seen(surroundings=around))
    with_weights = compared(seen(surroundings=around, weights=Weights({"weight": "w1"}, {})))
    assert alone.repeats
    assert alone.stages[0].detail == "python 3.11 / 3.12; settings.num_threads 1 / 2"
    assert with_weights.first == "initial weights"
    assert statuses(with_weights)["environment"] == "differs"


def test_what_neither_saw_is_unseen_with_its_reason() -> None:
    hidden = [sample(place, index=None, files=None, file_digests=None, before=None, steps=None) for place in range(4)]
    one = seen(loader=loader(listing=None), batches=batches(*hidden, absent={"before": "nobody looked"}))
    verdict = compared(one, one)
    assert verdict.repeats
    assert statuses(verdict)["file list"] == statuses(verdict)["before transform"] == "unseen"
    assert "as far as was seen (not: file list, before transform)" in said(verdict)


def whole(*digests: str | None, **changes: Any) -> Observed:
    """What a loader that is no ``DataLoader`` shows: whole batches."""
    made = BatchRecords(tuple(BatchRecord(number, digest) for number, digest in enumerate(digests)), 2, False)
    return seen(loader=loader(listing=None, absent={"loader": "no DataLoader"}), batches=made, **changes)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (("a", "b"), ("a", "b"), {"order": "equal", "after transform": "equal"}),
        (("a", "b"), ("b", "a"), {"order": "differs", "after transform": "unseen"}),
        (("a", "b"), ("c", "a"), {"order": "differs", "after transform": "unseen"}),
        (("a", "b"), ("a", "c"), {"order": "unseen", "after transform": "differs"}),
        (("a", "b"), ("c", "d"), {"order": "unseen", "after transform": "differs"}),
        (("a", "a"), ("c", "a"), {"order": "unseen", "after transform": "differs"}),
        (("a", "b"), ("a",), {"order": "unseen", "after transform": "differs"}),
        (("a", None), ("a", None), {"order": "unseen", "after transform": "unseen"}),
        (("a", None), ("b", None), {"order": "unseen", "after transform": "differs"}),
        (("a", None), ("a", "b"), {"order": "unseen", "after transform": "differs"}),
    ],
    ids=str,
)
def test_digests_of_whole_batches_show_that_they_are_equal_and_that_they_differ(
    first: tuple[str | None, ...], second: tuple[str | None, ...], expected: dict[str, str]
) -> None:
    verdict = compared(whole(*second), whole(*first))
    assert {name: statuses(verdict)[name] for name in expected} == expected
    assert verdict.repeats == ("differs" not in expected.values())
    if verdict.repeats and "unseen" in expected.values():
        assert "(not: file list, order, before transform, after transform)" in said(verdict)


def test_batches_that_cannot_be_compared_are_not_said_to_be_equal() -> None:
    other = {"outputs": Outputs({"output": "float32[2]:o1"}, {}, ("0.25",))}
    unseen, equal = compared(whole(None, **other), whole(None)), compared(whole("a", **other), whole("a"))
    assert unseen.first == equal.first == "first output"
    assert unseen.findings[0].reasons[0].because.startswith("weights are equal (after transform was not seen)")
    assert equal.findings[0].reasons[0].because.startswith("weights and first batches are equal")


def input_trace(content: str) -> Trace:
    given = TensorDigest("float32", (2,), (1,), content)
    plain = trace(f"of {content}")
    return replace(
        plain,
        records=(replace(plain.records[0], inputs=(Ref("self", "input/step0.0"),)),),
        leaves=(Leaf("input/step0.0", "input", given, 0),),
    )


def test_what_the_trace_saw_of_the_input_stands_in_for_batches_that_cannot_be_hashed() -> None:
    verdict = compared(whole(None, trace=input_trace("x1")), whole(None, trace=input_trace("x0")))
    assert (verdict.first, statuses(verdict)["kernel"]) == ("after transform", "follows")
    assert "input/step0.0 differs" in next(s.detail for s in verdict.stages if s.name == "after transform")
    assert compared(whole(None, trace=input_trace("x0")), whole(None, trace=input_trace("x0"))).repeats


def test_a_sample_that_neither_check_saw_is_not_counted_among_the_equal_ones() -> None:
    one = seen(batches=batches(sample(0, before=None, file_digests=None), *map(sample, (1, 2, 3))))
    stage = next(stage for stage in compared(one, one).stages if stage.name == "before transform")
    assert stage.status == "unseen"
    assert "1 of 4 samples; the others are equal" in stage.detail


def test_what_one_check_alone_saw_is_not_said_to_differ_in_the_other() -> None:
    blind = seen(loader=loader(listing=None), batches=whole("a", "b").batches)
    findings = {finding.stage: finding.reasons[0].cause for finding in compared(blind).findings}
    assert findings == {"file list": "recorded_once", "order": "recorded_once"}


def test_a_generator_is_blamed_where_it_moved_and_not_where_it_stood_still() -> None:
    def states(*torchs: str) -> RandomState:
        return RandomState({m: {**GENERATORS, "torch": t} for m, t in zip(MOMENTS, torchs, strict=True)}, ())

    def because(first: RandomState, second: RandomState) -> str:
        changed = seen(random_state=second, weights=Weights({"weight": "float32[2]:w1"}, {}))
        return compared(changed, seen(random_state=first)).findings[0].reasons[0].because

    at_import = because(states("a", "a1", "s", "s", "s", "s", "s"), states("b", "b1", "s", "s", "s", "s", "s"))
    in_make_model = because(states("a", "a", "a", "a", "a1", "a1", "a1"), states("b", "b", "b", "b", "b1", "b1", "b1"))
    seeded_there = because(states("a", "a", "a", "a", "s", "s", "s"), states("b", "b", "b", "b", "s", "s", "s"))
    nowhere = because(states(*"ssssssx"), states(*"ssssssy"))
    assert at_import == f"{IMPORT} drew from torch, which was in a different state"
    assert in_make_model == "make_model drew from torch, which was in a different state"
    assert seeded_there == "make_model drew from torch, which it found in a different state and then seeded"
    assert nowhere.startswith("no generator that was seen")


def test_a_batch_of_a_loader_of_ones_own_is_traced_to_the_generator_that_it_was_drawn_from() -> None:
    made = [
        replace(
            whole(),
            batches=BatchRecords(
                (BatchRecord(0, "a"), BatchRecord(1, digest, None, None, states, ("torch",))), 2, False
            ),
        )
        for digest, states in (("b", GENERATORS), ("c", OTHER))
    ]
    reason = compared(made[1], made[0]).findings[0].reasons[0]
    expected = "the loader drew from torch, which was in a different state"
    assert (reason.cause, reason.because) == ("unseeded_loader", expected)


def seeded(*names: str, drew: str = "torch") -> tuple[Observed, Observed]:
    """Two checks of a pipeline that seeds these generators, and whose model then draws from ``drew``."""
    made = []
    for side in "ab":
        states = [{name: f"{name} {side}" for name in GENERATORS}] * 2
        states += [states[0] | dict.fromkeys(names, "seeded")] * 2
        states += [states[2] | {drew: f"{states[2][drew]} drawn"}] * (len(MOMENTS) - 4)
        moments = dict(zip(MOMENTS, states, strict=True))
        made.append(seen(random_state=RandomState(moments, ()), weights=Weights({"weight": f"float32[2]:{side}"}, {})))
    return made[0], made[1]


@pytest.mark.parametrize(
    ("names", "drew", "expected"),
    [
        (("python", "numpy"), "torch", "set_seed seeds Python and NumPy, and not torch"),
        (("python", "torch"), "numpy", "set_seed seeds Python and torch, and not NumPy"),
        ((), "torch", "torch is not seeded"),
        (("torch",), "torch", ""),
    ],
)
def test_missing_seed_is_named_before_symptoms(names: tuple[str, ...], drew: str, expected: str) -> None:
    first, second = seeded(*names, drew=drew)
    text = said(compared(second, first))
    assert ("Add to set_seed:" in text) == bool(expected)
    assert expected in text
    assert ("Add to set_seed:\n    torch.manual_seed(seed)" in text) == (drew == "torch" and bool(expected))


def test_seeding_is_not_blamed_for_another_seed() -> None:
    first, second = seeded("python")
    assert compared(replace(second, loader=loader(seed=2)), first).seeding is None


def test_nothing_that_can_be_compared_is_no_agreement() -> None:
    blind = seen(
        loader=loader(listing=None),
        batches=BatchRecords((replace(batches(sample(0)).batches[0], digest=None, samples=None),), 2, True),
        weights=Weights(None, None),
        outputs=Outputs(None, None, None),
        layers=None,
        trace=None,
    )
    with pytest.raises(HashbenchError, match="not the same as equal"):
        compared(blind, blind)


def test_checks_of_other_numbers_of_steps_are_refused() -> None:
    with pytest.raises(HashbenchError, match="2 and 5 steps"):
        compared(seen(batches=batches(*map(sample, range(4)), asked_for=5)))


def test_samples_are_matched_by_file_where_their_order_differs() -> None:
    verdict = compared(seen(batches=in_another_order()))
    assert statuses(verdict)["before transform"] == statuses(verdict)["after transform"] == "equal"


def test_the_same_indices_that_lead_to_other_files_are_another_order_of_equal_samples() -> None:
    listed = loader(listing=Listing("dataset.files", "/images", FILES[::-1]))
    swapped = batches(*(sample(place, index=str(3 - place)) for place in (3, 2, 1, 0)))
    verdict = compared(seen(loader=listed, batches=swapped))
    assert verdict.first == "order"
    assert statuses(verdict)["before transform"] == statuses(verdict)["after transform"] == "equal"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seed": 2}, "seed 1 / 2"),
        ({"shuffle": True}, "shuffle False / True"),
        ({"generators": {"sampler.generator": "g0"}}, "generators none / ['sampler.generator']"),
    ],
)
def test_loaders_that_were_asked_for_other_things_are_told_from_unseeded_ones(
    changes: dict[str, Any], said: str
) -> None:
    order = batches(*map(sample, (2, 0, 3, 1)))
    verdict = compare(check(seen(loader=loader(**changes), batches=order)), check())
    mirrored = compare(check(), check(seen(loader=loader(**changes), batches=order)))
    assert [reason.cause for reason in verdict.findings[0].reasons] == ["different_arguments"]
    assert said in mirrored.findings[0].reasons[0].because
    same = compare(check(), check(seen(batches=order)))
    assert [reason.cause for reason in same.findings[0].reasons] == ["outside_value"]


def test_random_transforms_after_another_order_are_a_consequence() -> None:
    drawn = [
        sample(place, after=f"x{place}", steps=(TransformStep("dataset.transform Flip", "y", ("torch",)),))
        for place in (2, 0, 3, 1)
    ]
    verdict = compared(seen(batches=batches(*drawn)))
    assert statuses(verdict)["after transform"] == "follows"


def test_weights_that_differ_by_themselves_are_told_beside_the_first_stage() -> None:
    verdict = compared(seen(batches=in_another_order(), weights=Weights({"weight": "w1"}, {})))
    assert [finding.stage for finding in verdict.findings] == ["order", "initial weights"]


def test_names_from_a_file_do_not_steer_the_terminal() -> None:
    verdict = compared(seen(weights=Weights({"\x1b[2Jweight": "w1"}, {})))
    assert "\x1b" not in said(verdict)


# ----------------------------------------------------------------------------------- from a check to the evidence


def flipped(place: int, **changes: Any) -> Any:
    step = TransformStep("dataset.transform Flip", f"flipped {place}", ("torch",))
    return sample(place, after=f"flipped {place}", steps=(step,), drew=("torch",), **changes)


def test_a_worker_that_its_init_function_moved_is_told_from_one_that_began_elsewhere() -> None:
    rest = [sample(place) for place in (1, 2, 3)]
    step = TransformStep("dataset.transform Flip", "not flipped", ("torch",))
    one = batches(flipped(0), *rest)
    other = batches(replace(flipped(0), after="not flipped", steps=(step,), generators=OTHER), *rest)
    begun = RandomState(dict.fromkeys(MOMENTS, GENERATORS), (LoaderWorker(0, OTHER, OTHER),))
    moved = RandomState(dict.fromkeys(MOMENTS, GENERATORS), (LoaderWorker(0, GENERATORS, OTHER),))

    by_base = compared(seen(batches=other, random_state=begun), seen(batches=one))
    by_init = compared(seen(batches=other, random_state=moved), seen(batches=one))
    assert by_base.findings[0].reasons[0].cause == "random_transform"
    assert by_init.findings[0].reasons[0].cause == "worker_seeds"


def test_a_generator_that_parts_inside_a_batch_is_named() -> None:
    other_batches = batches(sample(0, after="noise"), *(sample(place, generators=OTHER) for place in (1, 2, 3)))
    (finding,) = compared(seen(), seen(batches=other_batches)).findings
    assert finding.stage == "after transform"
    assert finding.reasons[0].cause == "reseeded"
    assert "a.png" in finding.reasons[0].because


def test_a_generator_that_parts_inside_a_batch_of_a_loader_of_ones_own_is_named() -> None:
    def whole(content: str, behind: dict[str, str]) -> BatchRecords:
        drew = ("torch",)
        made = (
            BatchRecord(0, content, generators=GENERATORS, drew=drew),
            BatchRecord(1, content, generators=behind, drew=drew),
        )
        return BatchRecords(made, asked_for=2, exhausted=True)

    facts = loader(absent={"loader": NOT_LOADER}, listing=None)
    one, other = (seen(loader=facts, batches=whole(*state)) for state in (("x", GENERATORS), ("y", OTHER)))
    (finding,) = compared(one, other).findings
    assert [reason.cause for reason in finding.reasons] == ["reseeded"]
    assert "batch 0" in finding.reasons[0].because


@pytest.mark.parametrize(
    ("changes", "also"),
    [
        ({}, []),
        ({"before": "another image"}, ["before transform", "after transform"]),
        ({"steps": (TransformStep("dataset.transform Flip", "a clock", ()),)}, ["after transform"]),
    ],
    ids=["a label made of the index", "another image", "a transform that reads a clock"],
)
def test_a_label_that_follows_the_order_is_no_second_finding(changes: dict[str, Any], also: list[str]) -> None:
    moved = [sample(1, index="0", after="label 0"), sample(0, index="1", after="label 1"), sample(2), sample(3)]
    moved = [replace(item, **changes) if number == 0 else item for number, item in enumerate(moved)]
    files = tuple(FILES[place] for place in (1, 0, 2, 3))
    other = seen(batches=batches(*moved), loader=loader(listing=Listing("dataset.files", "/images", files)))
    findings = compared(seen(), other).findings
    assert [finding.stage for finding in findings] == ["order", *also]


def test_stages_that_follow_the_hash_seed_with_the_first_one_are_no_findings_of_their_own() -> None:
    files = FILES[::-1]
    other = seen(
        loader=loader(listing=Listing("dataset.files", "/images", files)),
        batches=batches(sample(0, after="label 1"), *(sample(place) for place in (1, 2, 3))),
        weights=Weights({"weight": "float32[2]:w1"}, {}),
    )

    def found(**gone: bool) -> dict[str, str]:
        hash_order = {"order": True, "after transform": True, "initial weights": False} | gone
        verdict = compare(check(seen()), check(other), hash_order=hash_order)
        return {finding.stage: finding.reasons[0].cause for finding in verdict.findings}

    assert found() == {"order": "set_order", "initial weights": "initial_state"}
    assert found(**{"after transform": False}).keys() == {"order", "after transform", "initial weights"}


def test_the_repetition_of_a_check_excludes_or_proves_the_order_of_sets() -> None:
    other = seen(loader=loader(listing=Listing("dataset.files", "/images", FILES[::-1])))
    first, second = (
        replace(one, surroundings=replace(one.surroundings, hash_seed=seed, hash_seed_by="hashbench"))
        for one, seed in ((seen(), "5"), (other, "6"))
    )
    repeats, hashed = RepeatResult(True, "", None, 2), RepeatResult(False, "order", True, 4)

    def reasons(repetition: RepeatResult | None) -> list[str]:
        verdict = compare(check(first, repetition=repetition), check(second, repetition=repetition))
        return [reason.cause for reason in verdict.findings[0].reasons]

    same_seed = replace(second, surroundings=first.surroundings)
    assert reasons(None) == ["unsorted_listing", "set_order"]
    assert [reason.cause for reason in compared(same_seed, first).findings[0].reasons] == ["unsorted_listing"]
    assert reasons(repeats) == ["unsorted_listing"]
    assert reasons(hashed) == ["set_order"]
