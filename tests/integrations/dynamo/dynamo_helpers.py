"""Runs the stand-in for PyTorch's harness inside the test's process, with or without hashbench in it."""

from __future__ import annotations

import csv
import gc
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hashbench.core.records import HarnessRow
from hashbench.core.run.rng import preserved_rng
from hashbench.core.run.settings import preserved
from hashbench.integrations.dynamo import OnImport, hook, watch_for_harness
from hashbench.integrations.dynamo.session import VARIABLE, Session, collect

STANDIN = Path(__file__).with_name("standin")
SCRIPT = STANDIN / "zoo.py"
NOISY = "standin.noisy.default"
"""The kernel of ``noisy``: an op that draws from a generator of its own."""


@dataclass(frozen=True)
class Found:
    """What one model came to: the harness's row, ours, and the runner that was used."""

    theirs: dict[str, str]
    ours: HarnessRow | None
    runner: Any

    @property
    def row(self) -> Any:
        assert self.ours is not None
        return self.ours


class Standin:
    """The stand-in of one year, imported under a hook that only counts."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, year: str = "2026", changed: str = "") -> None:
        self.folder, self.monkeypatch = folder, monkeypatch
        self.found: list[str] = []
        monkeypatch.setenv("STANDIN_YEAR", year)
        monkeypatch.setenv("STANDIN_CHANGED", changed)
        with imported(lambda module: self.found.append(module.__name__)) as (self.common, self.zoo):
            pass

    def run(self, name: str, *flags: str, session: Session | None = None, only: str = "") -> Found:
        """Run one model as the stand-in's own process for it would; ``session``: with hashbench. ``only``: the model by
        another name that the harness takes."""
        self.folder.mkdir(exist_ok=True)
        output = self.folder / f"{name}-{'with' if session else 'without'}.csv"
        output.unlink(missing_ok=True)
        arguments = ["--accuracy", f"--only={only or name}", f"--output={output}", *flags]
        if session is not None:
            session = replace(session, csv=str(output))
            session.prepare(anew=True)
        runner = self.zoo.ZooRunner()
        with self._hooked(session, arguments), preserved(), preserved_rng():
            self.common.run(runner, self.common.parse_args(arguments))
        with output.open() as file:
            (theirs,) = csv.DictReader(file)
        gc.collect()
        ours = collect(session, ended="it ended") if session else []
        assert len(ours) == (session is not None), ours
        return Found(theirs, ours[0] if ours else None, runner)

    @contextmanager
    def _hooked(self, session: Session | None, arguments: list[str]) -> Iterator[None]:
        base = self.common.BenchmarkRunner
        before = base.check_accuracy, base.check_batch_invariance, base.validate_model
        parse_args = self.common.parse_args
        with self.monkeypatch.context() as patch:
            patch.setattr(sys, "argv", [str(SCRIPT), *arguments])
            for variable, value in (session.environment() if session else {}).items():
                patch.setenv(variable, value)
            hook.attach(self.common)
            assert (base.check_accuracy is not before[0]) == (session is not None)
            try:
                yield
            finally:
                base.check_accuracy, base.check_batch_invariance, base.validate_model = before
                self.common.parse_args = parse_args


@contextmanager
def imported(found: OnImport) -> Iterator[tuple[ModuleType, ModuleType]]:
    """The modules of the stand-in, imported anew while the finder looks on; the import system is then as before."""
    finders, path = list(sys.meta_path), list(sys.path)
    sys.path.insert(0, str(STANDIN))
    watch_for_harness(found)
    try:
        for name in ("common", "zoo"):
            sys.modules.pop(name, None)
        zoo = importlib.import_module("zoo")
        yield sys.modules["common"], zoo
    finally:
        sys.meta_path[:], sys.path[:] = finders, path
        for name in ("common", "zoo"):
            sys.modules.pop(name, None)


def a_session(
    folder: Path, *, trace: str = "always", budget: float = 0.0, mode: str = "inference", **more: Any
) -> Session:
    """A session that writes into ``folder``; no experiments unless there is a budget."""
    return Session(folder=str(folder), script=str(SCRIPT), trace=trace, budget=budget, mode=mode, **more)


__all__ = ["NOISY", "SCRIPT", "STANDIN", "VARIABLE", "Found", "Standin", "a_session", "imported"]
