"""Compare two sweeps model by model. Pure: reads no file, prints nothing.

:func:`decide` is the rule, on two statuses; the rest pairs the rows.
"""

from __future__ import annotations

import json
import operator
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from hashbench.core.catalog import CAUSES, Confidence, Kind, Origin, Word, kind_of
from hashbench.core.errors import HashbenchError
from hashbench.core.extensions import all_words, condition_of, shown, words_for
from hashbench.core.records import MODES, Row, value_of
from hashbench.core.results.load import Sweep
from hashbench.core.results.rows import row_key
from hashbench.core.text import count, join_limited, listed, one_line, shorten
from hashbench.core.trace.file import OTHER_OPS


class Became(Word):
    """Outcomes of one row, the worst first; some are of models alone, some of audits, of nondeterminism or of batch
    invariance. Not worse: what is as bad as before (``still …``), unknown to BASE (``new``), or not asked of NEW.

    Attributes:
        worse: it makes a comparison exit with 1.
    """

    worse: bool

    REGRESSED = "regressed", True  # it was no failure and now it is one
    BECAME_NONDETERMINISTIC = "became nondeterministic", True
    BECAME_DEPENDENT = "became dependent", True
    NOW_RAISES = "now raises", True
    NOW_SKIPPED = "now skipped", True  # what was looked at is not looked at any more: a difference could hide there
    NOT_MEASURED = "not measured any more", True  # likewise
    MISSING = "missing", True  # it was asked for and left no result: absent is never equal
    MOVED = "moved", True  # a kernel that nobody knew to differ, or one that differs for another reason
    FAILS_DIFFERENTLY = "fails differently", True  # the failure that is known is not the failure that is seen
    NOT_COMPARABLE = "not comparable", True  # it may have got worse; unknown is never equal
    DIFFERS_DIFFERENTLY = "differs differently", False
    DEPENDS_DIFFERENTLY = "depends differently", False
    STILL_DIFFERS = "still differs", False
    STILL_FAILS = "still fails", False
    FIXED = "fixed", False
    BECAME_INVARIANT = "became invariant", False
    NOT_SEEN = "not seen", False
    PASSES_ELSEWHERE = "passes under other settings", False  # those of before were not looked at; a pass is not worse
    MEASURED_NOW = "measured now", False
    NEW = "new", False
    STILL_SKIPPED = "still skipped", False
    NOT_SELECTED = "not selected", False
    NOT_ASKED = "not asked for", False
    DOCUMENTED_DIFFERENTLY = "documented differently", False
    UNCHANGED = "unchanged", False


CONDITIONS = ("dev", "dtype", "batch_size", "iterations", "runs", "threads", "deterministic")
"""Columns that must be equal, where both rows have them, for two results to be comparable. So must ``backend``, also
where one has none: that one says nothing of a compiled program."""

PLACE = ("origin", "kernel", "module")
"""Columns that locate the first divergence."""

BY_PYTHON: frozenset[str] = frozenset({Origin.SEQUENCE, Origin.OUTSIDE})
"""Origins of an order or a value from outside torch. Kernel and module are where it happened to show: the branch whose
thread finished first, the call that met the value. A second such source in one model may go unnoticed."""


R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class RowChange(Generic[R]):
    """The outcome of one row.

    Attributes:
        key: identifies the row (:data:`~hashbench.core.records.ROW_KEY`).
        outcome: the verdict.
        base, new: the rows; ``None`` where a side has none.
        note: one line on the difference.
        whole_group: no model of its suite, mode, dtype and device is on the other side.
    """

    key: tuple[str, ...]
    outcome: Became
    base: R | None
    new: R | None
    note: str = ""
    whole_group: bool = False


@dataclass(frozen=True, slots=True)
class Comparison(Generic[R]):
    """Two tables compared.

    Attributes:
        base, new: their labels.
        environment: entries of the environment that differ.
        changes: every row of either side, the worst first.
        remarks: sentences on the limits of this comparison.
    """

    base: str
    new: str
    environment: tuple[EnvironmentChange, ...]
    changes: tuple[RowChange[R], ...]
    remarks: tuple[str, ...] = ()

    @property
    def counts(self) -> dict[Became, int]:
        """Number of rows with each outcome, the worst first, without zeros."""
        counts = Counter(change.outcome for change in self.changes)
        return {outcome: counts[outcome] for outcome in Became if counts[outcome]}

    @property
    def got_worse(self) -> bool:
        """True if any outcome is worse."""
        return any(change.outcome.worse for change in self.changes)

    @property
    def compared(self) -> int:
        """Number of rows on both sides."""
        return sum(change.base is not None and change.new is not None for change in self.changes)

    @property
    def unpaired(self) -> tuple[int, int]:
        """Number of rows only in BASE, and only in NEW."""
        return sum(change.new is None for change in self.changes), sum(change.base is None for change in self.changes)


ModelChange = RowChange[Row]


def require_overlap(comparison: Comparison[Any]) -> None:
    """Raise :class:`HashbenchError` if no row is on both sides: whether anything got worse is unknown then."""
    if comparison.compared:
        return
    base, new = comparison.unpaired
    if not new:
        raise HashbenchError(
            f"{comparison.new} holds no rows",
            consequence=f"nothing was compared: {count(base, 'row')} of BASE ({comparison.base}) without a partner",
            tip="Name a finished sweep; one that was stopped goes on with `hashbench sweep --resume`.",
        )
    raise HashbenchError(
        f"{comparison.base} and {comparison.new} have no row in common",
        consequence=f"nothing was compared: {count(base, 'row')} of BASE ({_groups(comparison, 'base')}) and {new} of "
        f"NEW ({_groups(comparison, 'new')}) without a partner",
        tip="Name two results of the same models, suite and mode; `hashbench report` shows one sweep alone.",
    )


def _groups(comparison: Comparison[Any], side: str) -> str:
    """Return the suites, modes, dtypes and devices of the rows of a side."""
    keys = (change.key[:-1] for change in comparison.changes if getattr(change, side) is not None)
    return join_limited(list(dict.fromkeys(" ".join(filter(None, key)) for key in keys)), 3)


def worst_first(changes: Iterable[RowChange[R]]) -> tuple[RowChange[R], ...]:
    """Sort ``changes`` by outcome, stably."""
    order = list(Became)
    return tuple(sorted(changes, key=lambda change: order.index(change.outcome)))


def is_new_trouble(change: RowChange[Row]) -> bool:
    """Return True for a row that differs or fails and that BASE does not have."""
    return change.base is None and change.new is not None and kind_of(change.new.accuracy).is_trouble


def new_trouble_first(changes: Iterable[RowChange[Row]]) -> tuple[RowChange[Row], ...]:
    """Sort ``changes`` stably: rows that differ or fail and had no counterpart, then by outcome."""
    return tuple(sorted(worst_first(changes), key=lambda change: not is_new_trouble(change)))


VERBS = {
    Kind.DIFFER: ("differs", "differ"),
    Kind.LATENT: ("is flaky", "are flaky"),
    Kind.FAIL: ("fails", "fail"),
    Kind.PASS: ("passes", "pass"),
    Kind.SKIP: ("was skipped", "were skipped"),
    Kind.ABSENT: ("has no row", "have no row"),
}
"""Verbs for one model and for several."""

NAMED = 3
"""Maximum models named in a headline; more are counted."""


def named(changes: Iterable[RowChange[Row]]) -> str:
    """Join the names of models as ``a, b and c``; return "" for more than :data:`NAMED`."""
    names = list(dict.fromkeys(shorten(one_line(change.key[-1]), 40) for change in changes))
    return listed(names) if len(names) <= NAMED else ""


def new_in_words(changes: Iterable[RowChange[Row]]) -> str:
    """Return ``race is new and differs; a and b are new and fail``; empty where no row in trouble is new."""
    by_kind: dict[Kind, list[RowChange[Row]]] = {kind: [] for kind in VERBS}
    for change in changes:
        if is_new_trouble(change) and change.new is not None:
            by_kind[kind_of(change.new.accuracy)].append(change)
    parts = []
    for kind, same in by_kind.items():
        if same:
            several = len({change.key[-1] for change in same}) > 1
            names = named(same) or count(len(same), "row")
            parts.append(f"{names} {'are' if several else 'is'} new and {VERBS[kind][several]}")
    return "; ".join(parts)


# ------------------------------------------------------------------------------------------------ the rule


def decide(
    base: str,
    new: str,
    *,
    selected: bool = True,
    same_backend: bool = True,
    comparable: bool = True,
    same_place: bool = True,
    always: bool = True,
    stressed: bool = True,
) -> Became:
    """Return the outcome of a model with the status ``base`` that now has ``new``; ``""``: no row.

    Args:
        base: status in BASE.
        new: status in NEW.
        selected: NEW was asked to run this model.
        same_backend: both compared the same programs: one without a backend says nothing of compiled code.
        comparable: both ran under the same conditions.
        same_place: both differ at the same origin, kernel and module, with no other proven cause; or that is unknown,
            since another tracer recorded other ops.
        always: as far as is known, the difference of ``base`` shows in every pair of runs; one that shows now and then
            is not fixed because two runs agree.
        stressed: ``base`` was stressed, too; else it says nothing about a flaky difference.

    Raises:
        ValueError: neither side has a row.
    """
    match (kind_of(base), kind_of(new)):
        case (Kind.ABSENT, Kind.ABSENT):
            raise ValueError("neither sweep has a row: there is nothing to decide")
        case (Kind.ABSENT, _):
            return Became.NEW
        case (_, Kind.ABSENT):
            return Became.MISSING if selected else Became.NOT_SELECTED
        case (_, Kind.PASS) if same_backend and not comparable:
            return Became.PASSES_ELSEWHERE
        case _ if not (same_backend and comparable):
            return Became.NOT_COMPARABLE
        case (Kind.PASS, Kind.PASS):
            return Became.UNCHANGED
        case (Kind.PASS | Kind.SKIP, Kind.LATENT) if not stressed:
            return Became.NEW
        case (Kind.DIFFER, Kind.LATENT):
            return Became.NOT_SEEN
        case (Kind.LATENT, Kind.DIFFER | Kind.LATENT) if same_place:
            return Became.STILL_DIFFERS
        case (Kind.LATENT, Kind.LATENT):
            return Became.MOVED
        case (Kind.FAIL, Kind.LATENT):
            return Became.FIXED
        case (Kind.SKIP, Kind.SKIP):
            return Became.STILL_SKIPPED
        case (_, Kind.SKIP):
            return Became.NOW_SKIPPED
        case (Kind.DIFFER | Kind.LATENT, Kind.PASS) if not always:
            return Became.NOT_SEEN
        case (_, Kind.PASS):
            return Became.FIXED
        case (Kind.DIFFER, Kind.DIFFER):
            return Became.STILL_DIFFERS if same_place else Became.MOVED
        case (Kind.PASS | Kind.SKIP | Kind.LATENT, _):
            return Became.REGRESSED
        case _:
            return Became.STILL_FAILS if base == new else Became.FAILS_DIFFERENTLY


# ------------------------------------------------------------------------------------------------- pairing

Pair = tuple[Row | None, Row | None]
"""The rows of one model in BASE and NEW; one may be absent."""

Pairs = Sequence[tuple[Row, Row]]
"""The rows of models on both sides."""


def compare(base: Sweep, new: Sweep, *, scoped: bool = False) -> Comparison[Row]:
    """Compare every model of ``base`` and ``new``.

    Rows are paired by equal keys; against dynamo's files, by device and name (by name where there is no device). A row
    whose only counterpart has another device or dtype is ``not comparable``; with ``scoped``, it has no counterpart.

    Raises:
        HashbenchError: BASE has no rows, or a side has several rows where the other side's files only have names.
    """
    if not base.rows:
        raise HashbenchError(
            f"{base.label} holds no rows", consequence="there is nothing to compare with", tip="Name a finished sweep."
        )
    pairs = _pairs(base, new, scoped=scoped)
    both = [(old, now) for old, now in pairs if old and now]
    # What was skipped ran nowhere; its row has the environment of the machine that began the sweep.
    ran = [pair for pair in both if not any(kind_of(row.accuracy) is Kind.SKIP for row in pair)]
    return Comparison(
        base=base.label,
        new=new.label,
        environment=_environment_changes(base, new, ran),
        changes=new_trouble_first(sorted(_changes(base, new, pairs), key=lambda change: change.key)),
        remarks=(*_remarks(base, new), *filter(None, [tracer_remark(ran)]), *_environment_remarks(base, new, ran)),
    )


def _pairs(base: Sweep, new: Sweep, *, scoped: bool) -> list[Pair]:
    exact, loose = _keys(base, new)
    first, second = ({key: shown(row) for key, row in _by_key(sweep, exact).items()} for sweep in (base, new))
    pairs: list[Pair] = [(row, second.pop(key, None)) for key, row in first.items()]
    pairs += [(None, row) for row in second.values()]
    if scoped:
        return pairs
    # A row that only BASE has belongs to one that only NEW has where their looser key makes them unique.
    alone_in_base = _unique((old for old, now in pairs if old and not now), loose)
    alone_in_new = _unique((now for old, now in pairs if now and not old), loose)
    joined: list[Pair] = [(row, alone_in_new[key]) for key, row in alone_in_base.items() if key in alone_in_new]
    taken = {id(row) for pair in joined for row in pair}
    return [pair for pair in pairs if id(_either(pair)) not in taken] + joined


def _either(pair: Pair) -> Row:
    """Return the row of NEW, else that of BASE."""
    row = pair[1] or pair[0]
    if row is None:
        raise ValueError("a pair has a row on one side at least")
    return row


RowKey = Callable[[Row], Hashable]


def _keys(base: Sweep, new: Sweep) -> tuple[RowKey, RowKey]:
    """Return two keys of rows: the exact one, and one that ignores device and dtype."""
    kinds = {base.kind, new.kind}
    name = operator.attrgetter("name")
    if "dynamo_expected" in kinds:
        return name, name
    if "dynamo" in kinds:
        return operator.attrgetter("dev", "name"), name
    return row_key, operator.attrgetter("suite", "mode", "name")


def _by_key(sweep: Sweep, key: RowKey) -> dict[Hashable, Row]:
    rows: dict[Hashable, Row] = {}
    for row in sweep.rows:
        if rows.setdefault(key(row), row) is not row:
            raise HashbenchError(
                f"{sweep.label} holds {row.name} more than once",
                consequence="the other side has no suites, modes and dtypes to match them by",
                tip="Name one of its CSVs.",
            )
    return rows


def _unique(rows: Iterable[Row], key: RowKey) -> dict[Hashable, Row]:
    candidates = tuple(rows)
    counts = Counter(map(key, candidates))
    return {key(row): row for row in candidates if counts[key(row)] == 1}


# ------------------------------------------------------------------------------------------------- changes


def _changes(base: Sweep, new: Sweep, pairs: Iterable[Pair]) -> Iterator[ModelChange]:
    ours = base.kind == new.kind == "hashbench"
    base_groups, new_groups = ({row_key(row)[:-1] for row in sweep.rows} for sweep in (base, new))
    suites = {row.suite for row in new.rows}.union(*(selection.suites for selection in new.selections))
    modes = {*MODES, *(row.mode for row in new.rows), *(selection.mode for selection in new.selections)}
    for pair in pairs:
        old, now = pair
        key = row_key(_either(pair))
        outcome = _outcome(pair, selected=_is_selected(new, _either(pair), suites, modes), places_known=ours)
        whole_group = ours and not (old and now) and key[:-1] not in (new_groups if old else base_groups)
        yield RowChange(key, outcome, old, now, _note(outcome, pair), whole_group)


def _outcome(pair: Pair, *, selected: bool, places_known: bool) -> Became:
    base, new = pair
    if base is None or new is None:
        return decide(base.accuracy if base else "", new.accuracy if new else "", selected=selected)
    return decide(
        base.accuracy,
        new.accuracy,
        same_backend=not (base.suite and new.suite) or base.backend == new.backend,
        comparable=not _other_conditions(base, new),
        same_place=not places_known or bool(other_tracer(base, new)) or not _moved(base, new),
        always=_always(base, new),
        stressed=any(words.looked(base) for words in all_words()),
    )


def _always(base: Row, new: Row) -> bool:
    """Return True if, as far as is known, the difference of ``base`` would have shown in ``new``."""
    if kind_of(base.accuracy) is Kind.LATENT:
        return any(words.looked(new) and words.always(base) for words in all_words())
    return base.rate is None or base.rate >= 1


def _is_selected(sweep: Sweep, row: Row, suites: Collection[str], modes: Collection[str]) -> bool:
    """Return True if ``sweep`` was asked to run ``row``.

    Without a ``sweep.json`` for its suite and mode, it counts as asked, unless it is known which suites and modes were
    to run, or there is no row of its suite (``suites``: those of NEW): training or inference that is gone may be lost,
    a suite that was never named was not meant. Nor was a mode with a flag of its own, as an invariance, of which NEW
    has nothing (``modes``: its own, and these two).
    """
    if sweep.parts is not None and (row.suite, row.mode) not in sweep.parts:
        return False
    if sweep.parts is None and sweep.selections and (row.suite not in suites or row.mode not in modes):
        return False
    selections = [selection for selection in sweep.selections if selection.concerns(row)]
    return not selections or any(selection.covers(row) for selection in selections)


def _moved(base: Row, new: Row) -> list[str]:
    """Return the columns that show another difference; cause and stage only where both sides have established one."""
    established = all((cause := CAUSES.get(row.cause)) and cause.decided for row in (base, new))
    open_ = Confidence.OPEN in (base.confidence, new.confidence)
    # Flaky models differ as others do; of the same kind, eager runs that differ are no inaccurate compiled run.
    statuses = ("accuracy",) if kind_of(base.accuracy) is kind_of(new.accuracy) else ()
    stages = [] if open_ else [column for words in all_words() for column in words.moved(base, new)]
    causes = ("cause",) if established and not open_ else ()
    place: tuple[str, ...] = PLACE
    if {base.origin, new.origin} <= BY_PYTHON:  # one cause shows as an order or as a value, as time will have it
        place = () if causes and base.cause == new.cause else ("origin",)
    return _differing(base, new, (*statuses, *place, *stages, *causes))


def other_tracer(base: Row, new: Row) -> str:
    """Return ``python → native`` if the rows were recorded by different tracers, whose kernels are not compared; else
    empty."""
    known = base.tracer and new.tracer
    return f"{base.tracer} → {new.tracer}" if known and base.tracer != new.tracer else ""


def tracer_remark(pairs: Iterable[tuple[Row, Row]]) -> str:
    """Return a sentence on compared rows of different tracers; empty where there are none."""
    retraced = Counter(filter(None, (other_tracer(old, now) for old, now in pairs)))
    if not retraced:
        return ""
    rows, which = count(sum(retraced.values()), "row"), " and ".join(sorted(retraced))
    return f"The tracer of {rows} is another ({which}): {OTHER_OPS}, so their kernels and causes are not compared."


def _other_conditions(base: Row, new: Row) -> list[str]:
    known = [column for column in CONDITIONS if not {getattr(base, column), getattr(new, column)} & {None, ""}]
    ours = base.suite and new.suite  # PyTorch's harness does not tell which backend it judged
    return _differing(base, new, (*known, "backend") if ours else known)


def _differing(base: Row, new: Row, columns: Iterable[str]) -> list[str]:
    """Return ``column old → new`` for every column that differs."""
    values = {column: (value_of(base, column), value_of(new, column)) for column in columns}
    return [f"{column} {_or_none(old)} → {_or_none(now)}" for column, (old, now) in values.items() if old != now]


def _or_none(value: object) -> str:
    return "(none)" if value in (None, "") else str(value)


def _note(outcome: Became, pair: Pair) -> str:
    base, new = pair
    if base and new and outcome is Became.NOT_COMPARABLE:
        return "; ".join(_other_conditions(base, new))
    if base and new and outcome is Became.PASSES_ELSEWHERE:
        return "; ".join(filter(None, (*_other_conditions(base, new), what_happened(base))))
    if base and new and outcome is Became.MOVED:
        return "; ".join(_moved(base, new))
    if base and new and outcome is Became.STILL_DIFFERS and (tracers := other_tracer(base, new)) and _moved(base, new):
        return f"tracer {tracers}, so kernels are not compared; {what_happened(new)}"
    if base and new and outcome is Became.STILL_DIFFERS and {base.origin, new.origin} <= BY_PYTHON:
        before, now = what_happened(base), what_happened(new)
        return now if now == before else f"{now}; in BASE {before}"
    row = base if outcome in (Became.FIXED, Became.NOT_SEEN) else new
    return what_happened(row) if row else ""


def what_happened(row: Row) -> str:
    """Return the error of a row that failed, or where one that differs diverges, with the stage of the compiler."""
    if (words := words_for(row)) is not None:
        return ": ".join(filter(None, (words.place(row), row.error)))
    where = " in ".join(filter(None, (row.kernel, row.module))) if row.kernel else ""
    under = condition_of(row)
    return row.error or ": ".join(filter(None, (row.origin or under, where)))


# -------------------------------------------------------------------------------------------- environments

VOLATILE = frozenset(
    {
        # when and by whom: new for every sweep, and no cause of another result
        *("date", "time", "timestamp", "started", "finished", "created", "pid", "user", "uptime", "load"),
        # where: the same machine under another name, another folder
        *("host", "hostname", "node", "output", "folder", "cwd", "working_directory"),
        # which models, spelled as flags; what matters of it stands in the rows
        *("command", "command_line", "argv"),
        # by which function digests are made on a device: they are the same by any
        "digests",
        # why, not which
        "tracer_reason",
        # about the file, not about the machine
        *("schema", "env", "key"),
    }
)
"""Names of entries that are ignored at any level of an environment."""


@dataclass(frozen=True, slots=True)
class EnvironmentChange:
    """An entry that differs: its dotted key and both values as text, empty where a side lacks it."""

    key: str
    base: str
    new: str

    def __str__(self) -> str:
        return f"{self.key}: {self.base or '(none)'} → {self.new or '(none)'}"


def environment_changes(
    base: Iterable[Mapping[str, Any]], new: Iterable[Mapping[str, Any]]
) -> tuple[EnvironmentChange, ...]:
    """Return every entry that differs, sorted by key; several values on one side as ``a or b``."""
    first, second = merged(base), merged(new)
    return tuple(
        EnvironmentChange(key=key, base=first.get(key, ""), new=second.get(key, ""))
        for key in sorted(first.keys() | second.keys())
        if first.get(key, "") != second.get(key, "")
    )


def merged(environments: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Merge the entries of several environments by dotted key; several values of one become ``a or b``."""
    values: dict[str, set[str]] = {}
    for environment in environments:
        for key, value in flat(environment).items():
            values.setdefault(key, set()).add(value)
    return {key: " or ".join(sorted(texts)) for key, texts in values.items()}


def flat(environment: Mapping[str, Any]) -> dict[str, str]:
    """Flatten an environment into dotted keys and values as text, without volatile and empty entries."""
    entries: dict[str, str] = {}
    for name, value in environment.items():
        if name.lower() in VOLATILE:
            continue
        if isinstance(value, Mapping):
            entries |= {f"{name}.{key}": text for key, text in flat(value).items()}
        elif value != "":
            entries[name] = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return entries


# ------------------------------------------------------------------------------------------------- remarks


def _environment_changes(base: Sweep, new: Sweep, ran: Pairs) -> tuple[EnvironmentChange, ...]:
    """Compare the environments of the compared rows (of all rows where none is named); empty where a side has none."""
    if not base.environments or not new.environments:
        return ()
    used = []
    for sweep, rows in ((base, [old for old, _ in ran]), (new, [now for _, now in ran])):
        named = {row.env for row in rows} & sweep.environments.keys() or sweep.environments.keys()
        used.append([environment for key, environment in sweep.environments.items() if key in named])
    return environment_changes(*used)


def _remarks(base: Sweep, new: Sweep) -> Iterator[str]:
    for side, sweep in (("BASE", base), ("NEW", new)):
        if sweep.kind == "hashbench" and not sweep.environments:
            yield f"{side} has no environment.json: whether the machine or its settings changed is not known."
        if sweep.kind == "dynamo":
            yield f"{side} is dynamo's: rows are matched by device and name, and it names no kernels."
        if sweep.kind == "dynamo_expected":
            yield f"{side} is a list that dynamo's CI expects: rows are matched by name alone, and it names no kernels."


_SHOWN = 4


def _environment_remarks(base: Sweep, new: Sweep, ran: Pairs) -> Iterator[str]:
    """Yield sentences on rows of several machines: both sides may have the same environments while a model ran on
    another machine in each. Nothing where each side has one environment, since their differences are shown."""
    old_entries, new_entries = (
        {key: flat(environment) for key, environment in sweep.environments.items()} for sweep in (base, new)
    )
    several = False
    for side, known, rows in (
        ("BASE", old_entries, [old for old, _ in ran]),
        ("NEW", new_entries, [now for _, now in ran]),
    ):
        used = [known[key] for key in dict.fromkeys(row.env for row in rows) if key in known]
        kinds = [kind for number, kind in enumerate(used) if kind not in used[:number]]
        if len(kinds) > 1:
            several = True
            entries = {entry for kind in kinds for entry in kind.items() ^ kinds[0].items()}
            where = join_limited(sorted({name for name, _ in entries}), _SHOWN)
            yield f"{side} mixes {len(kinds)} environments, which differ in {where}."
        unknown = [row.name for row in rows if row.env not in known]
        if known and unknown:  # of a task that was lost with its machine, for one
            yield f"{side} does not say in which environment {join_limited(unknown, _SHOWN)} ran."
    elsewhere = [
        now.name
        for old, now in (ran if several else ())
        if old.env in old_entries and now.env in new_entries and old_entries[old.env] != new_entries[now.env]
    ]
    if elsewhere:
        share, names = f"{len(elsewhere)} of {count(len(ran), 'model')}", join_limited(elsewhere, _SHOWN)
        yield f"{share} ran in another environment than in BASE, which may be why they changed: {names}."
