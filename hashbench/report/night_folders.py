"""Which nights a user means who names folders: sweeps, nights of several sweeps, and folders of nights."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from hashbench.errors import HashbenchError
from hashbench.results.load import ACCURACY_FILE, NIGHT_FILE, SELECTION_FILE, csv_files
from hashbench.results.rows import read_json_object

_DATE = re.compile(r"(\d{4}-\d{2}-\d{2})(?:[T_ -]?(\d{2})[:.-]?(\d{2})(?:[:.-]?(\d{2}))?)?")


@dataclass(frozen=True, slots=True)
class NightFolder:
    """One night: its ``label``, the time of its beginning (ISO 8601, UTC), its ``path`` and the CSVs in it. ``named``:
    the user named it, and not a folder of nights, so that what is wrong with it is an error."""

    label: str
    when: str
    path: Path
    files: tuple[Path, ...]
    named: bool


def find_nights(paths: Iterable[Path | str]) -> list[NightFolder]:
    """The nights at ``paths``, oldest first, each once.

    A path is a CSV, a folder that :func:`~hashbench.results.load.load_sweep` reads, or a folder of such folders.
    Folders whose names begin with a date are nights of their own, also where each holds one sweep.

    Raises:
        HashbenchError: there is no such folder, or nothing in it.
    """
    found = {night.path.resolve(): night for path in paths for night in _nights_at(Path(path))}
    return sorted(found.values(), key=lambda night: (datetime.fromisoformat(night.when), night.label))


def _nights_at(path: Path) -> Iterator[NightFolder]:
    inner = _inner_nights(path)
    if not inner:
        yield _night(path, csv_files(path), named=True)
    for folder in inner:
        yield _night(folder, _accuracy_files(folder), named=False)


def _inner_nights(path: Path) -> list[Path]:
    """The folders in ``path`` that are nights; none where ``path`` is a night itself."""
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


def _night(path: Path, files: list[Path], *, named: bool) -> NightFolder:
    folder = path.parent if path.name == ACCURACY_FILE else path
    label = folder.name or folder.resolve().name
    return NightFolder(label=label, when=_when(label, folder, files), path=path, files=tuple(files), named=named)


def _when(label: str, folder: Path, files: Iterable[Path]) -> str:
    """When the first sweep of a night began: as it says itself, or the night does; else as the folder is called; else
    the age of its files."""
    began = sorted(filter(None, (_began(file.with_name(SELECTION_FILE)) for file in files)))
    # A night whose sweeps are gone must not sort before the one of the same day that it came after.
    began = began or list(filter(None, [_began(folder / NIGHT_FILE)]))
    if began:
        return began[0]
    named = _DATE.match(label)
    if named:
        date, hour, minute, second = named.groups()
        try:
            return _utc(datetime.fromisoformat(f"{date}T{hour or '00'}:{minute or '00'}:{second or '00'}"))
        except ValueError:
            pass  # 2026-13-45 is no date
    ages = [file.stat().st_mtime for file in files] or [folder.stat().st_mtime]
    return _utc(datetime.fromtimestamp(min(ages), UTC))


def _began(path: Path) -> str:
    try:
        return _utc(datetime.fromisoformat(str(read_json_object(path)["began"])))
    except (HashbenchError, KeyError, ValueError):
        return ""  # of an earlier version, or damaged: what that means is said where the sweep is read


def _utc(time: datetime) -> str:
    aware = time if time.tzinfo else time.replace(tzinfo=UTC)
    return aware.astimezone(UTC).isoformat(timespec="seconds")
