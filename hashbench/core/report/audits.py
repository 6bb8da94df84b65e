"""Kinds of audits: what is measured of the ops of torch's database, and how rows of verdicts are told apart, counted
and listed. Pure."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Protocol, TypeVar

from tabulate import tabulate

from hashbench.core.io import open_file
from hashbench.core.results.rows import RowFormat

SOURCES = ("op_db", "stress", "sweep")

Op = tuple[str, str]
"""``(source, name)``."""

R = TypeVar("R")


class OpSample(Protocol):
    """One call of an op; ``call`` is a :class:`~hashbench.core.check.function.FunctionCall`."""

    @property
    def sample(self) -> str: ...
    @property
    def inputs(self) -> str: ...
    @property
    def call(self) -> Any: ...


Samples = Iterable[tuple[str, "str | Sequence[OpSample]"]]
"""Dtypes of an op, each with its samples, or why it has none."""


class MeasureOp(Protocol):
    """Yields every row of an op, in a worker process.

    ``budget``: seconds for the causes of what differs; ``folder``: of the audit, for repros.
    """

    def __call__(self, op: Op, samples: Samples, *, device: str, budget: float, folder: Path) -> Iterator[Any]: ...


@dataclass(frozen=True, slots=True)
class AuditKind:
    """What an audit measures of each op.

    Attributes:
        name: in words, with an article.
        file: its table in the folder of an audit.
        rows: how its rows are written and read; each has ``dev``, ``source``, ``op``, ``verdict`` and ``error``.
        report: module whose ``summary`` formats rows for a terminal, and whose ``findings`` are what it lists. Its
            ``judged`` returns outcome and note of a sample in two audits.
        measure: target of a :class:`MeasureOp`; empty: the audit's own.
        asked_by: the flag that asks for it, as parsed.
        dtypes: default dtypes; empty: the audit's own.
        sources: of its ops.
        no_sample: what rows without a sample hold.
        marks: columns by which its table is known.
        conditions: columns that are equal in samples that can be compared.
        runs_repros: workers run a repro of what they find, with torch alone.
        races: what it measures depends on luck, and shows sooner with many threads.
    """

    name: str
    file: str
    rows: RowFormat[Any]
    report: str
    measure: str = ""
    asked_by: str = ""
    dtypes: tuple[str, ...] = ()
    sources: tuple[str, ...] = SOURCES
    no_sample: Mapping[str, str] = field(default_factory=dict)
    marks: tuple[str, ...] = ()
    conditions: tuple[str, ...] = ("inputs", "threads")
    runs_repros: bool = False
    races: bool = False

    def row(self, device: str, op: Op, verdict: str, **cells: Any) -> Any:
        """Return a row of an op of which no sample was measured."""
        source, name = op
        empty = dict.fromkeys(self.rows.key, "") | dict(self.no_sample)
        return self.rows.kind(**empty | {"dev": device, "source": source, "op": name, "verdict": verdict} | cells)

    def died(self, device: str, op: Op, *, timed_out: bool, error: str) -> Any:
        """Return the one row of an op that ended its own process, or ran out of time."""
        return self.row(device, op, "timeout" if timed_out else "crashed", error=error)

    def lies_at(self, path: Path) -> bool:
        """Return True if ``path`` is an audit of this kind: a folder with its file, or a CSV with ``op``, ``verdict``
        and the columns ``marks``."""
        if path.is_dir():
            return (path / self.file).is_file() and not (path / "accuracy.csv").exists()
        try:
            with os.fdopen(open_file(path), encoding="utf-8-sig", errors="replace", newline="") as file:
                header = file.readline(4096).rstrip("\r\n").split(",")
        except OSError:
            return False
        return {"op", "verdict", *self.marks} <= set(header)

    def reports(self) -> Any:
        """Return the module that formats and judges its rows, imported."""
        return resolve_name(self.report)


def by_verdict(
    rows: Iterable[R], verdicts: Sequence[str], key: Callable[[R], tuple[str, ...]]
) -> list[tuple[tuple[str, ...], list[R]]]:
    """Group rows by ``key``, which begins with the verdict, in the order of ``verdicts``."""
    groups: dict[tuple[str, ...], list[R]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return sorted(groups.items(), key=lambda group: (verdicts.index(group[0][0]), *group[0][1:]))


def values_of(rows: Iterable[Any], column: str) -> list[str]:
    """Return the distinct values of a column."""
    return list(dict.fromkeys(filter(None, (getattr(row, column) for row in rows))))


def counts(rows: Iterable[Any], verdicts: Iterable[str]) -> list[tuple[str, int, int]]:
    """Count ``(verdict, ops, samples)`` in the order of ``verdicts``. An op may be in several."""
    samples = Counter((row.verdict, row.source, row.op) for row in rows)
    of_verdicts = {word: [count for (verdict, *_), count in samples.items() if verdict == word] for word in verdicts}
    return [(word, len(of_ops), sum(of_ops)) for word, of_ops in of_verdicts.items() if of_ops]


def table_of_counts(rows: Iterable[Any], verdicts: Iterable[str], *, style: str = "simple") -> str:
    """Return a table of :func:`counts`."""
    return tabulate(counts(rows, verdicts), headers=("verdict", "ops", "samples"), tablefmt=style)
