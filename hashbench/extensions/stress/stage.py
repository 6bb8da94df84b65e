"""Run pairs of a model that passed under perturbations that must not matter, to find differences that luck hides.

All perturbations share one run, with more threads than cores, which is compared with a run of a fresh process with as
many threads: two runs show whether anything differs. As long as there is time, further runs in other variations follow;
if the number of threads is the plain pair's, its first run is the other side. If a pair differs, further pairs find the
perturbation (:class:`~hashbench.extensions.stress.perturbed.PerturbationSearch`): runs differ under it alone, and pairs
without it agree, or differ significantly less often. If none does, as far as there was time to try, up to ten more
pairs under all of them are counted (``together``). The model is built with the threads of the plain pair in both
processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from hashbench.core.catalog import Confidence, Limit, Origin, Perturbation, Status
from hashbench.core.check import pipeline
from hashbench.core.diagnose.causes import cut_short, stats
from hashbench.core.diagnose.causes.evidence import removes
from hashbench.core.diagnose.replay import controls
from hashbench.core.divergence import find as find_divergence
from hashbench.core.processes import available_memory_mib, peak_memory_mib, return_free_memory, tell_phase
from hashbench.core.records import (
    Decision,
    Diagnosis,
    Divergence,
    Evidence,
    ExperimentResult,
    Failure,
    RowEvidence,
    RunCounts,
    Trace,
    Verdict,
)
from hashbench.core.run.leaves import NotComparableError
from hashbench.core.run.outcome import Outcome, Run, RunMaker, difference_between, differing_digests
from hashbench.extensions.stress.facts import StressedPairs, StressFacts
from hashbench.extensions.stress.perturbed import (
    PairTally,
    PerturbationSearch,
    Provoked,
    StressedAttempt,
    StressedRuns,
    StressPlan,
    differ,
)

if TYPE_CHECKING:
    from hashbench.core.check.pair import PairCheck

SHARE = 1.3
"""Time limit of the stressed runs, but for the first two, as a share of the plain pair's."""
MOST = 6
"""Maximum of stressed runs of this process."""

ALL = tuple(controls.CONDITIONS)
"""Perturbations of the first stressed run."""
TOGETHER = tuple(name for name, condition in controls.CONDITIONS.items() if not condition.always)
"""Those that share one run with the threads of the plain pair."""


def add_stressed_runs(check: PairCheck, outcome: Outcome, first: Run, *, seconds: float) -> Outcome:
    """Add the results of pairs under perturbations to an outcome that passes: it still passes if one of them differs.

    Args:
        check: the comparison of equal runs, whose subject is stressed.
        outcome: of equal runs.
        first: the first run of the plain pair.
        seconds: of the plain pair, from the load of the model on.
    """
    check.keep_draft(outcome)
    plan = StressPlan(check.subject, check.options, check.level, first, seconds)
    provoked, counts = look(plan)
    outcome = outcome.having(StressFacts(str(StressedPairs.of(counts))))
    if provoked is None:
        return outcome

    def drafted(latent: Outcome) -> Outcome:
        return check.drafted(with_latent(outcome, provoked, provoked.name, latent))

    def explain(make: RunMaker, again: RunMaker, found: Outcome) -> Outcome:
        under = replace(check, subject=replace(check.subject, attempt=make), drafted=drafted)
        confirmed = found if found.between_processes else pipeline.confirm(under, found)
        return pipeline.diagnose(replace(under, subject=replace(check.subject, attempt=again)), confirmed)

    perturbation, latent = latent_outcome(outcome, provoked, plan, explain)
    return with_latent(outcome, provoked, perturbation, latent)


def with_latent(outcome: Outcome, provoked: Provoked, perturbation: str, latent: Outcome) -> Outcome:
    """Add the outcome of a stressed pair that differs: its place and cause as facts, and in the core's columns what
    only a diagnosis fills (evidence, advice, repro)."""
    divergence = latent.verdict.divergence if latent.verdict is not None else None
    differing, trials = provoked.counts
    place = {f"latent_{name}": getattr(divergence, name, "") for name in ("kernel", "module", "phase")}
    rate = stats.significant(differing / trials)
    facts = replace(outcome.of(StressFacts), latent=perturbation, latent_rate=rate, **place)
    counts = ExperimentResult(provoked.name, "pair", trials, differing, note=provoked.note)
    unnamed = (counts,) if counts.is_cut_short else ()
    because = f"{Limit.BUDGET.meaning} before each perturbation was tried alone" if unnamed else ""
    outcome = outcome.having(facts, confirmed=latent.confirmed, because=because, limited=unnamed)
    if (diagnosis := latent.diagnosis) is None:
        return outcome
    decision, arms = diagnosis.decision, diagnosis.evidence.arms
    return outcome.having(
        replace(facts, latent_cause=decision.cause, latent_confidence=decision.confidence),
        because="; ".join(filter(None, (decision.because, because))),
        advice=decision.advice,
        limited=(*cut_short(arms, decision.confidence), *unnamed),
        evidence=RowEvidence.of(arms),
        repro=diagnosis.repro,
        reproduced=diagnosis.reproduced,
    )


def look(plan: StressPlan) -> tuple[Provoked | None, tuple[ExperimentResult, ...]]:
    """Stress a subject; return what first made two runs differ, if anything did, and the counts of pairs."""
    tally = PairTally()
    found = _Stress(StressedRuns(plan), tally).look()
    if found is not None and found.name == Perturbation.TOGETHER:
        tally.differing[found.name], tally.trials[found.name] = found.counts
    return found, tally.results()


@dataclass(frozen=True, slots=True)
class _Stress:
    runs: StressedRuns
    tally: PairTally

    def look(self) -> Provoked | None:
        began = perf_counter()
        with self.runs.fresh(controls.oversubscribed()) as waited:
            beside = peak_memory_mib() <= available_memory_mib() / 2  # of the run and of the process, at the same time
            other = None
            if not beside:
                return_free_memory()
                other = self._noted(waited())
            tell_phase("stress: run 1")
            first = self.runs(ALL, 1)
            other = self._noted(waited()) if beside and isinstance(first, Run) else other
        if isinstance(first, Failure):
            return self._raised(ALL, 1, first)
        return self._other_process(first, other) or self._further_runs(first, began)

    def _noted(self, other: Run | Failure | None) -> Run | None:
        if isinstance(other, Failure):
            self.tally.notes[Perturbation.PROCESS] = other.error
            return None
        return other

    # ------------------------------------------------------------------------------------------------- stages

    def _other_process(self, first: Run, other: Run | None) -> Provoked | None:
        """Compare the ``other`` run, of a fresh process, with ``first``; without one, a run of this process."""
        plain, tally = self.runs.plan.first, self.tally
        if other is None:
            tell_phase("stress: run 2")
            return self._found(ALL, (0, 1), self.runs(ALL, 0), first)
        tally.trials.update((*ALL, Perturbation.PROCESS))
        if not differing_results(other, first):
            return None
        tell_phase("stress: what differs between processes")
        base, later = self.runs(ALL, 0), self.runs((), 0)
        if isinstance(base, Failure) or isinstance(later, Failure):
            return tally.of_processes(other, first)
        tally.pairs += 1
        if differ(base, first):
            return self._search().name(ALL, (0, 1), base, first)
        if differ(plain, later):  # as an earlier run left it
            return tally.of_processes(plain, later)
        with self.runs.fresh(torch.get_num_threads()) as waited:
            again = self._noted(waited())
        if again is not None and differing_results(plain, again):
            return tally.of_processes(plain, again)
        search = self._search()
        return search.alone(ALL) or replace(tally.of_processes(other, first), note=search.note)

    def _further_runs(self, first: Run, began: float) -> Provoked | None:
        """Make runs in other variations while there is time."""
        for variation in range(2, MOST + 1):
            if perf_counter() + self.runs.took > began + SHARE * self.runs.plan.seconds and not self.runs.is_short:
                return None
            tell_phase(f"stress: run {variation}")
            if variation == 2:
                found = self._found(TOGETHER, (0, 1), self.runs.plan.first, self.runs(TOGETHER, 1))
            else:
                found = self._found(ALL, (1, variation), first, self.runs(ALL, variation))
            if found is not None:
                return found
        return None

    def _search(self) -> PerturbationSearch:
        return PerturbationSearch(self.runs, self.tally, self.runs.plan.naming_budget())

    def _found(
        self, names: Sequence[str], variations: tuple[int, int], first: Run | Failure, second: Run | Failure
    ) -> Provoked | None:
        for variation, run in zip(variations, (first, second), strict=True):
            if isinstance(run, Failure):
                return self._raised(names, variation, run)
        assert isinstance(first, Run)
        assert isinstance(second, Run)
        self.tally.trials.update(names)
        self.tally.pairs += 1
        return self._search().name(tuple(names), variations, first, second) if differ(first, second) else None

    def _raised(self, names: Sequence[str], variation: int, failure: Failure) -> Provoked | None:
        """Find the single perturbation that reproduces the exception, which a plain run does not raise.

        Out of memory is no finding: these runs need more of it.
        """
        note = f"a run failed: {failure.error}"[:200]
        for name in names:
            self.tally.notes.setdefault(str(name), note)
        if failure.out_of_memory or isinstance(plain := self.runs((), 0), Failure):
            return None
        for name in names:
            tell_phase(f"stress: {name} alone")
            alone = [self.runs((name,), variation) for _ in range(2)]
            if all(isinstance(run, Failure) and not run.out_of_memory for run in alone):
                self.tally.trials[name] += 1
                self.tally.differing[name] += 1
                return Provoked((str(name),), (0, variation), (2, 2), plain, alone[0])
        return None


def differing_results(first: Run, second: Run) -> tuple[str, ...]:
    """Return the results of two runs in different processes whose digests differ; with other strides digests tell
    nothing."""
    differing = [name for name, differs in differing_digests(first, second).items() if differs]
    alone = first.noted.keys() ^ second.noted.keys()
    return (*differing, *(name for name in (*first.noted, *second.noted) if name in alone))


Explain = Callable[[RunMaker, RunMaker, Outcome], Outcome]
"""The outcome of a pair that differs with its cause, from what makes pairs that differ, and what experiments repeat."""


def latent_outcome(outcome: Outcome, provoked: Provoked, plan: StressPlan, explain: Explain) -> tuple[str, Outcome]:
    """Return the perturbation under which a passing model differs, and the outcome with the cause."""
    first, second, attempt = provoked.first, provoked.second, plan.subject.attempt
    assert first is not None
    assert second is not None
    if isinstance(second, Failure):
        return provoked.name, _raising(outcome, provoked, second)
    traces = (_trace(first), _trace(second))
    differing, trials = provoked.counts
    plain = replace(
        outcome,
        accuracy=Status.TWO_RUNS_DIFFER,
        perturbation=provoked.name,
        traces=traces,
        first=None,
    )
    if provoked.name == Perturbation.PROCESS:
        verdict = find_divergence(*traces, differing=differing_results(first, second))
        found = replace(plain, verdict=verdict, between_processes=True)
        return provoked.name, explain(attempt, attempt, found)
    try:
        difference = difference_between(first, second)
    except NotComparableError:
        difference = None
    verdict = find_divergence(*traces, differing=() if difference is None else difference.names)
    counts = RunCounts(trials, differing, distinct=2)
    found = replace(plain, verdict=verdict, difference=difference, run_counts=counts)
    make = StressedAttempt(attempt, provoked.names, provoked.variations, device=plan.device)
    # Experiments fill memory themselves.
    again = attempt if provoked.names == (Perturbation.MEMORY,) else make
    explained = explain(make, again, found)
    return perturbation_of(provoked.name, explained.diagnosis), explained


def _trace(run: Run) -> Trace:
    assert run.trace is not None
    return run.trace


_LOOK = "Let the model run under this perturbation as well: the column because has the error, the log what was printed."


def _raising(outcome: Outcome, provoked: Provoked, failure: Failure) -> Outcome:
    """Return the outcome of runs that raise only under a perturbation."""
    differing, trials = provoked.counts
    kernel = Divergence(Origin.OUTSIDE, "", failure.op, None, "", None, "", "", f"a run raises: {failure.error}"[:500])
    because = (
        f"under {provoked.name} alone {differing} of {trials} runs raise, and a plain one does not: {failure.error}"
    )
    return replace(
        outcome,
        perturbation=provoked.name,
        verdict=Verdict((), kernel, ()),
        diagnosis=Diagnosis(Decision("unknown", Confidence.OPEN, because[:500], _LOOK), Evidence(origin="")),
    )


def perturbation_of(provoked: str, diagnosis: Diagnosis | None) -> str:
    """Return ``clock``, ``entropy`` or ``process`` if experiments show that it is the cause, else ``provoked``."""
    if diagnosis is None:
        return provoked
    evidence = diagnosis.evidence
    for name, word in (("clocks", Perturbation.CLOCK), ("entropy", Perturbation.ENTROPY)):
        if any(removes(evidence, name, on) for on in ("call", "pair")) and diagnosis.decision.cause in _READ:
            return str(word)
    return str(Perturbation.PROCESS) if diagnosis.decision.cause == "surviving_state" else provoked


_READ = ("outside_value", "control_flow", "rng", "algorithm_selection", "initial_state", "input_pipeline")
"""Causes that are a value which the model reads."""
