"""The fingerprints of the machines that rows were made on, beside their CSV, and what differs between two of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hashbench.errors import HashbenchError
from hashbench.records import ROW_SCHEMA

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
        # about the file, not about the machine
        *("schema", "env", "key"),
    }
)
"""Names that are passed over wherever they stand in an environment."""


@dataclass(frozen=True, slots=True)
class EnvironmentChange:
    """One entry that differs: its dotted key and both values as text; empty where a side lacks it."""

    key: str
    base: str
    new: str


def environment_changes(
    base: Iterable[Mapping[str, Any]], new: Iterable[Mapping[str, Any]]
) -> tuple[EnvironmentChange, ...]:
    """Every entry that differs, sorted by key. A side of several environments has all their values, ``a or b``."""
    first, second = _merged(base), _merged(new)
    return tuple(
        EnvironmentChange(key=key, base=first.get(key, ""), new=second.get(key, ""))
        for key in sorted(first.keys() | second.keys())
        if first.get(key, "") != second.get(key, "")
    )


def _merged(environments: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    values: dict[str, set[str]] = {}
    for environment in environments:
        for key, value in flat(environment).items():
            values.setdefault(key, set()).add(value)
    return {key: " or ".join(sorted(texts)) for key, texts in values.items()}


def flat(environment: Mapping[str, Any]) -> dict[str, str]:
    """The entries of an environment that may matter, as text by their dotted keys; without those that are empty."""
    entries: dict[str, str] = {}
    for name, value in environment.items():
        if name.lower() in VOLATILE:
            continue
        if isinstance(value, Mapping):
            entries |= {f"{name}.{key}": text for key, text in flat(value).items()}
        elif value != "":
            entries[name] = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return entries


# ------------------------------------------------------------------------------------------------ beside a CSV


def environments_of(path: Path) -> tuple[dict[str, Any], ...]:
    """The fingerprints of the machines that a CSV's rows were made on, from ``<name>.environment.json`` or
    ``environment.json`` beside it: the newest, then the ``previous`` ones. None where there is no such file.

    Raises:
        HashbenchError: the file cannot be read, or was written by a version with other columns.
    """
    candidates = (path.with_name(f"{path.stem}.environment.json"), path.with_name("environment.json"))
    file = next((candidate for candidate in candidates if candidate.is_file()), None)
    if file is None:
        return ()
    content = read_json_object(file)
    schema = content.get("schema", ROW_SCHEMA)
    if schema != ROW_SCHEMA:
        raise HashbenchError(
            f"{path} has schema {schema!r} and this hashbench reads schema {ROW_SCHEMA}",
            consequence=f"its columns may mean something else ({file.name} says so)",
            tip="Read it with the version that wrote it, or run the sweep again.",
        )
    previous = content.pop("previous", [])
    earlier = previous if isinstance(previous, list) else []
    return (content, *(environment for environment in earlier if isinstance(environment, dict)))


def environments_text(environments: Sequence[Mapping[str, Any]]) -> str:
    """The content of an ``environment.json``: the newest environment, then those of earlier parts as ``previous``."""
    newest, *previous = environments
    content = {**newest, "previous": previous} if previous else newest
    return json.dumps(content, indent=2, default=str) + "\n"


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``; :class:`HashbenchError` where there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise HashbenchError(f"cannot read {path}", consequence=error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        raise HashbenchError(f"cannot read {path}", consequence=f"it is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise HashbenchError(f"cannot read {path}", consequence="it holds no JSON object")
    return content
