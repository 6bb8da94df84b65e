"""What differs between the machines and settings of two sweeps."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

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
        for key, value in _flat(environment):
            values.setdefault(key, set()).add(value)
    return {key: " or ".join(sorted(found)) for key, found in values.items()}


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, inner in value.items():
        if name.lower() in VOLATILE:
            continue
        if isinstance(inner, Mapping):
            yield from _flat(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", inner if isinstance(inner, str) else json.dumps(inner, sort_keys=True)
