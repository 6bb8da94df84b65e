"""Load nights of sweeps of the same models, and keep each model's history.

A report of a thousand nights must fit into one page, so a model's history is a list of *intervals*: consecutive nights
with the same result.
"""

from __future__ import annotations

import contextlib
import math
import operator
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from hashbench.core.catalog import kind_of
from hashbench.core.errors import HashbenchError
from hashbench.core.extensions import mechanism, shown
from hashbench.core.io import read_json_object
from hashbench.core.records import Row
from hashbench.core.report.compare import EnvironmentChange, environment_changes
from hashbench.core.results.folder import ACCURACY_FILE, NIGHT_FILE, SELECTION_FILE, with_evidence
from hashbench.core.results.load import Sweep, csv_files, load_file, load_files, night_problems, refuse_mixed
from hashbench.core.results.rows import row_key


@dataclass(frozen=True, slots=True)
class Night:
    """One night: a folder with the sweeps of all suites and modes.

    Attributes:
        label: the folder's name.
        when: the time of its beginning (ISO 8601, UTC).
        folder: its path.
        files: its CSVs.
        named: named by the user itself, not as part of a folder of nights; a damaged file is then an error.
        counts: number of rows by accuracy.
        environments: fingerprints of its environments, by key.
        changed: what changed in them since the night before.
        problems: sentences on files that could not be read, which are not among ``files``.
        seconds: total time of all models, diagnosis included; ``None`` if no row has it.
        memory_mib: the largest peak of one model; ``None`` if no row has it.
    """

    label: str
    when: str = ""
    folder: Path = Path()
    files: tuple[Path, ...] = ()
    named: bool = False
    counts: Mapping[str, int] = field(default_factory=dict)
    environments: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    changed: tuple[EnvironmentChange, ...] = ()
    problems: tuple[str, ...] = ()
    seconds: float | None = None
    memory_mib: float | None = None


@dataclass(frozen=True, slots=True)
class Interval:
    """Consecutive nights in which a model had the same accuracy, kernel and cause.

    A night without a row of the model belongs to no interval.

    Attributes:
        first: index of the first night in :attr:`History.nights`.
        last: index of the last one, included.
        accuracy: its status.
        kernel: the first divergent kernel.
        cause: its cause, or the stage of the compiler to blame.
        tracer: the tracer of its last night.
        retraced: whether its first night has another tracer than the night before: a new kernel or cause is then no
            change.
    """

    first: int
    last: int
    accuracy: str
    kernel: str = ""
    cause: str = ""
    tracer: str = ""
    retraced: bool = False

    @property
    def nights(self) -> int:
        """Number of nights."""
        return self.last - self.first + 1


MEASURED = ("rate", "seconds", "peak_memory_mib")
"""Columns kept night by night."""

Measured = tuple[tuple[int, float], ...]
"""``(night, value)``, oldest first."""


class Trouble(NamedTuple):
    """A row that differs or fails, its night, and the folder of its sweep."""

    row: Row
    night: int
    folder: Path = Path()


@dataclass(frozen=True, slots=True)
class ModelHistory:
    """One model over all nights.

    Attributes:
        key: as :data:`~hashbench.core.records.ROW_KEY`.
        intervals: oldest first.
        newest: its row of the last night, or ``None``.
        trouble: its newest row that differs or fails, or ``None``.
        measured: for a model in trouble, values by column of :data:`MEASURED`.
    """

    key: tuple[str, ...]
    intervals: tuple[Interval, ...]
    newest: Row | None = None
    trouble: Trouble | None = None
    measured: Mapping[str, Measured] = field(default_factory=dict)

    @property
    def standing(self) -> Interval | None:
        """The present result as one interval, merged over changes of the tracer alone; ``None`` without rows."""
        standing: Interval | None = None
        for interval in reversed(self.intervals):
            if standing is None:
                standing = interval
            elif same_but_for_the_tracer(interval, standing) and interval.last + 1 == standing.first:
                standing = replace(standing, first=interval.first, retraced=interval.retraced)
            else:
                break
        return standing

    def at(self, night: int | None) -> Interval | None:
        """Return the interval that holds a night; ``None`` if the model has no row in it."""
        if night is None:
            return None
        return next((interval for interval in self.intervals if interval.first <= night <= interval.last), None)


@dataclass(frozen=True, slots=True)
class History:
    """All nights, oldest first, and all models, sorted by key."""

    nights: tuple[Night, ...]
    models: tuple[ModelHistory, ...]


def same_but_for_the_tracer(before: Interval, after: Interval) -> bool:
    """Return True if ``after`` differs from ``before`` at most in kernel and cause, and its tracer is another."""
    return after.retraced and before.accuracy == after.accuracy


def seen(result: Row | Interval | None) -> str:
    """Format a result: ``eager_two_runs_differ (aten.dot.default, alignment)``."""
    if result is None:
        return "no row"
    what = ", ".join(filter(None, (result.kernel, mechanism(result) if isinstance(result, Row) else result.cause)))
    return f"{result.accuracy} ({what})" if what else result.accuracy


_WORST_FIRST = {"differ": 0, "latent": 1, "fail": 2}


def models_in_trouble(history: History) -> list[tuple[int, ModelHistory, Trouble]]:
    """Return ``(index, model, newest trouble)`` of each model that ever differed or failed, most urgent first.

    Order: trouble of the last night before earlier trouble, late beginnings first, differences before failures, high
    rates first.
    """
    last = len(history.nights) - 1

    def urgency(entry: tuple[int, ModelHistory, Trouble]) -> tuple[bool, int, int, float, tuple[str, ...]]:
        _, model, trouble = entry
        interval = model.at(trouble.night)
        kind, rate = _WORST_FIRST.get(kind_of(trouble.row.accuracy), 3), trouble.row.rate or 0.0
        return trouble.night != last, -(interval.first if interval else -1), kind, -rate, model.key

    models = [(index, model, model.trouble) for index, model in enumerate(history.models) if model.trouble is not None]
    return sorted(models, key=urgency)


def load_history(folders: Iterable[Path | str], *, until: Path | None = None) -> History:
    """Load the history of the nights at ``folders`` (as :func:`find_nights` takes them).

    A file that cannot be read is an error if the user named it or its night, else a problem of its night.

    Args:
        folders: CSVs, nights, or folders of nights.
        until: the folder of the last night to load.

    Raises:
        HashbenchError: a folder does not exist or is empty, a named file cannot be read, or none can.
    """
    nights: list[Night] = []
    rows = ModelRows()
    known: Mapping[str, Mapping[str, Any]] = {}  # the environments of the last night that tells its own
    for night in find_nights(folders):
        nights.append(_read(night, rows, index=len(nights), known=known))
        known = nights[-1].environments or known
        if until is not None and night.folder.resolve() == until.resolve():
            break
    if nights and all(night.problems and not night.counts for night in nights):
        raise HashbenchError(
            "no night can be read",
            consequence=nights[-1].problems[0],
            tip="Name folders that `hashbench sweep` or `hashbench nightly` wrote.",
        )
    return History(tuple(nights), tuple(rows.models(last=len(nights) - 1)))


def sweep_of(night: Night) -> Sweep:
    """Return the full rows of a night, of the files that can be read."""
    return load_files(night.files, path=night.folder, damaged_night=bool(night.problems))


def _read(night: Night, rows: ModelRows, *, index: int, known: Mapping[str, Mapping[str, Any]]) -> Night:
    """Read the files of ``night`` and add their rows to ``rows``."""
    problems = list(night_problems(night.folder, named=night.named))
    if not problems and not night.files:
        problems = [f"{night.folder} holds no accuracy.csv"]
    sweeps: dict[Path, Sweep] = {}
    for file in night.files:
        try:
            sweep = load_file(file)
            refuse_mixed(night.folder, [*sweeps.values(), sweep])
            rows.add(sweep.rows, file=file, night=index)
            sweeps[file] = sweep
        except HashbenchError as error:
            if night.named:
                raise
            problems.append(str(error))
    environments = {key: value for sweep in sweeps.values() for key, value in sweep.environments.items()}
    comparable = known and environments and environments.keys() != known.keys()
    return replace(
        night,
        files=tuple(sweeps),
        counts=Counter(shown(row).accuracy for sweep in sweeps.values() for row in sweep.rows),
        environments=environments,
        changed=environment_changes(known.values(), environments.values()) if comparable else (),
        problems=tuple(problems),
        seconds=round(sum(times), 3) if (times := _all(sweeps, "seconds") + _all(sweeps, "overhead_seconds")) else None,
        memory_mib=max(_all(sweeps, "peak_memory_mib"), default=None),
    )


def _all(sweeps: Mapping[Path, Sweep], column: str) -> list[float]:
    """Return the values of a column in all sweeps, without ``None``."""
    values = (getattr(row, column) for sweep in sweeps.values() for row in sweep.rows)
    return [value for value in values if value is not None]


@dataclass(slots=True)
class _GatheredModel:
    """What is kept of the rows of one model: of each its :data:`MEASURED` values, after the night."""

    ended: list[Interval] = field(default_factory=list)
    state: tuple[str, str, str] | None = None
    first: int = 0
    last: int = -1
    tracer: str = ""
    retraced: bool = False
    values: list[tuple[int, float | None, float | None, float | None]] = field(default_factory=list)
    newest: Row | None = None
    trouble: Trouble | None = None

    def ending(self) -> tuple[Interval, ...]:
        if self.state is None:
            return ()
        return (Interval(self.first, self.last, *self.state, self.tracer, self.retraced),)

    def add(self, row: Row, *, night: int, folder: Path) -> None:
        state = (row.accuracy, row.kernel, mechanism(row))
        if state != self.state or night != self.last + 1:
            self.ended += self.ending()
            self.retraced = "" not in (self.tracer, row.tracer) and self.tracer != row.tracer
            self.state, self.first = state, night
        self.last, self.tracer = night, row.tracer
        self.values.append((night, row.rate, row.seconds, row.peak_memory_mib))
        self.newest = row
        if not kind_of(row.accuracy).is_fine:
            self.trouble = Trouble(row, night, folder)

    def measured(self) -> dict[str, Measured]:
        return {
            column: tuple((night, float(value)) for night, *values in self.values if _is_number(value := values[index]))
            for index, column in enumerate(MEASURED)
        }


def _is_number(value: float | None) -> TypeGuard[float]:
    return value is not None and not math.isnan(value)


class ModelRows:
    """Collector of the rows of all nights, added oldest first."""

    def __init__(self) -> None:
        self._models: dict[tuple[str, ...], _GatheredModel] = {}

    def add(self, rows: Sequence[Row], *, file: Path, night: int) -> None:
        """Add the rows of one CSV of ``night``.

        Raises:
            HashbenchError: a model has a row in this night already; none is added then.
        """
        for row in rows:
            if (known := self._models.get(row_key(row))) is not None and known.last == night:
                raise HashbenchError(
                    f"{file} holds {row.name} ({', '.join(filter(None, row_key(row)[:-1]))}) again",
                    consequence="each night may have only one result per model",
                    tip="Keep one of the two rows.",
                )
        for row in map(shown, rows):
            self._models.setdefault(row_key(row), _GatheredModel()).add(row, night=night, folder=file.parent)

    def models(self, *, last: int) -> Iterator[ModelHistory]:
        """Yield the histories of all models, sorted by key."""
        for key, model in sorted(self._models.items(), key=operator.itemgetter(0)):
            trouble, measured = model.trouble, model.measured() if model.trouble is not None else {}
            if trouble is not None:
                trouble = trouble._replace(row=with_evidence(trouble.row, trouble.folder))
            newest = model.newest if model.last == last else None
            yield ModelHistory(key, (*model.ended, *model.ending()), newest, trouble, measured)


# --------------------------------------------------------------------------------------------- which nights

_DATE = re.compile(r"(\d{4}-\d{2}-\d{2})(?:[T_ -]?(\d{2})[:.-]?(\d{2})(?:[:.-]?(\d{2}))?)?")


def find_nights(paths: Iterable[Path | str]) -> list[Night]:
    """Find the nights at ``paths``, without reading them; oldest first, each once.

    A path is a CSV, a folder that :func:`~hashbench.core.results.load.load_sweep` reads, or a folder of such folders.
    Folders whose names begin with a date are nights of their own, even with one sweep each.

    Raises:
        HashbenchError: a path does not exist, or holds nothing.
    """
    nights = {night.folder.resolve(): night for path in paths for night in _nights_at(Path(path))}
    if len(nights) > 1 and (whole := _joined_parts([*nights.values()])):
        return [whole]
    return sorted(nights.values(), key=lambda night: (datetime.fromisoformat(night.when), night.label))


def _joined_parts(nights: Sequence[Night]) -> Night | None:
    """Return CSVs that were named one by one as one night, where no model has a row in two of them: they are its parts,
    which have nothing to be compared with. ``None`` where they are nights of their own."""
    files = [night.folder for night in nights]
    dates = {dated[1] for night in nights if (dated := _DATE.match(night.label))}
    if len(dates) > 1 or not all(path.is_file() and path.suffix == ".csv" for path in files):
        return None
    try:
        keys = [{row_key(row) for row in load_file(path).rows} for path in files]
    except HashbenchError:
        return None  # said where the file is read
    if sum(map(len, keys)) > len(set().union(*keys)):
        return None
    folder = Path(os.path.commonpath([path.resolve().parent for path in files]))
    return Night(folder.name, min(night.when for night in nights), folder, tuple(files), named=True)


def _nights_at(path: Path) -> Iterator[Night]:
    inner = _inner_nights(path)
    for folder, files in [(folder, _accuracy_files(folder)) for folder in inner] or [(path, csv_files(path))]:
        named = folder.parent if folder.name == ACCURACY_FILE else folder
        label = named.name or named.resolve().name
        yield Night(label, _when(label, named, files), folder, tuple(files), named=not inner)


def _inner_nights(path: Path) -> list[Path]:
    """Return the folders in ``path`` that are nights; none if ``path`` is itself a night."""
    if not path.is_dir() or (path / ACCURACY_FILE).is_file() or (path / NIGHT_FILE).is_file():
        return []
    folders = sorted(folder for folder in path.iterdir() if folder.is_dir())
    dated = [folder for folder in folders if _DATE.match(folder.name) or (folder / NIGHT_FILE).is_file()]
    # Subfolders that each hold a sweep (training, inference) are one night, unless they have dates.
    deep = [folder for folder in folders if not (folder / ACCURACY_FILE).is_file() and _accuracy_files(folder)]
    return sorted({*dated, *deep})


def _accuracy_files(folder: Path) -> list[Path]:
    own = folder / ACCURACY_FILE
    return [own] if own.is_file() else sorted(folder.glob(f"*/{ACCURACY_FILE}"))


def _when(label: str, folder: Path, files: Sequence[Path]) -> str:
    """Return the time of a night's first sweep: from its own file, else from the night's file, else from the folder's
    name, else from the age of its files. The file precedes the name, so that two nights of one day keep their order."""
    began = sorted(filter(None, (_began(file.with_name(SELECTION_FILE)) for file in files)))
    if began or (night_began := _began(folder / NIGHT_FILE)):
        return began[0] if began else night_began
    dated = _DATE.match(label)
    if dated:
        date, hour, minute, second = dated.groups()
        with contextlib.suppress(ValueError):  # such as 2026-13-45
            return _utc(datetime.fromisoformat(f"{date}T{hour or '00'}:{minute or '00'}:{second or '00'}"))
    ages = [path.stat().st_mtime for path in files or [folder]]
    return _utc(datetime.fromtimestamp(min(ages), UTC))


def _began(path: Path) -> str:
    try:
        return _utc(datetime.fromisoformat(str(read_json_object(path)["began"])))
    except (HashbenchError, KeyError, ValueError):
        return ""  # damaged: what that means is said where the sweep is read


def _utc(time: datetime) -> str:
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).astimezone(UTC).isoformat(timespec="seconds")
