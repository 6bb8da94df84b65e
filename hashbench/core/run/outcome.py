"""Make one run from the reset state, and describe its results and those of repeated runs."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from hashbench.core.catalog import Status
from hashbench.core.errors import bounded, first_line, log_error, ran_out_of_memory
from hashbench.core.inductor.failures import failed_in
from hashbench.core.processes import preserved_umask
from hashbench.core.records import (
    Diagnosis,
    ExperimentResult,
    Facts,
    Failure,
    HasFacts,
    RowEvidence,
    RunCounts,
    RunOptions,
    TensorDigest,
    Trace,
    Verdict,
    contiguous_stride,
    holding,
)
from hashbench.core.run import outputs
from hashbench.core.run.addresses import arranged_addresses
from hashbench.core.run.distance import Difference
from hashbench.core.run.leaves import LeftOut, NotComparableError
from hashbench.core.run.rng import preserved_rng, reset_rng_state
from hashbench.core.run.settings import applied, preserved, settings
from hashbench.core.trace.api import HashDebugTrace, Recording
from hashbench.core.trace.arguments import raising_line
from hashbench.core.trace.callbacks import TraceCallback
from hashbench.core.trace.compiled import kept_eager

log = logging.getLogger(__name__)

_REFUSED = re.compile(
    r"(?P<kernel>[^\n]*?) does not have a deterministic implementation|deterministic.*CUBLAS_WORKSPACE_CONFIG",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Run:
    """One completed run.

    Attributes:
        recorded: its recording; ``None`` if untraced.
        results: tensors and values by name.
        settings_changed: torch settings that the run changed.
        compiled: names of ``torch.compile`` products that ran eagerly.
    """

    recorded: Trace | Recording | None
    results: Mapping[str, Any] = field(repr=False)
    settings_changed: tuple[str, ...] = ()
    compiled: tuple[str, ...] = ()

    @property
    def trace(self) -> Trace | None:
        """Its trace, built from the recording on first use: runs that agree need none."""
        if self.recorded is None or isinstance(self.recorded, Trace):
            return self.recorded
        return self.recorded.finish()

    @property
    def tracer(self) -> str:
        """Name of the tracer; empty if untraced."""
        return "" if self.recorded is None else self.recorded.tracer

    @property
    def noted(self) -> Mapping[str, TensorDigest]:
        """The digests of its results at the time they were added, by name; empty if untraced."""
        if isinstance(self.recorded, Trace):
            return {result.name: result.digest for result in self.recorded.results}
        return {} if self.recorded is None else self.recorded.noted

    @property
    def ops(self) -> int | None:
        """Number of recorded ops; ``None`` if untraced."""
        if isinstance(self.recorded, Trace):
            return len(self.recorded.records)
        return None if self.recorded is None else self.recorded.ops

    @property
    def op_names(self) -> frozenset[str]:
        """Names of the recorded ops; empty if untraced."""
        if isinstance(self.recorded, Trace):
            return frozenset(record.op for record in self.recorded.records)
        return frozenset() if self.recorded is None else self.recorded.op_names

    def agrees_with(self, other: Run) -> bool:
        """Return whether both traces are known to be equal without building them; if false, they must be compared."""
        first, second = self.recorded, other.recorded
        if first is None or second is None or isinstance(first, Trace) or isinstance(second, Trace):
            return False
        return first.content == second.content != b""

    @property
    def not_compared(self) -> tuple[str, ...]:
        """The parts of its results that cannot be compared, with the reason, each once for all iterations."""
        return tuple(dict.fromkeys(str(value) for value in self.results.values() if isinstance(value, LeftOut)))


def outputs_of(run: Run) -> dict[str, Any]:
    """Return the outputs of the last iteration of a model's run, by name."""
    prefix = f"output.{max((int(name.split('.')[1]) for name in run.results if name.startswith('output.')), default=0)}"
    return {name: value for name, value in run.results.items() if name == prefix or name.startswith(f"{prefix}.")}


Given = Callable[[Callable[..., Any], Any], Any]
"""Maps a run's copies of the model and of the example inputs to the inputs of the run."""


class RunMaker(Protocol):
    """Makes one run from the reset state."""

    def __call__(
        self,
        given: Given | None = None,
        *,
        number: int | None = None,
        traced: bool = True,
        diagnosing: bool = False,
        watcher: TraceCallback | None = None,
    ) -> Run | Failure:
        """Make one run.

        Args:
            given: makes the inputs of this run; ``None``: the example inputs.
            number: from 1, of a run whose results are compared; ``None``: a run of an experiment. A function raises its
                own exceptions in the former.
            traced: record it.
            diagnosing: hash every input before each call.
            watcher: called around every call.
        """
        ...


@dataclass(frozen=True, slots=True)
class Prepared:
    """Copies of a model and its inputs that one run may change.

    Attributes:
        model: copy of the model.
        inputs: copies of its inputs.
        execute: runs them, traced or untraced, and returns the results by name.
    """

    model: torch.nn.Module
    inputs: Any
    execute: Callable[[HashDebugTrace | None], dict[str, Any]]


def attempt(
    prepare: Callable[[], Prepared],
    options: RunOptions,
    *,
    traced: bool = True,
    diagnosing: bool = False,
    watcher: TraceCallback | None = None,
    compiled: bool = False,
) -> Run | Failure:
    """Make one run of the copies from ``prepare``, which is called in the reset state, and release its memory.

    ``compiled``: compiled code runs as such, not eagerly.
    """
    try:
        return _attempt(prepare, options, traced, diagnosing, watcher, compiled=compiled)
    finally:
        release_memory(torch.device(options.device))  # the frame that held the copy of the model is gone


def prepared_runs(
    prepare: Callable[[Given | None], Prepared], options: RunOptions, *, compiled: bool = False
) -> RunMaker:
    """Return the maker of runs of a model, whose copies ``prepare`` makes; exceptions of a run are values.

    ``compiled``: compiled code runs as such, not eagerly.
    """

    def run(given: Given | None = None, *, number: int | None = None, **how: Any) -> Run | Failure:  # noqa: ARG001
        return attempt(functools.partial(prepare, given), options, compiled=compiled, **how)

    return run


def watched(prepare: Callable[[], Prepared], options: RunOptions, watcher: TraceCallback) -> Run | Failure:
    """Make one traced run with ``watcher`` on every call. The caller must call :func:`release_memory`."""
    return _attempt(prepare, options, traced=True, diagnosing=False, watcher=watcher)


def traces_of(
    prepare: Callable[[], Prepared], options: RunOptions, *, runs: int, threads: int | None = None
) -> list[Trace | Failure]:
    """Return the traces of so many runs, or why they failed: what a fresh process does for an experiment.

    The prepared copies are at random addresses, or at the same ones in every process. ``threads`` applies to the runs;
    ``None`` keeps the number with which the model was built.
    """
    kept: list[bytes] = []

    def prepare_in_order() -> Prepared:
        if not sys.flags.hash_randomization:
            with preserved_rng():
                prepare()  # what is made or freed the first time alone moves nothing the second time
        kept[:] = arranged_addresses()
        return prepare()

    with applied({"num_threads": str(threads)} if threads else {}):
        made = [attempt(prepare_in_order, options) for _ in range(runs)]
    traces = [run if isinstance(run, Failure) else run.trace for run in made]
    return [trace for trace in traces if trace is not None]


def _attempt(
    prepare: Callable[[], Prepared],
    options: RunOptions,
    traced: bool,
    diagnosing: bool,
    watcher: TraceCallback | None,
    *,
    compiled: bool = False,
) -> Run | Failure:
    trace: HashDebugTrace | None = None
    try:
        with _reset_state(options.seed, compiled=compiled) as ran_eagerly:
            before = settings()
            prepared = prepare()
            if traced:
                trace = HashDebugTrace(
                    model=prepared.model,
                    inputs=prepared.inputs,
                    settings=settings,
                    hash_inputs=diagnosing or options.hash_inputs,
                    source_lines=diagnosing,
                    watcher=watcher,
                    tracer=options.tracer,
                )
            results = prepared.execute(trace)
            changed = _changes(before, settings())
            _require_content(results)
        recorded = None if trace is None else Recording(trace)
        if recorded is not None and watcher is None and not recorded.content:  # who watches may need no trace
            recorded.finish()
        return Run(recorded, results, changed, tuple(ran_eagerly))
    except NotComparableError as error:
        return Failure(f"the results cannot be compared: {error}", not_comparable=True)
    except Exception as error:
        log_error("a run failed")
        failure = failure_of(error, op=trace.failed_op if trace is not None else "")
        if not compiled:
            return failure
        where = failed_in(error)
        return replace(failure, stage=where.stage, op=where.op or failure.op)


def _require_content(results: Mapping[str, Any]) -> None:
    if results and all(isinstance(value, LeftOut) for value in results.values()):
        raise NotComparableError("; ".join(dict.fromkeys(map(str, results.values()))))


@contextlib.contextmanager
def _reset_state(seed: int, *, compiled: bool = False) -> Iterator[Mapping[str, None]]:
    """Reset the state for a run; restore torch settings and the umask afterwards.

    Yields the names of compiled functions that ran eagerly: none if ``compiled`` code runs as such.
    """
    nothing = contextlib.nullcontext[Mapping[str, None]]({})
    eagerly: contextlib.AbstractContextManager[Mapping[str, None]] = nothing if compiled else kept_eager()
    with preserved(), preserved_umask(), eagerly as names, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reset_rng_state(seed)
        yield names


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[str, ...]:
    names = [name for name in sorted({*before, *after}) if before.get(name) != after.get(name)]
    return tuple(f"{name}: {before.get(name)} to {after.get(name)}" for name in names)


def add_result(results: dict[str, Any], trace: HashDebugTrace | None, name: str, value: Any, *, copied: bool) -> None:
    """Add a result to those of a run, and record its digest at this moment.

    Args:
        results: results so far. Two results of one name (the keys ``1`` and ``"1"`` of a dict) are both kept.
        trace: of the run, if traced.
        name: of the result.
        value: tensor or Python value.
        copied: clone the tensor, since a later step may change it.
    """
    while name in results:
        name += "'"
    if trace is not None:
        trace.add_result(name, value)
    if isinstance(value, torch.Tensor):
        value = value.detach().clone() if copied else value.detach()
    results[name] = value


def failure_of(error: BaseException, *, op: str = "") -> Failure:
    """Convert an exception to a :class:`Failure` with a message bounded to what a row can hold.

    ``op`` is the dispatched op that raised it; the rest is parsed from torch's messages.
    """
    message = bounded(str(error))
    text = f"{type(error).__name__}: {message}"
    refused = _REFUSED.search(message)
    refused_op = "" if refused is None else op or refused["kernel"] or "unknown"
    return Failure(
        text,
        out_of_memory=ran_out_of_memory(error),
        op=op,
        nondeterministic_op=refused_op,
        source=raising_line(error),
    )


# ------------------------------------------------------------------------------------------------ a device's memory

_PEAK = "allocated_bytes.all.peak"


def reset_peak_memory(device: torch.device) -> None:
    """Restart the peak memory counter of ``device``."""
    if device.type != "cpu":
        with contextlib.suppress(RuntimeError, NotImplementedError):  # an allocator that does not count
            torch.accelerator.reset_peak_memory_stats(device)


def peak_mib(device: torch.device) -> float | None:
    """Return the peak of tensor memory on ``device`` since :func:`reset_peak_memory`, in MiB.

    ``None`` on the CPU, if nothing was allocated, and if torch's allocator does not count.
    """
    if device.type == "cpu":
        return None
    try:
        peak = torch.accelerator.memory_stats(device).get(_PEAK)
    except (RuntimeError, NotImplementedError):
        return None
    return None if peak is None else peak / 2**20


def release_memory(device: torch.device) -> None:
    """Collect garbage and release the cached memory of ``device``.

    A device on which a kernel failed raises on every further call; that is only logged here.
    """
    gc.collect()
    if device.type == "cpu":
        return
    try:
        torch.accelerator.empty_cache()
    except (RuntimeError, NotImplementedError) as error:
        log.warning("the memory of %s cannot be given back: %s", device, first_line(error))


# ------------------------------------------------------------------------------------------------ repeated runs


@dataclass(frozen=True, slots=True)
class FoundColumns:
    """What a check found beside a divergence: the fields are the core's columns of the same names. An empty one leaves
    the column as the rest of the outcome has it; ``limited`` is no column: experiments for which time was too short."""

    batch_size: int | None = None
    backend: str = ""
    kernel: str = ""
    phase: str = ""
    module: str = ""
    source: str = ""
    detail: str = ""
    confidence: str = ""
    because: str = ""
    evidence: RowEvidence = field(default_factory=RowEvidence)
    differing_results: str = ""
    confirmed: str = ""
    advice: str = ""
    repro: str = ""
    reproduced: str = ""
    limited: tuple[ExperimentResult, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome(HasFacts):
    """What repeated runs of one thing show: the status word, and all that is known about it.

    ``first`` is the run that the others were compared with, kept for further stages. ``perturbation``: the runs that
    differ were made under it. ``between_processes``: they are of different processes. ``process_traces`` are those of
    runs in several processes, by the number of the process; ``beside_mib``: peak memory of processes beside this one.
    ``facts`` and ``finding`` are what an extension found.
    """

    accuracy: str
    deterministic: str
    runs: int = 0
    iterations: int | None = None
    failure: Failure | None = None
    verdict: Verdict | None = None
    difference: Difference | None = None
    run_counts: RunCounts | None = None
    confirmed: str = ""
    untraced: str = ""
    diagnosis: Diagnosis | None = None
    perturbed_ops: str = ""
    nondeterministic_op: str = ""
    settings_changed: tuple[str, ...] = ()
    not_compared: tuple[str, ...] = ()
    second_build: str = ""
    deterministic_ops: tuple[str, ...] = ()
    compiled: tuple[str, ...] = ()
    tracer: str = ""
    ops: int | None = None
    benign: tuple[str, ...] | None = None
    traces: tuple[Trace, ...] = field(default=(), repr=False)
    first: Run | None = field(default=None, repr=False)
    perturbation: str = ""
    between_processes: bool = False
    process_traces: tuple[Mapping[int, Trace], ...] = field(default=(), repr=False)
    beside_mib: float = 0.0
    facts: tuple[Facts, ...] = ()
    finding: FoundColumns = FoundColumns()

    def having(self, *facts: Facts, **found: Any) -> Outcome:
        """Return the outcome with these facts, each in the place of those of its kind, and these fields of its
        finding."""
        kept = functools.reduce(holding, facts, self.facts)
        return replace(self, facts=kept, finding=replace(self.finding, **found))


def failed_status(failure: Failure, *, number: int) -> str:
    """Return the status of a failure of run ``number``; dynamo counts two runs, so later ones count as the second."""
    if failure.not_comparable:
        return Status.NOT_COMPARABLE
    if number == 1:
        return Status.FIRST_RUN_OOM if failure.out_of_memory else Status.FIRST_RUN_FAIL
    return Status.SECOND_RUN_OOM if failure.out_of_memory else Status.SECOND_RUN_FAIL


def difference_between(first: Run, second: Run) -> Difference | None:
    """Measure the difference of two traced runs by the digests recorded with their results.

    A tensor shared by both runs (a buffer that survives the deep copy) has changed since the first run. If strides
    differ, the tensors themselves are compared.
    """
    return outputs.compare(first.results, second.results, noted=differing_digests(first, second))


def results_that_differ(first: Run, second: Run) -> tuple[str, ...]:
    """Return the names of results that differ between two traced runs, without measuring how far."""
    return outputs.differing(first.results, second.results, noted=differing_digests(first, second))


def differing_digests(first: Run, second: Run) -> dict[str, bool]:
    """Return, for results recorded by both runs, whether their digests differ; omitted if strides differ."""
    old, new = first.noted, second.noted
    return {name: old[name] != new[name] for name in old if name in new and old[name].stride == new[name].stride}


def fingerprint(run: Run) -> int:
    """Hash the results of a run: equal for bitwise equal results, regardless of strides."""
    contents = []
    for name, (dtype, shape, stride, text) in run.noted.items():
        value = run.results[name]
        if isinstance(value, torch.Tensor) and stride != contiguous_stride(shape):
            text = outputs.logical_value(value)
        contents.append((name, dtype, shape, text))
    return hash(tuple(contents))
