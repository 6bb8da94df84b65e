"""What the first part of a report shows: models that changed for one and the same reason, together.

After an update of a library forty models may differ by one kernel; a reader wants that said once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hashbench.catalog import Kind, kind_of, letter_of
from hashbench.records import Row
from hashbench.report.compare import Outcome
from hashbench.report.expectations import ExpectationStatus, Judgement
from hashbench.report.history import History
from hashbench.results.load import is_link
from hashbench.results.rows import row_key
from hashbench.text import shorten

MEMBERS = 100
"""Models that a group names at most."""

GROUPS = 40
"""Groups that one status has at most."""

MEMBERS_IN_ALL = 3000
"""Models that all groups together name at most."""

WHY = 600
"""Characters of an error or a note."""


@dataclass(frozen=True, slots=True)
class Member:
    """One model of a group. ``index`` is its place in :attr:`History.models` (-1: it has none), ``base`` and ``new``
    what was expected and what is; ``note`` says more of it, ``link`` is what an expectation links to."""

    index: int
    key: tuple[str, ...]
    base: str
    new: str
    note: str = ""
    link: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """Models that stand alike for the same reason. ``row`` is that of the first of them; ``place`` says whether its
    kernel and cause are to be told, ``why`` is the error or the note. ``omitted`` counts members that are not in
    ``members``."""

    word: str
    meaning: str
    kind: str
    letter: str
    row: Row
    place: bool
    why: str
    advice: str
    members: tuple[Member, ...]
    omitted: int = 0

    @property
    def size(self) -> int:
        """How many models the group has."""
        return len(self.members) + self.omitted


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups, and how many models in further groups there is no room for."""

    shown: tuple[Group, ...] = ()
    omitted: int = 0

    @property
    def size(self) -> int:
        """How many models all groups have."""
        return sum(group.size for group in self.shown) + self.omitted


def is_news(one: Judgement) -> bool:
    """Whether a reader must be told first: it got worse, or better, or nobody expected anything of it and it does not
    pass."""
    if one.status is ExpectationStatus.UNEXPECTED:
        return is_trouble(one.new)
    return one.worse or one.status in (ExpectationStatus.STALE, ExpectationStatus.FIXED)


def is_known(one: Judgement) -> bool:
    """Whether it is in trouble and nobody is surprised."""
    return not is_news(one) and (is_trouble(one.new) or one.status is ExpectationStatus.NOT_SEEN)


def is_trouble(row: Row | None) -> bool:
    """Whether a row differs or fails."""
    return row is not None and kind_of(row.accuracy).is_trouble


def counts_of(judgements: Iterable[Judgement]) -> tuple[tuple[str, bool, int], ...]:
    """``(word, worse, models)`` in the order of ``judgements``, that is the worst first."""
    counts = Counter((one.word, one.worse) for one in judgements)
    return tuple((word, worse, count) for (word, worse), count in counts.items())


def present(history: History) -> tuple[Judgement, ...]:
    """What is wrong in the last night, where nothing says what was expected."""
    rows = [model.newest for model in history.models if model.newest is not None and is_trouble(model.newest)]
    return tuple(Judgement(row_key(row), ExpectationStatus.UNEXPECTED, Outcome.NEW, None, row) for row in rows)


# ------------------------------------------------------------------------------------------------- grouping


def groups_of(
    judgements: Iterable[Judgement],
    indices: Mapping[tuple[str, ...], int],
    *,
    wanted: Callable[[Judgement], bool] = is_news,
) -> Groups:
    """The judgements that are ``wanted``, those alike together: first what got worse, then by status, the largest
    group first. ``indices`` are those of the models in the history."""
    lots: dict[tuple[str, ...], list[Judgement]] = {}
    for one in filter(wanted, judgements):
        lots.setdefault((one.status, *_reason(one)), []).append(one)
    order = {status: place for place, status in enumerate(ExpectationStatus)}
    ranked = sorted(lots.values(), key=lambda lot: (not lot[0].worse, order[lot[0].status], -len(lot)))
    shown = list(_first_of_each(ranked))
    omitted = sum(map(len, ranked)) - sum(map(len, shown))
    groups, left = [], MEMBERS_IN_ALL
    for lot in shown:
        groups.append(_group(lot, indices, room=min(left, MEMBERS)))
        left -= len(groups[-1].members)
    return Groups(tuple(groups), omitted)


def _first_of_each(ranked: Iterable[list[Judgement]]) -> Iterator[list[Judgement]]:
    seen: Counter[ExpectationStatus] = Counter()
    for lot in ranked:
        seen[lot[0].status] += 1
        if seen[lot[0].status] <= GROUPS:
            yield lot


def telling_row(one: Judgement) -> Row:
    """The row that says what is wrong: the new one; of what is gone or mended, the old one."""
    gone = one.status in (ExpectationStatus.FIXED, ExpectationStatus.NOT_SEEN, ExpectationStatus.STALE)
    row = (one.base or one.new) if gone else (one.new or one.base)
    if row is None:
        raise ValueError("a judgement has a row on one side at least")
    return row


def _reason(one: Judgement) -> tuple[str, ...]:
    """What a judgement must have in common with others to be told with them."""
    row = telling_row(one)
    if one.status is ExpectationStatus.MISSING:
        return one.key[:-1]
    reason = one.note if one.status is ExpectationStatus.NOT_COMPARABLE else ""
    if kind_of(row.accuracy) is Kind.DIFFER:
        return reason, row.kernel, row.cause or row.origin
    return reason, row.accuracy, shorten(row.error, 80)


def _group(lot: Sequence[Judgement], indices: Mapping[tuple[str, ...], int], *, room: int) -> Group:
    first, row = lot[0], telling_row(lot[0])
    place = kind_of(row.accuracy) is Kind.DIFFER and first.status is not ExpectationStatus.MISSING
    return Group(
        word=first.word,
        meaning=first.status.meaning,
        kind=_kind(first, row),
        letter="" if first.new is None else letter_of(first.new.accuracy),
        row=row,
        place=place,
        why=shorten(_why(first, row), WHY) if not place or first.status is ExpectationStatus.NOT_COMPARABLE else "",
        advice=_advice(first, row),
        members=tuple(_member(one, indices) for one in lot[:room]),
        omitted=max(0, len(lot) - room),
    )


def _kind(one: Judgement, row: Row) -> str:
    """What a group looks like: ``fixed``, ``absent``, ``skip``, ``differ``, ``fail``."""
    if one.status in (ExpectationStatus.FIXED, ExpectationStatus.STALE):
        return "fixed"
    return "absent" if one.new is None else kind_of(row.accuracy)


def _why(one: Judgement, row: Row) -> str:
    if one.status is ExpectationStatus.MISSING:
        return "There is no row of it in the last night."
    if one.status is ExpectationStatus.NOT_COMPARABLE:
        return one.note
    return row.error or one.note or row.accuracy


def _advice(one: Judgement, row: Row) -> str:
    if one.status in (
        ExpectationStatus.FIXED,
        ExpectationStatus.STALE,
        ExpectationStatus.NOT_COMPARABLE,
        ExpectationStatus.MISSING,
    ):
        return one.status.advice
    return row.advice or one.status.advice


def _member(one: Judgement, indices: Mapping[tuple[str, ...], int]) -> Member:
    base, new = (row.accuracy if row else "" for row in (one.base, one.new))
    return Member(
        indices.get(one.key, -1),
        one.key,
        base,
        new,
        note="; ".join(filter(None, (one.note if one.status is ExpectationStatus.MOVED else "", expectation_of(one)))),
        link=one.link if is_link(one.link) else "",
    )


def expectation_of(one: Judgement) -> str:
    """What a CSV of expected rows says of it; empty where it says nothing."""
    if not one.expected:
        return ""
    text = "expected" + (f" since {one.since}" if one.since else "")
    return text + (f", not seen for {one.unseen} nights" if one.unseen else "")
