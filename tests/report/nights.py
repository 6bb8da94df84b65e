"""Folders of nights written by hand, for the tests of history, expectations and reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hashbench.records import Row

from .rows import row, write_sweep

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
