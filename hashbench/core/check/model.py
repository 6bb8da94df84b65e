"""``BenchmarkRunner``: one model, from its data to its row.

The order of steps is that of ``check_accuracy`` in PyTorch's ``benchmarks/dynamo``, and so are the names of the
methods that a subclass may override. What happens to a model never ends a sweep: failures are values
(:class:`~hashbench.core.records.Failure`) and become rows.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from time import perf_counter
from typing import Any, ClassVar

import torch

from hashbench.core.catalog import Status
from hashbench.core.check.builds import contents_of, second_build
from hashbench.core.check.pair import PairCheck, retried_with_warnings
from hashbench.core.check.row import keep_draft, row_of
from hashbench.core.check.subject import Subject
from hashbench.core.diagnose import fresh_process
from hashbench.core.errors import log_error
from hashbench.core.extensions import check_for, own_check_of
from hashbench.core.processes import preserved_umask, tell_phase
from hashbench.core.records import BATCH_INVARIANCE, Failure, ModelSpec, Row, RunOptions, Trace
from hashbench.core.run import leaves, outputs
from hashbench.core.run.outcome import (
    Given,
    Outcome,
    Prepared,
    Run,
    add_result,
    failed_status,
    failure_of,
    prepared_runs,
    release_memory,
    reset_peak_memory,
    traces_of,
    watched,
)
from hashbench.core.run.rng import preserved_rng, reset_rng_state
from hashbench.core.run.settings import claim_workspace, deterministic_settings
from hashbench.core.run.workload import (
    Workload,
    batch_of,
    call,
    cast_inputs,
    cast_module,
    clone_inputs,
    map_tensors,
    mean_of_outputs,
    random_projection,
)
from hashbench.core.suites import registry
from hashbench.core.trace.api import HashDebugTrace
from hashbench.core.trace.arguments import named_tensors
from hashbench.core.trace.callbacks import TraceCallback
from hashbench.core.trace.compiled import compiled_in_place
from hashbench.core.trace.digest import unobserved, untraced
from hashbench.core.trace.storage_writers import share_memory
from hashbench.core.trace.tracer import choose

DEFAULT_ITERATIONS = 2

Forward = Callable[[torch.nn.Module, Any], Any]
"""Calls a model with example inputs: :func:`~hashbench.core.run.workload.call`, or what it is compiled to."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def run_model(spec: ModelSpec, options: RunOptions) -> Row:
    """Run one model in a sweep worker (the worker's entry point)."""
    return BenchmarkRunner(options).run_model(spec)


class BenchmarkRunner:
    """Runs one model at least twice and says whether, and if not why, the runs agree.

    On CUDA, ``CUBLAS_WORKSPACE_CONFIG`` is set for the rest of the process as soon as there is a runner: cuBLAS reads
    it once, when it starts.

    Args:
        options: device, dtype, mode and the rest; see :class:`~hashbench.core.records.RunOptions`.

    Raises:
        HashbenchError: the tracer that is asked for cannot be used.
    """

    fresh_target: ClassVar[str] = fresh_process.DEFAULT_TARGET
    """``module:class`` that builds the same model again in a fresh process; see
    :func:`~hashbench.core.diagnose.fresh_process.fresh_traces`."""

    def __init__(self, options: RunOptions) -> None:
        self.options = options
        self.device = torch.device(options.device)
        self.training = options.mode == "training"
        choose(options.tracer)
        claim_workspace(options.device)

    def run_model(self, spec: ModelSpec) -> Row:
        """Load a model, check it, keep its traces, and return its row; settings and random state are restored."""
        started = perf_counter()
        reset_peak_memory(self.device)
        level = self.options.deterministic or spec.deterministic or "on"
        with preserved_rng():
            outcome = retried_with_warnings(functools.partial(self._check, spec), level)
        return row_of(spec, self.options, outcome, seconds=perf_counter() - started)

    def _check(self, spec: ModelSpec, level: str) -> Outcome:
        if (own_check := own_check_of(spec)) is not None:
            return own_check(spec, self.options, level, target=self.fresh_target)
        try:
            return self._loaded_and_checked(spec, level)
        finally:
            release_memory(self.device)  # the frame that held the model is gone

    def _loaded_and_checked(self, spec: ModelSpec, level: str) -> Outcome:
        with deterministic_settings(level, threads=self.options.threads):
            tell_phase("loading")
            began = perf_counter()
            try:
                with preserved_umask():
                    workload = self.load_model(spec)
            except Exception as error:
                return _setup_failure(Status.FAIL_TO_LOAD, level, error, f"loading {spec.name} failed")
            if (own_check := own_check_of(workload)) is not None:  # its own function says so
                spec = replace(spec, world_size=workload.world_size)
                return own_check(spec, self.options, level, target=self.fresh_target)
            seconds, compared_alone = perf_counter() - began, check_for(self.options) is None
            built = contents_of(workload) if compared_alone else {}
            try:
                workload = self.prepare(workload)
            except Exception as error:
                failed = _setup_failure(Status.FAIL_TO_RUN, level, error, f"preparing {spec.name} failed")
                return replace(failed, iterations=workload.iterations)
            outcome = self.check_accuracy(
                workload,
                deterministic=level,
                optimizer=spec.optimizer,
                spec=spec,
                loading_seconds=perf_counter() - began,
            )
            if outcome.accuracy != Status.PASS or not compared_alone:
                return outcome
            del workload
            keep_draft(spec, self.options, outcome)  # building it again may end this process
            tell_phase("building it again")
            with preserved_umask():
                again = second_build(built, functools.partial(self.load_model, spec), first_seconds=seconds)
            return replace(outcome, second_build=again)

    def traces_of(self, spec: ModelSpec, *, level: str, runs: int, threads: int | None = None) -> list[Trace | Failure]:
        """Build the model and make ``runs`` traced runs at deterministic level ``level``: what a fresh process does.
        ``threads`` are of the runs: with them the model might be initialized differently."""
        with preserved_rng(), deterministic_settings(level, threads=self.options.threads), self.pick_grad():
            workload = self.prepare(self.load_model(spec))
            return traces_of(
                functools.partial(prepared_run, self, workload, spec.optimizer),
                self.options,
                runs=runs,
                threads=threads,
            )

    def watched_run(self, spec: ModelSpec, watcher: TraceCallback, *, level: str) -> Run | Failure:
        """Build the model and make one traced run of it, without results, with ``watcher`` on every call. The caller
        must release its memory.

        It is one step, then another of the optimizer, whose first one has other kernels than all later ones; with
        ``options.iterations`` so many whole steps.
        """
        with deterministic_settings(level, threads=self.options.threads), self.pick_grad():
            workload = self.prepare(self.load_model(spec))
            workload = replace(workload, iterations=self.options.iterations or 1)
            return watched(functools.partial(_uncopied, self, workload, spec.optimizer), self.options, watcher)

    def load_model(self, spec: ModelSpec) -> Workload:
        """Build the model and its inputs from the seed."""
        reset_rng_state(self.options.seed)
        workload = registry.load(spec, batch_size=self.options.batch_size_of(spec), mode=self.options.model_mode)
        iterations = self.options.iterations or workload.iterations or spec.iterations or DEFAULT_ITERATIONS
        return replace(workload, iterations=iterations)

    def prepare(self, workload: Workload) -> Workload:
        """Set mode, device and dtype: ``train()`` or ``eval()``, ``to(device)``, and the casts that flags request."""
        module = workload.module.train(self.training).to(self.device)
        dtype = _DTYPES.get(self.options.dtype)
        if dtype is not None:
            module = module.to(dtype)
        return replace(workload, module=module)

    def check_accuracy(
        self,
        workload: Workload,
        *,
        deterministic: str = "on",
        optimizer: str = "",
        spec: ModelSpec | None = None,
        loading_seconds: float = 0.0,
    ) -> Outcome:
        """Run the model ``options.runs`` times, compare every run with the first, and find out why they differ.

        An op that has no deterministic implementation does not end it: the runs are repeated with ``warn`` in force,
        and the outcome names the op. ``spec`` is how a fresh process can build the model again.
        """
        if self.options.batch_invariant and self.options.mode != BATCH_INVARIANCE:
            workload = replace(workload, iterations=1)  # a cache holds what one step left
        subject = subject_of(self, workload, spec, optimizer=optimizer)

        def check(level: str) -> Outcome:
            with deterministic_settings(level, threads=self.options.threads), self.pick_grad():
                if (extended := check_for(self.options)) is not None:
                    return extended(self, workload, subject, level, optimizer)
                return PairCheck(subject, self.options, level, loading_seconds=loading_seconds).run()

        outcome = retried_with_warnings(check, deterministic)
        lost = compiled_in_place(workload.module)  # by a deep copy
        return replace(outcome, compiled=tuple(dict.fromkeys((*lost, *outcome.compiled))))

    def deepcopy_model(self, module: torch.nn.Module) -> torch.nn.Module:
        """Copy the module, for one run to change."""
        return copy.deepcopy(module)

    def init_optimizer(
        self, workload: Workload, model: torch.nn.Module, name: str = ""
    ) -> torch.optim.Optimizer | None:
        """Return the optimizer of one run: the workload's own, else Adam with ``lr=0.01`` as in dynamo (``sgd`` if the
        zoo's data say so); ``None`` in inference and for models without parameters to train.

        Unlike dynamo, the CPU has one, too, unless a compiled run is compared with eager mode.
        """
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not self.training or not parameters or (self.options.backend and self.device.type == "cpu"):
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
        *,
        forward: Forward = call,
    ) -> dict[str, Any]:
        """Run all steps of one run, calling the model by ``forward``; return its results by name."""
        results: dict[str, Any] = {}
        with trace or contextlib.nullcontext():
            for iteration, named in _steps(self, workload, model, inputs, optimizer, trace, forward):
                for (kind, path), value in named:
                    with untraced():
                        add_result(results, trace, f"{kind}.{iteration}{path}", value, copied=True)
        if self.training:
            shared = share_memory(workload.module, model)
            for name, value in outputs.state_results(model, optimizer):
                add_result(results, trace, name, value, copied=shared)
        return results

    def forward_pass(
        self,
        workload: Workload,  # noqa: ARG002 – takes what forward_and_backward_pass takes
        model: torch.nn.Module,
        inputs: Any,
        optimizer: torch.optim.Optimizer | None,  # noqa: ARG002
        trace: HashDebugTrace | None,  # noqa: ARG002
        *,
        forward: Forward = call,
    ) -> list[tuple[tuple[str, str], Any]]:
        """Run one step of inference; return the outputs."""
        with self.autocast():
            output = forward(model, inputs)
        return _named_outputs(output)

    def forward_and_backward_pass(
        self,
        workload: Workload,
        model: torch.nn.Module,
        inputs: Any,
        optimizer: torch.optim.Optimizer | None,
        trace: HashDebugTrace | None,
        *,
        forward: Forward = call,
    ) -> list[tuple[tuple[str, str], Any]]:
        """Run one step of training on clones of the inputs; return outputs, loss, and gradients of inputs."""
        with unobserved():
            inputs = clone_inputs(inputs)
            if trace is not None:
                trace.register_inputs(inputs)
            model.zero_grad(set_to_none=True)
        with self.autocast():
            output = forward(model, inputs)
            loss = self.compute_loss(workload, output)
        torch.autograd.backward(loss)
        if optimizer is not None:
            optimizer.step()
        results = [*_named_outputs(output), (("loss", ""), loss)]
        gradients = ((path, tensor.grad) for path, tensor in named_tensors(inputs))
        return results + [(("input_grad", f".{path}"), grad) for path, grad in gradients if grad is not None]

    def compute_loss(self, workload: Workload, output: Any) -> torch.Tensor:
        """Return the scalar to differentiate: the workload's own loss, else the mean of every floating-point tensor of
        the output; with ``--cotangent random`` a fixed projection, because a constant gradient can hide a difference.
        """
        if self.options.cotangent == "random":
            return random_projection(output, seed=self.options.seed)
        return workload.loss(output) if workload.loss is not None else mean_of_outputs(output)

    def pick_grad(self) -> contextlib.AbstractContextManager[Any]:
        """Enable gradients in training, disable them in inference."""
        return torch.enable_grad() if self.training else torch.no_grad()

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Enter ``torch.autocast`` with ``--amp``, else nothing."""
        return torch.autocast(self.device.type) if self.options.dtype == "amp" else contextlib.nullcontext()

    def fresh_inputs(self, workload: Workload) -> Any:
        """Return inputs for one run to change."""
        inputs = workload.make_inputs() if workload.make_inputs is not None else clone_inputs(workload.inputs)
        dtype = _DTYPES.get(self.options.dtype)
        return map_tensors(inputs, lambda tensor: tensor.to(self.device, dtype if tensor.is_floating_point() else None))


# --------------------------------------------------------------------------------------------------- helpers


def subject_of(
    runner: BenchmarkRunner, workload: Workload, spec: ModelSpec | None = None, *, optimizer: str = ""
) -> Subject:
    """Return a prepared model as a check runs it."""
    options = runner.options
    runs = max(2, options.runs or (spec.runs if spec is not None else None) or 2)
    inputs = None
    if options.batch_invariant:
        inputs = workload.inputs if workload.make_inputs is None else runner.fresh_inputs(workload)
    return Subject(
        prepared_runs(functools.partial(prepared_run, runner, workload, optimizer), options),
        spec,
        target=runner.fresh_target,
        runs=lambda: runs,
        iterations=workload.iterations,
        model=workload.module,
        inputs=inputs,
        batch=batch_of(inputs, options.batch_size if spec is None else options.batch_size_of(spec)),
        tokens=workload.tokens,
    )


def prepared_run(
    runner: BenchmarkRunner,
    workload: Workload,
    optimizer: str,
    given: Given | None = None,
    *,
    copied: bool = True,
    dtype: torch.dtype | None = None,
    forward: Forward = call,
) -> Prepared:
    """Prepare one run of a workload: a deep copy of its model, unless it is not ``copied``, an optimizer, and inputs.

    Args:
        runner: makes the run.
        workload: the model and its inputs.
        optimizer: name of the optimizer, as of ``BenchmarkRunner.init_optimizer``.
        given: maps the inputs.
        copied: copy the model; a run changes it.
        dtype: of the model and its floating-point inputs; ``None``: as they are.
        forward: calls the model.
    """
    model = runner.deepcopy_model(workload.module) if copied else workload.module
    if dtype is not None:
        model = cast_module(model, dtype)
        workload = replace(workload, module=model)
    chosen = runner.init_optimizer(workload, model, optimizer)
    inputs = runner.fresh_inputs(workload)
    if dtype is not None:
        inputs = cast_inputs(inputs, dtype)
    if given is not None:
        inputs = given(model, inputs)
    execute = functools.partial(runner.run_n_iterations, workload, model, inputs, chosen)
    return Prepared(model, inputs, execute if forward is call else functools.partial(execute, forward=forward))


def _uncopied(runner: BenchmarkRunner, workload: Workload, name: str) -> Prepared:
    """Prepare the only run of a workload, for its kernels alone."""
    model, inputs = workload.module, runner.fresh_inputs(workload)
    optimizer = runner.init_optimizer(workload, model, name)

    def execute(trace: HashDebugTrace | None) -> dict[str, Any]:
        with trace or contextlib.nullcontext():
            for _ in _steps(runner, workload, model, inputs, optimizer, trace):
                pass
            if optimizer is not None and runner.options.iterations is None:
                optimizer.step()
        return {}

    return Prepared(model, inputs, execute)


def _steps(
    runner: BenchmarkRunner,
    workload: Workload,
    model: torch.nn.Module,
    inputs: Any,
    optimizer: torch.optim.Optimizer | None,
    trace: HashDebugTrace | None,
    forward: Forward = call,
) -> Iterator[tuple[int, list[tuple[tuple[str, str], Any]]]]:
    """Make one step after another in an active ``trace``; yield the results of each by name."""
    step: Callable[..., Any] = runner.forward_and_backward_pass if runner.training else runner.forward_pass
    if forward is not call:  # which a subclass need not take
        step = functools.partial(step, forward=forward)
    for iteration in range(workload.iterations or DEFAULT_ITERATIONS):
        if trace is not None:
            trace.iteration = iteration
            trace.mark(f"iteration {iteration}")
        yield iteration, step(workload, model, inputs, optimizer, trace)


def _setup_failure(accuracy: str, level: str, error: Exception, what: str) -> Outcome:
    """Return the outcome of a model that failed before its first run; running out of memory has a status of its own."""
    log_error(what)
    failure = failure_of(error)
    return Outcome(failed_status(failure, number=1) if failure.out_of_memory else accuracy, level, failure=failure)


def _named_outputs(output: Any) -> list[tuple[tuple[str, str], Any]]:
    with unobserved():
        found = list(leaves.leaves(output, "output"))
    return [(("output", name.removeprefix("output")), value) for name, value in found]
