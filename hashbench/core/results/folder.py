"""The folder of one sweep: what lies where, who may write, and how each file stays valid at every moment.

``rows/<key>.json`` is the truth, one file a model, written whole or not at all; ``accuracy.csv`` is made from it.
``sweep.json`` says what was asked for, ``environment.json`` where it ran, ``logs/`` what models printed; ``traces/``
and ``repro/`` are the runner's. ``rows/<key>.draft`` is what it knew of a difference before it looked for the cause,
``rows/<key>.first`` the row of a first attempt, while the model waits to be run again alone.

Nothing that is read is deleted. A row of a version that knows more than this one is refused, and nothing is touched
then; a file that cannot be read at all is renamed to ``NAME.unreadable`` by the sweep that resumes.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hashbench.core.errors import HashbenchError
from hashbench.core.io import (
    NotRegularError,
    UnknownContentError,
    first_link,
    from_json,
    hold_lock,
    open_file,
    read_file,
    read_json,
    refuse_unwritable,
    replace_file,
    set_aside,
    to_json,
)
from hashbench.core.records import ROW_SCHEMA, SWEEP_MODES, SWEEP_SCHEMA, Facts, ModelSpec, Row, RunOptions
from hashbench.core.results import versions
from hashbench.core.results.rows import ROWS, environments_text, row_from_json, row_key, row_to_json
from hashbench.core.text import join_limited, one_line

ACCURACY_FILE, SELECTION_FILE, ENVIRONMENT_FILE = "accuracy.csv", "sweep.json", "environment.json"
LOCK_FILE = ".lock"
NIGHT_FILE = "night.json"
"""Beside the folders of the sweeps of one night."""

WRITTEN = (
    *(ACCURACY_FILE, SELECTION_FILE, ENVIRONMENT_FILE, LOCK_FILE),
    *("rows", "logs", "traces", "repro", "fingerprints", "compiled_kernels"),
    *("audit.csv", "invariance.csv", "audit.json", "catalog.json", "ops"),
)
"""All that sweeps and audits write into their folder, beside what else may lie there: it may be a user's project."""

_LONGEST_NAME = 80
"""Characters of a model's name in a file name; file systems take 255 bytes, and suite, mode and ending come on top."""


def file_key(*, suite: str, mode: str, name: str) -> str:
    """Return the file name, without suffix, of one model of a sweep: ``<suite>.<mode>.<name>``.

    Different models get different keys: a name that had to be altered (separators, spaces, length, a dot in the suite)
    ends in ``~`` and a hash of the original, and no unaltered name contains a ``~``.
    """
    return f"{_safe(suite, extra='')}.{mode}.{_safe(name, extra='.')}"


def _safe(text: str, *, extra: str) -> str:
    safe = re.sub(rf"[^A-Za-z0-9_{extra}-]", "_", text)[-_LONGEST_NAME:]
    if safe == text:
        return text
    return f"{safe}~{hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()[:12]}"


@dataclass(frozen=True, slots=True)
class KeptRows:
    """The row files of a sweep, by key: ``rows``, and ``firsts`` of first attempts, whose models were to run again when
    the sweep ended. ``unreadable``: where files are now that could not be read."""

    rows: dict[str, Row]
    firsts: dict[str, Row]
    unreadable: tuple[Path, ...] = ()


class ResultsFolder:
    """Reads and writes the results folder ``path``.

    Methods raise ``OSError`` when the disk does not take what they write; every file is then as it was before.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.csv = self.path / ACCURACY_FILE
        self.manifest = self.path / SELECTION_FILE
        self.environment = self.path / ENVIRONMENT_FILE
        self.rows = self.path / "rows"
        self.logs = self.path / "logs"
        self.traces = self.path / "traces"

    def row_path(self, key: str) -> Path:
        """Return the path of the row of ``key``."""
        return self.rows / f"{key}.json"

    def draft_path(self, key: str) -> Path:
        """Return the path of the row of ``key`` during its diagnosis: experiments may kill the process."""
        return self.rows / f"{key}.draft"

    def first_path(self, key: str) -> Path:
        """Return the path of the row of the first attempt at ``key`` while a second one is due."""
        return self.rows / f"{key}.first"

    def log_path(self, key: str) -> Path:
        """Return the path of the log of the worker of ``key``."""
        return self.logs / f"{key}.log"

    @property
    def in_use(self) -> bool:
        """Whether a sweep has written here before."""
        return os.path.lexists(self.csv) or os.path.lexists(self.manifest) or any(self.rows.glob("*.json"))

    def refuse_unusable(self, *, resume: bool) -> None:
        """Refuse what :meth:`claimed` would, as far as that shows without touching anything: for before work that takes
        long.

        Raises:
            HashbenchError: as :meth:`claimed`.
        """
        if self.is_being_written():
            raise _is_held(self.path)
        if not resume:
            self._refuse_results()
        try:
            refuse_unwritable(self.path, folder=True)
        except OSError as error:
            raise _cannot_write(self.path, error) from error

    @contextlib.contextmanager
    def claimed(self, *, resume: bool) -> Iterator[None]:
        """Create the folder and hold it alone until the end of the context, or of the process.

        Raises:
            HashbenchError: it cannot be written, another sweep holds it, there is a symbolic link in it, or (without
                ``resume``) it holds results. Nothing in it is touched then.
        """
        lock_path = self.path / LOCK_FILE
        try:
            if not resume and not os.path.lexists(lock_path):
                self._refuse_results()
            self.path.mkdir(parents=True, exist_ok=True)
            refuse_links(self.path / name for name in WRITTEN)
            lock = hold_lock(lock_path)
        except BlockingIOError as error:
            raise _is_held(self.path) from error
        except OSError as error:
            raise _cannot_write(self.path, error) from error
        try:
            try:
                if not resume:
                    self._refuse_results()
                self._prepare()
            except OSError as error:
                raise _cannot_write(self.path, error) from error
            yield
        finally:
            os.close(lock)

    def is_being_written(self) -> bool:
        """Return True if a sweep holds the lock of the folder."""
        try:
            lock = open_file(self.path / LOCK_FILE)
        except OSError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return isinstance(error, BlockingIOError)
        finally:
            os.close(lock)
        return False

    def _refuse_results(self) -> None:
        if self.in_use:
            raise HashbenchError(
                f"{self.path} already holds the results of a sweep",
                consequence="nothing in it was touched",
                tip="Add --resume to complete it, or choose another --output.",
            )

    def _prepare(self) -> None:
        for folder in (self.rows, self.logs, self.traces):
            folder.mkdir(exist_ok=True)

    def clear_leftovers(self) -> None:
        """Delete what killed workers left unfinished: temporary files, and drafts of models that run again."""
        for leftover in [*self.path.glob(".*.tmp"), *self.rows.glob(".*.tmp"), *self.rows.glob("*.draft")]:
            leftover.unlink()

    # ------------------------------------------------------------------------------------ what was asked for

    def write_manifest(self, manifest: Mapping[str, Any]) -> None:
        """Keep what this sweep was asked for, and as ``began`` the time of the first such call (ISO 8601, UTC), unless
        the manifest says when it began."""
        began = self._began() or manifest.get("began") or datetime.now(UTC).isoformat(timespec="seconds")
        _replace(self.manifest, json.dumps({**manifest, "began": began}, indent=2) + "\n")

    def _began(self) -> str:
        try:
            return str(read_json(self.manifest).get("began", ""))
        except (OSError, ValueError, AttributeError):
            return ""

    def read_manifest(self) -> dict[str, Any]:
        """Read ``sweep.json``: the models and options of the sweep in this folder.

        Raises:
            HashbenchError: it is missing or damaged.
        """
        try:
            return checked_manifest(read_json(self.manifest))
        except (OSError, ValueError) as error:
            raise HashbenchError(
                f"cannot resume {self.path}",
                consequence="its sweep.json is missing or damaged, so nobody knows which models belong to it",
                tip="Start again with another --output.",
            ) from error

    def write_environment(self, environment: Mapping[str, Any]) -> tuple[Path, ...]:
        """Keep where this sweep runs. A resumed sweep keeps the environments of its earlier parts, which their rows
        refer to, under ``previous``. Return where the file with these is now, if it could not be read."""
        known, unreadable = _known_environments(self.environment)
        self.write_environments([environment, *known])
        return unreadable

    def add_environment(self, environment: Mapping[str, Any]) -> None:
        """Keep another machine's environment beside the sweep's own, under ``previous`` as well."""
        *others, own = _known_environments(self.environment)[0] or [environment]
        self.write_environments([own, *others, environment])

    def write_environments(self, environments: Sequence[Mapping[str, Any]]) -> None:
        """Keep the environments of several machines, each once: the first one as this sweep's own, the others under
        ``previous``."""
        kept: dict[str, Mapping[str, Any]] = {}
        for environment in environments:
            kept.setdefault(str(environment.get("key") or environment), environment)
        _replace(self.environment, environments_text(list(kept.values())))

    # -------------------------------------------------------------------------------------------------- rows

    def read_rows(self, specs: Mapping[str, ModelSpec], *, mode: str) -> KeptRows:
        """Read the rows of ``specs`` (by key), and those of first attempts. Files that cannot be read are set aside, so
        that their models run again.

        Raises:
            HashbenchError: a row is of another version of hashbench; nothing was touched.
        """
        rows: dict[str, Row] = {}
        firsts: dict[str, Row] = {}
        unreadable = []
        for key, spec in specs.items():
            for kept, path in ((rows, self.row_path(key)), (firsts, self.first_path(key))):
                try:
                    kept[key] = row_in(path, spec, mode)
                except FileNotFoundError:
                    continue
                except UnknownContentError as error:
                    raise of_another_version(path, error) from error
                except NOT_A_ROW:
                    unreadable.append(path)
        return KeptRows(rows, firsts, tuple(map(set_aside, unreadable)))

    def read_row(self, key: str, spec: ModelSpec, *, mode: str) -> Row | None:
        """Read the row that a worker wrote for ``spec``, if any. Raises as :meth:`read_rows`."""
        return self.read_rows({key: spec}, mode=mode).rows.get(key)

    def read_draft(self, key: str, spec: ModelSpec, *, mode: str) -> Row | None:
        """Read the row that the runner kept before its diagnosis, if any."""
        return _row_if_any(self.draft_path(key), spec, mode)

    def put_off(self, key: str, row: Row) -> None:
        """Keep ``row`` as that of the first attempt at ``key``, which then has no row, no draft and no log any more: as
        long as the second attempt has left none, the model counts as not run."""
        self.row_path(key).unlink(missing_ok=True)  # first: beside the other file it would be the second attempt's
        _replace(self.first_path(key), json.dumps(row_to_json(row)))
        self.draft_path(key).unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            # No other model's log ends so: what a key had to alter ends in more letters.
            self.log_path(key).rename(self.logs / f"{key}~1.log")

    def remove_row(self, key: str) -> None:
        """Let ``key`` count as not run."""
        self.row_path(key).unlink(missing_ok=True)

    def put_aside_outdated(self, key: str) -> None:
        """Rename the row of ``key`` to ``<key>.json.outdated``, and delete what is left of a first attempt: the model
        counts as not run."""
        self.first_path(key).unlink(missing_ok=True)
        self.draft_path(key).unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            self.row_path(key).replace(self.rows / f"{key}.json.outdated")

    def write_row(self, key: str, row: Row) -> None:
        """Make ``row`` the row of ``key``, in the place of any draft and of a first attempt."""
        _replace(self.row_path(key), json.dumps(row_to_json(row)))
        self.draft_path(key).unlink(missing_ok=True)
        self.first_path(key).unlink(missing_ok=True)

    # --------------------------------------------------------------------------------------------------- CSV

    def rebuild_csv(self, rows: Iterable[Row], *, asked: Iterable[type[Facts]] = ()) -> None:
        """Make ``accuracy.csv`` hold exactly ``rows``, with columns of facts ``asked`` for, unless it does already."""
        text = ROWS.text(rows, asked=asked)
        with contextlib.suppress(FileNotFoundError):
            # Lines are appended later: a copy by hard links, as of a backup, must not get them.
            if self.csv.lstat().st_nlink == 1 and read_file(self.csv) == text.encode():
                return
        _replace(self.csv, text)

    def append_to_csv(self, row: Row) -> bool:
        """Add one line to ``accuracy.csv``, all of it or nothing. Return False if it lacks a column of the row."""
        header = _header(self.csv)
        if not {*ROWS.written([row])} <= {*header}:
            return False
        line = ROWS.line(row, header).encode()
        descriptor = open_file(self.csv, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
        try:
            length = os.fstat(descriptor).st_size
            try:
                _write_whole(descriptor, line)
            except BaseException:
                os.ftruncate(descriptor, length)
                raise
        finally:
            os.close(descriptor)
        return True


def _known_environments(path: Path) -> tuple[list[Mapping[str, Any]], tuple[Path, ...]]:
    """Return those that were kept, the sweep's own as the last, and the path of a file that was set aside, since it
    cannot be read."""
    if not os.path.lexists(path):
        return [], ()
    try:
        own = from_json(Mapping[str, object], read_json(path))
        previous = from_json(tuple[Mapping[str, object], ...], own.get("previous", []))
    except NOT_A_ROW:
        return [], (set_aside(path),)
    return [*previous, {name: value for name, value in own.items() if name != "previous"}], ()


def _header(path: Path) -> list[str]:
    with os.fdopen(open_file(path), encoding="utf-8", errors="replace", newline="") as file:
        return next(csv.reader(file), [])


def refuse_links(paths: Iterable[Path]) -> None:
    """Refuse to write where a symbolic link lies, at ``paths`` or in a folder of them: whoever put it there would
    choose what is overwritten.

    Raises:
        HashbenchError: there is one.
        OSError: a folder cannot be read.
    """
    if (link := first_link(paths)) is not None:
        raise HashbenchError(
            f"{link} is a symbolic link",
            consequence="what is written there would change a file elsewhere, so nothing was run",
            tip="Replace it by what it leads to, or choose another --output.",
        )


def _replace(path: Path, text: str) -> None:
    """Replace a file of the folder; see :func:`refuse_links`."""
    replace_file(path, text, links=False)


def _write_whole(descriptor: int, line: bytes) -> None:
    # A disk that gets full takes the first bytes without complaint.
    if os.write(descriptor, line) != len(line):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.fsync(descriptor)


NOT_A_ROW = (ValueError, TypeError, AttributeError, NotRegularError, IsADirectoryError)
"""What reading a row file raises that holds something else."""


def of_another_version(path: Path, error: UnknownContentError, *, tip: str = versions.USE_THE_WRITER) -> HashbenchError:
    """Return the refusal of a row file of another version of hashbench, which ``error`` names."""
    return HashbenchError(
        f"{path} holds what this hashbench does not know", consequence=f"{error}; nothing was touched", tip=tip
    )


def row_in(path: Path, spec: ModelSpec, mode: str) -> Row:
    """Read the row of ``spec`` in the file ``path``; a file that was renamed or copied from another model counts as
    damaged.

    Raises:
        OSError: the file cannot be read.
        UnknownContentError: it is of another version.
        Exception: one of :data:`NOT_A_ROW`, if it is damaged.
    """
    return _checked(row_from_json(read_json(path)), spec, mode)


def sent_row(text: str, spec: ModelSpec, mode: str) -> Row | None:
    """Return the row of ``spec`` in a text that its worker sent in place of a file; ``None`` where there is none."""
    try:
        return _checked(row_from_json(json.loads(text)), spec, mode)
    except (RecursionError, *NOT_A_ROW):
        return None


def left_row(path: Path, sent: str, spec: ModelSpec, mode: str) -> Row | None:
    """Return the row of ``spec`` that its worker left in a file, else the one that it ``sent``; ``None`` where there
    is neither."""
    row = _row_if_any(path, spec, mode)
    return sent_row(sent, spec, mode) if row is None else row


def _checked(row: Row, spec: ModelSpec, mode: str) -> Row:
    if (row.suite, row.mode, row.name) != (spec.suite, mode, spec.name):
        raise ValueError("the row is another model's")
    return row


def with_evidence(row: Row, folder: Path) -> Row:
    """Return ``row`` with the results of its experiments, read from its row file in ``folder``; unchanged if there is
    no such file or it does not match. Raises :class:`HashbenchError` if that file is of another version."""
    if not row.evidence or row.evidence.results:
        return row
    key = file_key(suite=row.suite, mode=_safe(row.mode, extra=""), name=row.name)
    path = folder / "rows" / f"{key}.json"
    try:
        kept = _row_if_any(path, ModelSpec(suite=row.suite, name=row.name), row.mode)
    except UnknownContentError as error:
        raise of_another_version(path, error, tip="Read it with the hashbench that wrote it.") from error
    if kept is None or (row_key(kept), one_line(kept.evidence.text)) != (row_key(row), row.evidence.text):
        return row
    return replace(row, evidence=kept.evidence)


def traceback_of(row: Row, folder: Path, *, limit: int = 4000) -> str:
    """Return the last traceback in the log of ``row`` in the sweep at ``folder``, else the end of the log. At most the
    last ``limit`` characters; empty if the log cannot be read."""
    key = file_key(suite=row.suite, mode=_safe(row.mode, extra=""), name=row.name)
    try:
        with os.fdopen(open_file(folder / "logs" / f"{key}.log"), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 16 * limit))
            log = file.read(16 * limit).decode(errors="replace").rstrip()
    except OSError:
        return ""
    begin = log.rfind(_TRACEBACK)
    text = log[begin:] if begin >= 0 else "\n".join(log.splitlines()[-20:])
    return text if len(text) <= limit else f"… {text[-limit:]}"


_TRACEBACK = "Traceback (most recent call last):"


def _row_if_any(path: Path, spec: ModelSpec, mode: str) -> Row | None:
    """Read the row in a file; ``None`` if it is missing or damaged. Raises :class:`UnknownContentError`."""
    try:
        return row_in(path, spec, mode)
    except UnknownContentError:
        raise
    except (OSError, *NOT_A_ROW):
        return None


def _is_held(path: Path) -> HashbenchError:
    return HashbenchError(
        f"another sweep is writing into {path}",
        consequence="two sweeps in one folder would mix their rows",
        tip="Wait until it ends, or choose another --output.",
    )


def _cannot_write(path: Path, error: OSError) -> HashbenchError:
    return HashbenchError(
        f"cannot write results into {path}",
        consequence=f"{error.strerror or error}; nothing was run",
        tip="Choose another folder with --output.",
    )


# -------------------------------------------------------------------------------------- what a sweep was asked for

Model = tuple[str, str]
"""Suite and name."""


@dataclass(frozen=True, slots=True)
class Partition:
    """Part ``id``, from 0, of ``total`` parts of the selection ``of``, which is in its order (empty where there is
    one part)."""

    id: int = 0
    total: int = 1
    of: tuple[Model, ...] = ()


def manifest_of(
    specs: Iterable[ModelSpec],
    options: RunOptions,
    partition: Partition,
    digests: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Build ``sweep.json``: what a resumed sweep must have in common with the one that it resumes, and the ``digests``
    of its suites' files. A shard names the whole selection, so that shards of different selections can be told apart
    and the models of a missing shard can be named."""
    kept = dataclasses.asdict(options)
    del kept["output"]  # results folders can be moved
    head = {**versions.stamp(SWEEP_SCHEMA), "rows": ROW_SCHEMA, "suites": [], "options": kept}
    if digests:
        head["digests"] = dict(digests)
    return with_models(head, [(spec.suite, spec.name) for spec in specs], partition)


def with_models(manifest: Mapping[str, Any], models: Sequence[Model], partition: Partition) -> dict[str, Any]:
    """Return the manifest of a sweep of ``models`` with the same options."""
    part: dict[str, Any] = {"id": partition.id, "total": partition.total}
    if partition.total > 1:
        part["of"] = [list(model) for model in partition.of]
    suites = sorted({suite for suite, _ in models})
    return {**manifest, "suites": suites, "partition": part, "models": [list(model) for model in models]}


@dataclass(frozen=True, slots=True)
class _PartOfSweep:
    id: int
    total: int
    of: tuple[Model, ...] = ()


@dataclass(frozen=True, slots=True)
class _SweepFile:
    """The content of ``sweep.json``, as :func:`manifest_of` makes it."""

    options: RunOptions
    models: tuple[Model, ...]
    partition: _PartOfSweep
    suites: tuple[str, ...] = ()
    digests: Mapping[str, str] = dataclasses.field(default_factory=dict)
    schema: int = SWEEP_SCHEMA
    rows: int = ROW_SCHEMA
    hashbench: str = ""
    began: object = None


def checked_manifest(content: Any) -> dict[str, Any]:
    """Validate the types in the parsed content of a ``sweep.json`` and fill in defaults. A manifest of another version
    is returned unchanged: see :func:`schema_difference`.

    Raises:
        ValueError: it is of this version, and a part of it has another type than :func:`manifest_of` writes.
    """
    manifest = dict(from_json(Mapping[str, object], content, where=SELECTION_FILE))
    if schema_difference(manifest):
        return manifest
    manifest = {**manifest, "partition": manifest.get("partition", {"id": 0, "total": 1})}
    known = from_json(_SweepFile, manifest, where=SELECTION_FILE)
    if "mode" not in manifest["options"]:
        raise ValueError("options lack the mode")
    for where, models in (("models", known.models), ("of", known.partition.of)):
        if len(set(models)) != len(models):
            raise ValueError(f"{where} names a model twice")
    return manifest


def schema_difference(manifest: Mapping[str, Any]) -> str:
    """Describe what this version does not know of ``manifest``, and name the version that wrote it; empty if it knows
    all."""
    options = manifest.get("options")
    names = {*manifest.keys() - _MANIFEST, *(options.keys() - _DEFAULTS.keys() if isinstance(options, Mapping) else ())}
    mode = options.get("mode") if isinstance(options, Mapping) else None
    unknown = ""
    if repr(manifest.get("schema", SWEEP_SCHEMA)) != repr(SWEEP_SCHEMA):
        unknown = f"sweep.json has schema {manifest.get('schema')!r:.40}"
    elif repr(manifest.get("rows", ROW_SCHEMA)) != repr(ROW_SCHEMA):
        unknown = f"its rows have schema {manifest.get('rows')!r:.40}, this hashbench reads {ROW_SCHEMA}"
    elif isinstance(mode, str) and mode not in SWEEP_MODES:
        unknown = f"sweep.json has the mode {mode!r:.40}"
    elif names:
        unknown = f"sweep.json has fields that this hashbench does not know: {join_limited(sorted(map(str, names)), 5)}"
    return unknown and f"{one_line(unknown)}; {versions.both(manifest, reads=SWEEP_SCHEMA)}"


_MANIFEST = frozenset(field.name for field in dataclasses.fields(_SweepFile))
_DEFAULTS: Mapping[str, Any] = {name: value for name, value in to_json(RunOptions()).items() if name != "output"}
"""Options, as they are for a sweep that does not name them."""


def describe_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """List what keeps a sweep with the manifest ``now`` from resuming one with ``before``; empty if nothing does."""
    other_schema = schema_difference(before)
    if other_schema:
        return [other_schema]
    differences = option_differences(before, now)
    if before.get("suites") != now["suites"]:
        differences.append(f"suites were {before.get('suites')} and are {now['suites']}")
    elif _part(before) != _part(now):
        differences.append(f"it was partition {_part(before)} and is {_part(now)}")
    elif (before.get("partition") or {}).get("of") != now["partition"].get("of"):
        differences.append("it was a part of another selection of models")
    elif before.get("models") != now["models"]:
        differences.append(_model_differences(before.get("models") or [], now["models"]))
    return differences


def changed_suites(before: Mapping[str, Any], now: Mapping[str, Any]) -> frozenset[str]:
    """Return the suites whose files have another digest in the manifest ``now`` than in ``before``. Without a digest
    in one of the two, a suite counts as unchanged."""
    old, new = before.get("digests", {}), now.get("digests", {})
    return frozenset(suite for suite in old.keys() & new.keys() if old[suite] != new[suite])


_HINTS = {"threads": " (--jobs sets it, too)"}


def option_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """``seed was 1 and is 2`` for every option that is not the same in both manifests."""
    sides = tuple({**_DEFAULTS} | (manifest.get("options") or {}) for manifest in (before, now))
    differences = []
    for name in sorted(sides[0].keys() | sides[1].keys()):
        was, is_ = (_option(side[name]) if name in side else "absent" for side in sides)
        if was != is_:
            differences.append(f"{name} was {was} and is {is_}{_HINTS.get(name, '')}")
    return differences


def _option(value: Any) -> str:
    """Return the text of an option; a tuple is the list that JSON makes of it."""
    return repr(list(value) if isinstance(value, tuple) else value)


def _part(manifest: Mapping[str, Any]) -> str:
    partition = manifest.get("partition") or {}
    return f"{partition.get('id', 0)} of {partition.get('total', 1)}"


def _model_differences(before: Sequence[Sequence[str]], now: Sequence[Sequence[str]]) -> str:
    old, new = {tuple(model)[-1] for model in before}, {tuple(model)[-1] for model in now}
    phrases = (("no longer", old - new), ("now", new - old))
    changes = [f"{phrase} {join_limited(sorted(names), 3)}" for phrase, names in phrases if names]
    return f"models: {', '.join(changes)}" if changes else "the models come in another order"
