"""``Program``: a workload whose forward pass is compiled, or which runs in another dtype; and its runs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from hashbench.core.inductor.internals import dynamo_counters, reset_dynamo, without_graph_caches
from hashbench.core.records import Failure, RunOptions
from hashbench.core.run.outcome import Prepared, Run, attempt
from hashbench.core.run.workload import Workload, call, cast_inputs, cast_module

if TYPE_CHECKING:
    from hashbench.core.check.model import BenchmarkRunner
    from hashbench.core.check.subject import Given, RunMaker
    from hashbench.core.trace.callbacks import TraceCallback

Backend = str | Callable[..., Any]
"""What ``torch.compile`` takes: a registered backend, or a function of a graph and example inputs."""


class AnyProgram(Protocol):
    """What can be run: a :class:`Program`, or what makes the runs of PyTorch's own harness."""

    @property
    def attempt(self) -> RunMaker:
        """Makes a run."""
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


class Program:
    """A workload under a backend and in a dtype.

    Args:
        runner: prepares and runs it.
        workload: the model and its inputs.
        optimizer: name of the optimizer, as of ``BenchmarkRunner.init_optimizer``.
        backend: of ``torch.compile``; ``None``: eager mode.
        dtype: of the model and its floating-point inputs; ``None``: as they are.
    """

    def __init__(
        self,
        runner: BenchmarkRunner,
        workload: Workload,
        optimizer: str = "",
        *,
        backend: Backend | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._runner, self._workload, self._optimizer, self._dtype = runner, workload, optimizer, dtype
        self._compiled = backend is not None
        self._forward = call if backend is None else torch.compile(call, backend=backend)

    def attempt(
        self,
        given: Given | None = None,
        *,
        number: int | None = None,  # noqa: ARG002 – a RunMaker
        traced: bool = True,
        diagnosing: bool = False,
        watcher: TraceCallback | None = None,
    ) -> Run | Failure:
        """Make one run, as a :class:`~hashbench.core.check.subject.RunMaker` does."""
        prepare = functools.partial(self._prepared, given)
        how: dict[str, Any] = {"traced": traced, "diagnosing": diagnosing, "watcher": watcher}
        return attempt(prepare, self._options, compiled=self._compiled, **how)

    @property
    def _options(self) -> RunOptions:
        return self._runner.options

    def _prepared(self, given: Given | None) -> Prepared:
        runner, workload = self._runner, self._workload
        model = runner.deepcopy_model(workload.module)
        inputs = runner.fresh_inputs(workload)
        if self._dtype is not None:
            model, inputs = cast_module(model, self._dtype), cast_inputs(inputs, self._dtype)
            workload = replace(workload, module=model)
        chosen = runner.init_optimizer(workload, model, self._optimizer)
        if given is not None:
            inputs = given(model, inputs)
        execute = functools.partial(runner.run_n_iterations, workload, model, inputs, chosen, forward=self._forward)
        return Prepared(model, inputs, execute)


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
