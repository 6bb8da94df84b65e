"""The folder of one sweep: what lies where, who may write, and how each file stays valid at every moment.

``rows/<key>.json`` is the truth, one file a model, written whole or not at all. ``accuracy.csv`` is made from it: it
grows by one line a model while the sweep runs and is rebuilt at the end and on resume. ``sweep.json`` says what was
asked for, ``environment.json`` where it ran, ``logs/`` what the models printed, ``traces/`` and ``repro/`` are the
runner's, and so is ``rows/<key>.draft``: what it knew of a difference before it looked for the cause.
``rows/<key>.first`` is there while a model waits to be run again alone: the row of its first attempt.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hashbench.errors import HashbenchError
from hashbench.io import replace_file
from hashbench.records import ModelSpec, Row
from hashbench.results.rows import ROWS, row_from_json, row_key, row_to_json
from hashbench.text import one_line

_LONGEST_NAME = 80
"""Characters of a model's name in a file name; file systems take 255 bytes, and suite, mode and ending come on top."""


def file_key(*, suite: str, mode: str, name: str) -> str:
    """A file name without ending for one model of a sweep: ``<suite>.<mode>.<name>``.

    Different models get different keys: what had to be altered (separators, spaces, long names, a dot in the
    suite) ends in ``~`` and a hash of the original, and nothing unaltered holds a ``~``.
    """
    return f"{_safe(suite, extra='')}.{mode}.{_safe(name, extra='.')}"


def _safe(text: str, *, extra: str) -> str:
    safe = re.sub(rf"[^A-Za-z0-9_{extra}-]", "_", text)[-_LONGEST_NAME:]
    if safe == text:
        return text
    return f"{safe}~{hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()[:12]}"


class ResultsFolder:
    """Reads and writes the results folder ``path``.

    Methods raise ``OSError`` when the disk does not take what they write; every file is then as it was before.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.csv = self.path / "accuracy.csv"
        self.manifest = self.path / "sweep.json"
        self.environment = self.path / "environment.json"
        self.rows = self.path / "rows"
        self.logs = self.path / "logs"
        self.traces = self.path / "traces"

    def row_path(self, key: str) -> Path:
        """Where the row of ``key`` belongs."""
        return self.rows / f"{key}.json"

    def draft_path(self, key: str) -> Path:
        """Where the runner keeps the row of ``key`` while it looks for the cause: experiments may kill the process."""
        return self.rows / f"{key}.draft"

    def first_path(self, key: str) -> Path:
        """Where the row of the first attempt at ``key`` is while there is a second one."""
        return self.rows / f"{key}.first"

    def log_path(self, key: str) -> Path:
        """Where a worker for ``key`` prints."""
        return self.logs / f"{key}.log"

    @property
    def in_use(self) -> bool:
        """Whether a sweep has written here before."""
        return os.path.lexists(self.csv) or os.path.lexists(self.manifest) or any(self.rows.glob("*.json"))

    @contextlib.contextmanager
    def claimed(self, *, resume: bool) -> Iterator[None]:
        """Create the folder and hold it alone until the end of the context, or of the process.

        Raises:
            HashbenchError: it cannot be written, another sweep holds it, or (without ``resume``) it holds results.
                Nothing in it is touched then.
        """
        lock_path = self.path / ".lock"
        try:
            if not resume and not os.path.lexists(lock_path):
                self._refuse_results()
            self.path.mkdir(parents=True, exist_ok=True)
            lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise _cannot_write(self.path, error) from error
        try:
            self._lock(lock)
            if not resume:
                self._refuse_results()
            self._prepare()
            yield
        finally:
            os.close(lock)

    def _lock(self, lock: int) -> None:
        # The kernel gives this lock back when the process ends, however it ends.
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise HashbenchError(
                f"another sweep is writing into {self.path}",
                consequence="two sweeps in one folder would mix their rows",
                tip="Wait until it ends, or choose another --output.",
            ) from error
        except OSError as error:
            raise _cannot_write(self.path, error) from error

    def _refuse_results(self) -> None:
        if self.in_use:
            raise HashbenchError(
                f"{self.path} already holds the results of a sweep",
                consequence="nothing in it was touched",
                tip="Add --resume to complete it, or choose another --output.",
            )

    def _prepare(self) -> None:
        try:
            for folder in (self.rows, self.logs, self.traces):
                folder.mkdir(exist_ok=True)
            for leftover in [*self.path.glob(".*.tmp"), *self.rows.glob(".*.tmp"), *self.rows.glob("*.draft")]:
                leftover.unlink()
        except OSError as error:
            raise _cannot_write(self.path, error) from error

    # ------------------------------------------------------------------------------------ what was asked for

    def write_manifest(self, manifest: Mapping[str, Any]) -> None:
        """Keep what this sweep was asked for, and as ``began`` the time of the first such call (ISO 8601, UTC), unless
        the manifest says when it began."""
        began = self._began() or manifest.get("began") or datetime.now(UTC).isoformat(timespec="seconds")
        replace_file(self.manifest, json.dumps({**manifest, "began": began}, indent=2) + "\n")

    def _began(self) -> str:
        try:
            return str(json.loads(self.manifest.read_bytes()).get("began", ""))
        except (OSError, ValueError, AttributeError):
            return ""

    def read_manifest(self) -> dict[str, Any]:
        """What the sweep in this folder was asked for.

        Raises:
            HashbenchError: it is missing or damaged.
        """
        try:
            manifest = json.loads(self.manifest.read_bytes())
        except (OSError, ValueError) as error:
            raise HashbenchError(
                f"cannot resume {self.path}",
                consequence="its sweep.json is missing or damaged, so nobody knows which models belong to it",
                tip="Start again with another --output.",
            ) from error
        return manifest if isinstance(manifest, dict) else {}

    def write_environment(self, environment: Mapping[str, Any]) -> None:
        """Keep where this sweep runs. A resumed sweep keeps the environments of its earlier parts, which their rows
        refer to, under ``previous``."""
        earlier = [known for known in self._earlier_environments() if _identity(known) != _identity(environment)]
        content = {**environment, "previous": earlier} if earlier else dict(environment)
        replace_file(self.environment, json.dumps(content, indent=2, default=str) + "\n")

    def add_environment(self, environment: Mapping[str, Any]) -> None:
        """Keep another machine's environment beside the sweep's own, under ``previous`` as well."""
        known = self._earlier_environments()
        if known and all(_identity(one) != _identity(environment) for one in known):
            *others, own = known
            content = {**own, "previous": [*others, dict(environment)]}
            replace_file(self.environment, json.dumps(content, indent=2, default=str) + "\n")

    def write_environments(self, environments: Sequence[Mapping[str, Any]]) -> None:
        """Keep the environments of several sweeps: the first one as this sweep's own, the others under ``previous``."""
        kept: dict[str, Mapping[str, Any]] = {}
        for environment in environments:
            kept.setdefault(str(_identity(environment)), environment)
        own, *others = kept.values()
        content = {**own, "previous": others} if others else dict(own)
        replace_file(self.environment, json.dumps(content, indent=2, default=str) + "\n")

    def _earlier_environments(self) -> list[dict[str, Any]]:
        try:
            newest = json.loads(self.environment.read_bytes())
            return [*newest.pop("previous", []), newest]
        except (OSError, ValueError, AttributeError, TypeError):
            return []

    # -------------------------------------------------------------------------------------------------- rows

    def read_rows(self, specs: Mapping[str, ModelSpec], *, mode: str) -> tuple[dict[str, Row], int]:
        """The rows on disk of ``specs`` (by key), and how many files were damaged. Those are deleted, so that their
        models run again."""
        rows: dict[str, Row] = {}
        damaged = 0
        for key, spec in specs.items():
            path = self.row_path(key)
            try:
                rows[key] = row_in(path, spec, mode)
            except FileNotFoundError:
                continue
            except NOT_A_ROW:
                path.unlink()
                damaged += 1
        return rows, damaged

    def read_row(self, key: str, spec: ModelSpec, *, mode: str) -> Row | None:
        """The row that a worker left for ``spec``, if it did."""
        return self.read_rows({key: spec}, mode=mode)[0].get(key)

    def read_draft(self, key: str, spec: ModelSpec, *, mode: str) -> Row | None:
        """The row that the runner kept before it looked for the cause, if it came that far."""
        return _row_if_any(self.draft_path(key), spec, mode)

    def read_firsts(self, specs: Mapping[str, ModelSpec], *, mode: str) -> dict[str, Row]:
        """The rows of first attempts, by key, of models that were to run again when the sweep ended."""
        keys = [path.name.removesuffix(".first") for path in sorted(self.rows.glob("*.first"))]
        found = {key: _row_if_any(self.first_path(key), specs[key], mode) for key in keys if key in specs}
        return {key: row for key, row in found.items() if row is not None}

    def put_off(self, key: str, row: Row) -> None:
        """Keep ``row`` as that of the first attempt at ``key``, which then has no row, no draft and no log any more: as
        long as the second attempt has left none, the model counts as not run."""
        self.row_path(key).unlink(missing_ok=True)  # first: beside the other file it would be the second attempt's
        replace_file(self.first_path(key), json.dumps(row_to_json(row)))
        self.draft_path(key).unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            # No other model's log ends so: what a key had to alter ends in more letters.
            self.log_path(key).rename(self.logs / f"{key}~1.log")

    def remove_row(self, key: str) -> None:
        """Let ``key`` count as not run."""
        self.row_path(key).unlink(missing_ok=True)

    def write_row(self, key: str, row: Row) -> None:
        """Make ``row`` the row of ``key``, in the place of any draft and of a first attempt."""
        replace_file(self.row_path(key), json.dumps(row_to_json(row)))
        self.draft_path(key).unlink(missing_ok=True)
        self.first_path(key).unlink(missing_ok=True)

    # --------------------------------------------------------------------------------------------------- CSV

    def rebuild_csv(self, rows: Iterable[Row]) -> None:
        """Make ``accuracy.csv`` hold exactly ``rows``; a file that does already is left alone."""
        text = ROWS.text(rows)
        with contextlib.suppress(FileNotFoundError):
            if self.csv.read_bytes() == text.encode():
                return
        replace_file(self.csv, text)

    def append_to_csv(self, row: Row) -> None:
        """Add one line to ``accuracy.csv``, all of it or nothing."""
        line = ROWS.line(row).encode()
        descriptor = os.open(self.csv, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            length = os.fstat(descriptor).st_size
            try:
                _write_whole(descriptor, line)
            except BaseException:
                os.ftruncate(descriptor, length)
                raise
        finally:
            os.close(descriptor)


def _write_whole(descriptor: int, line: bytes) -> None:
    # A disk that gets full takes the first bytes without complaint.
    if os.write(descriptor, line) != len(line):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.fsync(descriptor)


NOT_A_ROW = (ValueError, TypeError, AttributeError, RecursionError)
"""What reading a row file raises that holds something else."""


def row_in(path: Path, spec: ModelSpec, mode: str) -> Row:
    """The row of ``spec`` in the file ``path``. Raises ``OSError``, or one of :data:`NOT_A_ROW`."""
    return _checked(row_from_json(json.loads(path.read_bytes())), spec, mode)


def with_evidence(row: Row, folder: Path) -> Row:
    """``row`` of the ``accuracy.csv`` in ``folder`` with the results of its experiments, which its row file has; as it
    is where there is no such file, or one that says something else."""
    if not row.evidence or row.evidence.results:
        return row
    key = file_key(suite=row.suite, mode=_safe(row.mode, extra=""), name=row.name)
    found = _row_if_any(folder / "rows" / f"{key}.json", ModelSpec(suite=row.suite, name=row.name), row.mode)
    if found is None or (row_key(found), one_line(found.evidence.text)) != (row_key(row), row.evidence.text):
        return row
    return replace(row, evidence=found.evidence)


def _row_if_any(path: Path, spec: ModelSpec, mode: str) -> Row | None:
    try:
        return row_in(path, spec, mode)
    except (OSError, *NOT_A_ROW):
        return None


def _checked(row: Row, spec: ModelSpec, mode: str) -> Row:
    """``row``, if it is about ``spec``; a file that somebody renamed or copied is damaged."""
    if (row.suite, row.mode, row.name) != (spec.suite, mode, spec.name):
        raise ValueError("the row is another model's")
    return row


def _identity(environment: Mapping[str, Any]) -> Any:
    return environment.get("key") or environment


def _cannot_write(path: Path, error: OSError) -> HashbenchError:
    return HashbenchError(
        f"cannot write results into {path}",
        consequence=f"{error.strerror or error}; nothing was run",
        tip="Choose another folder with --output.",
    )
