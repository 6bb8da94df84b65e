"""How a night compares with what is expected of each model."""

from __future__ import annotations

import pytest

from hashbench.core.report.compare import compare
from hashbench.core.results.load import Requested, Sweep
from hashbench.extensions.report.expectations import (
    STALE_AFTER,
    ExpectationStatus,
    expectation_status,
    judge,
    unseen_nights,
)
from hashbench.extensions.report.history import History, Interval, ModelHistory, Night
from tests.core.report.rows import DIFFER, SINCE, differing, expecting, row, sweep
from tests.extensions.report.judgements import OF_MODELS

PASS, SKIP = "pass", "pass_due_to_skip"
FLAKY = {"rate": 0.3}

# What is expected (None: nothing), tonight's row (None: there is none), how it stands, whether that is worse.
TRUTH = {
    "passes as expected": (row(), row(), ExpectationStatus.MET, False),
    "differs as expected": (differing(), differing(), ExpectationStatus.MET, False),
    "fails as expected": (row(accuracy="crashed"), row(accuracy="crashed"), ExpectationStatus.MET, False),
    "is skipped as expected": (row(accuracy=SKIP), row(accuracy=SKIP), ExpectationStatus.MET, False),
    "differs and should pass": (row(), differing(), ExpectationStatus.NEW_DIFFERENCE, True),
    "differs and should fail": (row(accuracy="timeout"), differing(), ExpectationStatus.NEW_DIFFERENCE, True),
    "crashes and should pass": (row(), row(accuracy="crashed"), ExpectationStatus.BROKEN, True),
    "crashes and should differ": (differing(), row(accuracy="crashed"), ExpectationStatus.BROKEN, True),
    "crashes and should time out": (row(accuracy="timeout"), row(accuracy="crashed"), ExpectationStatus.BROKEN, True),
    "differs in another kernel": (differing(), differing(kernel="aten.dot.default"), ExpectationStatus.MOVED, True),
    "differs in another module": (differing(), differing(module="fc"), ExpectationStatus.MOVED, True),
    "differs for another cause": (differing(), differing(cause="rng"), ExpectationStatus.MOVED, True),
    "differs for a cause that was not found": (differing(), differing(cause="unknown"), ExpectationStatus.MET, False),
    "differs for a cause that is open": (
        differing(),
        differing(cause="rng", confidence="open"),
        ExpectationStatus.MET,
        False,
    ),
    "differs and was not diagnosed": (differing(), differing(cause="", confidence=""), ExpectationStatus.MET, False),
    "differed always and passes": (differing(), row(), ExpectationStatus.FIXED, False),
    "differed now and then and passes": (differing(**FLAKY), row(), ExpectationStatus.NOT_SEEN, False),
    "differed now and then and does": (differing(**FLAKY), differing(), ExpectationStatus.MET, False),
    "failed and passes": (row(accuracy="crashed"), row(), ExpectationStatus.FIXED, False),
    "is skipped and should run": (row(), row(accuracy=SKIP), ExpectationStatus.NOW_SKIPPED, True),
    "is missing": (row(), None, ExpectationStatus.MISSING, True),
    "is missing and should differ": (differing(), None, ExpectationStatus.MISSING, True),
    "differs with other threads": (differing(threads=2), differing(threads=4), ExpectationStatus.NOT_COMPARABLE, True),
    "passes with other threads": (row(threads=2), row(threads=4), ExpectationStatus.PASSES_ELSEWHERE, False),
    "differed and passes with the flag": (
        differing(deterministic="off"),
        row(deterministic="on"),
        ExpectationStatus.PASSES_ELSEWHERE,
        False,
    ),
    "is new and passes": (None, row(), ExpectationStatus.UNEXPECTED, False),
    "is new and differs": (None, differing(), ExpectationStatus.UNEXPECTED, False),
    "is of another device": (row(dev="cuda"), row(), ExpectationStatus.UNEXPECTED, False),
}


def history(*models: ModelHistory, nights: int = 2, problems: tuple[str, ...] = ()) -> History:
    made = [Night(f"night {n}", counts={"pass": 1}) for n in range(nights)]
    made[-1] = Night("tonight", problems=problems)
    return History(nights=tuple(made), models=models)


def asked(*names: str) -> Requested:
    return Requested(frozenset(("torchvision", name) for name in names), mode="training", device="cpu")


def tonight(*rows, models: tuple[str, ...] = ("resnet18", "vgg11")) -> Sweep:
    return sweep(*rows, selections=(asked(*models),))


@pytest.mark.parametrize(("expected", "new", "status", "worse"), TRUTH.values(), ids=TRUTH.keys())
def test_a_model_that(expected, new, status, worse):
    judged = judge(
        history(),
        tonight(*([new] if new else [])),
        expected=expecting(*([expected] if expected else [])),
    )
    found = {one.status for one in judged.judgements} - {ExpectationStatus.NOT_ASKED}
    assert found == {status}
    assert judged.got_worse is worse


OF_BOTH = {name: (old, new, worse) for name, (old, new, _, worse) in TRUTH.items() if old and old.dev == "cpu"}
"""``hashbench compare`` says nothing about what BASE does not know, and it pairs rows over devices."""


@pytest.mark.parametrize(("expected", "new", "worse"), OF_BOTH.values(), ids=OF_BOTH.keys())
def test_compare_agrees_for_a_model_that(expected, new, worse):
    comparison = compare(expecting(expected), tonight(*([new] if new else [])))
    assert comparison.got_worse is worse


def test_every_outcome_has_a_standing():
    assert {expectation_status(outcome, PASS) for outcome in OF_MODELS} <= set(ExpectationStatus)


@pytest.mark.parametrize("unseen", [0, STALE_AFTER - 1, STALE_AFTER, 999])
def test_no_number_of_nights_makes_what_is_worse_stale(unseen):
    for outcome in filter(lambda one: one.worse, OF_MODELS):
        assert expectation_status(outcome, DIFFER, unseen=unseen) is not ExpectationStatus.STALE


# -------------------------------------------------------------------------------------------------- stale


def course(*intervals: tuple[int, int, str, str]) -> ModelHistory:
    key = ("torchvision", "training", "float32", "cpu", "resnet18")
    return ModelHistory(key=key, intervals=tuple(Interval(*interval) for interval in intervals))


KERNEL = "aten.index_put_.default"
UNSEEN = {
    "never seen": (course((0, 39, PASS, "")), 40),
    "seen in the last night": (course((0, 5, PASS, ""), (6, 6, DIFFER, KERNEL)), 0),
    "seen three nights ago": (course((0, 5, DIFFER, KERNEL), (6, 8, PASS, "")), 3),
    "seen before nights in which it was skipped": (
        course((0, 5, DIFFER, KERNEL), (6, 9, SKIP, ""), (10, 11, PASS, "")),
        2,
    ),
    "seen before nights without a row": (course((0, 5, DIFFER, KERNEL), (30, 31, PASS, "")), 2),
    "seen in another kernel only": (course((0, 3, PASS, ""), (4, 9, DIFFER, "aten.dot.default")), 10),
    "seen where the kernel is not known": (course((0, 3, DIFFER, "")), 0),
    "crashed since": (course((0, 3, DIFFER, KERNEL), (4, 5, "crashed", "")), 2),
    "without a history": (None, 0),
}


@pytest.mark.parametrize(("model", "nights"), UNSEEN.values(), ids=UNSEEN.keys())
def test_nights_without_what_is_expected(model, nights):
    assert unseen_nights(model, differing()) == nights


@pytest.mark.parametrize(
    ("passed", "rate", "status"),
    [
        (29, 0.3, ExpectationStatus.NOT_SEEN),
        (29, 1.0, ExpectationStatus.FIXED),
        (30, 0.3, ExpectationStatus.STALE),
        (30, 1.0, ExpectationStatus.STALE),
    ],
)
def test_expectation_is_stale_after_thirty_nights(passed, rate, status):
    model = course((0, 0, DIFFER, KERNEL), (1, passed, PASS, ""))
    judged = judge(history(model, nights=passed + 1), tonight(row()), expected=expecting(differing(rate=rate)))
    (one,) = judged.judgements
    assert (one.status, one.unseen, one.worse) == (status, passed, False)
    assert (one.since, one.link, one.seen) == tuple(SINCE.values())


# ---------------------------------------------------------------------------------------- expected, or last night


def test_what_is_expected_counts_and_not_last_night():
    judged = judge(history(), tonight(differing()), expected=expecting(differing(**FLAKY)), last=sweep(row()), before=0)
    (one,) = judged.judgements
    assert (one.status, one.expected, judged.got_worse) == (ExpectationStatus.MET, True, False)


def test_last_night_counts_where_nothing_is_expected():
    judged = judge(
        history(), tonight(differing(), row("vgg11")), expected=expecting(row("vgg11")), last=sweep(row()), before=0
    )
    standings = {one.key[-1]: (one.status, one.expected) for one in judged.judgements}
    assert standings == {"resnet18": (ExpectationStatus.NEW_DIFFERENCE, False), "vgg11": (ExpectationStatus.MET, True)}
    assert [one.word for one in judge(history(), tonight(row()), last=sweep(row())).judgements] == ["as last night"]


def test_what_was_not_asked_for_is_not_missing():
    judged = judge(history(), tonight(row(), models=("resnet18",)), expected=expecting(row(), row("vgg11")))
    assert [one.status for one in judged.judgements] == [ExpectationStatus.MET, ExpectationStatus.NOT_ASKED]
    assert not judged.got_worse


def test_only_suites_that_were_asked_for_can_be_missing():
    expected = expecting(row(), row("bert", suite="huggingface"))
    parts = frozenset({("torchvision", "training")})
    new = sweep(row(), selections=(asked("resnet18"),), parts=parts)
    assert not judge(history(), new, expected=expected).got_worse
    failed = sweep(row(), selections=(asked("resnet18"),), parts=parts | {("huggingface", "training")})
    assert judge(history(), failed, expected=expected).got_worse


def test_night_with_problems_is_worse():
    judged = judge(
        history(problems=("timm in training: its sweep did not end",)), tonight(row()), expected=expecting(row())
    )
    assert judged.got_worse


def test_the_first_night_of_all_is_not_worse():
    judged = judge(history(nights=1), tonight(differing(), row("vgg11")))
    assert {one.status for one in judged.judgements} == {ExpectationStatus.UNEXPECTED}
    assert not judged.got_worse
    assert "There is no earlier night to compare with." in judged.remarks
    assert judged.alone
    assert judged.verdict == "Of 2 models, 1 differs and 1 passes"


def test_night_without_expectation_is_not_called_equal():
    expected, new = expecting(row(suite="timm")), tonight(differing(), row("vgg11", "timeout"), row("vgg11", mode="x"))
    judged = judge(history(nights=1), new, expected=expected)
    assert judged.verdict == "Of 3 rows of 2 models, 1 differs, 1 fails and 1 passes"
    assert "None of the 1 row of what is expected is of a model of this night." in judged.remarks


def test_night_of_other_models_has_no_comparison():
    judged = judge(history(), tonight(differing("b"), models=("b",)), last=sweep(row("a")), before=0)
    assert (judged.alone, judged.last, judged.verdict) == (True, "", "Of 1 model, 1 differs")
    assert "No model of night 0 is one of this night: nothing was compared with it." in judged.remarks
    assert not any("compared with the night before" in remark for remark in judged.remarks)


def test_rows_without_counterpart_are_counted():
    judged = judge(history(), tonight(row(), differing("b"), row("c")), expected=expecting(row()))
    assert judged.verdict == (
        "b is new and differs; nothing got worse; 1 more row had nothing to compare with: 1 passes"
    )
    assert not judged.alone
    assert judged.judgements[0].key[-1] == "b"


def test_night_of_which_is_not_known_whether_it_got_worse_says_so():
    judged = judge(history(), tonight(differing(threads=4)), expected=expecting(row(threads=2)))
    assert judged.verdict == "Whether anything got worse is not known: 1 not comparable"
    assert judged.got_worse


def test_new_rows_in_trouble_are_counted_where_they_are_many():
    new = tonight(row(), *(differing(name) for name in "bcde"), row("f", accuracy="crashed"))
    judged = judge(history(), new, expected=expecting(row()))
    assert judged.verdict == "4 rows are new and differ; f is new and fails; nothing got worse"


def test_night_that_lost_every_expected_model_is_worse():
    judged = judge(history(), tonight(models=("resnet18",)), expected=expecting(row()))
    assert (judged.verdict, judged.alone) == ("Worse: 1 missing", False)


def test_the_worst_comes_first():
    expected = expecting(row("a"), differing("b"), row("c"), differing("d"))
    new = tonight(row("a"), row("b"), differing("c"), differing("d"), models=("a", "b", "c", "d"))
    assert [one.key[-1] for one in judge(history(), new, expected=expected).judgements] == ["c", "b", "a", "d"]
