"""What is expected of every model, and what tonight makes of that. Pure: reads no file, prints nothing.

An expectation is a row: that of a CSV of expected rows where there is one, else last night's. It holds for its suite,
mode, dtype and device. Whether anything got worse is decided by :mod:`hashbench.report.compare` and nowhere else; a
:class:`Standing` says the same more finely, with what the history knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass
from enum import StrEnum

from hashbench.catalog import Kind, kind_of
from hashbench.records import Row
from hashbench.report.compare import WORSE, Change, Outcome, compare
from hashbench.report.history import History, Interval, ModelHistory
from hashbench.results.environments import EnvironmentChange
from hashbench.results.load import Provenance, Sweep
from hashbench.results.rows import row_key

STALE_AFTER = 30
"""Nights in which a model ran and did not show what is expected of it, before that is called stale."""


class Standing(StrEnum):
    """How tonight stands to what is expected of a model, the worst first."""

    NEW_DIFFERENCE = "new difference"
    BROKEN = "broken"
    MOVED = "moved"
    MISSING = "missing"
    NOW_SKIPPED = "now skipped"
    NOT_COMPARABLE = "not comparable"
    UNEXPECTED = "no expectation"
    STALE = "stale"
    FIXED = "fixed"
    NOT_SEEN = "not seen"
    MET = "met"
    NOT_ASKED = "not asked for"


_STANDINGS = {
    Outcome.NOW_SKIPPED: Standing.NOW_SKIPPED,
    Outcome.MISSING: Standing.MISSING,
    Outcome.MOVED: Standing.MOVED,
    Outcome.NOT_COMPARABLE: Standing.NOT_COMPARABLE,
    Outcome.STILL_DIFFERS: Standing.MET,
    Outcome.STILL_FAILS: Standing.MET,
    Outcome.FIXED: Standing.FIXED,
    Outcome.NOT_SEEN: Standing.NOT_SEEN,
    Outcome.NEW: Standing.UNEXPECTED,
    Outcome.STILL_SKIPPED: Standing.MET,
    Outcome.NOT_SELECTED: Standing.NOT_ASKED,
    Outcome.UNCHANGED: Standing.MET,
}
"""Of every outcome but two, which depend on what is seen now: ``regressed`` and ``fails otherwise``."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """One model tonight. ``key`` follows :data:`~hashbench.records.ROW_KEY`. ``base`` is what was expected: a row of an
    expected CSV (``expected``) or last night's, ``new`` is tonight's row; ``None`` where there is none. ``since``,
    ``link`` and ``seen`` are what the expected CSV says of it. ``unseen`` counts the last nights in a row in which the
    model ran and did not show the trouble that is expected. ``note`` is one line on what is different."""

    key: tuple[str, ...]
    standing: Standing
    outcome: Outcome
    base: Row | None
    new: Row | None
    expected: bool = False
    since: str = ""
    link: str = ""
    seen: str = ""
    unseen: int = 0
    note: str = ""

    @property
    def worse(self) -> bool:
        """Whether it got worse: the answer of ``hashbench compare``, which knows no other."""
        return self.outcome in WORSE

    @property
    def word(self) -> str:
        """The standing as a reader understands it: nothing is *met* where only last night is known."""
        return "as last night" if self.standing is Standing.MET and not self.expected else str(self.standing)


@dataclass(frozen=True, slots=True)
class Judged:
    """The last night of a history, judged. ``night`` and ``last`` are the labels of this night and of the last one
    before it that has rows, which has the index ``before`` (empty and ``None``: there is none). ``judgements`` has
    every model of either side, the worst first; ``environment`` is what changed since the night before; ``remarks`` are
    sentences on what cannot be seen, ``problems`` those on what went wrong with the night itself, which make it worse.
    """

    night: str
    last: str
    judgements: tuple[Judgement, ...]
    before: int | None = None
    environment: tuple[EnvironmentChange, ...] = ()
    remarks: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def got_worse(self) -> bool:
        """Whether any model got worse, or the night itself is not whole."""
        return bool(self.problems) or any(judgement.worse for judgement in self.judgements)


def standing_of(outcome: Outcome, accuracy: str, *, expected: bool = True, unseen: int = 0) -> Standing:
    """The standing of a model that now has the status ``accuracy``, whose row is ``expected`` by a CSV (or was last
    night's), and which has not shown it for ``unseen`` nights in which it ran."""
    if outcome in (Outcome.REGRESSED, Outcome.FAILS_OTHERWISE):
        return Standing.NEW_DIFFERENCE if kind_of(accuracy) is Kind.DIFFER else Standing.BROKEN
    if expected and outcome in (Outcome.FIXED, Outcome.NOT_SEEN) and unseen >= STALE_AFTER:
        return Standing.STALE
    return _STANDINGS[outcome]


def unseen_nights(model: ModelHistory | None, expected: Row) -> int:
    """How many nights in a row, up to the last, the model ran and did not show what is ``expected``. Nights without a
    row of it, and nights in which it was skipped, do not count and do not end the row."""
    count = 0
    for interval in reversed(model.intervals if model else ()):
        if kind_of(interval.accuracy) is Kind.SKIP:
            continue
        if _shows(interval, expected):
            return count
        count += interval.nights
    return count


def _shows(interval: Interval, expected: Row) -> bool:
    kernels = {interval.kernel, expected.kernel} - {""}
    return interval.accuracy == expected.accuracy and len(kernels) <= 1


def judge(
    history: History,
    new: Sweep,
    *,
    expected: Sweep | None = None,
    last: Sweep | None = None,
    before: int | None = None,
) -> Judged:
    """Every model of the last night of ``history`` against what is expected of it.

    Args:
        history: with ``new`` as its last night.
        new: the whole rows of that night.
        expected: rows of CSVs such as ``results/expected``.
        last: an earlier night; it tells what to expect of models that ``expected`` does not know.
        before: the index of that night in ``history``.

    Raises:
        HashbenchError: the rows cannot be compared; see :func:`~hashbench.report.compare.compare`.
    """
    night = history.nights[-1]
    base = _base(expected, last)
    changes = compare(base, new, scoped=True).changes if base.rows else tuple(map(_first_seen, new.rows))
    models = {model.key: model for model in history.models}
    keys = {row_key(row) for row in expected.rows} if expected else set()
    told = expected.provenance if expected else {}
    found = [
        _judgement(
            change,
            models.get(change.key),
            expected=keys,
            provenance=told.get(row_key(change.base), Provenance()) if change.base else Provenance(),
        )
        for change in changes
    ]
    order = {standing: place for place, standing in enumerate(Standing)}
    return Judged(
        night=night.label,
        last=history.nights[before].label if before is not None else "",
        before=before,
        judgements=tuple(sorted(found, key=lambda one: (not one.worse, order[one.standing], one.key))),
        environment=night.changed,
        remarks=tuple(_remarks(history, new, expected, before)),
        problems=night.problems,
    )


def _base(expected: Sweep | None, last: Sweep | None) -> Sweep:
    """What is expected, filled up with last night's rows of the models that nothing is expected of."""
    rows = expected.rows if expected else ()
    known = {row_key(row) for row in rows}
    others = tuple(row for row in (last.rows if last else ()) if row_key(row) not in known)
    return Sweep(label="what is expected", rows=(*rows, *others), environments={}, kind="hashbench")


def _first_seen(row: Row) -> Change:
    return Change(key=row_key(row), outcome=Outcome.NEW, base=None, new=row)


def _judgement(
    change: Change, model: ModelHistory | None, *, expected: Set[tuple[str, ...]], provenance: Provenance
) -> Judgement:
    base, new = change.base, change.new
    is_expected = base is not None and row_key(base) in expected
    trouble = base is not None and is_expected and not kind_of(base.accuracy).is_fine
    unseen = unseen_nights(model, base) if base is not None and trouble else 0
    return Judgement(
        key=change.key,
        standing=standing_of(change.outcome, new.accuracy if new else "", expected=is_expected, unseen=unseen),
        outcome=change.outcome,
        base=base,
        new=new,
        expected=is_expected,
        since=provenance.since,
        link=provenance.link,
        seen=provenance.seen,
        unseen=unseen,
        note=change.note,
    )


def _remarks(history: History, new: Sweep, expected: Sweep | None, before: int | None) -> Iterator[str]:
    if before is None:
        yield "There is no earlier night to compare with."
    elif before < len(history.nights) - 2:
        yield f"The nights after {history.nights[before].label} have no rows."
    if expected is None:
        yield "Nothing says what is expected (--expected): models are compared with the night before."
    if not new.environments:
        yield "This night has no environment.json: whether the machine or its settings changed is not known."
