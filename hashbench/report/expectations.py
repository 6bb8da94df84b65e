"""What is expected of every model, and what tonight makes of that.

An expectation is a row of a CSV of expected rows, else last night's. Whether anything got worse is decided by
:mod:`hashbench.report.compare` alone; an :class:`ExpectationStatus` says the same more finely, with the history.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Self

from hashbench.catalog import Kind, kind_of
from hashbench.errors import HashbenchError
from hashbench.records import ExpectedRow, Row
from hashbench.report.compare import Change, ModelChange, Outcome, compare, tracer_remark, what_happened
from hashbench.report.history import History, Interval, ModelHistory, Night, load_history, seen
from hashbench.report.kernels import kernel_remarks
from hashbench.results.load import Sweep, load_files, load_sweep
from hashbench.results.rows import row_key
from hashbench.text import count, told

STALE_AFTER = 30
"""Nights in which a model ran and did not show what is expected of it, before that is called stale."""


class ExpectationStatus(StrEnum):
    """How tonight compares with what is expected of a model, the worst first.

    ``meaning`` is for somebody who reads the word for the first time, ``advice`` says what to do where the row itself
    does not.
    """

    meaning: str
    advice: str

    def __new__(cls, word: str, meaning: str = "", advice: str = "") -> Self:
        member = str.__new__(cls, word)
        member._value_ = word
        member.meaning, member.advice = meaning, advice
        return member

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
    UNEXPECTED = "no expectation", "Nothing says what to expect of it."
    STALE = (
        "stale",
        "What is expected of it has not been seen for a long time: the expectation can go.",
        "Take it out of the CSV of what is expected.",
    )
    FIXED = "fixed", "It did not pass and passes now."
    NOT_SEEN = "not seen", "It differs now and then, and did not this time: that is not fixed."
    MET = "as expected", "It does what it did before."
    NOT_ASKED = "not asked for", "The last night was not asked to run it."


AS_BEFORE = (Outcome.UNCHANGED, Outcome.STILL_DIFFERS, Outcome.STILL_FAILS, Outcome.STILL_SKIPPED)
_STATUS_OF = {
    Outcome.NEW: ExpectationStatus.UNEXPECTED,
    Outcome.NOT_SELECTED: ExpectationStatus.NOT_ASKED,
    **dict.fromkeys(AS_BEFORE, ExpectationStatus.MET),
}
"""Of outcomes that have another word here; ``regressed`` and ``fails otherwise`` depend on what is seen now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement(Change[Row, Outcome]):
    """One model tonight: what became of it since ``base``, a row of an expected CSV (``expected``) or last night's.
    ``since``, ``link`` and ``seen`` are what the expected CSV says of it. ``unseen`` counts the last nights in a row in
    which the model ran and did not show the trouble that is expected."""

    status: ExpectationStatus
    expected: bool = False
    since: str = ""
    link: str = ""
    seen: str = ""
    unseen: int = 0

    @property
    def worse(self) -> bool:
        """Whether it got worse: the answer of ``hashbench compare``, which knows no other."""
        return self.outcome.worse

    @property
    def word(self) -> str:
        """The status as a reader understands it: nothing is *as expected* where only last night is known."""
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
        """Whether the model differs or fails tonight."""
        return kind_of(self.now).is_trouble

    @property
    def message(self) -> str:
        """One line: what is seen, what was expected, and why."""
        since = f" since {self.since}" if self.since else ""
        source = "expected" if self.expected or self.base is None else "last night"
        nights = f", not seen for {count(self.unseen, 'night')}" if self.unseen else ""
        note = f"; {self.note}" if self.note else ""
        link = f" {self.link}" if self.link else ""
        return f"{self.word}: {seen(self.new)} ({source}: {self.before or 'nothing'}{since}{nights}){note}{link}"


@dataclass(frozen=True, slots=True)
class Judged:
    """The last night of ``history``, judged. ``judgements`` has every model of either side, the worst first; ``before``
    is the index of the last earlier night that has rows (``None``: there is none); ``remarks`` are sentences on what
    cannot be seen. The problems of the night itself make it worse."""

    history: History
    judgements: tuple[Judgement, ...]
    before: int | None = None
    remarks: tuple[str, ...] = ()

    @property
    def night(self) -> Night:
        """The night that is judged."""
        return self.history.nights[-1]

    @property
    def last(self) -> str:
        """The label of the night before; empty where there is none, and where no model of it can be compared."""
        return "" if self.before is None or self.alone else self.history.nights[self.before].label

    @property
    def got_worse(self) -> bool:
        """Whether any model got worse, or the night itself is not whole."""
        return bool(self.night.problems) or any(judgement.worse for judgement in self.judgements)

    @property
    def alone(self) -> bool:
        """Whether there was nothing to compare the night with: no model has a row on both sides, and none is missing
        from it. What it says then is what it found."""
        return not any(one.base is not None and (one.new is not None or one.worse) for one in self.judgements)

    @property
    def failed(self) -> bool:
        """Whether a strict reader has something to look at: it :attr:`got_worse`, or, of a night :attr:`alone`, a model
        differs or fails."""
        return self.got_worse or (self.alone and any(judgement.in_trouble for judgement in self.judgements))

    @property
    def verdict(self) -> str:
        """One line: whether anything got worse, and what; of a night :attr:`alone`, what differs and fails."""
        worse = Counter(str(one.status) for one in self.judgements if one.worse)
        parts = [f"{number} {word}" for word, number in worse.items()]
        if self.night.problems:
            parts.append(count(len(self.night.problems), "problem") + " of the night itself")
        if self.alone:
            return "; ".join([counted(self.judgements), *parts])
        return (f"Worse: {', '.join(parts)}" if parts else "Nothing got worse") + self.not_compared

    @property
    def not_compared(self) -> str:
        """``; 3 rows have nothing to compare with: 1 differs and 2 pass``; empty where each has, and of a night
        :attr:`alone`."""
        unmatched = [one for one in self.judgements if one.base is None]
        if not unmatched or self.alone:
            return ""
        return f"; {count(len(unmatched), 'row')} had nothing to compare with: {_kinds_in_words(unmatched)}"

    def word_of(self, one: Judgement) -> str:
        """The status of a judgement as a reader understands it; of a night :attr:`alone`, what is seen."""
        return _SEEN[kind_of(one.now)][0] if self.alone else one.word

    def message_of(self, one: Judgement) -> str:
        """One line: what is seen, what was expected, and why; of a night :attr:`alone`, what is seen and where."""
        if self.alone and one.new is not None:
            return "; ".join(filter(None, (seen(one.new), what_happened(one.new))))
        return one.message


_SEEN = {
    Kind.DIFFER: ("differs", "differ"),
    Kind.LATENT: ("is flaky", "are flaky"),
    Kind.FAIL: ("fails", "fail"),
    Kind.PASS: ("passes", "pass"),
    Kind.SKIP: ("was skipped", "were skipped"),
    Kind.ABSENT: ("has no row", "have no row"),
}
"""What one model does, and what several do."""


def counted(judgements: Collection[Judgement]) -> str:
    """``Of 3 models, 1 differs and 2 pass``: what the rows say, compared with nothing."""
    rows = [one for one in judgements if one.new is not None]
    if not rows:
        return "There are no rows"
    if any(one.in_trouble for one in rows):
        return f"Of {rows_of_models(rows)}, {_kinds_in_words(rows)}"
    return f"None of {rows_of_models(rows)} differs or fails: {_kinds_in_words(rows)}"


def rows_of_models(judgements: Collection[Judgement]) -> str:
    """``3 models``; where a model has rows of several modes, dtypes or devices, ``5 rows of 3 models``."""
    models = len({(one.key[0], one.key[-1]) for one in judgements})
    words = count(models, "model")
    return words if models == len(judgements) else f"{count(len(judgements), 'row')} of {words}"


def _kinds_in_words(judgements: Iterable[Judgement]) -> str:
    """``1 differs, 2 fail and 3 pass``, the worst first."""
    counts = Counter(kind_of(one.now) for one in judgements)
    parts = [f"{counts[kind]} {words[counts[kind] != 1]}" for kind, words in _SEEN.items() if counts[kind]]
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))


def expectation_status(outcome: Outcome, accuracy: str, *, expected: bool = True, unseen: int = 0) -> ExpectationStatus:
    """The status of a model that now has the status ``accuracy``, whose row is ``expected`` by a CSV (or was last
    night's), and which has not shown it for ``unseen`` nights in which it ran."""
    if outcome in (Outcome.REGRESSED, Outcome.FAILS_OTHERWISE) and kind_of(accuracy) is Kind.LATENT:
        return ExpectationStatus.NEW_LATENT
    if outcome in (Outcome.REGRESSED, Outcome.FAILS_OTHERWISE):
        return ExpectationStatus.NEW_DIFFERENCE if kind_of(accuracy) is Kind.DIFFER else ExpectationStatus.BROKEN
    if expected and outcome in (Outcome.FIXED, Outcome.NOT_SEEN) and unseen >= STALE_AFTER:
        return ExpectationStatus.STALE
    return _STATUS_OF.get(outcome) or ExpectationStatus(outcome.value)


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
    judgements.sort(key=lambda one: (not one.worse, order.index(one.status), one.key))
    judged = Judged(history, tuple(judgements), before)
    return replace(judged, remarks=tuple(_remarks(judged, new, expected)))


def changes_since(base: Sweep, new: Sweep) -> tuple[ModelChange, ...]:
    """What became of each row since ``base``, which may have none; a row says nothing of other devices and dtypes."""
    if not base.rows:
        return tuple(Change(key=row_key(row), outcome=Outcome.NEW, base=None, new=told(row)) for row in new.rows)
    return compare(base, new, scoped=True).changes


def _judgement(change: ModelChange, model: ModelHistory | None, *, expected: bool) -> Judgement:
    base, new = change.base, change.new
    told = base if expected and isinstance(base, ExpectedRow) else None
    trouble = expected and base is not None and not kind_of(base.accuracy).is_fine
    unseen = unseen_nights(model, base) if base is not None and trouble else 0
    status = expectation_status(change.outcome, new.accuracy if new else "", expected=expected, unseen=unseen)
    return Judgement(
        *(change.key, change.outcome, base, new, change.note),
        status=status,
        expected=expected,
        since=told.since if told else "",
        link=told.link if told else "",
        seen=told.seen if told else "",
        unseen=unseen,
    )


def _remarks(judged: Judged, new: Sweep, expected: Sweep | None) -> Iterator[str]:
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
    if retraced := tracer_remark((one.base, one.new) for one in judged.judgements if one.base and one.new):
        yield retraced
    if not new.environments:
        yield "This night has no environment.json: whether the machine or its settings changed is not known."


# ---------------------------------------------------------------------------------------------- from folders


def assess(folders: Sequence[Path | str], *, expected: Path | None = None, until: Path | None = None) -> Judged:
    """Judge the last night at ``folders``.

    Args:
        folders: as :func:`~hashbench.report.history.load_history` takes them.
        expected: a CSV of expected rows, or a folder of such.
        until: the folder of the night that is to be the last; later ones are left out.

    Raises:
        HashbenchError: a folder or file cannot be read, or ``expected`` is not a CSV of hashbench's.
    """
    wanted = load_sweep(expected) if expected is not None else None
    if wanted is not None and wanted.kind != "hashbench":
        raise HashbenchError(
            f"{expected} is dynamo's",
            consequence="it names no suites, modes and kernels, so it does not say what to expect of a night",
            tip="Compare with it by `hashbench compare`, or make one by `hashbench expect`.",
        )
    history = load_history(folders, until=until)
    new = _sweep_of(history.nights[-1])
    before = next((index for index in range(len(history.nights) - 2, -1, -1) if history.nights[index].counts), None)
    last = _sweep_of(history.nights[before]) if before is not None else None
    judged = judge(history, new, expected=wanted, last=last, before=before)
    if last is None or before is None:
        return judged
    rows = {row_key(row): row for row in last.rows}
    pairs = ((rows.get(row_key(row)), row) for row in new.rows)
    about = kernel_remarks(pairs, base=history.nights[before].files, new=history.nights[-1].files)
    return replace(judged, remarks=(*judged.remarks, *about))


def _sweep_of(night: Night) -> Sweep:
    """The whole rows of a night, of the files that can be read."""
    return load_files(night.files, path=night.folder, damaged_night=bool(night.problems))
