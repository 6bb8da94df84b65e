"""hashbench: run each model of a zoo twice and name the first kernel whose results differ.

``HashDebugTrace``, ``Workload``, ``BenchmarkRunner`` and the rest are imported when first used, so that the command
line and everything that only reads files start without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hashbench.check.model import BenchmarkRunner
    from hashbench.divergence import find as find_divergence
    from hashbench.errors import HashbenchError
    from hashbench.ranks.record import record_ranks
    from hashbench.ranks.results import result
    from hashbench.records import ModelSpec, Row, RunOptions, Trace
    from hashbench.results.dataframe import read_sweep
    from hashbench.run.workload import Workload
    from hashbench.suites.python_suites import model
    from hashbench.trace.api import HashDebugTrace
    from hashbench.training.recorder import watch

__version__ = "0.1.0"

_HOME = {
    "BenchmarkRunner": ("hashbench.check.model", "BenchmarkRunner"),
    "HashDebugTrace": ("hashbench.trace.api", "HashDebugTrace"),
    "HashbenchError": ("hashbench.errors", "HashbenchError"),
    "ModelSpec": ("hashbench.records", "ModelSpec"),
    "Row": ("hashbench.records", "Row"),
    "RunOptions": ("hashbench.records", "RunOptions"),
    "Trace": ("hashbench.records", "Trace"),
    "Workload": ("hashbench.run.workload", "Workload"),
    "find_divergence": ("hashbench.divergence", "find"),
    "model": ("hashbench.suites.python_suites", "model"),
    "read_sweep": ("hashbench.results.dataframe", "read_sweep"),
    "record_ranks": ("hashbench.ranks.record", "record_ranks"),
    "result": ("hashbench.ranks.results", "result"),
    "watch": ("hashbench.training.recorder", "watch"),
}

__all__ = [
    "BenchmarkRunner",
    "HashDebugTrace",
    "HashbenchError",
    "ModelSpec",
    "Row",
    "RunOptions",
    "Trace",
    "Workload",
    "find_divergence",
    "model",
    "read_sweep",
    "record_ranks",
    "result",
    "watch",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        module, attribute = _HOME[name]
        return getattr(importlib.import_module(module), attribute)
    raise AttributeError(f"module 'hashbench' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
