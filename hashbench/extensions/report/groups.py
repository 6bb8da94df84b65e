"""Group models with the same status and the same reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hashbench.core.catalog import Kind, kind_of
from hashbench.core.extensions import blamed, mechanism, remedy
from hashbench.core.records import Row
from hashbench.core.report.compare import is_new_trouble
from hashbench.core.text import shorten
from hashbench.extensions.report.charts import KIND_WORDS
from hashbench.extensions.report.expectations import ExpectationStatus, Judgement

MEMBERS = 100
"""Maximum models named in a group."""

GROUPS = 40
"""Maximum groups of one status."""

MEMBERS_IN_ALL = 3000
"""Maximum models named in all groups together."""

_GONE = (ExpectationStatus.FIXED, ExpectationStatus.NOT_SEEN, ExpectationStatus.STALE)
_ROW_SAYS_NOTHING = (
    *(ExpectationStatus.FIXED, ExpectationStatus.STALE),
    *(ExpectationStatus.NOT_COMPARABLE, ExpectationStatus.MISSING),
)


@dataclass(frozen=True, slots=True)
class Group:
    """Models with the same status and reason, shown once: one kernel of an upgraded library may make forty models
    differ.

    Attributes:
        members: the models named, the first of all.
        size: number of all models.
    """

    members: tuple[Judgement, ...]
    size: int

    @property
    def first(self) -> Judgement:
        """The model whose row is shown."""
        return self.members[0]

    @property
    def row(self) -> Row:
        """The row of ``first`` that is shown (:func:`telling_row`)."""
        return telling_row(self.first)

    @property
    def omitted(self) -> int:
        """Number of models not in ``members``."""
        return self.size - len(self.members)

    @property
    def in_other_modules(self) -> bool:
        """Whether models may differ in another module than ``row``; always true if some are omitted."""
        return self.omitted > 0 or any(telling_row(member).module != self.row.module for member in self.members)

    @property
    def names_kernel(self) -> bool:
        """Whether kernel and cause are shown."""
        return kind_of(self.row.accuracy).has_cause and self.first.status is not ExpectationStatus.MISSING

    @property
    def kind(self) -> str:
        """The badge: ``fixed``, ``absent``, ``skip``, ``differ``, ``fail``."""
        if self.first.status in (ExpectationStatus.FIXED, ExpectationStatus.STALE):
            return "fixed"
        return Kind.ABSENT if self.first.new is None else kind_of(self.row.accuracy)

    @property
    def why(self) -> str:
        """The error or the note; empty if kernel and cause are shown."""
        if self.first.status is ExpectationStatus.MISSING:
            return "There is no row of it in the last night."
        if self.first.status is ExpectationStatus.NOT_COMPARABLE:
            return self.first.note
        return "" if self.names_kernel else self.row.error or self.first.note or self.row.accuracy

    @property
    def runs_again(self) -> tuple[str, ...]:
        """Names of the broken models to rerun in one command: those of ``first``'s suite, mode, dtype and device."""
        if self.first.status is not ExpectationStatus.BROKEN:
            return ()
        return tuple(member.key[-1] for member in self.members[:8] if member.key[:-1] == self.first.key[:-1])

    @property
    def advice(self) -> str:
        """The next step."""
        status = self.first.status
        if self.runs_again and not self.row.advice:
            return "Run it again alone; its log is in the sweep's folder."  # the command is shown below
        return status.advice if status in _ROW_SAYS_NOTHING else remedy(self.row) or status.advice


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups, and the number of models in groups beyond the limits."""

    shown: tuple[Group, ...] = ()
    omitted: int = 0

    @property
    def size(self) -> int:
        """Number of models in all groups."""
        return sum(group.size for group in self.shown) + self.omitted


def is_news(judgement: Judgement) -> bool:
    """Return True for a change: worse, better, or unexpected trouble."""
    if judgement.status is ExpectationStatus.UNEXPECTED:
        return judgement.in_trouble
    if judgement.status is ExpectationStatus.PASSES_ELSEWHERE:
        return kind_of(judgement.before).is_trouble
    return judgement.worse or judgement.status in (ExpectationStatus.STALE, ExpectationStatus.FIXED)


def is_known(judgement: Judgement) -> bool:
    """Return True for trouble that is no change."""
    return not is_news(judgement) and (judgement.in_trouble or judgement.status is ExpectationStatus.NOT_SEEN)


def groups_of(judgements: Iterable[Judgement]) -> Groups:
    """Group judgements by status and reason: new rows in trouble first, then worse ones, then by status, differences
    before failures, large first."""
    alike: dict[tuple[str, ...], list[Judgement]] = {}
    for judgement in judgements:
        alike.setdefault((judgement.status, *_reason(judgement)), []).append(judgement)
    order = list(ExpectationStatus)
    kinds = list(KIND_WORDS)

    def urgency(same: Sequence[Judgement]) -> tuple[bool, bool, int, int, int]:
        kind = kind_of(same[0].now)
        kind_rank = kinds.index(kind) if kind in kinds else len(kinds)
        first = is_new_trouble(same[0])
        return not first, not same[0].worse, order.index(same[0].status), kind_rank, -len(same)

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


def telling_row(judgement: Judgement) -> Row:
    """Return the row to show: the new one; the old one of a model that is gone or fixed."""
    row = (judgement.base or judgement.new) if judgement.status in _GONE else (judgement.new or judgement.base)
    if row is None:
        raise ValueError("a judgement has a row on one side at least")
    return row


def _reason(judgement: Judgement) -> tuple[str, ...]:
    """Return the key by which judgements of one status are grouped."""
    row = telling_row(judgement)
    if judgement.status is ExpectationStatus.MISSING:
        return judgement.key[:-1]
    reason = judgement.note if judgement.status is ExpectationStatus.NOT_COMPARABLE else ""
    if kind_of(row.accuracy).has_cause:
        return reason, blamed(row), mechanism(row) or row.origin
    return reason, row.accuracy, shorten(row.error, 80)


def expectation_of(judgement: Judgement) -> str:
    """Format the expectation of a baseline CSV: status, since when, nights not seen; "" without one."""
    if not judgement.expected:
        return ""
    return judgement.expected_as(f"{judgement.before} expected") + judgement.not_seen
