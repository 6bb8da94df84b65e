"""Build a model in a fresh process by running the harness up to its accuracy check."""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from hashbench.core.records import Failure, ModelSpec, RunOptions, Trace
from hashbench.integrations.dynamo import watch_for_harness
from hashbench.integrations.dynamo.session import VARIABLE, after_flags


class FreshHarness:
    """Builder of a model through the harness; see :class:`hashbench.core.check.model.BenchmarkRunner`.

    The target of :func:`hashbench.core.diagnose.fresh_process.fresh_traces`. The harness runs as always up to its
    ``check_accuracy``; there the traced runs are made and the process leaves it. Its output goes to a temporary folder.
    """

    def __init__(self, options: RunOptions) -> None:
        self.options = options

    def traces_of(
        self,
        spec: ModelSpec,
        *,
        level: str,  # noqa: ARG002
        runs: int,
        threads: int | None = None,
    ) -> list[Trace | Failure]:
        """Return ``runs`` traced runs of the model, with ``threads`` threads unless ``None``.

        ``level`` is ignored: the harness sets the level of determinism itself.
        """
        os.environ.pop(VARIABLE, None)
        asked = spec.arguments
        watch_for_harness(
            lambda module: _prepare_harness(module, self.options, runs, threads, asked.get("generators", {}))
        )
        with tempfile.TemporaryDirectory(prefix="hashbench-") as folder:
            flags = [*asked["arguments"], f"--only={asked['only']}", f"--output={folder}/unused.csv"]
            sys.argv = [asked["script"], *flags]
            sys.path.insert(0, str(Path(asked["script"]).parent))
            try:
                runpy.run_path(asked["script"], run_name="__main__")
            except _Done as done:
                return done.traces
        return [Failure("the harness did not get as far as its accuracy check")]


class _Done(BaseException):
    """Exit from the harness; not an ``Exception``, so that no handler of it catches this."""

    def __init__(self, traces: list[Trace | Failure]) -> None:
        super().__init__()
        self.traces = traces


def _prepare_harness(
    module: ModuleType,
    options: RunOptions,
    runs: int,
    threads: int | None,
    generators: Mapping[str, Sequence[int]],
) -> None:
    """Restore these states of the global random generators before the harness builds its model; exit in its check."""
    runner = getattr(module, "BenchmarkRunner", None)
    if runner is None:
        return
    from hashbench.core.run.outcome import traces_of
    from hashbench.core.run.rng import restore_random_states, states_from_json
    from hashbench.core.run.settings import claim_workspace
    from hashbench.integrations.dynamo.model_check import preparing

    def check_accuracy(self: Any, name: str, model: Any, example_inputs: Any, *_: Any, **__: Any) -> NoReturn:
        claim_workspace(options.device)
        with self.pick_grad(name, self.args.training):
            prepare = preparing(self, vars(module), model, example_inputs)
            raise _Done(traces_of(prepare, options, runs=runs, threads=threads))

    runner.check_accuracy = check_accuracy
    after_flags(vars(module), lambda: restore_random_states(states_from_json(generators)))
