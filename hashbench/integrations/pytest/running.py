"""How the checks of one test are made: by the options of ``pytest.ini``, with files in its folder. No torch."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Any

import pytest

from hashbench.testing.asserts import DREW, Asserts
from hashbench.testing.options import BUDGET, REPLAYS, TRACERS

RECORD = "--hashbench-record"
INI = {
    "hashbench_runs": (
        int,
        2,
        2,
        "runs of a function that must be equal; if unset, 5 of one that takes < 50 ms",
    ),
    "hashbench_replays": (int, REPLAYS, 2, "repetitions of an experiment on a difference, at least"),
    "hashbench_diagnose_budget": (float, BUDGET, 0, "seconds for the experiments on one difference (0: none)"),
}
"""Option of ``pytest.ini`` → type, default, minimum, help."""


def asserts_of(item: pytest.Item, folders: pytest.TempPathFactory) -> Asserts:
    """Return the checks of a test, with the options of ``pytest.ini``; ``folders`` are pytest's own."""
    asked = asked_output(item.config)
    base = asked if asked is not None else folders.getbasetemp() / "hashbench"
    return Asserts(
        defaults={
            "runs": _runs_set(item.config),
            "replays": setting_of(item.config, "hashbench_replays"),
            "diagnose_budget": setting_of(item.config, "hashbench_diagnose_budget"),
            "tracer": tracer_of(item.config),
            "output": base / folder_name(item.nodeid),
        },
        files=item.path.parent,
        records=item.config.getoption(RECORD),
        how_to_record=f"pytest {RECORD}",
        tell=lambda name, what: item.user_properties.append((name, item.nodeid if name == DREW else what)),
    )


def setting_of(config: pytest.Config, name: str) -> Any:
    """Return the value of an option of ``pytest.ini``."""
    kind, default, least, _ = INI[name]
    text = str(config.getini(name)).strip()
    if not text:
        return default
    try:
        value = kind(text)
    except ValueError:
        raise pytest.UsageError(f"{name} must be a number, got {text}") from None
    if not least <= value < float("inf"):
        raise pytest.UsageError(f"{name} must be >= {least}, got {text}")
    return value


def _runs_set(config: pytest.Config) -> int | None:
    """Return ``hashbench_runs`` where it is set."""
    return setting_of(config, "hashbench_runs") if str(config.getini("hashbench_runs")).strip() else None


def tracer_of(config: pytest.Config) -> str:
    """Return ``hashbench_tracer`` of ``pytest.ini``."""
    tracer = str(config.getini("hashbench_tracer")).strip() or "auto"
    if tracer not in TRACERS:
        raise pytest.UsageError(f"hashbench_tracer must be {', '.join(TRACERS)}, got {tracer}")
    return tracer


def asked_output(config: pytest.Config) -> Path | None:
    """Return the folder of ``--hashbench-output``."""
    asked = config.getoption("--hashbench-output")
    return None if asked is None else config.invocation_params.dir / asked


def folder_name(test: str) -> str:
    """Return a short file name that is unique to the test and the worker of pytest-xdist."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    digest = hashlib.sha256(f"{test}{worker}".encode(errors="surrogatepass")).hexdigest()[:8]
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "_", test.rpartition("/")[2])[:60]
    return f"{plain}-{digest}"
