"""Which stage differs: decided on values written by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hashbench.core.records import Leaf, Ref, TensorDigest, Trace
from hashbench.tools.pipeline.comparing import compare
from hashbench.tools.pipeline.observed import (
    Listing,
    Outputs,
    Surroundings,
    TransformStep,
    Weights,
)
from tests.tools.pipeline.pipeline_helpers import (
    FILES,
    batches,
    check,
    compared,
    in_another_order,
    loader,
    said,
    sample,
    seen,
    statuses,
    trace,
    whole,
)

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


def test_samples_are_matched_by_file_where_their_order_differs() -> None:
    verdict = compared(seen(batches=in_another_order()))
    assert statuses(verdict)["before transform"] == statuses(verdict)["after transform"] == "equal"


def test_the_same_indices_that_lead_to_other_files_are_another_order_of_equal_samples() -> None:
    listed = loader(listing=Listing("dataset.files", "/images", FILES[::-1]))
    swapped = batches(*(sample(place, index=str(3 - place)) for place in (3, 2, 1, 0)))
    verdict = compared(seen(loader=listed, batches=swapped))
    assert verdict.first == "order"
    assert statuses(verdict)["before transform"] == statuses(verdict)["after transform"] == "equal"


def test_random_transforms_after_another_order_are_a_consequence() -> None:
    drawn = [
        sample(place, after=f"x{place}", steps=(TransformStep("dataset.transform Flip", "y", ("torch",)),))
        for place in (2, 0, 3, 1)
    ]
    verdict = compared(seen(batches=batches(*drawn)))
    assert statuses(verdict)["after transform"] == "follows"
