"""Two sweeps in, what became of every model out. Pure: reads no file, prints nothing.

:func:`decide` is the rule, over two status words; the rest finds which rows belong together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, NamedTuple, Self, TypeVar

from hashbench.catalog import CAUSES, Kind, kind_of
from hashbench.errors import HashbenchError
from hashbench.records import Row
from hashbench.results.environments import EnvironmentChange, environment_changes
from hashbench.results.load import Sweep
from hashbench.results.rows import row_key
from hashbench.text import a_few


class Became(StrEnum):
    """What became of one row, the worst first; ``worse`` says whether it makes a comparison end with exit code 1."""

    worse: bool

    def __new__(cls, word: str, worse: bool = False) -> Self:
        member = str.__new__(cls, word)
        member._value_ = word
        member.worse = worse
        return member


class Outcome(Became):
    """What became of a model, the worst first. Not worse: what is as bad as it was (``still …``), a model that BASE
    says nothing about (``new``), and one that NEW was not asked to run."""

    REGRESSED = "regressed", True  # it was no failure and now it is one
    NOW_SKIPPED = "now skipped", True  # what was looked at is not looked at any more: a difference could hide there
    MISSING = "missing", True  # it was asked for and left no result: absent is never equal
    MOVED = "moved", True  # a kernel that nobody knew to differ, or one that differs for another reason
    FAILS_OTHERWISE = "fails otherwise", True  # the failure that is known is not the failure that is seen
    NOT_COMPARABLE = "not comparable", True  # it may have got worse; unknown is never equal
    STILL_DIFFERS = "still differs"
    STILL_FAILS = "still fails"
    FIXED = "fixed"
    NOT_SEEN = "not seen"
    NEW = "new"
    STILL_SKIPPED = "still skipped"
    NOT_SELECTED = "not selected"
    UNCHANGED = "unchanged"


CONDITIONS = ("dev", "dtype", "batch_size", "iterations", "runs", "threads", "deterministic")
"""Columns that must agree, where both rows have them, before two results can be compared."""

PLACE = ("origin", "kernel", "module")
"""Columns that say where a difference entered."""


R = TypeVar("R")
B = TypeVar("B", bound=Became)


@dataclass(frozen=True, slots=True)
class Change(Generic[R, B]):
    """What became of one row. ``key`` is what identifies it (:data:`~hashbench.records.ROW_KEY`); ``note`` is one line
    on what is different; ``whole_group`` says that no model of its suite, mode, dtype and device is on the other
    side."""

    key: tuple[str, ...]
    outcome: B
    base: R | None
    new: R | None
    note: str = ""
    whole_group: bool = False


@dataclass(frozen=True, slots=True)
class Comparison(Generic[R, B]):
    """Two tables compared: ``base`` and ``new`` are their labels, ``changes`` holds every row of either side, the worst
    first, ``remarks`` are sentences on what this comparison cannot see."""

    base: str
    new: str
    environment: tuple[EnvironmentChange, ...]
    changes: tuple[Change[R, B], ...]
    remarks: tuple[str, ...] = ()

    @property
    def counts(self) -> dict[B, int]:
        """How many rows had each outcome, the worst first; outcomes that nothing had are left out."""
        return dict(Counter(change.outcome for change in self.changes))

    @property
    def got_worse(self) -> bool:
        """Whether any outcome is worse."""
        return any(change.outcome.worse for change in self.changes)


ModelChange = Change[Row, Outcome]


def worst_first(changes: Iterable[Change[R, B]]) -> tuple[Change[R, B], ...]:
    """``changes`` in the order of their outcomes, else as they are."""
    return tuple(sorted(changes, key=lambda change: list(type(change.outcome).__members__).index(change.outcome.name)))


# ------------------------------------------------------------------------------------------------ the rule


def decide(
    base: str,
    new: str,
    *,
    selected: bool = True,
    comparable: bool = True,
    same_place: bool = True,
    always: bool = True,
) -> Outcome:
    """What became of a model with the accuracy ``base`` that now has ``new``; ``""`` means that there is no row.

    ``selected``: NEW was asked to run this model. ``comparable``: both ran under the same conditions.
    ``same_place``: where both differ, the difference entered at the same origin, kernel and module, and no
    experiments say that it has another cause. ``always``: as far as is known, the difference of ``base`` shows in every
    pair of runs; one that shows now and then is not gone because two runs agree.

    Raises:
        ValueError: neither side has a row.
    """
    match (kind_of(base), kind_of(new)):
        case (Kind.ABSENT, Kind.ABSENT):
            raise ValueError("neither sweep has a row: there is nothing to decide")
        case (Kind.ABSENT, _):
            return Outcome.NEW
        case (_, Kind.ABSENT):
            return Outcome.MISSING if selected else Outcome.NOT_SELECTED
        case _ if not comparable:
            return Outcome.NOT_COMPARABLE
        case (Kind.PASS, Kind.PASS):
            return Outcome.UNCHANGED
        case (Kind.SKIP, Kind.SKIP):
            return Outcome.STILL_SKIPPED
        case (_, Kind.SKIP):
            return Outcome.NOW_SKIPPED
        case (Kind.DIFFER, Kind.PASS) if not always:
            return Outcome.NOT_SEEN
        case (_, Kind.PASS):
            return Outcome.FIXED
        case (Kind.DIFFER, Kind.DIFFER):
            return Outcome.STILL_DIFFERS if same_place else Outcome.MOVED
        case (Kind.PASS | Kind.SKIP, _):
            return Outcome.REGRESSED
        case _:
            return Outcome.STILL_FAILS if base == new else Outcome.FAILS_OTHERWISE


# ------------------------------------------------------------------------------------------------- pairing


def compare(base: Sweep, new: Sweep, *, scoped: bool = False) -> Comparison[Row, Outcome]:
    """What became of every model of ``base`` and ``new``.

    Rows belong together when their keys are equal; against dynamo's files, when device and name (or the name, where
    there is no device) are. A row whose only counterpart has another device or dtype is ``not comparable``; with
    ``scoped``, it says nothing about that one.

    Raises:
        HashbenchError: BASE has no rows, or a side has several rows where the other side's files tell only names.
    """
    if not base.rows:
        raise HashbenchError(
            f"{base.label} holds no rows", consequence="there is nothing to compare with", tip="Name a finished sweep."
        )
    pairs = _pairs(base, new, scoped=scoped)
    compared = [pair for pair in pairs if pair.base and pair.new]
    # What was skipped ran nowhere; its row has the environment of the machine that began the sweep.
    ran = [(old, now) for old, now in compared if old and now and not _is_skipped(old) and not _is_skipped(now)]
    return Comparison(
        base=base.label,
        new=new.label,
        environment=_environment_changes(base, new, [_Pair(*rows) for rows in ran]),
        changes=worst_first(sorted(_changes(base, new, pairs), key=lambda change: change.key)),
        remarks=(*_remarks(base, new, compared=len(compared)), *_environment_remarks(base, new, ran)),
    )


def _is_skipped(row: Row) -> bool:
    return kind_of(row.accuracy) is Kind.SKIP


class _Pair(NamedTuple):
    """The rows of one model, one of them perhaps absent."""

    base: Row | None
    new: Row | None

    @property
    def row(self) -> Row:
        """The row that is there, rather NEW's than BASE's."""
        row = self.new or self.base
        if row is None:
            raise ValueError("a pair has a row on one side at least")
        return row


def _pairs(base: Sweep, new: Sweep, *, scoped: bool) -> list[_Pair]:
    exact, loose = _keys(base, new)
    first, second = _by_key(base, exact), _by_key(new, exact)
    pairs = [_Pair(row, second.get(key)) for key, row in first.items()]
    pairs += [_Pair(None, row) for key, row in second.items() if key not in first]
    return pairs if scoped else _paired_loosely(pairs, loose)


RowKey = Callable[[Row], Hashable]


def _keys(base: Sweep, new: Sweep) -> tuple[RowKey, RowKey]:
    """What identifies a row on both sides, and what still does when device and dtype may differ."""
    kinds = {base.kind, new.kind}
    if "dynamo_expected" in kinds:
        return _name, _name
    if "dynamo" in kinds:
        return (lambda row: (row.dev, row.name)), _name
    return row_key, (lambda row: (row.suite, row.mode, row.name))


def _name(row: Row) -> str:
    return row.name


def _by_key(sweep: Sweep, key: RowKey) -> dict[Hashable, Row]:
    found: dict[Hashable, Row] = {}
    for row in sweep.rows:
        if found.setdefault(key(row), row) is not row:
            raise HashbenchError(
                f"{sweep.label} holds {row.name} more than once",
                consequence="the other side does not tell suites, modes and dtypes apart",
                tip="Name one of its CSVs.",
            )
    return found


def _paired_loosely(pairs: list[_Pair], key: RowKey) -> list[_Pair]:
    """Join a row that only BASE has with one that only NEW has, where their looser key makes them unique."""
    lonely_base = _unique((pair.base for pair in pairs if pair.base and not pair.new), key)
    lonely_new = _unique((pair.new for pair in pairs if pair.new and not pair.base), key)
    joined = [_Pair(row, lonely_new[name]) for name, row in lonely_base.items() if name in lonely_new]
    taken = {id(row) for pair in joined for row in pair}
    return [pair for pair in pairs if id(pair.row) not in taken] + joined


def _unique(rows: Iterable[Row], key: RowKey) -> dict[Hashable, Row]:
    candidates = tuple(rows)
    count = Counter(map(key, candidates))
    return {key(row): row for row in candidates if count[key(row)] == 1}


# ------------------------------------------------------------------------------------------------- changes


def _changes(base: Sweep, new: Sweep, pairs: Iterable[_Pair]) -> Iterator[ModelChange]:
    ours = base.kind == new.kind == "hashbench"
    base_groups, new_groups = ({_group(row) for row in sweep.rows} for sweep in (base, new))
    suites = {row.suite for row in new.rows} | {suite for one in new.selections for suite, _ in one.models}
    for pair in pairs:
        others = new_groups if pair.base else base_groups
        yield Change(
            key=row_key(pair.row),
            outcome=(outcome := _outcome(pair, selected=_is_selected(new, pair.row, suites), places_known=ours)),
            base=pair.base,
            new=pair.new,
            note=_note(outcome, pair),
            whole_group=ours and not (pair.base and pair.new) and _group(pair.row) not in others,
        )


def _group(row: Row) -> tuple[str, ...]:
    return row_key(row)[:-1]


def _outcome(pair: _Pair, *, selected: bool, places_known: bool) -> Outcome:
    base, new = pair
    if base is None or new is None:
        return decide(base.accuracy if base else "", new.accuracy if new else "", selected=selected)
    return decide(
        base.accuracy,
        new.accuracy,
        comparable=not _differing(base, new, CONDITIONS, both=True),
        same_place=not places_known or not _moved(base, new),
        always=base.rate is None or base.rate >= 1,
    )


def _moved(base: Row, new: Row) -> list[str]:
    """What says that the difference is another one; a cause says so only where both sides have established one."""
    causes = () if _open_cause(base) or _open_cause(new) else ("cause",)
    return _differing(base, new, (*PLACE, *causes))


def _open_cause(row: Row) -> bool:
    return (cause := CAUSES.get(row.cause)) is None or not cause.decided or row.confidence == "open"


def _is_selected(sweep: Sweep, row: Row, suites: Collection[str]) -> bool:
    """Whether ``sweep`` was asked for ``row``; without a ``sweep.json`` for its suite and mode it counts as asked,
    unless it is known which suites it was to run in which modes, or there is nothing of its suite (``suites`` are those
    of NEW): a mode that is gone may be lost, a suite that was never named was not meant."""
    if sweep.parts is not None and (row.suite, row.mode) not in sweep.parts:
        return False
    if sweep.parts is None and sweep.selections and row.suite not in suites:
        return False
    selections = [selection for selection in sweep.selections if selection.concerns(row)]
    return not selections or any(selection.covers(row) for selection in selections)


def _differing(base: Row, new: Row, columns: Iterable[str], *, both: bool = False) -> list[str]:
    """``column old → new`` for every column that differs; with ``both``, only where neither side is empty."""
    texts = []
    for column in columns:
        old, now = getattr(base, column), getattr(new, column)
        if old != now and not (both and (old in (None, "") or now in (None, ""))):
            texts.append(f"{column} {_or_none(old)} → {_or_none(now)}")
    return texts


def _or_none(value: Any) -> str:
    return "(none)" if value in (None, "") else str(value)


def _note(outcome: Outcome, pair: _Pair) -> str:
    base, new = pair
    if base and new and outcome is Outcome.NOT_COMPARABLE:
        return "; ".join(_differing(base, new, CONDITIONS, both=True))
    if base and new and outcome is Outcome.MOVED:
        return "; ".join(_moved(base, new))
    if base and outcome in (Outcome.FIXED, Outcome.NOT_SEEN):
        return _what_happened(base)
    return _what_happened(new) if new else ""


def _what_happened(row: Row) -> str:
    """The error of a row that failed; for one that differs, where."""
    if row.error:
        return row.error
    where = f"{row.kernel} in {row.module}" if row.kernel and row.module else row.kernel
    return f"{row.origin}: {where}" if row.origin and where else where or row.origin


# ------------------------------------------------------------------------------------------------- remarks


def _environment_changes(base: Sweep, new: Sweep, compared: Iterable[_Pair]) -> tuple[EnvironmentChange, ...]:
    """Only of the environments in which the compared rows were made; none where a side does not tell its own."""
    if not base.environments or not new.environments:
        return ()
    pairs = tuple(compared)
    return environment_changes(
        _environments_of(base, {pair.base.env for pair in pairs if pair.base}),
        _environments_of(new, {pair.new.env for pair in pairs if pair.new}),
    )


def _environments_of(sweep: Sweep, used: Collection[str]) -> list[Mapping[str, Any]]:
    """The environments that are ``used``; all of them where the rows do not say."""
    keys = [key for key in sweep.environments if key in used]
    return [sweep.environments[key] for key in keys or sweep.environments]


def _remarks(base: Sweep, new: Sweep, *, compared: int) -> Iterator[str]:
    for side, sweep in (("BASE", base), ("NEW", new)):
        if sweep.kind == "hashbench" and not sweep.environments:
            yield f"{side} has no environment.json: whether the machine or its settings changed is not known."
        if sweep.kind == "dynamo":
            yield f"{side} is dynamo's: rows are matched by device and name, and it names no kernels."
        if sweep.kind == "dynamo_expected":
            yield f"{side} is a list that dynamo's CI expects: rows are matched by name alone, and it names no kernels."
    if not compared:
        yield "No model is on both sides: nothing was compared."


# ------------------------------------------------------------------------------- several machines on one side

_SHOWN = 4


def _environment_remarks(base: Sweep, new: Sweep, pairs: Sequence[tuple[Row, Row]]) -> Iterator[str]:
    """Sentences on the rows of ``pairs`` (BASE's and NEW's of one model each) where a side ran on several machines: its
    environments may be the other side's, taken together, while a model ran on another machine in each. None where each
    side is of one environment, since what differs between the two is shown by itself."""
    sides = (("BASE", base, [row for row, _ in pairs]), ("NEW", new, [row for _, row in pairs]))
    several = False
    for side, sweep, rows in sides:
        kinds = _kinds(sweep.environments, rows)
        if len(kinds) > 1:
            several = True
            where = a_few(_differing_entries(kinds), _SHOWN)
            yield f"{side} mixes {len(kinds)} environments, which differ in {where}."
        yield from _unknown(side, sweep, rows)
    if several:
        yield from _ran_elsewhere(base, new, pairs)


def _kinds(environments: Mapping[str, Mapping[str, Any]], rows: Iterable[Row]) -> list[Mapping[str, Any]]:
    """The environments of ``rows``, those that differ in what matters."""
    kinds: list[Mapping[str, Any]] = []
    for key in dict.fromkeys(row.env for row in rows):
        found = environments.get(key)
        if found is not None and all(environment_changes([found], [kind]) for kind in kinds):
            kinds.append(found)
    return kinds


def _differing_entries(kinds: Sequence[Mapping[str, Any]]) -> list[str]:
    entries = {change.key for kind in kinds[1:] for change in environment_changes([kinds[0]], [kind])}
    return sorted(entries)


def _unknown(side: str, sweep: Sweep, rows: Sequence[Row]) -> Iterator[str]:
    """Rows of a task that was lost with its machine, for one."""
    names = [row.name for row in rows if row.env not in sweep.environments]
    if sweep.environments and names:
        yield f"{side} does not tell in which environment {a_few(names, _SHOWN)} ran."


def _ran_elsewhere(base: Sweep, new: Sweep, pairs: Sequence[tuple[Row, Row]]) -> Iterator[str]:
    known: dict[tuple[str, str], bool] = {}
    names = []
    for old, now in pairs:
        if old.env not in base.environments or now.env not in new.environments:
            continue
        both = (old.env, now.env)
        if both not in known:
            known[both] = bool(environment_changes([base.environments[old.env]], [new.environments[now.env]]))
        if known[both]:
            names.append(now.name)
    if names:
        count = f"{len(names)} of {len(pairs)} models"
        yield f"{count} ran in another environment than in BASE, which may be why they changed: {a_few(names, _SHOWN)}."
