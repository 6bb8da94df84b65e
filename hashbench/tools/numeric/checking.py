"""The check itself: both models run side by side, everything compared stage by stage, and put back."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from hashbench.errors import HashbenchError
from hashbench.run.outcome import failure_of
from hashbench.run.rng import preserved_rng
from hashbench.run.settings import deterministic_settings
from hashbench.run.workload import clone_inputs
from hashbench.text import squeezed
from hashbench.tools.numeric.compare import compare_mappings, unused, without_wrapper
from hashbench.tools.numeric.report import SIDES, STAGES, Comparison, Raised, Report
from hashbench.tools.numeric.running import Request, Subject, subject_of
from hashbench.tools.numeric.traced import with_partings
from hashbench.trace.storage_writers import share_memory

log = logging.getLogger(__name__)


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
    if isinstance(request.before, torch.nn.Module):
        state = [name for name, _ in (*request.before.named_parameters(), *request.before.named_buffers())]
        modules = [name for name, _ in request.before.named_modules() if name]
        misspelt = unused([without_wrapper(name) for name in (*state, *modules)], request.rename)
        if misspelt:
            raise HashbenchError(
                f"rename has {misspelt[0]!r}, which the model before does not have",
                consequence="nothing would be renamed by it",
                tip="Give names, or what they begin with, of dict(model.named_parameters()).",
            )
    unknown = sorted(request.stages - set(STAGES))
    if unknown or not request.stages:
        what = f"{unknown[0]!r} is no stage" if unknown else "no stage was asked for"
        raise HashbenchError(what, consequence="nothing would be compared", tip=f"Stages are: {', '.join(STAGES)}.")


def _check(request: Request) -> Report:
    with deterministic_settings(request.deterministic):
        with _subjects(request) as (subjects, notes):
            report = _Comparing(request, subjects, notes).report()
        if report.bitwise:
            return report
        if not report.raised:
            report = replace(report, notes=(*report.notes, *_repeatability(request)))
        return with_partings(request, report) if request.trace else report


@contextlib.contextmanager
def _subjects(request: Request) -> Iterator[tuple[tuple[Subject, Subject], list[str]]]:
    notes: list[str] = []
    with subject_of(request, SIDES[0], notes) as first, subject_of(request, SIDES[1], notes) as second:
        if first.module is not None and second.module is not None and share_memory(first.module, second.module):
            raise HashbenchError(
                "the models hold the same parameters, and cannot be copied",
                consequence="what one run changes would be changed for the other",
                tip="Give each model parameters of its own.",
            )
        yield (first, second), notes


class _Comparing:
    """Two subjects run side by side, and what comparing them has found so far.

    Each stage of both is compared before the next one is run: nothing has to be kept until a whole run has ended, and
    a run ends at the same stage on both sides.
    """

    def __init__(self, request: Request, subjects: tuple[Subject, Subject], notes: list[str]) -> None:
        self.request, self.subjects, self.notes = request, subjects, notes
        self.comparisons: list[Comparison] = []
        self.raised: list[Raised] = []

    def report(self) -> Report:
        """The report on all iterations, up to the first exception: after it the two have not done the same."""
        with self.request.gradients():
            for iteration in range(self.request.iterations):
                if not self._iterate(iteration):
                    break
        notes = (*dict.fromkeys(self.notes), *_nan_notes(self.comparisons))
        return Report(tuple(self.comparisons), tuple(self.raised), notes, iterations=self.request.iterations)

    def _iterate(self, iteration: int) -> bool:
        """Whether both went through it to the end. Both run each stage, so that it is known whether both raise."""
        runs = [subject.iteration(clone_inputs(self.request.inputs)) for subject in self.subjects]
        for stage in self.request.stages_run:
            if stage == "gradients" and not all(subject.has_gradient for subject in self.subjects):
                return self._without_gradient(iteration)
            values = [
                self._next(run, Raised(side, stage, iteration, "")) for run, side in zip(runs, SIDES, strict=True)
            ]
            before, after = values
            if before is None or after is None:
                return False
            if stage in self.request.stages:
                rename = None if stage == "outputs" else self.request.rename
                compared = compare_mappings(stage, before, after, rule=self.request.rule, rename=rename)
                self.comparisons.append(replace(compared, iteration=iteration))
        return True

    def _next(self, run: Iterator[tuple[str, dict[str, Any]]], at: Raised) -> dict[str, Any] | None:
        """The values of the next stage, or ``None`` where it raised, which is noted."""
        try:
            return next(run)[1]
        except HashbenchError:
            raise
        except Exception as error:
            failure = failure_of(error)
            refused = failure.nondeterministic_op
            self.raised.append(replace(at, error=squeezed(failure.error), exception=error, nondeterministic_op=refused))
            return None

    def _without_gradient(self, iteration: int) -> bool:
        lacking = [side for side, subject in zip(SIDES, self.subjects, strict=True) if not subject.has_gradient]
        if self.request.training is None and len(lacking) == len(SIDES):
            self.notes.append("no output of either model has a gradient: neither gradients nor a step were compared")
            return True
        error = "no output has a gradient, so there is nothing to differentiate"
        self.raised += [Raised(side, "gradients", iteration, error) for side in lacking]
        return False


def _nan_notes(comparisons: Iterable[Comparison]) -> Iterator[str]:
    """What is NaN in both models agrees, but shows nothing."""
    names: dict[str, set[str]] = {stage: set() for stage in STAGES}
    for comparison in comparisons:
        names[comparison.stage] |= {tensor.name for tensor in comparison.tensors if tensor.nan_in_both}
    for stage, nan in names.items():
        if nan:
            yield f"{stage}: {len(nan)} hold elements that are NaN in both models, which show nothing ({min(nan)})"


def _repeatability(request: Request) -> Iterator[str]:
    """What a difference between two models means where one of them does not even agree with itself."""
    for side, model in zip(SIDES, (request.before, request.after), strict=True):
        again = replace(request, before=model, after=model, iterations=1, rename=None)
        try:
            with _subjects(again) as (subjects, notes):
                if not all(subject.copied for subject in subjects):
                    continue
                report = _Comparing(again, subjects, notes).report()
        except HashbenchError:
            continue
        if not report.bitwise:
            yield (
                f"the model {side} does not repeat itself: of two equal runs, {report.verdict.partition(': ')[2]}. "
                "`hashbench sweep` says which kernel it is"
            )
