"""Which models are told together, in which order, and with which advice."""

from __future__ import annotations

from typing import Any

import pytest

from hashbench.catalog import CAUSES, STATUSES, letter_of
from hashbench.records import Row
from hashbench.report.compare import Outcome
from hashbench.report.expectations import ExpectationStatus, Judgement
from hashbench.report.html.changes import GROUPS, MEMBERS, Group, counts_of, groups_of, is_known, is_news, present
from tests.report.histories import diagnosed, failed, history
from tests.report.rows import row

DIFFERS, PASSES = diagnosed("a"), row("a")


def judgement(
    status: ExpectationStatus, outcome: Outcome, base: Row | None, new: Row | None, **values: Any
) -> Judgement:
    name = (new or base or PASSES).name
    return Judgement(("specimens", "training", "float32", "cpu", name), status, outcome, base, new, **values)


NEW_DIFFERENCE = judgement(ExpectationStatus.NEW_DIFFERENCE, Outcome.REGRESSED, PASSES, DIFFERS)
BROKEN = judgement(ExpectationStatus.BROKEN, Outcome.REGRESSED, PASSES, failed("a"))
MOVED = judgement(ExpectationStatus.MOVED, Outcome.MOVED, DIFFERS, DIFFERS, note="kernel x → y")
MISSING = judgement(ExpectationStatus.MISSING, Outcome.MISSING, PASSES, None)
INCOMPARABLE = judgement(
    ExpectationStatus.NOT_COMPARABLE, Outcome.NOT_COMPARABLE, PASSES, DIFFERS, note="threads 1 → 2"
)
UNEXPECTED = judgement(ExpectationStatus.UNEXPECTED, Outcome.NEW, None, DIFFERS)
UNEXPECTED_PASS = judgement(ExpectationStatus.UNEXPECTED, Outcome.NEW, None, PASSES)
FIXED = judgement(ExpectationStatus.FIXED, Outcome.FIXED, DIFFERS, PASSES)
STALE = judgement(ExpectationStatus.STALE, Outcome.FIXED, DIFFERS, PASSES, expected=True, since="2026-01-01", unseen=40)
NOT_SEEN = judgement(ExpectationStatus.NOT_SEEN, Outcome.NOT_SEEN, DIFFERS, PASSES)
MET = judgement(ExpectationStatus.MET, Outcome.STILL_DIFFERS, DIFFERS, DIFFERS)
MET_PASS = judgement(ExpectationStatus.MET, Outcome.UNCHANGED, PASSES, PASSES)


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


def only(*judgements: Judgement, **values: Any) -> Group:
    (group,) = groups_of(judgements, {}, **values).shown
    return group


def test_models_with_one_kernel_and_one_cause_are_told_together() -> None:
    rows = [diagnosed(name, module=f"Net.{name}") for name in "abc"]
    lot = [judgement(ExpectationStatus.NEW_DIFFERENCE, Outcome.REGRESSED, PASSES, one) for one in rows]
    assert [member.key[-1] for member in only(*lot).members] == ["a", "b", "c"]


@pytest.mark.parametrize("values", [{"kernel": "aten.cumsum.default"}, {"cause": "write_race"}])
def test_another_kernel_or_cause_is_another_group(values: dict[str, str]) -> None:
    other = judgement(ExpectationStatus.NEW_DIFFERENCE, Outcome.REGRESSED, PASSES, diagnosed("b", **values))
    assert len(groups_of([NEW_DIFFERENCE, other], {}).shown) == 2


def test_what_got_worse_comes_before_what_got_better_and_large_groups_before_small_ones() -> None:
    many = [
        judgement(
            ExpectationStatus.NEW_DIFFERENCE, Outcome.REGRESSED, PASSES, diagnosed(name, kernel="aten.many.default")
        )
        for name in "bcd"
    ]
    groups = groups_of([FIXED, UNEXPECTED, MISSING, NEW_DIFFERENCE, *many], {}).shown
    assert [(group.word, group.size) for group in groups] == [
        ("new difference", 3),
        ("new difference", 1),
        ("missing", 1),
        ("no expectation", 1),
        ("fixed", 1),
    ]


def test_a_difference_tells_its_kernel_and_its_own_advice() -> None:
    group = only(NEW_DIFFERENCE)
    assert (group.place, group.why, group.advice) == (True, "", DIFFERS.advice)
    assert (group.kind, group.letter) == ("differ", "D")


def test_a_failure_tells_its_error_and_what_to_do() -> None:
    group = only(BROKEN)
    assert (group.place, group.why) == (False, "died with signal 9")
    assert "Run it again alone" in group.advice
    assert (group.kind, group.letter) == ("fail", "C")


def test_what_is_missing_is_said_to_be_and_has_no_letter() -> None:
    group = only(MISSING)
    assert "no row" in group.why
    assert "--resume" in group.advice
    assert (group.kind, group.letter, group.place) == ("absent", "", False)


def test_what_cannot_be_compared_says_why_and_still_names_the_kernel() -> None:
    group = only(INCOMPARABLE)
    assert (group.why, group.place) == ("threads 1 → 2", True)
    assert "same conditions" in group.advice


def test_what_was_fixed_shows_what_it_was_and_asks_for_nothing() -> None:
    group = only(FIXED)
    assert (group.row.kernel, group.kind, group.advice) == (DIFFERS.kernel, "fixed", "")


def test_a_moved_difference_says_from_where_to_where() -> None:
    assert only(MOVED).members[0].note == "kernel x → y"


def test_an_expectation_says_since_when_and_for_how_long_it_was_not_seen() -> None:
    assert only(STALE).members[0].note == "expected since 2026-01-01, not seen for 40 nights"


@pytest.mark.parametrize(
    ("link", "kept"), [("https://example.org/1", "https://example.org/1"), ("javascript:alert(1)", "")]
)
def test_only_web_addresses_become_links(link: str, kept: str) -> None:
    one = judgement(ExpectationStatus.STALE, Outcome.FIXED, DIFFERS, PASSES, expected=True, link=link)
    assert only(one).members[0].link == kept


def test_members_point_to_their_model_in_the_history() -> None:
    key = NEW_DIFFERENCE.key
    (group,) = groups_of([NEW_DIFFERENCE], {key: 7}).shown
    assert group.members[0].index == 7


def test_what_has_no_room_is_counted() -> None:
    big = [
        judgement(ExpectationStatus.NEW_DIFFERENCE, Outcome.REGRESSED, PASSES, diagnosed(f"m{n}"))
        for n in range(MEMBERS + 5)
    ]
    assert (len(only(*big).members), only(*big).omitted, only(*big).size) == (MEMBERS, 5, MEMBERS + 5)
    varied = [
        judgement(ExpectationStatus.BROKEN, Outcome.REGRESSED, PASSES, failed(f"m{n}", error=f"error {n}"))
        for n in range(GROUPS + 3)
    ]
    groups = groups_of(varied, {})
    assert (len(groups.shown), groups.omitted, groups.size) == (GROUPS, 3, GROUPS + 3)


def test_counts_are_in_the_order_of_the_judgements() -> None:
    assert counts_of([MOVED, MOVED, MET_PASS]) == (("moved", True, 2), ("as last night", False, 1))


def test_without_a_judgement_all_present_trouble_is_told() -> None:
    found = history([DIFFERS, failed("b"), row("c")])
    groups = groups_of(present(found), {})
    assert [group.members[0].key[-1] for group in groups.shown] == ["a", "b"]


# ---------------------------------------------------------------------------------------------------- words


def test_every_cause_and_standing_has_a_sentence() -> None:
    assert all(cause.meaning.endswith(".") for cause in CAUSES.values())
    assert all(status.meaning.endswith(".") for status in ExpectationStatus)


@pytest.mark.parametrize(
    ("status", "letter"),
    [
        ("pass", "P"),
        ("eager_two_runs_differ", "D"),
        ("pass_due_to_skip", "S"),
        ("eager_1st_run_OOM", "M"),
        ("timeout", "T"),
        ("crashed", "C"),
        ("model_fail_to_load", "F"),
        ("a word of dynamo's", "F"),
        ("", ""),
    ],
)
def test_letters_of(status: str, letter: str) -> None:
    assert letter_of(status) == letter


def test_every_status_has_a_sentence() -> None:
    assert all(status.meaning for status in STATUSES.values())
