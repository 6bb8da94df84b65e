"""The runs of a model with ranks as one rank makes them: built anew for each, in a process group that is up.

A model that is wrapped for its ranks (FSDP) cannot be copied, so that each run calls the model's function again, from
the reset random state and in a new group. Every rank makes the same runs and writes its traces and an answer into the
folder in which the ranks meet; :mod:`hashbench.extensions.ranks.check` reads them.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from time import monotonic
from typing import Any

import torch

from hashbench.core.check.model import BenchmarkRunner, prepared_run
from hashbench.core.diagnose.rank_processes import Peers
from hashbench.core.errors import log_error
from hashbench.core.io import from_json, read_json, replace_file, to_json
from hashbench.core.processes import peak_memory_mib
from hashbench.core.records import Failure, ModelSpec, RunOptions, Trace, TracedRank
from hashbench.core.run.distance import Difference
from hashbench.core.run.leaves import NotComparableError
from hashbench.core.run.outcome import (
    Given,
    Prepared,
    Run,
    difference_between,
    failure_of,
    fingerprint,
    peak_mib,
    prepared_runs,
    reset_peak_memory,
)
from hashbench.core.run.rng import preserved_rng
from hashbench.core.run.settings import deterministic_settings
from hashbench.core.suites.python_suites import imported_once
from hashbench.core.trace import file
from hashbench.core.trace.digest import untraced


@dataclass(frozen=True, slots=True)
class RankRuns:
    """What every rank is asked for.

    Attributes:
        target: ``module:class`` of the runner that builds the model.
        spec: the model.
        options: of the sweep.
        level: deterministic level.
        runs: number of traced runs.
        diagnosing: hash every input before each call.
    """

    target: str
    spec: ModelSpec
    options: RunOptions
    level: str
    runs: int
    diagnosing: bool = False


@dataclass(frozen=True, slots=True)
class RankAnswer:
    """What the runs of one rank show.

    Attributes:
        failure: why a run failed.
        number: of the run that failed, from 1; else the number of runs.
        stage: what failed: ``loading``, ``preparing``, ``running``.
        at: time of the failure, on a clock that all ranks share.
        difference: of the first run that differs from the first.
        labels: for each run the number of the first run with equal results, from 0.
        iterations: steps of a run.
        ops: records of the first run.
        tracer: name of the tracer.
        settings_changed: torch settings that a run changed.
        compiled: products of ``torch.compile`` that ran eagerly.
        not_compared: parts of the results that cannot be compared.
        memory_mib: peak memory of the process.
        device_memory_mib: peak memory of tensors on the device.
    """

    failure: Failure | None = None
    number: int = 0
    stage: str = "running"
    at: float = 0.0
    difference: Difference | None = None
    labels: tuple[int, ...] = ()
    iterations: int | None = None
    ops: int | None = None
    tracer: str = ""
    settings_changed: tuple[str, ...] = ()
    compiled: tuple[str, ...] = ()
    not_compared: tuple[str, ...] = ()
    memory_mib: float = 0.0
    device_memory_mib: float | None = None


def answer_path(folder: Path, rank: int) -> Path:
    """Return where a rank writes its answer."""
    return folder / f"answer{rank}.json"


def read_answer(folder: Path, rank: int) -> RankAnswer | None:
    """Return the answer of a rank; ``None`` if it left none."""
    path = answer_path(folder, rank)
    return from_json(RankAnswer, read_json(path)) if path.exists() else None


def trace_path(folder: Path, *, run: int, rank: int) -> Path:
    """Return where a rank writes the trace of a run, from 1."""
    return folder / f"run{run}" / f"rank{rank}.log.gz"


def make_runs(peers: Peers, request: RankRuns) -> None:
    """Entry point of a rank: make the runs, compare each with the first, write traces and the answer."""
    answer = _answer_of(peers, request)
    on_device = peak_mib(torch.device(request.options.device))
    answer = replace(answer, memory_mib=peak_memory_mib(), device_memory_mib=on_device)
    replace_file(answer_path(peers.folder, peers.rank), json.dumps(to_json(answer)))


def _answer_of(peers: Peers, request: RankRuns) -> RankAnswer:
    reset_peak_memory(torch.device(request.options.device))
    maker = RankRunMaker(peers, request)
    answer, first, seen = RankAnswer(), None, []
    with maker.in_force():
        for number in range(1, request.runs + 1):
            run = maker(diagnosing=request.diagnosing)
            answer = replace(answer, number=number, iterations=maker.iterations)
            if isinstance(run, Failure):
                return replace(answer, failure=run, stage=maker.stage, at=maker.ended_at)
            assert run.trace is not None
            file.write(of_rank(run.trace, peers), trace_path(peers.folder, run=number, rank=peers.rank))
            first = first or run
            seen.append(fingerprint(run))
            try:
                answer = _with(answer, first, run, label=seen.index(seen[-1]))
            except NotComparableError as error:
                unequal = Failure(f"the results of two runs cannot be compared: {error}", not_comparable=True)
                return replace(answer, failure=unequal, at=monotonic())
    return answer


def _with(answer: RankAnswer, first: Run, run: Run, *, label: int) -> RankAnswer:
    """Add a run to the answer."""
    difference = None if run is first else difference_between(first, run)
    return replace(
        answer,
        difference=answer.difference or difference,
        labels=(*answer.labels, label),
        ops=first.ops,
        tracer=first.tracer,
        settings_changed=tuple(dict.fromkeys((*answer.settings_changed, *run.settings_changed))),
        compiled=tuple(dict.fromkeys((*answer.compiled, *run.compiled))),
        not_compared=first.not_compared,
    )


def of_rank(trace: Trace, peers: Peers) -> Trace:
    """Return the trace as that of a rank."""
    return replace(trace, rank=TracedRank(peers.rank, peers.world_size))


class RankRunMaker:
    """Makes runs of the model on this rank; every rank must make the same ones at the same time.

    Attributes:
        stage: what the last run was at: ``loading``, ``preparing``, ``running``.
        iterations: steps of a run, once known.
        ended_at: when the last run ended, on a clock that all ranks share.
    """

    def __init__(self, peers: Peers, request: RankRuns) -> None:
        self.peers, self.request = peers, request
        self.stage, self.ended_at = "loading", 0.0
        self.iterations: int | None = None
        self._numbers = itertools.count()
        make: Callable[[RunOptions], BenchmarkRunner] = resolve_name(request.target)
        self._runner = make(request.options)

    def __call__(self, given: Given | None = None, **how: Any) -> Run | Failure:
        """Make one run from the reset state, in a group of its own; a :class:`~hashbench.core.run.outcome.RunMaker`."""
        options = self.request.options
        try:
            with self.peers.group(number=next(self._numbers), device=options.device):
                run = prepared_runs(self._prepare, options)(given, **how)
                self.ended_at = monotonic()  # before the group is left, at which the others raise, too
                if isinstance(run, Run) and run.recorded is not None and not isinstance(run.recorded, Trace):
                    run.recorded.finish()  # while the groups that it names are there
        except RuntimeError as error:
            log_error("the process group failed")
            return failure_of(error)
        return run if isinstance(run, Failure) else replace(run, results=_local(run.results))

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Enter what is in force for all runs: settings, random state, gradients, zoo files imported once."""
        with ExitStack() as stack:
            stack.enter_context(preserved_rng())
            stack.enter_context(deterministic_settings(self.request.level, threads=self.request.options.threads))
            stack.enter_context(self._runner.pick_grad())
            stack.enter_context(imported_once())
            yield

    def _prepare(self, given: Given | None) -> Prepared:
        """Build the model for one run."""
        runner, spec = self._runner, self.request.spec
        self.stage = "loading"
        workload = runner.load_model(spec)
        self.iterations = workload.iterations
        self.stage = "preparing"
        workload = runner.prepare(workload)
        self.stage = "running"
        return prepared_run(runner, workload, spec.optimizer, given, copied=False)


def _local(results: Mapping[str, Any]) -> dict[str, Any]:
    """Replace distributed tensors by the part that this rank holds: comparing them would take collectives."""
    with untraced():
        return {
            name: value.detach().to_local() if hasattr(value, "to_local") else value for name, value in results.items()
        }
