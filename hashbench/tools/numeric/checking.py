"""The check itself: both models stage by stage, iteration by iteration, everything compared and put back."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from hashbench.errors import HashbenchError
from hashbench.run.outcome import failure_of
from hashbench.run.rng import preserved_rng
from hashbench.run.settings import deterministic_settings
from hashbench.text import squeezed
from hashbench.tools.numeric.findings import (
    SIDES,
    STAGES,
    Comparison,
    Raised,
    Rename,
    Report,
    Rule,
    renamed,
    unused,
    without_wrapper,
)
from hashbench.tools.numeric.measuring import compare_mappings
from hashbench.tools.numeric.running import Plan, Subject, fresh_inputs, gradients_wanted, subject_of
from hashbench.tools.numeric.traced import execute, find_partings, names_back
from hashbench.trace.storage_writers import share_memory

log = logging.getLogger(__name__)

Model = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Request:
    """What a check was asked for: two models, how to run them, what counts as equal."""

    before: Model
    after: Model
    plan: Plan
    rule: Rule
    rename: Rename = None
    iterations: int = 1
    deterministic: str = "on"
    trace: bool = False


def check(request: Request) -> Report:
    """Run and compare both models. Settings, random state and models are put back; nothing is printed.

    An exception of a model becomes part of the report. Where torch refuses an op for having no deterministic
    implementation, all is run again with warnings in place of refusals.

    Raises:
        HashbenchError: what was asked for means nothing.
    """
    _refuse_nonsense(request)
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


def _refuse_nonsense(request: Request) -> None:
    if type(request.iterations) is not int or request.iterations < 1:
        raise HashbenchError(
            f"num_iterations={request.iterations!r} is no number of iterations",
            consequence="nothing would be compared",
            tip="Give an integer from 1.",
        )
    _refuse_odd_names(request)
    unknown = sorted(request.plan.stages - set(STAGES))
    if unknown or not request.plan.stages:
        what = f"{unknown[0]!r} is no stage" if unknown else "no stage was asked for"
        raise HashbenchError(what, consequence="nothing would be compared", tip=f"Stages are: {', '.join(STAGES)}.")


def _refuse_odd_names(request: Request) -> None:
    if not isinstance(request.before, torch.nn.Module):
        return
    model = request.before
    state = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    names = [without_wrapper(name) for name in (*state, *(name for name, _ in model.named_modules() if name))]
    odd = unused(names, request.rename)
    if odd:
        raise HashbenchError(
            f"rename has {odd[0]!r}, which the model before does not have",
            consequence="nothing would be renamed by it",
            tip="Give names, or what they begin with, of dict(model.named_parameters()).",
        )


def _check(request: Request) -> Report:
    with deterministic_settings(request.deterministic):
        found = _Pair(request)
        with found.subjects(request.before, request.after) as subjects:
            found.run(subjects)
        report = found.report()
        if report.bitwise or any(item.stage not in STAGES for item in report.raised):
            return report
        if not report.raised:
            report = replace(report, notes=(*report.notes, *_repeatability(request)))
        return _with_partings(request, report) if request.trace else report


class _Pair:
    """Two subjects side by side, and what comparing them has found so far."""

    def __init__(self, request: Request) -> None:
        self.request, self.plan = request, request.plan
        self.comparisons: list[Comparison] = []
        self.raised: list[Raised] = []
        self.notes: list[str] = []
        self.iteration = 0

    @contextlib.contextmanager
    def subjects(self, before: Model, after: Model) -> Iterator[tuple[Subject, Subject]]:
        with (
            subject_of(before, self.plan, side=SIDES[0], notes=self.notes) as first,
            subject_of(after, self.plan, side=SIDES[1], notes=self.notes) as second,
        ):
            self._refuse_one_memory(first, second)
            yield first, second

    def _refuse_one_memory(self, first: Subject, second: Subject) -> None:
        if first.module is None or second.module is None or not share_memory(first.module, second.module):
            return
        raise HashbenchError(
            "the models hold the same parameters, and cannot be copied",
            consequence="what one run changes would be changed for the other",
            tip="Give each model parameters of its own.",
        )

    def run(self, subjects: tuple[Subject, Subject]) -> None:
        """All iterations, up to the first exception: after it the two have not done the same."""
        with gradients_wanted(self.plan):
            for iteration in range(self.request.iterations):
                self.iteration = iteration
                for subject in subjects:
                    subject.set_inputs(fresh_inputs(self.plan))
                if not self._iterate(subjects):
                    return

    def _iterate(self, subjects: tuple[Subject, Subject]) -> bool:
        return (
            self._stage("parameters", subjects, Subject.parameters)
            and self._stage("outputs", subjects, Subject.forward)
            and self._stage("buffers", subjects, Subject.buffers)
            and (not self.plan.differentiates or self._train(subjects))
        )

    def _train(self, subjects: tuple[Subject, Subject]) -> bool:
        differentiable = [subject.has_gradient for subject in subjects]
        if not all(differentiable):
            self._note_no_gradient(differentiable)
            return self.plan.training is None and not any(differentiable)
        return self._stage("gradients", subjects, Subject.backward) and (
            not self.plan.steps or self._stage("stepped", subjects, Subject.step)
        )

    def _note_no_gradient(self, differentiable: list[bool]) -> None:
        if self.plan.training is None and not any(differentiable):
            self.notes.append("no output of either model has a gradient: neither gradients nor a step were compared")
            return
        for side, has in zip(SIDES, differentiable, strict=True):
            if not has:
                error = "no output has a gradient, so there is nothing to differentiate"
                self.raised.append(Raised(side, "gradients", self.iteration, error))

    def _stage(self, stage: str, subjects: tuple[Subject, Subject], act: Callable[[Subject], dict[str, Any]]) -> bool:
        """Whether neither raised. Both are run, so that it is known whether both do."""
        found = [self._attempt(subject, side, stage, act) for subject, side in zip(subjects, SIDES, strict=True)]
        before, after = found
        if before is None or after is None:
            return False
        if stage in self.plan.stages:
            rename = None if stage == "outputs" else self._rename_of(stage, before)
            compared = compare_mappings(stage, before, after, rule=self.request.rule, rename=rename)
            self.comparisons.append(replace(compared, iteration=self.iteration))
        return True

    def _rename_of(self, stage: str, before: Mapping[str, Any]) -> Rename:
        if stage != "gradients" or self.request.rename is None:
            return self.request.rename
        inputs = {name: name for name in before if name.startswith("input.")}  # are no parameters
        names = renamed([name for name in before if name not in inputs], self.request.rename)
        return (names | inputs).__getitem__

    def _attempt(
        self, subject: Subject, side: str, stage: str, act: Callable[[Subject], dict[str, Any]]
    ) -> dict[str, Any] | None:
        try:
            return act(subject)
        except HashbenchError:
            raise
        except Exception as error:
            failure = failure_of(error)
            text = squeezed(failure.error)
            self.raised.append(Raised(side, stage, self.iteration, text, error, failure.nondeterministic_op))
            return None

    def report(self) -> Report:
        notes = [*dict.fromkeys(self.notes), *_nan_notes(self.comparisons)]
        return Report(tuple(self.comparisons), tuple(self.raised), tuple(notes), iterations=self.request.iterations)


def _nan_notes(comparisons: Iterable[Comparison]) -> Iterator[str]:
    """What is NaN in both models agrees, but shows nothing."""
    for stage in STAGES:
        names = {
            item.name for found in comparisons if found.stage == stage for item in found.tensors if item.nan_in_both
        }
        if names:
            yield f"{stage}: {len(names)} hold elements that are NaN in both models, which show nothing ({min(names)})"


def _repeatability(request: Request) -> Iterator[str]:
    """What a difference between two models means where one of them does not even agree with itself."""
    for side, model in zip(SIDES, (request.before, request.after), strict=True):
        again = _Pair(replace(request, iterations=1, rename=None))
        try:
            with again.subjects(model, model) as subjects:
                if not all(subject.copied for subject in subjects):
                    continue
                again.run(subjects)
        except HashbenchError:
            continue
        report = again.report()
        if not report.bitwise:
            yield (
                f"the model {side} does not repeat itself: of two equal runs, {report.verdict.partition(': ')[2]}. "
                "`hashbench sweep` says which kernel it is"
            )


def _with_partings(request: Request, report: Report) -> Report:
    """The report with the place where the models part, looked for up to the first iteration in which they differ."""
    differing = [found.iteration for found in report.comparisons if not found.bitwise]
    if not differing:
        return report
    notes: list[str] = []
    executions = []
    names: dict[str, str] = {}
    for side, model in zip(SIDES, (request.before, request.after), strict=True):
        try:
            with subject_of(model, request.plan, side=side, notes=[]) as subject:
                if side == SIDES[0]:
                    names = names_back([*subject.parameters(), *subject.buffers()], request.rename)
                used = names if side == SIDES[1] else {}
                executions.append(execute(subject, request.plan, iterations=min(differing) + 1, names=used))
        except HashbenchError:
            raise
        except Exception as error:
            text = squeezed(f"{type(error).__name__}: {error}")
            notes.append(f"no trace: the model {side} raised under it: {text}")
            return replace(report, notes=(*report.notes, *notes))
    partings, told = find_partings(*executions, rule=request.rule)
    return replace(report, partings=partings, notes=(*report.notes, *notes, *told))
