"""``sweep.json``: what a sweep was asked for, and whether that is what another one was asked for. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hashbench.records import ROW_SCHEMA, SWEEP_SCHEMA, ModelSpec, RunOptions
from hashbench.text import a_few

Model = tuple[str, str]
"""Suite and name."""


@dataclass(frozen=True, slots=True)
class Partition:
    """Part ``id``, from 0, of ``total`` parts of the selection ``of``, which is in its order (empty where there is
    one part)."""

    id: int = 0
    total: int = 1
    of: tuple[Model, ...] = ()


def manifest_of(specs: Iterable[ModelSpec], options: RunOptions, partition: Partition) -> dict[str, Any]:
    """What a resumed sweep must have in common with the one that it resumes. A shard knows the whole selection, so that
    shards can be told from those of another one, and what a missing shard lacks can be named."""
    models = [(spec.suite, spec.name) for spec in specs]
    kept = dataclasses.asdict(options)
    del kept["output"]  # results folders can be moved
    return {
        "schema": SWEEP_SCHEMA,
        "rows": ROW_SCHEMA,
        "suites": sorted({suite for suite, _ in models}),
        "options": kept,
        "partition": _partition(partition),
        "models": [list(model) for model in models],
    }


def _partition(partition: Partition) -> dict[str, Any]:
    found: dict[str, Any] = {"id": partition.id, "total": partition.total}
    return found if partition.total == 1 else {**found, "of": [list(model) for model in partition.of]}


def as_whole(shard: Mapping[str, Any], models: Sequence[Model]) -> dict[str, Any]:
    """The manifest of the sweep of ``models`` of which ``shard`` is the manifest of a part: that of a sweep which was
    never cut."""
    return {
        **shard,
        "suites": sorted({suite for suite, _ in models}),
        "partition": _partition(Partition()),
        "models": [list(model) for model in models],
    }


def schema_difference(manifest: Mapping[str, Any], *, now: Mapping[str, Any]) -> str:
    """What versions ``manifest`` has that ``now`` has not; empty where they agree."""
    if manifest.get("schema") != now["schema"]:
        return f"sweep.json has version {manifest.get('schema')!r}, this hashbench writes {now['schema']!r}"
    if manifest.get("rows") != now.get("rows"):
        return f"its rows have schema {manifest.get('rows')!r}, this hashbench writes {now.get('rows')!r}"
    return ""


def describe_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What keeps a sweep with the manifest ``now`` from resuming one with ``before``; empty when nothing does."""
    other_schema = schema_difference(before, now=now)
    if other_schema:
        return [other_schema]
    differences = option_differences(before, now)
    if before.get("suites") != now["suites"]:
        differences.append(f"suites were {before.get('suites')} and are {now['suites']}")
    elif _part(before) != _part(now):
        differences.append(f"it was partition {_part(before)} and is {_part(now)}")
    elif before.get("models") != now["models"]:
        differences.append(_model_differences(before.get("models") or [], now["models"]))
    return differences


_HINTS = {"threads": " (--jobs sets it, too)"}


def option_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """``seed was 1 and is 2`` for every option that is not the same in both manifests."""
    old, new = before.get("options") or {}, now.get("options") or {}
    return [
        f"{name} was {old.get(name)!r} and is {new.get(name)!r}{_HINTS.get(name, '')}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]


def _part(manifest: Mapping[str, Any]) -> str:
    partition = manifest.get("partition") or {}
    return f"{partition.get('id', 0)} of {partition.get('total', 1)}"


def _model_differences(before: Sequence[Sequence[str]], now: Sequence[Sequence[str]]) -> str:
    old, new = {tuple(model)[-1] for model in before}, {tuple(model)[-1] for model in now}
    phrases = (("no longer", old - new), ("now", new - old))
    changes = [f"{phrase} {a_few(sorted(names), 3)}" for phrase, names in phrases if names]
    return f"models: {', '.join(changes)}" if changes else "the models come in another order"
