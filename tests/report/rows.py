"""Rows and sweeps written by hand, for the tests of ``report``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hashbench.records import Row
from hashbench.results.folder import file_key
from hashbench.results.load import Sweep
from hashbench.results.rows import ROWS, row_to_json

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
    return dataclasses.replace(PLAIN, name=name, accuracy=accuracy, **values)


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
