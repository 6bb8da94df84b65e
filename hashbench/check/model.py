"""``BenchmarkRunner``: one model, from its data to its row.

The order of steps is that of ``check_accuracy`` in PyTorch's ``benchmarks/dynamo``, and so are the names of the
methods that a subclass may override. It runs a model at least twice from the same reset state under a trace; where two
runs disagree, the first divergent record says where that began. What happens to a model never ends a sweep: failures
are values (:class:`~hashbench.records.Failure`) and become rows.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import logging
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

from hashbench.check.row import make_row
from hashbench.devices import memory
from hashbench.diagnose import driver, fresh_process
from hashbench.divergence import introduce
from hashbench.errors import ran_out_of_memory
from hashbench.io import replace_file
from hashbench.records import Decision, Diagnosis, Evidence, Failure, ModelSpec, Row, RunCounts, RunOptions, Trace
from hashbench.results.folder import ResultsFolder, file_key
from hashbench.results.rows import row_to_json
from hashbench.run import outputs
from hashbench.run.inputs import call, clone_inputs, map_tensors, mean_of_outputs, random_projection
from hashbench.run.outcome import (
    Outcome,
    Run,
    confirmation,
    difference_between,
    failed_status,
    failure_of,
    fingerprint,
    refused_op,
    replaces,
)
from hashbench.run.settings import (
    claim_workspace,
    deterministic_settings,
    preserved,
    preserved_rng,
    reset_rng_state,
    settings,
)
from hashbench.run.workload import Workload
from hashbench.suites import registry
from hashbench.text import a_few
from hashbench.trace import file, mode_dependent
from hashbench.trace.api import HashDebugTrace
from hashbench.trace.arguments import named_tensors
from hashbench.trace.callbacks import TraceCallback
from hashbench.trace.storage_writers import share_memory

log = logging.getLogger(__name__)

DEFAULT_ITERATIONS = 2
CONFIRMING_PAIRS = 3
"""How often a difference is looked for again with inputs hashed before it is called rare."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def run_model(spec: ModelSpec, options: RunOptions) -> Row:
    """What a worker of a sweep calls."""
    return BenchmarkRunner(options).run_model(spec)


class BenchmarkRunner:
    """Runs one model at least twice and says whether, and if not why, the runs agree.

    On CUDA, ``CUBLAS_WORKSPACE_CONFIG`` is set for the rest of the process as soon as there is a runner: cuBLAS reads
    it once, when it starts.

    Args:
        options: device, dtype, mode and the rest; see :class:`~hashbench.records.RunOptions`.
    """

    fresh_target: ClassVar[str] = fresh_process.DEFAULT_TARGET
    """``module:class`` that builds the same model again in a fresh process; see
    :func:`~hashbench.diagnose.fresh_process.fresh_traces`."""

    def __init__(self, options: RunOptions) -> None:
        self.options = options
        self.device = torch.device(options.device)
        self.training = options.mode == "training"
        if self.device.type == "cuda":
            claim_workspace()

    # ------------------------------------------------------------------------------------------ one model

    def run_model(self, spec: ModelSpec) -> Row:
        """Load a model, check it, keep its traces, and describe it all in one row. Settings and random state of the
        caller are restored, and the model's memory is free again."""
        started = time.perf_counter()
        memory.reset_peak(self.device)
        level = self.options.deterministic or spec.deterministic or "on"
        with preserved_rng():
            outcome, iterations = self._load_and_check(spec, level)
            refused = refused_op(outcome)
            if refused and outcome.deterministic == "on":
                outcome, iterations = self._load_and_check(spec, "warn")
                outcome = replace(outcome, nondeterministic_op=refused)
        return self._row(spec, outcome, iterations, seconds=time.perf_counter() - started)

    def _row(self, spec: ModelSpec, outcome: Outcome, iterations: int | None, *, seconds: float | None) -> Row:
        kept = self._keep_traces(spec, outcome)
        return make_row(spec, self.options, outcome, iterations=iterations, traces=kept, seconds=seconds)

    def _load_and_check(self, spec: ModelSpec, level: str) -> tuple[Outcome, int | None]:
        """The outcome and the number of iterations, and nothing that holds on to the model."""
        try:
            return self._loaded_and_checked(spec, level)
        finally:
            memory.release(self.device)

    def _loaded_and_checked(self, spec: ModelSpec, level: str) -> tuple[Outcome, int | None]:
        with deterministic_settings(level, threads=self.options.threads):
            try:
                workload = self.load_model(spec)
            except Exception as error:
                return _unready("model_fail_to_load", level, error, f"loading {spec.name} failed"), None
            try:
                workload = self.prepare(workload)
            except Exception as error:
                failed = _unready("eager_fail_to_run", level, error, f"preparing {spec.name} failed")
                return failed, workload.iterations
            outcome = self.check_accuracy(workload, deterministic=level, optimizer=spec.optimizer, spec=spec)
            return outcome, workload.iterations

    def traces_of(self, spec: ModelSpec, *, level: str, runs: int) -> list[Trace | Failure]:
        """Build the model and make ``runs`` traced runs, as :meth:`run_model` would with deterministic level ``level``,
        and nothing else: what a fresh process does for an experiment."""
        with preserved_rng(), deterministic_settings(level, threads=self.options.threads), self.pick_grad():
            workload = self.prepare(self.load_model(spec))
            made = [self._attempt(workload, spec.optimizer) for _ in range(runs)]
        found = (run if isinstance(run, Failure) else run.trace for run in made)
        return [outcome for outcome in found if outcome is not None]

    def load_model(self, spec: ModelSpec) -> Workload:
        """Build the model and its inputs from the seed."""
        reset_rng_state(self.options.seed)
        workload = registry.load(spec, batch_size=self.options.batch_size, mode=self.options.mode)
        iterations = self.options.iterations or workload.iterations or spec.iterations or DEFAULT_ITERATIONS
        return replace(workload, iterations=iterations)

    def prepare(self, workload: Workload) -> Workload:
        """Mode, device and dtype: ``train()`` or ``eval()``, ``to(device)``, and the casts that flags ask for."""
        module = workload.module.train(self.training).to(self.device)
        dtype = _DTYPES.get(self.options.dtype)
        if dtype is not None:
            module = module.to(dtype)
        return replace(workload, module=module)

    # --------------------------------------------------------------------------------------- the comparison

    def check_accuracy(
        self, workload: Workload, *, deterministic: str = "on", optimizer: str = "", spec: ModelSpec | None = None
    ) -> Outcome:
        """Run the model ``options.runs`` times, compare every run with the first, and find out why they differ.

        An op that has no deterministic implementation does not end it: the runs are repeated with ``warn`` in force,
        and the outcome names the op. ``spec`` is how a fresh process can build the model again.
        """
        with deterministic_settings(deterministic, threads=self.options.threads), self.pick_grad():
            outcome = self._check(workload, deterministic, optimizer, _runs_of(self.options, spec))
            outcome = self._diagnose(workload, outcome, optimizer, spec)
        refused = refused_op(outcome)
        if not refused or deterministic != "on":
            return outcome
        again = self.check_accuracy(workload, deterministic="warn", optimizer=optimizer, spec=spec)
        return replace(again, nondeterministic_op=refused)

    def _diagnose(self, workload: Workload, outcome: Outcome, optimizer: str, spec: ModelSpec | None) -> Outcome:
        if outcome.accuracy != "eager_two_runs_differ" or self.options.diagnose_budget <= 0:
            return outcome
        if spec is not None:
            self._keep_draft(spec, outcome, workload)
        attempt = functools.partial(self._attempt, workload, optimizer)
        subject = driver.Subject(attempt, self.options, outcome, spec, target=self.fresh_target)
        try:
            return replace(outcome, diagnosis=driver.diagnose(subject))
        except OSError:
            raise  # the results folder takes no more: that ends the sweep
        except Exception as error:
            _log_error("the diagnosis failed")
            failed = Decision("unknown", "open", f"the diagnosis failed: {type(error).__name__}: {error}", "")
            return replace(outcome, diagnosis=Diagnosis(failed, Evidence(origin="")))

    def _check(self, workload: Workload, level: str, optimizer: str, runs: int) -> Outcome:
        first = self._attempt(workload, optimizer)
        if isinstance(first, Failure):
            return Outcome(failed_status(first, number=1), level, failure=first)
        outcome = Outcome(
            "pass",
            level,
            runs=1,
            settings_changed=first.settings_changed,
            ops=_ops(first),
            perturbed_ops=_perturbed_ops(first),
        )
        fingerprints = [fingerprint(first)]
        for number in range(2, runs + 1):
            other = self._attempt(workload, optimizer)
            if isinstance(other, Failure):
                return replace(outcome, accuracy=failed_status(other, number=2), runs=number, failure=other)
            try:
                fingerprints.append(fingerprint(other))
                outcome = self._compare(outcome, first, other, number)
            except Exception as error:
                if not ran_out_of_memory(error):
                    raise
                _log_error("comparing two runs failed")
                failed = failure_of(error)
                return replace(outcome, accuracy=failed_status(failed, number=2), runs=number, failure=failed)
        others = sum(found != fingerprints[0] for found in fingerprints)
        counts = RunCounts(len(fingerprints) - 1, others, len(set(fingerprints)))
        outcome = replace(outcome, run_counts=counts)
        del first, other
        if outcome.accuracy == "eager_two_runs_differ":
            outcome = self._confirm(workload, outcome, optimizer)
        if self.options.untraced_pair:
            outcome = self._compare_untraced(workload, outcome, optimizer)
        return outcome

    def _compare(self, outcome: Outcome, first: Run, other: Run, number: int) -> Outcome:
        """The outcome so far with one more run compared with the first. The first pair that differs is described."""
        changed = tuple(dict.fromkeys((*outcome.settings_changed, *other.settings_changed)))
        outcome = replace(outcome, runs=number, settings_changed=changed)
        if outcome.accuracy != "pass" or first.trace is None or other.trace is None:
            return outcome
        try:
            difference = difference_between(first, other)
        except outputs.NotComparableError as error:
            verdict = introduce.find(first.trace, other.trace)
            failure = Failure(f"the results of two runs cannot be compared: {error}")
            return replace(
                outcome,
                accuracy="results_not_comparable",
                failure=failure,
                verdict=verdict,
                benign=verdict.benign,
                traces=(first.trace, other.trace),
            )
        names = () if difference is None else difference.names
        verdict = introduce.find(first.trace, other.trace, differing=names)
        traces = (first.trace, other.trace)
        benign = tuple(dict.fromkeys((*(outcome.benign or ()), *verdict.benign)))
        if difference is None:
            return replace(outcome, benign=benign, traces=traces)
        return replace(
            outcome,
            accuracy="eager_two_runs_differ",
            verdict=verdict,
            difference=difference,
            benign=verdict.benign,
            traces=traces,
        )

    def _confirm(self, workload: Workload, outcome: Outcome, optimizer: str) -> Outcome:
        """The diagnosis pass: pairs with every input hashed around every op, which shows what bypassed the dispatcher.

        Its verdict replaces a plain one that blames a kernel, since it can tell a kernel from memory that was changed
        under it, and one that blames a view or a tensor where what was read through it turns out equal. Any other plain
        verdict rests on what both runs show directly, and on the first run of the process, which is special where a
        state survives: it stays.
        """
        for number in range(1, CONFIRMING_PAIRS + 1):
            first, second = (self._attempt(workload, optimizer, diagnosing=True) for _ in range(2))
            if isinstance(first, Failure) or isinstance(second, Failure) or first.trace is None or second.trace is None:
                return replace(outcome, confirmed="no: a further run failed")
            try:
                difference = difference_between(first, second)
            except outputs.NotComparableError as error:
                return replace(outcome, confirmed=f"yes, in another way: {error}")
            if difference is None:
                continue
            verdict = introduce.find(first.trace, second.trace, differing=difference.names)
            traces = (first.trace, second.trace)
            confirmed = confirmation(outcome.verdict, verdict, pairs=number)
            if not replaces(verdict, outcome.verdict, traces):
                return replace(outcome, confirmed=confirmed)
            return replace(outcome, verdict=verdict, confirmed=confirmed, benign=verdict.benign, traces=traces)
        return replace(outcome, confirmed=f"no: {CONFIRMING_PAIRS} further pairs agreed")

    def _compare_untraced(self, workload: Workload, outcome: Outcome, optimizer: str) -> Outcome:
        runs = [self._attempt(workload, optimizer, traced=False) for _ in range(2)]
        traced = self._attempt(workload, optimizer)
        if isinstance(runs[0], Failure) or isinstance(runs[1], Failure) or isinstance(traced, Failure):
            return replace(outcome, untraced="failed")
        try:
            difference = outputs.compare(runs[0].results, runs[1].results)
            by_tracing = outputs.compare(runs[0].results, traced.results)
        except outputs.NotComparableError:
            return replace(outcome, untraced="not comparable")
        outcome = replace(outcome, untraced="agree" if difference is None else "differ")
        if difference is not None and outcome.accuracy == "pass":
            return replace(outcome, accuracy="eager_two_runs_differ", difference=difference)
        if difference is None and by_tracing is not None:
            known = outcome.perturbed_ops or "unknown"
            return replace(outcome, perturbed_ops=f"{known} (results differ from those of an untraced run)")
        return outcome

    # ------------------------------------------------------------------------------------------------ one run

    def _attempt(
        self,
        workload: Workload,
        optimizer: str,
        *,
        traced: bool = True,
        diagnosing: bool = False,
        watcher: TraceCallback | None = None,
    ) -> Run | Failure:
        """One run from the reset state, or why it failed. Its memory is released before the next."""
        try:
            return self._run_once(workload, optimizer, traced=traced, diagnosing=diagnosing, watcher=watcher)
        finally:
            memory.release(self.device)  # the frame that held the copy of the model is gone

    def _run_once(
        self, workload: Workload, optimizer: str, *, traced: bool, diagnosing: bool, watcher: TraceCallback | None
    ) -> Run | Failure:
        trace: HashDebugTrace | None = None
        try:
            with self._reset_state():
                before = settings()
                model = self.deepcopy_model(workload.module)
                chosen = self.init_optimizer(workload, model, optimizer)
                inputs = self.fresh_inputs(workload)
                if traced:
                    diagnose = diagnosing or self.options.hash_inputs
                    trace = HashDebugTrace(
                        model=model,
                        inputs=inputs,
                        settings=settings,
                        hash_inputs=diagnose,
                        source_lines=diagnosing,
                        watcher=watcher,
                    )
                found = self.run_n_iterations(workload, model, inputs, chosen, trace)
                changed = tuple(_settings_changed(before, settings()))
            return Run(None if trace is None else trace.finish(), found, changed)
        except outputs.NotComparableError as error:
            return Failure(f"the results cannot be compared: {error}", op="results")
        except Exception as error:
            _log_error("a run failed")
            return failure_of(error, op=trace.failed_op if trace is not None else "")

    @contextlib.contextmanager
    def _reset_state(self) -> Iterator[None]:
        """The state that every run begins in; what the run changes of torch's settings is put back."""
        with preserved(), torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reset_rng_state(self.options.seed)
            yield

    def deepcopy_model(self, module: torch.nn.Module) -> torch.nn.Module:
        """The copy that one run may change."""
        return copy.deepcopy(module)

    def init_optimizer(
        self, workload: Workload, model: torch.nn.Module, name: str = ""
    ) -> torch.optim.Optimizer | None:
        """The optimizer of one run: the workload's own, else Adam with ``lr=0.01`` as in dynamo (``sgd`` where the
        zoo's data ask for it); ``None`` in inference and for models without parameters to train. On the CPU too,
        unlike dynamo."""
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not self.training or not parameters:
            return None
        if workload.make_optimizer is not None:
            return workload.make_optimizer(parameters)
        if name == "sgd":
            return torch.optim.SGD(parameters, lr=0.01, foreach=True)
        return torch.optim.Adam(parameters, lr=0.01, foreach=True, capturable=self.device.type == "cuda")

    def run_n_iterations(
        self,
        workload: Workload,
        model: torch.nn.Module,
        inputs: Any,
        optimizer: torch.optim.Optimizer | None,
        trace: HashDebugTrace | None,
    ) -> dict[str, Any]:
        """All steps of one run; returns its results by name."""
        step = self.forward_and_backward_pass if self.training else self.forward_pass
        found: dict[str, Any] = {}
        with trace if trace is not None else contextlib.nullcontext():
            for iteration in range(workload.iterations or DEFAULT_ITERATIONS):
                if trace is not None:
                    trace.iteration = iteration
                    trace.mark(f"iteration {iteration}")
                for (kind, place), value in step(workload, model, inputs, optimizer, trace):
                    with _disable_current_modes(), torch.no_grad():
                        _note(found, trace, f"{kind}.{iteration}{place}", value, copied=True)
        if self.training:
            shared = share_memory(workload.module, model)
            for name, value in outputs.state_results(model, optimizer):
                _note(found, trace, name, value, copied=shared)
        return found

    def forward_pass(
        self,
        workload: Workload,  # noqa: ARG002 – takes what forward_and_backward_pass takes
        model: torch.nn.Module,
        inputs: Any,
        optimizer: torch.optim.Optimizer | None,  # noqa: ARG002
        trace: HashDebugTrace | None,  # noqa: ARG002
    ) -> list[tuple[tuple[str, str], Any]]:
        """One step of inference: the outputs."""
        with self.autocast():
            output = call(model, inputs)
        return _named_outputs(output)

    def forward_and_backward_pass(
        self,
        workload: Workload,
        model: torch.nn.Module,
        inputs: Any,
        optimizer: torch.optim.Optimizer | None,
        trace: HashDebugTrace | None,
    ) -> list[tuple[tuple[str, str], Any]]:
        """One step of training on a fresh clone of the inputs: outputs, loss, gradients of inputs that require one."""
        with _disable_current_modes():
            inputs = clone_inputs(inputs)
            if trace is not None:
                trace.register_inputs(inputs)
            model.zero_grad(set_to_none=True)
        with self.autocast():
            output = call(model, inputs)
            loss = self.compute_loss(workload, output)
        torch.autograd.backward(loss)
        if optimizer is not None:
            optimizer.step()
        found = _named_outputs(output)
        found.append((("loss", ""), loss))
        found += [
            (("input_grad", f".{path}"), tensor.grad)
            for path, tensor in named_tensors(inputs)
            if tensor.grad is not None
        ]
        return found

    def compute_loss(self, workload: Workload, output: Any) -> torch.Tensor:
        """The scalar to differentiate: the workload's own loss, else the mean of every floating-point tensor of the
        output; with ``--cotangent random`` a fixed random projection instead of either, because a constant gradient
        can hide a difference."""
        if self.options.cotangent == "random":
            return random_projection(output, seed=self.options.seed)
        if workload.loss is not None:
            return workload.loss(output)
        return mean_of_outputs(output)

    def pick_grad(self) -> contextlib.AbstractContextManager[Any]:
        """Gradients in training, none in inference."""
        return torch.enable_grad() if self.training else torch.no_grad()

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """``torch.autocast`` with ``--amp``, else nothing."""
        return torch.autocast(self.device.type) if self.options.dtype == "amp" else contextlib.nullcontext()

    def fresh_inputs(self, workload: Workload) -> Any:
        """The inputs that one run may change."""
        inputs = workload.make_inputs() if workload.make_inputs is not None else clone_inputs(workload.inputs)
        return map_tensors(inputs, self._place_input)

    def _place_input(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = _DTYPES.get(self.options.dtype)
        moved = tensor.to(self.device)
        return moved.to(dtype) if dtype is not None and moved.is_floating_point() else moved

    def _keep_draft(self, spec: ModelSpec, outcome: Outcome, workload: Workload) -> None:
        """What is known by now; an experiment that kills this process must not take it along."""
        folder = ResultsFolder(Path(self.options.output))
        if not self.options.output or not folder.rows.is_dir():
            return
        key = file_key(suite=spec.suite, mode=self.options.mode, name=spec.name)
        row = self._row(spec, outcome, workload.iterations, seconds=None)
        replace_file(folder.draft_path(key), json.dumps(row_to_json(row)))

    def _keep_traces(self, spec: ModelSpec, outcome: Outcome) -> str:
        wanted = outcome.accuracy not in ("pass",) or self.options.keep_traces
        if not self.options.output or not outcome.traces or not wanted:
            return ""
        key = file_key(suite=spec.suite, mode=self.options.mode, name=spec.name)
        names = [f"traces/{key}.run{number}.log" for number in range(1, len(outcome.traces) + 1)]
        for name, trace in zip(names, outcome.traces, strict=True):
            file.write(trace, Path(self.options.output) / name)
        return " ".join(names)


# --------------------------------------------------------------------------------------------------- helpers


def _log_error(what: str) -> None:
    """Log the exception that is handled just now, as text: a handler that keeps records would keep its traceback, and
    with that every tensor of the run that failed."""
    log.error("%s\n%s", what, traceback.format_exc().rstrip())


def _unready(accuracy: str, level: str, error: Exception, what: str) -> Outcome:
    """A model that did not get as far as its first run. Where memory ran out, that is what the status says."""
    _log_error(what)
    failure = failure_of(error)
    return Outcome(failed_status(failure, number=1) if failure.out_of_memory else accuracy, level, failure=failure)


def _runs_of(options: RunOptions, spec: ModelSpec | None) -> int:
    """How many runs are made: as the command line says, else the model's data, else two."""
    asked = options.runs or (spec.runs if spec is not None else None)
    return max(2, asked or 2)


def _named_outputs(output: Any) -> list[tuple[tuple[str, str], Any]]:
    return [(("output", name.removeprefix("output")), value) for name, value in outputs.flatten(output, "output")]


def _note(found: dict[str, Any], trace: HashDebugTrace | None, name: str, value: Any, *, copied: bool) -> None:
    """Keep a result, and note its digest at this moment. An output is copied since a later step may change it.

    Two results of one name (the keys ``1`` and ``"1"`` of a dict) are both kept.
    """
    while name in found:
        name += "'"
    if trace is not None:
        trace.add_result(name, value)
    if isinstance(value, torch.Tensor):
        value = value.detach().clone() if copied else value.detach()
    found[name] = value


def _settings_changed(before: Mapping[str, str], after: Mapping[str, str]) -> Iterable[str]:
    names = sorted({*before, *after})
    return (f"{name}: {before.get(name)} to {after.get(name)}" for name in names if before.get(name) != after.get(name))


def _ops(run: Run) -> int | None:
    return None if run.trace is None else len(run.trace.records)


def _perturbed_ops(run: Run) -> str:
    return "" if run.trace is None else a_few(mode_dependent.mode_dependent(run.trace))
