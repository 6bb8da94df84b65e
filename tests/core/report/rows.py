"""Rows, sweeps and folders of nights written by hand, for the tests of ``report``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hashbench.core.records import ExpectedRow, Row, extended
from hashbench.core.results.folder import file_key
from hashbench.core.results.load import Sweep
from hashbench.core.results.rows import ROWS, row_to_json
from tests.flat_rows import changed

PLAIN = Row(
    dev="cpu",
    name="resnet18",
    batch_size=4,
    accuracy="pass",
    suite="torchvision",
    mode="training",
    dtype="float32",
    iterations=2,
    runs=2,
    deterministic="on",
    env="e1",
)
DIFFERING = dataclasses.replace(
    PLAIN, accuracy="eager_two_runs_differ", origin="kernel", kernel="aten.index_put_.default", module="layer1.0"
)


def row(name: str = "resnet18", accuracy: str = "pass", **values: Any) -> Row:
    """A row of a torchvision model in training, float32, CPU, unless said otherwise."""
    return changed(PLAIN, name=name, accuracy=accuracy, **values)


def sweep(*rows: Row, **values: Any) -> Sweep:
    return Sweep(**{"label": "a sweep", "rows": rows, "environments": {}, "kind": "hashbench"} | values)


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    path.write_text(ROWS.text(rows), encoding="utf-8", newline="")


def write_sweep(folder: Path, *rows: Row, environment: dict | None = None, selection: dict | None = None) -> Path:
    """A results folder as a sweep leaves it; row files only of rows with the results of experiments."""
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "accuracy.csv", rows)
    for one in rows:
        if one.evidence.results:
            path = folder / "rows" / f"{file_key(suite=one.suite, mode=one.mode, name=one.name)}.json"
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(row_to_json(one)))
    for name, content in (("environment.json", environment), ("sweep.json", selection)):
        if content is not None:
            (folder / name).write_text(json.dumps(content))
    return folder


DIFFER = "eager_two_runs_differ"
KNOWN = {
    "origin": "kernel",
    "kernel": "aten.index_put_.default",
    "module": "layer1.0",
    "cause": "write_race",
    "confidence": "proven",
    "because": "20 of 20 calls differ, and none with one thread",
    "advice": "Use one thread.",
    "rate": 1.0,
    "trials": 20,
    "rate_of": "replays",
}


def differing(name: str = "resnet18", **values: Any) -> Row:
    """A row of a model whose runs differ, with its diagnosis."""
    return row(name, DIFFER, **{**KNOWN, **values})


def selection(*rows: Row) -> dict[str, Any]:
    """What ``sweep.json`` of a sweep of these models says."""
    options = {"mode": rows[0].mode, "device": rows[0].dev, "dtype": ""}
    return {"schema": 1, "models": [[one.suite, one.name] for one in rows], "options": options}


def write_night(root: Path, label: str, *rows: Row, environment: dict[str, Any] | None = None) -> Path:
    """A night with one sweep folder for each suite and mode of ``rows``."""
    for suite, mode in sorted({(one.suite, one.mode) for one in rows}):
        mine = [one for one in rows if (one.suite, one.mode) == (suite, mode)]
        write_sweep(
            root / label / f"{suite}_{mode}",
            *mine,
            environment=environment or {"schema": 1, "key": "e1", "cpu": "X"},
            selection=selection(*mine),
        )
    return root / label


SINCE = {"since": "2026-10-01", "link": "https://example.org/1", "seen": "2026-11-01"}


def expecting(*rows: Row, told: dict[str, str] = SINCE) -> Sweep:
    """Expected rows, all of which are ``told`` alike."""
    return sweep(*(extended(ExpectedRow, one, **told) for one in rows))
