"""Models that stand alike for the same reason, told together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hashbench.catalog import Kind, kind_of
from hashbench.records import Row
from hashbench.report.charts import KIND_WORDS
from hashbench.report.expectations import ExpectationStatus, Judgement
from hashbench.text import count, shorten

MEMBERS = 100
"""Models that a group names at most."""

GROUPS = 40
"""Groups that one status has at most."""

MEMBERS_IN_ALL = 3000
"""Models that all groups together name at most."""

_GONE = (ExpectationStatus.FIXED, ExpectationStatus.NOT_SEEN, ExpectationStatus.STALE)
_ROW_SAYS_NOTHING = (
    *(ExpectationStatus.FIXED, ExpectationStatus.STALE),
    *(ExpectationStatus.NOT_COMPARABLE, ExpectationStatus.MISSING),
)


@dataclass(frozen=True, slots=True)
class Group:
    """Models that stand alike for the same reason: after an update of a library forty may differ by one kernel, and a
    reader wants that said once. ``omitted`` counts those that are not in ``members``."""

    members: tuple[Judgement, ...]
    size: int

    @property
    def first(self) -> Judgement:
        """The model whose row tells what is wrong."""
        return self.members[0]

    @property
    def row(self) -> Row:
        """The row of ``first`` that says what is wrong."""
        return telling_row(self.first)

    @property
    def omitted(self) -> int:
        """How many models ``members`` leaves out."""
        return self.size - len(self.members)

    @property
    def in_other_modules(self) -> bool:
        """Whether other models of it differ in another module than ``row`` does; of those left out nobody knows."""
        return self.omitted > 0 or any(telling_row(member).module != self.row.module for member in self.members)

    @property
    def names_kernel(self) -> bool:
        """Whether its kernel and cause are to be told."""
        return kind_of(self.row.accuracy).has_cause and self.first.status is not ExpectationStatus.MISSING

    @property
    def kind(self) -> str:
        """What it looks like: ``fixed``, ``absent``, ``skip``, ``differ``, ``fail``."""
        if self.first.status in (ExpectationStatus.FIXED, ExpectationStatus.STALE):
            return "fixed"
        return Kind.ABSENT if self.first.new is None else kind_of(self.row.accuracy)

    @property
    def why(self) -> str:
        """The error or the note, where the kernel does not say all."""
        if self.first.status is ExpectationStatus.MISSING:
            return "There is no row of it in the last night."
        if self.first.status is ExpectationStatus.NOT_COMPARABLE:
            return self.first.note
        return "" if self.names_kernel else self.row.error or self.first.note or self.row.accuracy

    @property
    def runs_again(self) -> tuple[str, ...]:
        """The models to run again, those of ``first``'s suite, mode, dtype and device; none unless they are broken."""
        if self.first.status is not ExpectationStatus.BROKEN:
            return ()
        return tuple(member.key[-1] for member in self.members[:8] if member.key[:-1] == self.first.key[:-1])

    @property
    def advice(self) -> str:
        """What to do."""
        status = self.first.status
        if self.runs_again and not self.row.advice:
            return "Run it again alone; its log is in the sweep's folder."  # the command is shown below
        return status.advice if status in _ROW_SAYS_NOTHING else self.row.advice or status.advice


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
        return one.in_trouble
    return one.worse or one.status in (ExpectationStatus.STALE, ExpectationStatus.FIXED)


def is_known(one: Judgement) -> bool:
    """Whether it is in trouble and nobody is surprised."""
    return not is_news(one) and (one.in_trouble or one.status is ExpectationStatus.NOT_SEEN)


def groups_of(judgements: Iterable[Judgement]) -> Groups:
    """``judgements``, those alike together: first what got worse, then by status, differences before failures, the
    largest group first."""
    alike: dict[tuple[str, ...], list[Judgement]] = {}
    for one in judgements:
        alike.setdefault((one.status, *_reason(one)), []).append(one)
    order = list(ExpectationStatus)
    kinds = list(KIND_WORDS)

    def urgency(same: Sequence[Judgement]) -> tuple[bool, int, int, int]:
        kind = kind_of(same[0].now)
        kind_rank = kinds.index(kind) if kind in kinds else len(kinds)
        return not same[0].worse, order.index(same[0].status), kind_rank, -len(same)

    ranked = sorted(alike.values(), key=urgency)
    seen: Counter[ExpectationStatus] = Counter()
    groups, left, omitted = [], MEMBERS_IN_ALL, 0
    for same in ranked:
        seen[same[0].status] += 1
        if seen[same[0].status] > GROUPS:
            omitted += len(same)
        else:
            groups.append(Group(tuple(same[: max(1, min(left, MEMBERS))]), len(same)))
            left -= len(groups[-1].members)
    return Groups(tuple(groups), omitted)


def telling_row(one: Judgement) -> Row:
    """The row that says what is wrong: the new one; of what is gone or mended, the old one."""
    row = (one.base or one.new) if one.status in _GONE else (one.new or one.base)
    if row is None:
        raise ValueError("a judgement has a row on one side at least")
    return row


def _reason(one: Judgement) -> tuple[str, ...]:
    """What a judgement must have in common with others to be told with them."""
    row = telling_row(one)
    if one.status is ExpectationStatus.MISSING:
        return one.key[:-1]
    reason = one.note if one.status is ExpectationStatus.NOT_COMPARABLE else ""
    if kind_of(row.accuracy).has_cause:
        return reason, row.kernel, row.cause or row.origin
    return reason, row.accuracy, shorten(row.error, 80)


def expectation_of(one: Judgement) -> str:
    """What a CSV of expected rows says of it; empty where it says nothing."""
    if not one.expected:
        return ""
    text = f"{one.before} expected" + (f" since {one.since}" if one.since else "")
    return text + (f", not seen for {count(one.unseen, 'night')}" if one.unseen else "")
