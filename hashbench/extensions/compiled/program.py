"""A compiled model: what runs it under a backend and in a dtype, and which of its results count."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hashbench.core.check.model import BenchmarkRunner, prepared_run
from hashbench.core.inductor.internals import dynamo_counters, reset_dynamo, without_graph_caches
from hashbench.core.records import Failure, RunOptions
from hashbench.core.run.outcome import Run, RunMaker, prepared_runs
from hashbench.core.run.workload import Workload, call
from hashbench.extensions.compiled.accuracy import Tolerance, tolerance_of
from hashbench.extensions.compiled.aot import Backend, Results
from hashbench.extensions.compiled.as_device.backend import InductorAs
from hashbench.extensions.compiled.as_device.devices import device_of


class ProgramMaker(Protocol):
    """Makes what runs one model under a backend and in a dtype: a workload, or that of PyTorch's own harness."""

    def __call__(self, *, backend: Any = None, dtype: torch.dtype | None = None) -> RunMaker:
        """Return the maker of runs under a backend (``None``: eager mode) in a dtype (``None``: the model's own)."""
        ...


@dataclass(frozen=True, slots=True)
class Compilation:
    """What dynamo counted since it was reset.

    Attributes:
        graphs: number of graphs that it gave to the backend.
        graph_breaks: number of graph breaks.
        eager_frames: number of frames that ran eagerly.
        reasons: of graph breaks and skipped frames, each once: the first line, later ones have addresses.
    """

    graphs: int
    graph_breaks: int
    eager_frames: int
    reasons: tuple[str, ...]

    @classmethod
    def so_far(cls) -> Compilation:
        """Read dynamo's counters."""
        counted = dynamo_counters()
        frames, breaks = counted.get("frames", {}), counted.get("graph_break", {})
        reasons = (*breaks, *counted.get("unimplemented", {}))
        return cls(
            graphs=counted.get("stats", {}).get("unique_graphs", 0),
            graph_breaks=sum(breaks.values()),
            eager_frames=frames.get("total", 0) - frames.get("ok", 0),
            reasons=tuple(dict.fromkeys(reason.strip().partition("\n")[0] for reason in reasons)),
        )


def runs_under(
    runner: BenchmarkRunner,
    workload: Workload,
    optimizer: str = "",
    *,
    backend: str | Backend | None = None,
    dtype: torch.dtype | None = None,
) -> RunMaker:
    """Return what runs a workload under a backend and in a dtype; all its runs are of one compilation.

    Args:
        runner: prepares and runs it.
        workload: the model and its inputs.
        optimizer: name of the optimizer, as of ``BenchmarkRunner.init_optimizer``.
        backend: of ``torch.compile``; ``None``: eager mode.
        dtype: of the model and its floating-point inputs; ``None``: as they are.
    """
    forward = call if backend is None else torch.compile(call, backend=_compiler(backend))
    prepare = functools.partial(prepared_run, runner, workload, optimizer, dtype=dtype, forward=forward)
    return prepared_runs(prepare, runner.options, compiled=backend is not None)


def _compiler(backend: str | Backend) -> str | Backend:
    """Return what ``torch.compile`` takes as this backend."""
    device = device_of(backend) if isinstance(backend, str) else None
    return backend if device is None else InductorAs(device)


@dataclass(frozen=True, slots=True)
class CompiledModel:
    """A model whose programs are compared.

    Attributes:
        make: makes its programs.
        results: returns those of a run's results that the harness compares.
        tolerance: that the harness compares them with.
        root: class of the model, with which paths of its modules begin.
    """

    make: ProgramMaker
    results: Callable[[Run], Mapping[str, Any]]
    tolerance: Tolerance
    root: str

    def step(self, backend: Any = None, dtype: torch.dtype | None = None) -> Results:
        """Compile it anew, make a run, and return the tensors among its results.

        Raises:
            RuntimeError: the run failed.
        """
        with compiling():
            return self.tensors(self.make(backend=backend, dtype=dtype)(traced=False))

    def tensors(self, run: Run | Failure) -> Results:
        """Return the tensors among the results of a run; raise ``RuntimeError`` if it failed."""
        if isinstance(run, Failure):
            raise RuntimeError(run.error)  # noqa: TRY004 – it is what the run raised
        return {name: value for name, value in self.results(run).items() if isinstance(value, torch.Tensor)}

    @classmethod
    def of(
        cls, runner: BenchmarkRunner, workload: Workload, options: RunOptions, *, suite: str = "", optimizer: str = ""
    ) -> CompiledModel:
        """Return a workload, prepared, as ``runner`` runs it.

        Args:
            runner: makes the runs.
            workload: model and inputs.
            options: of the sweep.
            suite: of the model: some have a tolerance of their own.
            optimizer: name of the optimizer.
        """
        training = options.model_mode == "training"
        last = str((workload.iterations or 1) - 1)
        return cls(
            functools.partial(runs_under, runner, workload, optimizer),
            functools.partial(_harness_results, last=last, training=training),
            tolerance_of(suite, training=training, device=options.device, dtype=options.dtype),
            type(workload.module).__name__,
        )


def _harness_results(run: Run, *, last: str, training: bool) -> dict[str, Any]:
    """Return the results that the harness compares: those of the ``last`` iteration, in training without outputs."""
    kept = {}
    for name, value in run.results.items():
        kind, _, rest = name.partition(".")
        of_step = kind in ("output", "loss", "input_grad")
        if of_step and (rest.partition(".")[0].partition("[")[0] != last or (training and kind == "output")):
            continue
        kept[name] = value
    return kept


@contextlib.contextmanager
def compiling(options: Mapping[str, Any] | None = None, *, graph_caches: bool = False) -> Iterator[None]:
    """Compile as the harness does, with ``fallback_random``; nothing compiled is left afterwards.

    Args:
        options: further settings of ``torch._inductor.config``, by name.
        graph_caches: take graphs from the caches of Inductor and AOTAutograd.
    """
    import torch._inductor.config

    caches = contextlib.nullcontext() if graph_caches else without_graph_caches()
    with torch._inductor.config.patch({"fallback_random": True, **(options or {})}), caches:
        reset_dynamo()
        try:
            yield
        finally:
            reset_dynamo()
