"""Which models are told together, in which order, and with which advice."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hashbench.catalog import CAUSES, STATUSES, letter_of
from hashbench.records import Row
from hashbench.report.compare import Outcome
from hashbench.report.expectations import ExpectationStatus, Judged, Judgement
from hashbench.report.page import (
    GROUPS,
    MEMBERS,
    Group,
    expectation_of,
    groups_of,
    is_known,
    is_news,
    render_html,
)
from tests.report.histories import diagnosed, failed, history
from tests.report.rows import row

DIFFERS, PASSES = diagnosed("a"), row("a")


def judgement(
    status: ExpectationStatus, outcome: Outcome, base: Row | None, new: Row | None, **values: Any
) -> Judgement:
    name = (new or base or PASSES).name
    return Judgement(("specimens", "training", "float32", "cpu", name), outcome, base, new, status=status, **values)


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


def only(*judgements: Judgement) -> Group:
    (group,) = groups_of(judgements).shown
    return group


def test_models_with_one_kernel_and_one_cause_are_told_together() -> None:
    rows = [diagnosed(name, module=f"Net.{name}") for name in "abc"]
    lot = [judgement(ExpectationStatus.NEW_DIFFERENCE, Outcome.REGRESSED, PASSES, one) for one in rows]
    assert [member.key[-1] for member in only(*lot).members] == ["a", "b", "c"]


@pytest.mark.parametrize("values", [{"kernel": "aten.cumsum.default"}, {"cause": "write_race"}])
def test_another_kernel_or_cause_is_another_group(values: dict[str, str]) -> None:
    other = judgement(ExpectationStatus.NEW_DIFFERENCE, Outcome.REGRESSED, PASSES, diagnosed("b", **values))
    assert len(groups_of([NEW_DIFFERENCE, other]).shown) == 2


def test_what_got_worse_comes_before_what_got_better_and_large_groups_before_small_ones() -> None:
    many = [
        judgement(
            ExpectationStatus.NEW_DIFFERENCE, Outcome.REGRESSED, PASSES, diagnosed(name, kernel="aten.many.default")
        )
        for name in "bcd"
    ]
    groups = groups_of([FIXED, UNEXPECTED, MISSING, NEW_DIFFERENCE, *many]).shown
    assert [(group.first.word, group.size) for group in groups] == [
        ("new difference", 3),
        ("new difference", 1),
        ("missing", 1),
        ("no expectation", 1),
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


def page(*judgements: Judgement) -> str:
    """What the page shows of them as changes."""
    text = render_html(Judged(history([DIFFERS]), judgements))
    return text[text.index('id="changes"') : text.index('id="totals"')]


def test_a_moved_difference_says_from_where_to_where() -> None:
    assert "kernel x → y" in page(MOVED)


def test_an_expectation_says_since_when_and_for_how_long_it_was_not_seen() -> None:
    assert expectation_of(STALE) == "expected since 2026-01-01, not seen for 40 nights"
    assert expectation_of(STALE) in page(STALE)
    assert expectation_of(MOVED) == ""


@pytest.mark.parametrize("link", ["https://example.org/1", "javascript:alert(1)"])
def test_only_web_addresses_become_links(link: str) -> None:
    text = page(dataclasses.replace(STALE, link=link))
    assert (f'<a href="{link}"' in text, link in text) == (link.startswith("https"),) * 2


def test_members_point_to_their_model_in_the_history() -> None:
    assert '<li data-model="0">' in page(NEW_DIFFERENCE)
    assert '<li data-model="-1">' in page(judgement(ExpectationStatus.BROKEN, Outcome.REGRESSED, None, failed("b")))


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
    groups = groups_of(varied)
    assert (len(groups.shown), groups.omitted, groups.size) == (GROUPS, 3, GROUPS + 3)


def test_counts_are_in_the_order_of_the_judgements() -> None:
    text = page(MOVED, MOVED, MET_PASS)
    assert text.index('<span class="is-worse"><b>2</b> moved</span>') < text.index(
        "<span><b>1</b> as last night</span>"
    )


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
