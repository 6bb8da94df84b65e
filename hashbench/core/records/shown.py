"""What is shown: rows, their columns and the facts of extensions. Pure; imports no torch."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from hashbench.core.catalog import FORMER_STATUSES, WRITTEN
from hashbench.core.records.concluded import ExperimentResult, result_in

ROW_SCHEMA = 1
"""Version of the CSV columns' meaning and of the row files, written to ``environment.json`` as ``schema``; another
version is refused. A new column does not raise it: a row that lacks a column has its default."""


SWEEP_SCHEMA = 1
"""Version of ``sweep.json``. A sweep of another version, or with rows of another, is neither resumed nor merged."""


@dataclass(frozen=True, slots=True)
class RowEvidence:
    """The column ``evidence``: all experiment results in order, and their text. Compared by text.

    A row read from a CSV has the text only.
    """

    text: str = ""
    results: tuple[ExperimentResult, ...] = field(default=(), compare=False)

    @classmethod
    def of(cls, results: Iterable[ExperimentResult]) -> RowEvidence:
        """Build the column from results."""
        kept = tuple(results)
        return cls(_text_of(kept), kept)

    def result(self, name: str, on: str) -> ExperimentResult:
        """Return the named result, or one without trials if it was not run."""
        return result_in(self.results, name, on)

    def __str__(self) -> str:
        return self.text

    def __bool__(self) -> bool:
        return bool(self.text)

    def __post_init__(self) -> None:
        if self.results and self.text != _text_of(self.results):
            raise ValueError("the text of this evidence is not that of its results")


def _text_of(results: Iterable[ExperimentResult]) -> str:
    return "; ".join(result.word() for result in results)


SHARE, AMOUNT = (0.0, 1.0), (0.0, 1e12)
"""Between which values a share lies, and seconds or MiB."""


class Column(NamedTuple):
    """What is declared of a column beside its name, type and default.

    Attributes:
        label: on the page of a model; empty: it appears in sentences or tables.
        formerly: the name that it has in older files; empty: the same.
        noun: what its words are called.
        words: that it may hold; empty: any.
        former_words: what some of them are today, by their names in older files.
        check: tells a valid text; with what that is, and a tip.
        between: lowest and highest number.
        rare: a CSV has it only where a row does.
        after: the column of a sweep's table that it follows; empty: the table lacks it.
        yields_to: the column that a narrow table keeps rather; empty: none.
        place: comparisons as CSV show it of both sides.
    """

    label: str = ""
    formerly: str = ""
    noun: str = ""
    words: Sequence[str] = ()
    former_words: Mapping[str, str] = MappingProxyType({})
    check: tuple[Callable[[str], bool], str, str] | None = None
    between: tuple[float, float] | None = None
    rare: bool = False
    after: str = ""
    yields_to: str = ""
    place: bool = False


def declared(**attributes: Any) -> Mapping[str, Column]:
    """Return the metadata of a field that is a column, with attributes of a :class:`Column`."""
    return {"column": Column(**attributes)}


def column(default: object = "", **attributes: Any) -> Any:
    """Declare a column with a default, and with attributes of a :class:`Column`."""
    return field(default=default, metadata=declared(**attributes))


@dataclass(frozen=True, slots=True)
class Facts:
    """What an extension knows of a model: the fields of its dataclass are its columns, in their order.

    A default means absent; of facts that are all absent, a row has none.
    """


_Facts = TypeVar("_Facts", bound=Facts)


class HasFacts:
    """What has facts of extensions, one of each kind at most."""

    __slots__ = ()
    facts: tuple[Facts, ...]

    def of(self, kind: type[_Facts]) -> _Facts:
        """Return the facts of a kind; where there are none, those that are all absent."""
        return next((each for each in self.facts if isinstance(each, kind)), kind())


def holding(facts: Iterable[Facts], item: Facts) -> tuple[Facts, ...]:
    """Return ``facts`` with ``one`` in the place of those of its kind."""
    return (*(each for each in facts if type(each) is not type(item)), item)


def value_of(row: object, name: str) -> Any:
    """Return what a row has in a column, its own or one of its facts; ``None`` where these are absent."""
    for holder in (row, *getattr(row, "facts", ())):
        if hasattr(holder, name):
            return getattr(holder, name)
    return None


@dataclass(frozen=True, slots=True)
class Row(HasFacts):
    """One line of ``accuracy.csv``; ``docs/csv.md`` explains every column. ``None`` and ``""`` are written as an empty
    cell: absent, never zero. ``facts`` is no column: those of extensions are its fields, after the core's."""

    dev: str
    name: str
    batch_size: int | None
    accuracy: str = field(metadata=declared(noun="status", words=WRITTEN, former_words=FORMER_STATUSES))
    suite: str = ""
    mode: str = ""
    dtype: str = ""
    iterations: int | None = None
    runs: int | None = None
    threads: int | None = None
    deterministic: str = ""
    nondeterministic_op: str = column(rare=True)
    ops: int | None = None
    origin: str = ""
    kernel: str = ""
    op_index: int | None = None
    phase: str = ""
    iteration: int | None = None
    module: str = ""
    forward_op: str = ""
    source: str = ""
    detail: str = ""
    steered_by: str = column(rare=True)
    cause: str = ""
    confidence: str = ""
    because: str = ""
    evidence: RowEvidence = RowEvidence()
    other_sources: str = column(rare=True)
    capture: str = column(rare=True)
    distinct: int | None = None
    trials: int | None = None
    rate_of: str = ""
    rate: float | None = column(None, between=SHARE)
    rate_low: float | None = column(None, between=SHARE)
    rate_high: float | None = column(None, between=SHARE)
    differing_results: str = column(rare=True)
    differing_elements: int | None = column(None, rare=True)
    max_abs_diff: float | None = column(None, rare=True)
    max_ulp: int | None = column(None, rare=True)
    mean_relative_variability: float | None = column(None, rare=True)
    count_variability: float | None = column(None, rare=True)
    representation: str = column(rare=True)
    benign: int | None = column(None, rare=True)
    benign_ops: str = column(rare=True)
    confirmed: str = column(label="Confirmed by another pair")
    untraced: str = column(label="Untraced runs", rare=True)
    tracer: str = column(label="Tracer")
    perturbed_ops: str = column(rare=True)
    settings_changed: str = column(label="Settings changed", rare=True)
    not_compared: str = column(label="Not compared", rare=True)
    second_build: str = column(label="Second build")
    deterministic_ops: str = column(label="Deterministic by the flag alone")
    compiled: str = column(label="Compiled code", rare=True)
    backend: str = column(label="Backend", rare=True)
    deterministic_doc: str = column(label="torch documents", rare=True)
    deterministic_here: str = column(rare=True)
    deterministic_price: float | None = column(None, rare=True)
    advice: str = ""
    repro: str = ""
    reproduced: str = ""
    traces: str = ""
    retried: str = column(rare=True)
    seconds: float | None = column(None, between=AMOUNT)
    overhead_seconds: float | None = column(None, between=AMOUNT)
    peak_memory_mib: float | None = column(None, between=AMOUNT)
    device_memory_mib: float | None = column(None, between=AMOUNT, rare=True)
    env: str = ""
    error: str = ""
    facts: tuple[Facts, ...] = ()


def is_date(text: str) -> bool:
    """Return True if ``text`` is a date such as ``2026-11-20``, or empty."""
    try:
        return not text or date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


_LINK = re.compile(r"https?://[^\s<>()\[\]\"'`\\|]+")
"""Only what needs no escaping in HTML attributes and Markdown, and never ``javascript:``."""


def is_link(text: str) -> bool:
    """Return True if ``text`` is a URL that may become a link, or empty."""
    return not text or _LINK.fullmatch(text) is not None


_DATE = (is_date, "a date", "Write it as 2026-11-20, or leave it empty.")


@dataclass(frozen=True, slots=True)
class ExpectedRow(Row):
    """A row of a baseline CSV. Fields are empty if unknown.

    Attributes:
        since: date (ISO 8601) since which it is expected.
        link: URL of the issue.
        seen: date on which the failure or difference was last seen.
    """

    since: str = column(check=_DATE)
    link: str = column(check=(is_link, "an address", "It begins with https:// and holds no spaces or quotes."))
    seen: str = column(check=_DATE)


@dataclass(frozen=True, slots=True)
class HarnessRow(Row):
    """A row with the status of PyTorch's own harness for the model; empty if the harness has no row."""

    harness_accuracy: str = ""


_Row = TypeVar("_Row", bound=Row)


def extended(kind: type[_Row], row: Row, **more: str) -> _Row:
    """Convert ``row`` to a ``kind`` of row with ``more`` columns."""
    return kind(**{column: getattr(row, column) for column in (*ROW_COLUMNS, "facts")} | more)


ROW_COLUMNS: tuple[str, ...] = tuple(f.name for f in dataclasses.fields(Row) if f.name != "facts")
"""The core's columns."""


ROW_KEY: tuple[str, ...] = ("suite", "mode", "dtype", "dev", "name")
"""Key of a row: two sweeps are compared by it, and a sweep holds each key at most once."""
