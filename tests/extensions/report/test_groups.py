"""Models with the same status and reason are one group."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hashbench.core.records import Row
from hashbench.core.report.compare import Became
from hashbench.extensions.report.expectations import ExpectationStatus, Judgement
from hashbench.extensions.report.groups import GROUPS, MEMBERS, Group, expectation_of, groups_of, is_known, is_news
from tests.extensions.compiled.compiled_rows import INACCURATE, ROUNDED
from tests.extensions.report.histories import diagnosed, failed
from tests.extensions.report.judgements import (
    DIFFERS,
    MET_PASS,
    MOVED,
    NEW_DIFFERENCE,
    PASSES,
    STALE,
    changes_of,
    judgement,
)
from tests.flat_rows import changed

BROKEN = judgement(ExpectationStatus.BROKEN, Became.REGRESSED, PASSES, failed("a"))
MISSING = judgement(ExpectationStatus.MISSING, Became.MISSING, PASSES, None)
INCOMPARABLE = judgement(ExpectationStatus.NOT_COMPARABLE, Became.NOT_COMPARABLE, PASSES, DIFFERS, note="threads 1 → 2")
UNEXPECTED = judgement(ExpectationStatus.UNEXPECTED, Became.NEW, None, DIFFERS)
UNEXPECTED_PASS = judgement(ExpectationStatus.UNEXPECTED, Became.NEW, None, PASSES)
FIXED = judgement(ExpectationStatus.FIXED, Became.FIXED, DIFFERS, PASSES)
NOT_SEEN = judgement(ExpectationStatus.NOT_SEEN, Became.NOT_SEEN, DIFFERS, PASSES)
MET = judgement(ExpectationStatus.MET, Became.STILL_DIFFERS, DIFFERS, DIFFERS)


@pytest.mark.parametrize(
    ("one", "where"),
    [
        pytest.param(NEW_DIFFERENCE, "news", id="a new difference is news"),
        pytest.param(BROKEN, "news", id="a new failure is news"),
        pytest.param(MOVED, "news", id="a difference that moved is news"),
        pytest.param(MISSING, "news", id="a missing row is news"),
        pytest.param(INCOMPARABLE, "news", id="what cannot be compared is news"),
        pytest.param(UNEXPECTED, "news", id="trouble that nothing is expected of is news"),
        pytest.param(UNEXPECTED_PASS, "", id="a new model that passes is only counted"),
        pytest.param(FIXED, "news", id="what was fixed is news"),
        pytest.param(STALE, "news", id="a stale expectation is news"),
        pytest.param(NOT_SEEN, "known", id="what was not seen this time is known trouble"),
        pytest.param(MET, "known", id="what still differs is known trouble"),
        pytest.param(MET_PASS, "", id="what still passes is only counted"),
    ],
)
def test_a_reader_is_told(one: Judgement, where: str) -> None:
    assert (is_news(one), is_known(one)) == (where == "news", where == "known")


def only(*judgements: Judgement) -> Group:
    (group,) = groups_of(judgements).shown
    return group


def test_same_kernel_and_cause_is_one_group() -> None:
    rows = [diagnosed(name, module=f"Net.{name}") for name in "abc"]
    lot = [judgement(ExpectationStatus.NEW_DIFFERENCE, Became.REGRESSED, PASSES, one) for one in rows]
    assert [member.key[-1] for member in only(*lot).members] == ["a", "b", "c"]
    assert only(*lot).in_other_modules
    assert not only(*lot[:1]).in_other_modules
    assert not only(
        lot[0], judgement(ExpectationStatus.NEW_DIFFERENCE, Became.REGRESSED, PASSES, rows[0])
    ).in_other_modules


@pytest.mark.parametrize("values", [{"kernel": "aten.cumsum.default"}, {"cause": "write_race"}])
def test_another_kernel_or_cause_is_another_group(values: dict[str, str]) -> None:
    other = judgement(ExpectationStatus.NEW_DIFFERENCE, Became.REGRESSED, PASSES, diagnosed("b", **values))
    assert len(groups_of([NEW_DIFFERENCE, other]).shown) == 2


def test_groups_are_ordered_new_trouble_first_then_worst_and_largest() -> None:
    many = [
        judgement(
            ExpectationStatus.NEW_DIFFERENCE, Became.REGRESSED, PASSES, diagnosed(name, kernel="aten.many.default")
        )
        for name in "bcd"
    ]
    groups = groups_of([FIXED, UNEXPECTED, MISSING, NEW_DIFFERENCE, *many]).shown
    assert [(group.first.word, group.size) for group in groups] == [
        ("no expectation", 1),
        ("new difference", 3),
        ("new difference", 1),
        ("missing", 1),
        ("fixed", 1),
    ]


@pytest.mark.parametrize(
    ("one", "names_kernel", "kind", "why", "advice"),
    [
        pytest.param(NEW_DIFFERENCE, True, "differ", "", DIFFERS.advice, id="a difference tells its own advice"),
        pytest.param(BROKEN, False, "fail", "died with signal 9", "Run it again alone", id="a failure tells its error"),
        pytest.param(MISSING, False, "absent", "There is no row", "--resume", id="a missing row is said to be"),
        pytest.param(INCOMPARABLE, True, "differ", "threads 1 → 2", "same conditions", id="other conditions are named"),
        pytest.param(FIXED, True, "fixed", "", "", id="what was fixed shows what it was and asks for nothing"),
    ],
)
def test_a_group_tells(one: Judgement, names_kernel: bool, kind: str, why: str, advice: str) -> None:
    group = only(one)
    assert (group.names_kernel, group.kind) == (names_kernel, kind)
    assert (why in group.why, advice in group.advice) == (True, True)
    assert (bool(group.why), bool(group.advice)) == (bool(why), bool(advice))
    assert group.row.kernel == (DIFFERS.kernel if names_kernel else "")


def test_expectation_says_since_when_and_unseen_nights() -> None:
    assert expectation_of(STALE) == "eager_two_runs_differ expected since 2026-01-01, not seen for 40 nights"
    assert expectation_of(STALE) in changes_of(STALE)
    assert expectation_of(MOVED) == ""


def test_what_has_no_room_is_counted() -> None:
    big = [
        judgement(ExpectationStatus.NEW_DIFFERENCE, Became.REGRESSED, PASSES, diagnosed(f"m{n}"))
        for n in range(MEMBERS + 5)
    ]
    assert (len(only(*big).members), only(*big).omitted, only(*big).size) == (MEMBERS, 5, MEMBERS + 5)
    varied = [
        judgement(ExpectationStatus.BROKEN, Became.REGRESSED, PASSES, failed(f"m{n}", error=f"error {n}"))
        for n in range(GROUPS + 3)
    ]
    groups = groups_of(varied)
    assert (len(groups.shown), groups.omitted, groups.size) == (GROUPS, 3, GROUPS + 3)


def test_compiled_models_are_grouped_by_what_is_to_blame() -> None:
    def of(row: Row, name: str) -> Judgement:
        new = replace(row, name=name, suite="specimens")
        return judgement(ExpectationStatus.NEW_DIFFERENCE, Became.REGRESSED, PASSES, new)

    rows = [of(INACCURATE, "a"), of(INACCURATE, "b"), of(ROUNDED, "c"), of(changed(ROUNDED, op="aten.x"), "d")]
    groups = groups_of([*rows, of(changed(INACCURATE, stage="lowering"), "e")]).shown
    assert [[one.key[-1] for one in group.members] for group in groups] == [["a", "b"], ["c", "d"], ["e"]]
    assert groups[0].advice == "report the code generated for aten.relu.default"
