"""Judge a night against what is expected of every model.

An expectation is a row of a CSV of expected rows, else that of the night before. Whether anything got worse is decided
by :mod:`hashbench.core.report.compare` alone; an :class:`ExpectationStatus` says the same more finely, with the
history.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hashbench.core.catalog import Kind, Word, kind_of
from hashbench.core.errors import HashbenchError
from hashbench.core.extensions import remarks_on, shown
from hashbench.core.records import ExpectedRow, Row
from hashbench.core.report.compare import (
    VERBS,
    Became,
    ModelChange,
    RowChange,
    compare,
    is_new_trouble,
    new_in_words,
    tracer_remark,
    what_happened,
)
from hashbench.core.report.sentence import Clause, Explained, WorsenedRow, clauses_of, explained
from hashbench.core.results.load import Sweep, load_sweep
from hashbench.core.results.rows import row_key
from hashbench.core.text import count, listed
from hashbench.extensions.report.history import History, Interval, ModelHistory, Night, load_history, seen, sweep_of
from hashbench.extensions.report.night_cases import explain

STALE_AFTER = 30
"""Nights in which a model ran without showing what is expected, after which the expectation is stale."""


class ExpectationStatus(Word):
    """How a night compares with what is expected of a model, the worst first.

    Attributes:
        meaning: a sentence that explains the word.
        advice: what to do where the row itself does not say.
    """

    meaning: str
    advice: str

    NEW_DIFFERENCE = (
        "new difference",
        "It was fine, and two runs differ now.",
        "Sweep it again with more --replays, for a diagnosis.",
    )
    NEW_LATENT = (
        "newly flaky",
        "It passes, as before, and differs under stress, which it did not.",
        "Sweep it again with --stress and more --replays, for a diagnosis.",
    )
    BROKEN = (
        "broken",
        "It fails now, and did not before, or failed in another way.",
        "Run it again alone (hashbench sweep --only NAME); its log is in the sweep's folder.",
    )
    MOVED = (
        "moved",
        "It differed before, and now in another place or for another reason.",
        "Compare both diagnoses; the earlier one stands in the night before.",
    )
    MISSING = (
        "missing",
        "It was asked for and left no result: absent is not equal.",
        "Look whether the sweep ended, and go on with it: hashbench sweep --resume.",
    )
    NOW_SKIPPED = (
        "now skipped",
        "It was run before and is skipped now: a difference could hide there.",
        "Read the reason, and sweep it again once that is gone.",
    )
    NOT_COMPARABLE = (
        "not comparable",
        "It ran under other conditions: whether it got worse is not known.",
        "Sweep again under the same conditions, or make a new baseline for these.",
    )
    UNEXPECTED = "no expectation", "Nothing says what to expect of it.", ""
    STALE = (
        "stale",
        "What is expected of it has not been seen for a long time: the expectation can go.",
        "Take it out of the CSV of what is expected.",
    )
    FIXED = "fixed", "It did not pass and passes now.", ""
    PASSES_ELSEWHERE = (
        "passes under other settings",
        "It passes under other settings than before, under which it was not run.",
        "Sweep it again under the settings of before, or make a new baseline for these.",
    )
    NOT_SEEN = "not seen", "It differs now and then, and did not this time: that is not fixed.", ""
    MET = "as expected", "It does what it did before.", ""
    NOT_ASKED = "not asked for", "The last night was not asked to run it.", ""


AS_BEFORE = (Became.UNCHANGED, Became.STILL_DIFFERS, Became.STILL_FAILS, Became.STILL_SKIPPED)
_STATUS_OF = {
    Became.NEW: ExpectationStatus.UNEXPECTED,
    Became.NOT_SELECTED: ExpectationStatus.NOT_ASKED,
    **dict.fromkeys(AS_BEFORE, ExpectationStatus.MET),
}
"""Outcomes with another word here; ``regressed`` and ``fails differently`` depend on the new status."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement(RowChange[Row]):
    """One model of a night, compared with ``base``: an expected row or the row of the night before.

    Attributes:
        status: the verdict.
        expected: ``base`` is an expected row.
        since, link, seen: columns of the expected row.
        unseen: last consecutive nights in which the model ran without the expected trouble.
    """

    status: ExpectationStatus
    expected: bool = False
    since: str = ""
    link: str = ""
    seen: str = ""
    unseen: int = 0

    @property
    def worse(self) -> bool:
        """True if it got worse, as ``hashbench compare`` decides it."""
        return self.outcome.worse

    @property
    def word(self) -> str:
        """The status in words: nothing is *as expected* where only the night before is known."""
        return "as last night" if self.status is ExpectationStatus.MET and not self.expected else str(self.status)

    @property
    def before(self) -> str:
        """The status of ``base``; empty where there is none."""
        return self.base.accuracy if self.base else ""

    @property
    def now(self) -> str:
        """The status of ``new``; empty where there is none."""
        return self.new.accuracy if self.new else ""

    @property
    def in_trouble(self) -> bool:
        """True if the model differs or fails now."""
        return kind_of(self.now).is_trouble

    @property
    def message(self) -> str:
        """One line: what was seen, what was expected, and why."""
        source = "expected" if self.expected or self.base is None else "last night"
        note = f"; {self.note}" if self.note else ""
        link = f" {self.link}" if self.link else ""
        before = self.expected_as(self.before or "nothing") + self.not_seen
        return f"{self.word}: {seen(self.new)} ({source}: {before}){note}{link}"

    def expected_as(self, status: str) -> str:
        """Return ``status``, and the date since which it is expected."""
        return f"{status} since {self.since}" if self.since else status

    @property
    def not_seen(self) -> str:
        """``, not seen for 3 nights``; empty where the last night shows it."""
        return f", not seen for {count(self.unseen, 'night')}" if self.unseen else ""


@dataclass(frozen=True, slots=True)
class JudgedNight:
    """The last night of ``history``, judged. Problems of the night itself make it worse.

    Attributes:
        history: all nights.
        judgements: every model of either side, the worst first.
        before: index of the last earlier night with rows; ``None``: there is none.
        remarks: sentences on what cannot be compared.
        clauses: why models got worse, the most severe reason first; empty if none did.
        found: models that differ or fail and have nothing to compare with.
    """

    history: History
    judgements: tuple[Judgement, ...]
    before: int | None = None
    remarks: tuple[str, ...] = ()
    clauses: tuple[Clause, ...] = ()
    found: tuple[Explained, ...] = ()

    @property
    def night(self) -> Night:
        """The judged night."""
        return self.history.nights[-1]

    @property
    def last(self) -> str:
        """Label of the night before; empty where there is none, or no model of it can be compared."""
        return "" if self.before is None or self.alone else self.history.nights[self.before].label

    @property
    def got_worse(self) -> bool:
        """True if any model got worse, or the night itself is incomplete."""
        return bool(self.night.problems) or any(judgement.worse for judgement in self.judgements)

    @property
    def alone(self) -> bool:
        """True if there was nothing to compare with: no model has a row on both sides, and none is missing. The report
        then says what the night found."""
        return not any(
            judgement.base is not None and (judgement.new is not None or judgement.worse)
            for judgement in self.judgements
        )

    @property
    def failed(self) -> bool:
        """True if ``--strict`` fails: it :attr:`got_worse` or, of a night :attr:`alone`, a model differs or fails."""
        return self.got_worse or (self.alone and any(judgement.in_trouble for judgement in self.judgements))

    @property
    def verdict(self) -> str:
        """One line: whether anything got worse, and what; of a night :attr:`alone`, what differs and fails."""
        worse = Counter(judgement.status for judgement in self.judgements if judgement.worse)
        parts = [f"{number} {word}" for word, number in worse.items()]
        if self.night.problems:
            parts.append(count(len(self.night.problems), "problem") + " of the night itself")
        if self.alone:
            return "; ".join([counted(self.judgements), *parts])
        unknown = set(worse) == {ExpectationStatus.NOT_COMPARABLE} and not self.night.problems
        verb = "whether anything got worse is not known" if unknown else "worse"
        found = f"{verb}: {', '.join(parts)}" if parts else "nothing got worse"
        new = new_in_words(self.new_trouble)
        return "; ".join(filter(None, (new, found if new else f"{found[:1].upper()}{found[1:]}"))) + self.not_compared

    @property
    def new_trouble(self) -> tuple[Judgement, ...]:
        """Rows that differ or fail and have nothing to compare with; none of a night :attr:`alone`."""
        return () if self.alone else tuple(filter(is_new_trouble, self.judgements))

    @property
    def not_compared(self) -> str:
        """``; 3 more rows had nothing to compare with: 1 was skipped and 2 pass``, without :attr:`new_trouble`; empty
        where each has, and of a night :attr:`alone`."""
        unmatched = [
            judgement for judgement in self.judgements if judgement.base is None and not is_new_trouble(judgement)
        ]
        if not unmatched or self.alone:
            return ""
        rows = "more row" if self.new_trouble else "row"
        return f"; {count(len(unmatched), rows)} had nothing to compare with: {_kinds_in_words(unmatched)}"

    def word_of(self, judgement: Judgement) -> str:
        """Return the status of a judgement in words; of a night :attr:`alone`, what is seen."""
        return VERBS[kind_of(judgement.now)][0] if self.alone else judgement.word

    def message_of(self, judgement: Judgement) -> str:
        """Return one line: what is seen, what was expected, and why; of a night :attr:`alone`, what and where."""
        if self.alone and judgement.new is not None:
            return "; ".join(filter(None, (seen(judgement.new), what_happened(judgement.new))))
        return judgement.message


def counted(judgements: Collection[Judgement]) -> str:
    """Return ``Of 3 models, 1 differs and 2 pass``: the rows, compared with nothing."""
    rows = [judgement for judgement in judgements if judgement.new is not None]
    if not rows:
        return "There are no rows"
    if any(judgement.in_trouble for judgement in rows):
        return f"Of {rows_of_models(rows)}, {_kinds_in_words(rows)}"
    return f"None of {rows_of_models(rows)} differs or fails: {_kinds_in_words(rows)}"


def rows_of_models(judgements: Collection[Judgement]) -> str:
    """Return ``3 models``, or ``5 rows of 3 models`` where a model has rows of several modes, dtypes or devices."""
    models = len({(judgement.key[0], judgement.key[-1]) for judgement in judgements})
    words = count(models, "model")
    return words if models == len(judgements) else f"{count(len(judgements), 'row')} of {words}"


def _kinds_in_words(judgements: Iterable[Judgement]) -> str:
    """Return ``1 differs, 2 fail and 3 pass``, the worst first."""
    counts = Counter(kind_of(judgement.now) for judgement in judgements)
    return listed([f"{counts[kind]} {words[counts[kind] != 1]}" for kind, words in VERBS.items() if counts[kind]])


def expectation_status(outcome: Became, accuracy: str, *, expected: bool = True, unseen: int = 0) -> ExpectationStatus:
    """Return the status of a model that has the status ``accuracy`` now.

    Args:
        outcome: its outcome against what is expected.
        accuracy: its status.
        expected: a CSV expects its row; else it is compared with the night before.
        unseen: consecutive nights in which it ran without showing what is expected.
    """
    if outcome in (Became.REGRESSED, Became.FAILS_DIFFERENTLY) and kind_of(accuracy) is Kind.LATENT:
        return ExpectationStatus.NEW_LATENT
    if outcome in (Became.REGRESSED, Became.FAILS_DIFFERENTLY):
        return ExpectationStatus.NEW_DIFFERENCE if kind_of(accuracy) is Kind.DIFFER else ExpectationStatus.BROKEN
    if expected and outcome in (Became.FIXED, Became.NOT_SEEN) and unseen >= STALE_AFTER:
        return ExpectationStatus.STALE
    return _STATUS_OF.get(outcome) or ExpectationStatus(outcome.value)


def unseen_nights(model: ModelHistory | None, expected: Row) -> int:
    """Count the last consecutive nights in which the model ran without showing what is ``expected``. Nights without a
    row of it, or in which it was skipped, are passed over."""
    count = 0
    for interval in reversed(model.intervals if model else ()):
        if kind_of(interval.accuracy) is Kind.SKIP:
            continue
        if _shows(interval, expected):
            return count
        count += interval.nights
    return count


def _shows(interval: Interval, expected: Row) -> bool:
    tracers = {interval.tracer, expected.tracer} - {""}
    kernels = {interval.kernel, expected.kernel} - {""} if len(tracers) <= 1 else ()
    return interval.accuracy == expected.accuracy and len(kernels) <= 1


def judge(
    history: History,
    new: Sweep,
    *,
    expected: Sweep | None = None,
    last: Sweep | None = None,
    before: int | None = None,
) -> JudgedNight:
    """Judge every model of the last night of ``history`` against what is expected of it.

    Args:
        history: with ``new`` as its last night.
        new: the full rows of that night.
        expected: rows of CSVs such as ``results/expected``.
        last: an earlier night, expected of models that ``expected`` does not have.
        before: the index of that night in ``history``.

    Raises:
        HashbenchError: the rows cannot be compared; see :func:`~hashbench.core.report.compare.compare`.
    """
    known = {row_key(row) for row in expected.rows} if expected else set()
    others = [row for row in (last.rows if last else ()) if row_key(row) not in known]
    rows = (*(expected.rows if expected else ()), *others)
    base = Sweep(label="what is expected", rows=rows, environments={}, kind="hashbench")
    models = {model.key: model for model in history.models}
    judgements = []
    for change in changes_since(base, new):
        key = row_key(change.base) if change.base else ()
        judgements.append(_judgement(change, models.get(change.key), expected=key in known))
    order = list(ExpectationStatus)
    judgements.sort(
        key=lambda judgement: (
            not is_new_trouble(judgement),
            not judgement.worse,
            order.index(judgement.status),
            judgement.key,
        )
    )
    before_it = {row_key(row): row for row in (last.rows if last else ())}
    cases = [
        WorsenedRow(change=one, new=new, before=before_it.get(one.key), base=last) for one in _to_explain(judgements)
    ]
    judged = _with_reasons(JudgedNight(history, tuple(judgements), before), map(explained, cases))
    return replace(judged, remarks=tuple(_remarks(judged, new, expected)))


def changes_since(base: Sweep, new: Sweep) -> tuple[ModelChange, ...]:
    """Compare each row with ``base``, which may be empty; other devices and dtypes have no counterpart."""
    if not base.rows:
        return tuple(RowChange(key=row_key(row), outcome=Became.NEW, base=None, new=shown(row)) for row in new.rows)
    return compare(base, new, scoped=True).changes


def _judgement(change: ModelChange, model: ModelHistory | None, *, expected: bool) -> Judgement:
    base, new = change.base, change.new
    expected_row = base if expected and isinstance(base, ExpectedRow) else None
    trouble = expected and base is not None and not kind_of(base.accuracy).is_fine
    unseen = unseen_nights(model, base) if base is not None and trouble else 0
    status = expectation_status(change.outcome, new.accuracy if new else "", expected=expected, unseen=unseen)
    return Judgement(
        *(change.key, change.outcome, base, new, change.note),
        status=status,
        expected=expected,
        since=expected_row.since if expected_row else "",
        link=expected_row.link if expected_row else "",
        seen=expected_row.seen if expected_row else "",
        unseen=unseen,
    )


def _remarks(judged: JudgedNight, new: Sweep, expected: Sweep | None) -> Iterator[str]:
    history, before = judged.history, judged.before
    if before is None:
        yield "There is no earlier night to compare with."
    elif judged.alone:
        yield f"No model of {history.nights[before].label} is one of this night: nothing was compared with it."
    elif before < len(history.nights) - 2:
        yield f"The nights after {history.nights[before].label} have no rows."
    if expected is None:
        before_it = "" if before is None or judged.alone else ": models are compared with the night before"
        yield f"Nothing says what is expected (--expected){before_it}."
    elif judged.alone:
        yield f"None of the {count(len(expected.rows), 'row')} of what is expected is of a model of this night."
    if retraced := tracer_remark(
        (judgement.base, judgement.new) for judgement in judged.judgements if judgement.base and judgement.new
    ):
        yield retraced
    if not new.environments:
        yield "This night has no environment.json: whether the machine or its settings changed is not known."


# ---------------------------------------------------------------------------------------------- from folders


def assess(folders: Sequence[Path | str], *, expected: Path | None = None, until: Path | None = None) -> JudgedNight:
    """Judge the last night at ``folders``.

    Args:
        folders: as :func:`~hashbench.extensions.report.history.load_history` takes them.
        expected: a CSV of expected rows, or a folder of such.
        until: the folder of the night that is to be the last; later ones are left out.

    Raises:
        HashbenchError: a folder or file cannot be read, or ``expected`` is not a CSV of hashbench's.
    """
    wanted = load_sweep(expected) if expected is not None else None
    if wanted is not None and wanted.kind != "hashbench":
        raise HashbenchError(
            f"{expected} is dynamo's",
            consequence="without suites, modes and kernels, it cannot be a baseline of a night",
            tip="Compare with it by `hashbench compare`, or make one by `hashbench expect`.",
        )
    history = load_history(folders, until=until)
    new = sweep_of(history.nights[-1])
    before = next((index for index in range(len(history.nights) - 2, -1, -1) if history.nights[index].counts), None)
    last = sweep_of(history.nights[before]) if before is not None else None
    judged = judge(history, new, expected=wanted, last=last, before=before)
    judged = _with_reasons(judged, explain(_to_explain(judged.judgements), history, before=before))
    if last is None or before is None:
        return judged
    rows = {row_key(row): row for row in last.rows}
    pairs = [(rows.get(row_key(row)), row) for row in new.rows]
    files = {"base": history.nights[before].files, "new": history.nights[-1].files}
    about = remarks_on(pairs, **files)
    return replace(judged, remarks=(*judged.remarks, *about))


def _to_explain(judgements: Iterable[Judgement]) -> list[Judgement]:
    """Return what got worse, and what differs or fails and has nothing to compare with."""
    return [judgement for judgement in judgements if judgement.worse or is_new_trouble(judgement)]


def _with_reasons(judged: JudgedNight, known: Iterable[Explained]) -> JudgedNight:
    """Return the night with the reasons of its models, those of :func:`_to_explain`."""
    models = list(known)
    worse = [model for model in models if model.change.outcome.worse]
    return replace(judged, clauses=clauses_of(worse), found=tuple(model for model in models if model not in worse))
