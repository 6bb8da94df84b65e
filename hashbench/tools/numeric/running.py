"""The check itself: both models run side by side, everything compared stage by stage, and put back.

A copy of each model is run, or, where there is none, the model itself with everything put back afterwards.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hashbench.core.errors import HashbenchError
from hashbench.core.run.outcome import failure_of
from hashbench.core.run.rng import preserved_rng, reset_rng_state
from hashbench.core.run.settings import deterministic_settings
from hashbench.core.run.workload import call, clone_inputs
from hashbench.core.text import squeezed
from hashbench.core.trace.arguments import named_tensors
from hashbench.core.trace.storage_writers import share_memory
from hashbench.core.trace.tracer import choose
from hashbench.tools.numeric import first_difference
from hashbench.tools.numeric.compare import compare_mappings, leaves_of, unused, without_wrapper, without_wrappers
from hashbench.tools.numeric.report import SIDES, STAGES, Comparison, Raised, Rename, Report, Rule

log = logging.getLogger(__name__)

MAIN_RANDOM_SEED = 1337
"""The seed of torch's own numeric check."""

Model = Callable[..., Any]
MakeOptimizer = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True)
class NumericRequest:
    """Two models, how both are run, what is compared, and what counts as equal.

    Attributes:
        before, after: the models before and after; functions, which have no parameters, will do too.
        inputs: a tuple or list (positional arguments), a mapping (keyword arguments) or one tensor.
        iterations: from 1.
        precision: ``rtol`` and ``atol`` for every dtype. ``None``: those of ``torch.testing.assert_close``.
        rtol, atol: one of them, in place of what ``precision`` says.
        training: ``True``: in ``train()`` mode, and outputs without a gradient are reported as failed. ``False``: in
            ``eval()`` mode without gradients. ``None``: in the mode that the models are in, gradients if there are any.
        stages: those to compare. A transformation that rewrites parameters leaves the ``outputs`` to be compared.
        rename: from names of parameters and buffers before to those after.
        ignore: differences of form that count as none, of ``dtype``, ``device``, ``layout``.
        loss: gets the output, returns the scalar to differentiate. Default: the sum of all outputs with a gradient.
        make_optimizer: gets the parameters, returns an optimizer. Default: SGD with ``lr=0.01``.
        requires_optimizer: whether the stage ``stepped`` is run at all.
        deterministic: ``on``, ``warn`` or ``off``, as ``hashbench sweep --deterministic``.
        seed: of Python's, NumPy's and torch's generators.
        trace: where the models differ, run them once more and name the first op at which they differ.
        tracer: what traces them then: ``native``, ``python``, or ``auto``.
        rule: the tolerances and ``ignore``; derived.

    Raises:
        HashbenchError: a value means nothing, or a name in ``rename`` or ``stages`` is unknown.
    """

    before: Model
    after: Model
    inputs: Any
    iterations: int = 10
    precision: float | None = 1e-4
    rtol: float | None = None
    atol: float | None = None
    training: bool | None = None
    stages: Collection[str] = STAGES
    rename: Rename = None
    ignore: Collection[str] = ()
    loss: Callable[[Any], torch.Tensor] | None = None
    make_optimizer: MakeOptimizer | None = None
    requires_optimizer: bool = True
    deterministic: str = "on"
    seed: int = MAIN_RANDOM_SEED
    trace: bool = False
    tracer: str = "auto"
    rule: Rule = field(init=False)

    def __post_init__(self) -> None:
        left_out = {"gradients", "stepped"} if self.training is False else set()
        left_out |= set() if self.requires_optimizer else {"stepped"}
        stages = frozenset([self.stages] if isinstance(self.stages, str) else self.stages) - left_out
        object.__setattr__(self, "rule", Rule(self.precision, self.rtol, self.atol, frozenset(self.ignore)))
        object.__setattr__(self, "stages", stages)
        if type(self.iterations) is not int or self.iterations < 1:
            what = f"num_iterations must be an int >= 1, got {self.iterations!r}"
            raise _nothing_compared(what, "Pass num_iterations=1 or more.")
        if isinstance(self.before, torch.nn.Module):
            self._refuse_misspelt(self.before)
        choose(self.tracer)
        unknown = sorted(stages - set(STAGES))
        if unknown or not stages:
            what = f"unknown stage {unknown[0]!r}" if unknown else "stages is empty"
            raise _nothing_compared(what, f"Choose from {', '.join(STAGES)}.")

    def _refuse_misspelt(self, model: torch.nn.Module) -> None:
        named = (*model.named_parameters(), *model.named_buffers(), *model.named_modules())
        misspelt = unused([without_wrapper(name) for name, _ in named if name], self.rename)
        if misspelt:
            raise HashbenchError(
                f"rename has {misspelt[0]!r}, which the model before does not have",
                consequence="nothing would be renamed by it",
                tip="Give names, or what they begin with, of dict(model.named_parameters()).",
            )

    @property
    def stages_run(self) -> tuple[str, ...]:
        """The stages that are run, up to the last one that is compared."""
        last = "buffers"
        if self.training is not False:
            last = next((stage for stage in ("stepped", "gradients") if stage in self.stages), last)
        return STAGES[: STAGES.index(last) + 1]

    def gradients(self) -> contextlib.AbstractContextManager[Any]:
        """Disable gradients in inference; otherwise as torch has it by default, whatever the caller's mode."""
        return torch.no_grad() if self.training is False else torch.enable_grad()


def _nothing_compared(what: str, tip: str) -> HashbenchError:
    return HashbenchError(what, consequence="nothing would be compared", tip=tip)


class ModelRun:
    """A model that may be changed, and its run so far."""

    def __init__(self, model: Model, request: NumericRequest) -> None:
        self.model, self.request = model, request
        self.module = model if isinstance(model, torch.nn.Module) else None
        self.has_gradient = False
        self._optimizer: torch.optim.Optimizer | None = None

    def iteration(self, inputs: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield every stage of one iteration with its values by name, each run when it is asked for, in the reset
        random state. It ends with the buffers where no output has a gradient. ``inputs`` may be changed."""
        stages = self.request.stages_run
        yield "parameters", self.parameters()
        if self.module is not None:
            self.module.zero_grad(set_to_none=True)
        reset_rng_state(self.request.seed)
        output = call(self.model, inputs)  # type: ignore[arg-type]  # any callable will do
        self.has_gradient = any(tensor.requires_grad for _, tensor in named_tensors(output))
        yield "outputs", leaves_of(output, "output")
        yield "buffers", self.buffers()
        if "gradients" not in stages or not self.has_gradient:
            return
        reset_rng_state(self.request.seed)
        torch.autograd.backward(_sum_of(output) if self.request.loss is None else self.request.loss(output))
        del output
        yield "gradients", self._gradients(inputs)
        if "stepped" in stages:
            reset_rng_state(self.request.seed)
            self._step()
            yield "stepped", self.parameters()

    def parameters(self) -> dict[str, Any]:
        """Return the parameters by name."""
        return {} if self.module is None else without_wrappers(self.module.named_parameters())

    def buffers(self) -> dict[str, Any]:
        """Return the buffers by name."""
        return {} if self.module is None else without_wrappers(self.module.named_buffers())

    def _gradients(self, inputs: Any) -> dict[str, Any]:
        """Return the gradients of parameters, ``None`` where there is none, and of the inputs that require one."""
        return {name: parameter.grad for name, parameter in self.parameters().items()} | {
            f"input.{path}": tensor.grad
            for path, tensor in named_tensors(inputs)
            if tensor.requires_grad and tensor.is_leaf
        }

    def _step(self) -> None:
        """Make a step of the caller's optimizer, else of SGD with ``lr=0.01``, as torch's own check has it."""
        trained = [parameter for parameter in self.parameters().values() if parameter.requires_grad]
        if not trained:
            return
        if self._optimizer is None:
            make = self.request.make_optimizer
            self._optimizer = torch.optim.SGD(trained, lr=0.01) if make is None else make(trained)
        self._optimizer.step()


def _sum_of(output: Any) -> torch.Tensor:
    sums = [tensor.sum() for _, tensor in named_tensors(output) if tensor.requires_grad]
    real = [torch.view_as_real(item).sum() if item.is_complex() else item for item in sums]
    return torch.stack([item.to(real[0].device, torch.float64) for item in real]).sum() if len(real) > 1 else real[0]


@contextlib.contextmanager
def subject_of(request: NumericRequest, side: str, notes: list[str]) -> Iterator[ModelRun]:
    """Yield a subject: a deep copy of the model ``before`` or ``after``, else the model itself, which is then as it was
    before. What a reader must know of that is added to ``notes``."""
    model = request.before if side == SIDES[0] else request.after
    if not isinstance(model, torch.nn.Module):
        if not callable(model):
            raise HashbenchError(
                f"the model {side} is a {type(model).__name__}, which cannot be called",
                tip="Give a torch.nn.Module, or a function of the inputs.",
            )
        notes.append(f"the model {side} is not a module: it has no parameters, and what it changes is not put back")
        yield ModelRun(model, request)
        return
    copied, reason = _copy_of(model)
    with contextlib.nullcontext(copied) if copied is not None else _put_back(model) as module:
        if copied is None:
            notes.append(
                f"the model {side} ran itself, for it cannot be copied ({reason}): "
                "parameters, buffers, gradients and modes were put back"
            )
        if request.training is not None:
            module.train(request.training)
        yield ModelRun(module, request)


def _copy_of(model: torch.nn.Module) -> tuple[torch.nn.Module | None, str]:
    try:
        copied = copy.deepcopy(model)
    except Exception as error:
        return None, in_words(error)[:100]
    return (None, "its deep copy shares its memory") if share_memory(model, copied) else (copied, "")


@contextlib.contextmanager
def _put_back(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the model; restore everything that a step changes on leaving."""
    modes = {module: module.training for module in model.modules()}
    slots = [(module._buffers, name, value) for module in model.modules() for name, value in module._buffers.items()]
    gradients = {parameter: parameter.grad for parameter in model.parameters()}
    contents = [(tensor, tensor.detach().clone()) for tensor in (*model.parameters(), *model.buffers())]
    try:
        yield model
    finally:
        for buffers, name, value in slots:
            buffers[name] = value
        with torch.no_grad():
            for tensor, content in contents:
                tensor.detach().copy_(content)
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        for module, mode in modes.items():
            module.training = mode


# ---------------------------------------------------------------------------------------------------- both models


def check(request: NumericRequest) -> Report:
    """Run and compare both models. Settings, random state and models are put back; nothing is printed.

    An exception of a model becomes part of the report. Where torch refuses an op for having no deterministic
    implementation, all is run again with warnings in place of refusals.

    Raises:
        HashbenchError: a model cannot be called, or the two share their parameters and cannot be copied.
    """
    with preserved_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = _check(request)
        refused = next((item.nondeterministic_op for item in report.raised if item.nondeterministic_op), "")
        if refused and request.deterministic == "on":
            note = f"{refused} has no deterministic implementation: all was run with warnings in place of refusals"
            report = _check(replace(request, deterministic="warn"))
            report = replace(report, notes=(note, *report.notes))
    for raised in report.raised:
        log.info("%s", raised, exc_info=raised.exception)
    return report


def _check(request: NumericRequest) -> Report:
    with deterministic_settings(request.deterministic):
        with _subjects(request) as (subjects, notes):
            report = _compared(request, subjects, notes)
        if report.bitwise:
            return report
        if not report.raised:
            report = replace(report, notes=(*report.notes, *_repeatability(request)))
        return _with_first_differences(request, report) if request.trace else report


@contextlib.contextmanager
def _subjects(request: NumericRequest) -> Iterator[tuple[tuple[ModelRun, ModelRun], list[str]]]:
    notes: list[str] = []
    with subject_of(request, SIDES[0], notes) as first, subject_of(request, SIDES[1], notes) as second:
        if first.module is not None and second.module is not None and share_memory(first.module, second.module):
            raise HashbenchError(
                "the models hold the same parameters, and cannot be copied",
                consequence="what one run changes would be changed for the other",
                tip="Give each model parameters of its own.",
            )
        yield (first, second), notes


def _compared(request: NumericRequest, subjects: tuple[ModelRun, ModelRun], notes: Iterable[str]) -> Report:
    """Return the report on all iterations, up to the first exception: after it the two have not done the same."""
    findings: list[Comparison | Raised | str] = []
    raised: tuple[Raised, ...] = ()
    with request.gradients():
        for iteration in range(request.iterations):
            findings += _iteration(request, subjects, iteration)
            raised = tuple(item for item in findings if isinstance(item, Raised))
            if raised:
                break
    comparisons = tuple(item for item in findings if isinstance(item, Comparison))
    notes = dict.fromkeys([*notes, *(item for item in findings if isinstance(item, str))])
    return Report(comparisons, raised, (*notes, *_nan_notes(comparisons)), iterations=request.iterations)


def _iteration(
    request: NumericRequest, subjects: tuple[ModelRun, ModelRun], iteration: int
) -> Iterator[Comparison | Raised | str]:
    """Yield the comparisons of one iteration up to what one or both raise; a string is a note. Each stage of both is
    run and compared before the next, so that no more than one is kept, and both end at the same one."""
    runs = [subject.iteration(clone_inputs(request.inputs)) for subject in subjects]
    for stage in request.stages_run:
        lacking = [side for side, subject in zip(SIDES, subjects, strict=True) if not subject.has_gradient]
        if stage == "gradients" and lacking:
            if request.training is None and len(lacking) == len(SIDES):
                yield "no output of either model has a gradient: neither gradients nor a step were compared"
                return
            error = "no output has a gradient, so there is nothing to differentiate"
            yield from (Raised(side, stage, iteration, error) for side in lacking)
            return
        values = []
        for side, run in zip(SIDES, runs, strict=True):
            try:
                values.append(next(run)[1])
            except Exception as exception:
                failure = failure_of(exception)
                yield Raised(side, stage, iteration, squeezed(failure.error), exception, failure.nondeterministic_op)
        if len(values) < len(SIDES):
            return
        if stage in request.stages:
            rename = None if stage == "outputs" else request.rename
            compared = compare_mappings(stage, *values, rule=request.rule, rename=rename)
            yield replace(compared, iteration=iteration)


def _nan_notes(comparisons: Iterable[Comparison]) -> Iterator[str]:
    """Note the tensors with NaN in both models: these agree, but show nothing."""
    names: dict[str, set[str]] = {stage: set() for stage in STAGES}
    for comparison in comparisons:
        names[comparison.stage] |= {tensor.name for tensor in comparison.tensors if tensor.nan_in_both}
    for stage, nan in names.items():
        if nan:
            yield f"{stage}: {len(nan)} hold elements that are NaN in both models, which show nothing ({min(nan)})"


def _repeatability(request: NumericRequest) -> Iterator[str]:
    """Note each model that does not even reproduce its own results."""
    for side, model in zip(SIDES, (request.before, request.after), strict=True):
        again = replace(request, before=model, after=model, iterations=1, rename=None)
        try:
            with _subjects(again) as (subjects, notes):
                if notes:  # not a module, or it cannot be copied
                    continue
                report = _compared(again, subjects, notes)
        except HashbenchError:
            continue
        if not report.bitwise:
            yield (
                f"the model {side} does not repeat itself: of two equal runs, {report.verdict.partition(': ')[2]}. "
                "`hashbench sweep` says which kernel it is"
            )


def _with_first_differences(request: NumericRequest, report: Report) -> Report:
    """Return the report with the first differences, by tolerance and bit by bit, each if there is one, and with what a
    reader must know of them. They are looked for up to the first iteration in which the models differ."""
    differing = [comparison.iteration for comparison in report.comparisons if not comparison.bitwise]
    if not differing:
        return report
    steps = min(differing) + 1
    executions: list[first_difference.Execution] = []
    names: dict[str, str] = {}
    for side in SIDES:
        try:
            with subject_of(request, side, []) as subject:
                executions.append(first_difference.execute(subject, request, iterations=steps, names=names))
                if side == SIDES[0]:
                    names = first_difference.names_back([*subject.parameters(), *subject.buffers()], request.rename)
        except Exception as error:
            note = f"no trace: the model {side} raised under it: {in_words(error)}"
            return replace(report, notes=(*report.notes, note))
    before, after = executions
    found = tuple(first_difference.first_differences(before, after, request.rule))
    notes = first_difference.notes_on(before, after, differs=bool(found))
    return replace(report, first_differences=found, notes=(*report.notes, *notes))


def in_words(error: BaseException) -> str:
    """Return an exception as one line."""
    return squeezed(f"{type(error).__name__}: {error}")
