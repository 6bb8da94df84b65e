"""A runner whose suite is one function, for tests of ``BenchmarkRunner``."""

from __future__ import annotations

from collections.abc import Callable

from hashbench.core.check.model import BenchmarkRunner
from hashbench.core.records import ModelSpec
from hashbench.core.run.workload import Workload
from hashbench.core.suites import registry


class FunctionRunner(BenchmarkRunner):
    """A runner of what ``build`` returns, whatever the model is called."""

    build: Callable[[], Workload]

    def load_model(self, spec: ModelSpec) -> Workload:
        made, registry.load = registry.load, lambda *_, **__: self.build()
        try:
            return super().load_model(spec)
        finally:
            registry.load = made
