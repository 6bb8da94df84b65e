"""Many sweeps of the same models, night after night: what each model did, and when that changed.

The report of a thousand nights must fit into one page, so a model's history is kept as *spells*: stretches of nights in
which nothing about it changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from hashbench.catalog import kind_of
from hashbench.errors import HashbenchError
from hashbench.records import Row
from hashbench.report.night_folders import NightFolder, find_nights
from hashbench.report.night_rows import Memory, NightRows, read_night_rows
from hashbench.results.environments import EnvironmentChange, environment_changes
from hashbench.results.load import environments_beside, night_problems, selections_beside


@dataclass(frozen=True, slots=True)
class Night:
    """One sweep of a history: one folder, with all suites and modes in it.

    ``label`` is the folder's name, ``when`` the time of its beginning (ISO 8601, empty where nothing tells), ``counts``
    how many rows had each accuracy, ``seconds`` the sum over its rows, ``environments`` the fingerprints by their key,
    and ``changed`` what is different in them from the night before. ``problems`` are sentences on files of this night
    that could not be read: their rows are in no count and in no spell.
    """

    label: str
    when: str
    folder: Path
    counts: Mapping[str, int]
    seconds: float
    environments: Mapping[str, Mapping[str, Any]]
    changed: tuple[EnvironmentChange, ...] = ()
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Spell:
    """Nights ``first`` to ``last`` (indices of :attr:`History.nights`, both included) in which a model had the same
    ``accuracy``, ``kernel`` and ``cause``. A night without a row of the model belongs to no spell."""

    first: int
    last: int
    accuracy: str
    kernel: str = ""
    cause: str = ""


@dataclass(frozen=True, slots=True)
class ModelHistory:
    """One model over all nights. ``key`` follows :data:`~hashbench.records.ROW_KEY`. ``newest`` is its row in the last
    night (``None``: it has none there); ``told`` is its newest row that is neither a pass nor a skip, of night
    ``told_night``, with the diagnosis (``None``: there is none)."""

    key: tuple[str, ...]
    spells: tuple[Spell, ...]
    newest: Row | None = None
    told: Row | None = None
    told_night: int | None = None


@dataclass(frozen=True, slots=True)
class History:
    """All nights, oldest first, and all models, sorted by their keys."""

    nights: tuple[Night, ...]
    models: tuple[ModelHistory, ...]


# ------------------------------------------------------------------------------------------------ from folders

Numbers = NDArray[numpy.int32]


def load_history(folders: Iterable[Path | str], *, until: Path | None = None) -> History:
    """The history of the nights at ``folders`` (:func:`~hashbench.report.night_folders.find_nights` says which).

    Only the last night and the rows that are told of are read wholly; of the others, what spells need. A file that
    cannot be read is an error where the user named it or its night, and else a problem of its night. ``until`` is the
    folder of the night that is to be the last.

    Raises:
        HashbenchError: a folder is not there or holds nothing, a file that was named cannot be read, or none can.
    """
    found = _up_to(until, find_nights(folders))
    collected = _Collected()
    last = len(found) - 1
    # The newest first: the first row worth telling is then the one to keep.
    nights = [_night(found[index], collected, index=index, newest=index == last) for index in range(last, -1, -1)][::-1]
    _refuse_nothing(nights)
    return History(nights=tuple(_with_changes(nights)), models=tuple(collected.models(len(nights))))


def _up_to(until: Path | None, nights: list[NightFolder]) -> list[NightFolder]:
    places = [place for place, night in enumerate(nights) if until and night.path.resolve() == until.resolve()]
    return nights[: places[0] + 1] if places else nights


def _night(folder: NightFolder, collected: _Collected, *, index: int, newest: bool) -> Night:
    problems = list(night_problems(folder.path, named=folder.named))
    if not problems and not folder.files:
        problems = [f"{folder.path} holds no accuracy.csv"]
    environments: dict[str, Mapping[str, Any]] = {}
    seconds = 0.0
    for file in folder.files:
        try:
            here = environments_beside(file)
            selections_beside(file)  # the fast way does not read it, and who compares with this night needs it
            rows = read_night_rows(file, memory=collected.memory, wholly=newest)
            collected.add(rows, file=file, night=index, newest=newest)
        except HashbenchError as error:
            if folder.named:
                raise
            problems.append(str(error))
        else:
            seconds += rows.seconds
            environments |= here
    return Night(
        label=folder.label,
        when=folder.when,
        folder=folder.path,
        counts=collected.counts(index),
        seconds=seconds,
        environments=environments,
        problems=tuple(problems),
    )


def _refuse_nothing(nights: Sequence[Night]) -> None:
    if nights and all(night.problems and not night.counts for night in nights):
        raise HashbenchError(
            "no night can be read",
            consequence=nights[-1].problems[0],
            tip="Name folders that `hashbench sweep` or `hashbench nightly` wrote.",
        )


def _with_changes(nights: Iterable[Night]) -> Iterator[Night]:
    """The nights with what changed in their environments since the last night that tells its own."""
    before: Mapping[str, Mapping[str, Any]] = {}
    for night in nights:
        if before and night.environments and night.environments.keys() != before.keys():
            changed = environment_changes(before.values(), night.environments.values())
            yield replace(night, changed=changed)
        else:
            yield night
        before = night.environments or before


class _Collected:
    """What is known of all nights so far. Models and states have numbers in the order in which they were met."""

    def __init__(self) -> None:
        self._models: dict[tuple[str, ...], int] = {}
        self._states: dict[tuple[str, ...], int] = {}
        self._nights: dict[int, tuple[Numbers, Numbers]] = {}
        self.memory = Memory()
        self._newest: dict[int, Row] = {}
        self._told: dict[int, tuple[Row, int]] = {}

    def add(self, rows: NightRows, *, file: Path, night: int, newest: bool) -> None:
        """Take in the rows of one CSV of ``night``; :class:`HashbenchError` where it has a row of a model already."""
        models, states = _numbers(self._models, rows.keys), _numbers(self._states, rows.states)
        others = self._nights.get(night, (_NONE, _NONE))
        _refuse_twice(numpy.concatenate((others[0], models)), list(self._models), file=file)
        for index in numpy.flatnonzero(self._worth_telling()[states]).tolist():
            number = int(models[index])
            if number not in self._told:
                self._told[number] = (rows.row(index), night)
        if newest:
            self._newest |= {number: rows.row(index) for index, number in enumerate(models.tolist())}
        self._nights[night] = (numpy.concatenate((others[0], models)), numpy.concatenate((others[1], states)))

    def _worth_telling(self) -> NDArray[numpy.bool_]:
        verdicts = (kind_of(accuracy) for accuracy, *_ in self._states)
        return numpy.array([verdict not in ("pass", "skip") for verdict in verdicts], dtype=bool)

    def counts(self, night: int) -> Counter[str]:
        """How many rows of ``night`` have each accuracy."""
        _, states = self._nights.get(night, (_NONE, _NONE))
        found = Counter(dict(enumerate(numpy.bincount(states, minlength=len(self._states)).tolist())))
        counts: Counter[str] = Counter()
        for (accuracy, *_), number in self._states.items():
            counts[accuracy] += found[number]
        return +counts

    def models(self, nights: int) -> Iterator[ModelHistory]:
        """The histories of all models, sorted by their keys."""
        table = numpy.full((len(self._models), nights), -1, dtype=numpy.int32)
        for night, (models, states) in self._nights.items():
            table[models, night] = states
        spells = _spells(table, list(self._states))
        for key, number in sorted(self._models.items()):
            told, told_night = self._told.get(number, (None, None))
            yield ModelHistory(
                key=key, spells=spells[number], newest=self._newest.get(number), told=told, told_night=told_night
            )


_NONE: Numbers = numpy.array([], dtype=numpy.int32)


def _numbers(known: dict[tuple[str, ...], int], words: Sequence[tuple[str, ...]]) -> Numbers:
    """The numbers of ``words``; new ones are added to ``known``."""
    found = list(map(known.get, words))
    if None in found:
        found = [known.setdefault(word, len(known)) for word in words]
    return numpy.array(found, dtype=numpy.int32)


def _refuse_twice(models: Numbers, keys: Sequence[tuple[str, ...]], *, file: Path) -> None:
    counts = numpy.bincount(models, minlength=1)
    if counts.max() > 1:
        key = keys[int(counts.argmax())]
        raise HashbenchError(
            f"{file} holds {key[-1]} ({', '.join(filter(None, key[:-1]))}) again",
            consequence="a night has one result of it",
            tip="Keep one of the two rows.",
        )


def _spells(table: Numbers, states: Sequence[tuple[str, ...]]) -> list[tuple[Spell, ...]]:
    """The spells of each line of ``table`` (models × nights: numbers of states, -1 where there is no row)."""
    begins = numpy.ones(table.shape, dtype=bool)
    begins[:, 1:] = table[:, 1:] != table[:, :-1]
    models, firsts = (places.tolist() for places in numpy.nonzero(begins))
    found: list[list[Spell]] = [[] for _ in table]
    nexts = [*firsts[1:], 0]  # 0 is where the next model's first spell begins
    for model, first, following, state in zip(models, firsts, nexts, table[begins].tolist(), strict=True):
        if state >= 0:
            found[model].append(Spell(first, (following or table.shape[1]) - 1, *states[state]))
    return [tuple(spells) for spells in found]
