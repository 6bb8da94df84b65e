"""hashbench: run each model of a zoo twice and name the first kernel whose results differ.

``HashDebugTrace``, ``Workload``, ``BenchmarkRunner`` and the rest are imported when first used, so that the command
line and everything that only reads files start without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hashbench.core.check.model import BenchmarkRunner
    from hashbench.core.divergence import find as find_divergence
    from hashbench.core.errors import HashbenchError
    from hashbench.core.records import ModelSpec, Row, RunOptions, Trace
    from hashbench.core.results.dataframe import read_sweep
    from hashbench.core.run.workload import Workload
    from hashbench.core.suites.python_suites import model
    from hashbench.core.trace.api import HashDebugTrace
    from hashbench.extensions.ranks.record import record_ranks
    from hashbench.extensions.ranks.results import result
    from hashbench.extensions.watch.recorder import watch

__version__ = "0.1.0"

_HOME = {
    "BenchmarkRunner": ("hashbench.core.check.model", "BenchmarkRunner"),
    "HashDebugTrace": ("hashbench.core.trace.api", "HashDebugTrace"),
    "HashbenchError": ("hashbench.core.errors", "HashbenchError"),
    "ModelSpec": ("hashbench.core.records", "ModelSpec"),
    "Row": ("hashbench.core.records", "Row"),
    "RunOptions": ("hashbench.core.records", "RunOptions"),
    "Trace": ("hashbench.core.records", "Trace"),
    "Workload": ("hashbench.core.run.workload", "Workload"),
    "find_divergence": ("hashbench.core.divergence", "find"),
    "model": ("hashbench.core.suites.python_suites", "model"),
    "read_sweep": ("hashbench.core.results.dataframe", "read_sweep"),
    "record_ranks": ("hashbench.extensions.ranks.record", "record_ranks"),
    "result": ("hashbench.extensions.ranks.results", "result"),
    "watch": ("hashbench.extensions.watch.recorder", "watch"),
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
