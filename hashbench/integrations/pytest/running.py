"""How the runs of one test are made: the options of a check, those of ``pytest.ini``, and where files lie. No torch."""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from hashbench.core.check.function import FunctionCall
    from hashbench.core.records import RunOptions

RECORD, RECORDED = "--hashbench-record", "hashbench_recorded"
SEED = 1337
INI = {
    "hashbench_runs": (
        int,
        2,
        2,
        "runs of a function that must be equal; if unset, 5 of one that takes < 50 ms",
    ),
    "hashbench_replays": (int, 20, 2, "repetitions of an experiment on a difference, at least"),
    "hashbench_diagnose_budget": (float, 30.0, 0, "seconds for the experiments on one difference (0: none)"),
}
"""Option of ``pytest.ini`` → type, default, minimum, help."""
TRACERS = ("auto", "native", "python")


@dataclass(frozen=True, slots=True)
class Options:
    """How one function is run; what the marker takes.

    Args:
        runs: how often; all runs are compared with the first. ``None``: ``hashbench_runs``, else 5 where the first run
            takes less than 50 ms, else 2.
        seed: torch's, NumPy's and Python's global generators are set to it before every run.
        deterministic: ``on``, ``warn`` or ``off`` puts the settings of a sweep in force
            (``torch.use_deterministic_algorithms``, library flags); ``None``: those that the test has.
        diagnose: look for the cause of a difference, which runs the function many more times.
        ops: compare what every op left, not results alone. ``None``: the marker does, the fixture does not.
        allow_empty: a function that returns nothing and runs no op passes.
        tracer: ``auto``, ``native`` or ``python`` records the ops; ``None``: ``hashbench_tracer``, else ``auto``.
        stress: runs that agree are made again under perturbations that must not matter (more threads than cores, load,
            different content in fresh memory, other addresses, the garbage collector at other moments), which must
            agree, too. A function is not run in a fresh process.
    """

    runs: int | None = None
    seed: int = SEED
    deterministic: str | None = None
    diagnose: bool = True
    ops: bool | None = None
    allow_empty: bool = False
    tracer: str | None = None
    stress: bool = False

    def __post_init__(self) -> None:
        if self.runs is not None and (type(self.runs) is not int or self.runs < 2):
            raise ValueError(f"runs must be an int >= 2, got {self.runs!r}")
        if self.deterministic not in (None, "on", "warn", "off"):
            raise ValueError(f"deterministic must be 'on', 'warn', 'off' or None, got {self.deterministic!r}")
        if self.tracer not in (None, *TRACERS):
            raise ValueError(f"tracer must be {', '.join(map(repr, TRACERS))} or None, got {self.tracer!r}")
        if type(self.seed) is not int or not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be an int from 0 to 2**32 - 1, got {self.seed!r}")


@dataclass(frozen=True)
class RunningTest:
    """The test that asks for a check: how its runs are made, and where their files lie.

    Attributes:
        item: the test.
        folders: pytest's own.
    """

    item: pytest.Item
    folders: pytest.TempPathFactory

    def run_options(self, call: FunctionCall, options: Options, *, mode: str = "inference") -> RunOptions:
        """Return the options of the call's runs in this test."""
        from hashbench.core.check.function import device_of
        from hashbench.core.records import RunOptions

        return RunOptions(
            mode=mode,
            device=device_of(call),
            runs=options.runs or _runs_set(self.item.config),
            seed=options.seed,
            deterministic=options.deterministic or "",
            replays=setting_of(self.item.config, "hashbench_replays"),
            diagnose_budget=setting_of(self.item.config, "hashbench_diagnose_budget") if options.diagnose else 0,
            tracer=options.tracer or tracer_of(self.item.config),
            stress=options.stress,
            output=str(self.folder),
        )

    @functools.cached_property
    def folder(self) -> Path:
        """Folder for traces and repros of this test, created with the first one; existing files are kept."""
        name = folder_name(self.item.nodeid)
        asked = asked_output(self.item.config)
        base = asked if asked is not None else self.folders.getbasetemp() / "hashbench"
        folders = (base / (name if number == 1 else f"{name}-{number}") for number in itertools.count(1))
        return next(folder for folder in folders if not folder.exists())


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function or model in a message."""
    return str(getattr(function, "__qualname__", type(function).__name__)).replace("<locals>.", "")


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
