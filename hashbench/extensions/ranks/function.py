"""Check a function of a test that builds a model with ranks: every rank imports it, and runs what it returns."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

from hashbench.core.check.function import SUITE, row_of_check
from hashbench.core.check.model import DEFAULT_ITERATIONS, BenchmarkRunner
from hashbench.core.errors import HashbenchError
from hashbench.core.records import ModelSpec, Row, RunOptions
from hashbench.core.run.rng import reset_rng_state
from hashbench.core.run.workload import Workload
from hashbench.core.suites.python_suites import build, import_file
from hashbench.extensions.ranks.check import RanksCheck

TARGET = "hashbench.extensions.ranks.function:RankFunctionRunner"


class RankFunctionRunner(BenchmarkRunner):
    """Runs the model of a function that a spec names by module and name."""

    fresh_target = TARGET

    def load_model(self, spec: ModelSpec) -> Workload:
        """Import the function, unless it was, and call it from the seed."""
        reset_rng_state(self.options.seed)
        name = spec.arguments["function"]
        holder = _imported(spec.arguments["module"], Path(spec.source))
        workload = build(attrgetter(name)(holder), batch_size=None, what=name)
        return replace(workload, iterations=workload.iterations or DEFAULT_ITERATIONS)


def _imported(name: str, path: Path) -> ModuleType:
    """Import a module by its name or, where none or another one is found by it, by path, as pytest may have."""
    with contextlib.suppress(ImportError):
        module = importlib.import_module(name)
        if module.__file__ is not None and Path(module.__file__).resolve() == path.resolve():
            return module
    return import_file(path)


def check_ranks(factory: Callable[[], Any], name: str, options: RunOptions, *, ranks: int) -> Row:
    """Run the model of ``factory`` on several ranks, compare the runs, and find the rank and the cause of a difference.

    Args:
        factory: a function of a module; returns ``(module, example_inputs)`` or a ``Workload``.
        name: its name in the row.
        options: as of :func:`~hashbench.core.check.function.check_function`, with ``mode``.
        ranks: number of ranks.

    Raises:
        HashbenchError: the ranks cannot import the function, no process can be started, or an unusable tracer.
    """
    qualified = getattr(factory, "__qualname__", "")
    importable = inspect.isfunction(factory) and "<" not in qualified
    path = Path(inspect.getfile(factory)).absolute() if importable else Path()
    if not importable or factory.__module__ == "__main__" or not path.is_file():
        typed = importable and not path.is_file()
        session = ", and it was typed into a session that has no file" if typed else ""
        again = ", which would run the whole program again" if importable and not typed else ""
        raise HashbenchError(
            f"the ranks cannot import {name}",
            consequence=f"each calls it in a process of its own{again or session}",
            tip="Make it a function at the top of a module, and import it.",
        )
    arguments = {"module": factory.__module__, "function": qualified}
    spec = ModelSpec(SUITE, name, source=str(path), arguments=arguments, world_size=ranks)
    return row_of_check(spec, options, lambda level: RanksCheck(spec, options, level, target=TARGET).run())
