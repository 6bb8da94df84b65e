"""Pairs of runs of a model that passed, under circumstances that must not matter: a difference that luck hides.

The first run of the plain pair is one side where the number of threads is its own; runs with more threads than cores
are compared with the first of these. Several circumstances share a run; where a pair differs, further pairs tell which
one it was, and each of those is provoked alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

import torch

from hashbench.catalog import Circumstance, Status
from hashbench.causes.evidence import removes
from hashbench.diagnose import fresh_process
from hashbench.divergence import find as find_divergence
from hashbench.processes import Budget, tell_phase
from hashbench.records import Diagnosis, ExperimentResult, Failure, ModelSpec, RunCounts, RunOptions, Trace
from hashbench.replay import controls
from hashbench.run.leaves import NotComparableError
from hashbench.run.outcome import Attempt, Outcome, Run, difference_between, told_by_digests
from hashbench.trace.callbacks import TraceCallback

SHARE = 0.6
"""Part of the seconds of the plain pair that stressed runs may take before the last one is begun."""
FEWEST, MOST = 2, 6
"""Runs with more threads than cores."""
AGAIN = 10
"""Pairs in which a difference is looked for again to tell what provokes it."""
TO_TELL = 3
"""Pairs of which all differ where nothing but one circumstance is another."""
NAMING_SHARE = 0.3
"""Part of the budget of the diagnosis that it may take to tell which circumstance it was."""
PROCESS_SECONDS = 120.0
"""How long a fresh process may take."""

TOGETHER = tuple(name for name in controls.WITHIN_A_RUN if name != Circumstance.THREADS)
"""What shares one run with the threads of the plain pair."""
_STEADY = (Circumstance.MEMORY, Circumstance.ADDRESS, Circumstance.COLLECTOR)
"""Circumstances that bring the same difference about whenever they are the same."""


@dataclass(frozen=True, slots=True)
class Provoked:
    """A circumstance, in the ``variations`` that two runs differ in (the same twice: by chance), how often that was
    seen, and the two runs."""

    names: tuple[str, ...]
    variations: tuple[int, int]
    counts: tuple[int, int]
    first: Run | None = field(default=None, repr=False)
    second: Run | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """The one that it is called by."""
        return self.names[0]


class StressedAttempt:
    """Makes runs under ``names``, in one of ``variations`` after the other."""

    def __init__(
        self, attempt: Attempt, names: Sequence[str], variations: tuple[int, int], *, device: torch.device
    ) -> None:
        self.attempt, self.names, self.variations, self.device = attempt, names, variations, device
        self.made = 0

    def __call__(
        self, *, traced: bool = True, diagnosing: bool = False, watcher: TraceCallback | None = None
    ) -> Run | Failure:
        variation = self.variations[self.made % 2]
        self.made += 1
        with controls.provoked(self.names, variation, device=self.device):
            return self.attempt(traced=traced, diagnosing=diagnosing, watcher=watcher)


class Stress:
    """Makes the stressed runs of one model.

    Args:
        attempt: makes one run.
        options: the device, and what the diagnosis may take.
        level: the deterministic level in force.
        first: the first run of the plain pair.
        seconds: what the plain pair took, from which the model was loaded on.
        spec, target: how a fresh process builds the model; see :func:`~hashbench.diagnose.fresh_process.fresh_traces`.
    """

    def __init__(
        self,
        attempt: Attempt,
        options: RunOptions,
        level: str,
        *,
        first: Run,
        seconds: float,
        spec: ModelSpec | None,
        target: str,
    ) -> None:
        self.attempt, self.options, self.level = attempt, options, level
        self.first, self.seconds, self.spec, self.target = first, seconds, spec, target
        self.device = torch.device(options.device)
        self.began = perf_counter()
        self.trials: Counter[str] = Counter()
        self.differing: Counter[str] = Counter()
        self.notes: dict[str, str] = {}

    def look(self) -> Provoked | None:
        """What first made two runs differ; ``None`` where nothing did."""
        self.began = perf_counter()
        return self._one_run_of_all() or self._runs_with_more_threads() or self._fresh_process()

    def results(self) -> tuple[ExperimentResult, ...]:
        """How many pairs were made under each circumstance, and how many of them differ."""
        known = [str(name) for name in Circumstance if name in self.trials or name in self.notes]
        return tuple(
            ExperimentResult(name, "pair", self.trials[name], self.differing[name], note=self.notes.get(name, ""))
            for name in known
        )

    # ------------------------------------------------------------------------------------------------- stages

    def _one_run_of_all(self) -> Provoked | None:
        tell_phase("stress: one run")
        return self._found(TOGETHER, 1, self.first, self._run(TOGETHER, 1))

    def _runs_with_more_threads(self) -> Provoked | None:
        names = (Circumstance.THREADS, *TOGETHER)
        base = self._run(names, 0)
        if isinstance(base, Failure):
            self._failed(names, base)
            return None
        for variation in range(1, MOST):
            tell_phase(f"stress: run {variation + 1} with more threads")
            if found := self._found(names, variation, base, self._run(names, variation)):
                return found
            if variation + 1 >= FEWEST and perf_counter() - self.began > SHARE * self.seconds:
                break
        return None

    def _fresh_process(self) -> Provoked | None:
        if self.spec is None:
            return None
        tell_phase("stress: a fresh process")
        fresh = fresh_process.fresh_traces(
            self.spec,
            replace(self.options, tracer=self._trace(self.first).tracer, threads=torch.get_num_threads()),
            level=self.level,
            processes=1,
            runs=1,
            fixed_order=False,
            timeout=PROCESS_SECONDS,
            target=self.target,
        )
        name = str(Circumstance.PROCESS)
        if not fresh.processes:
            self.notes[name] = fresh.failures[0] if fresh.failures else "nothing came back"
            return None
        self.trials[name] += 1
        other = Run(fresh.processes[0][0], {})
        if not differing_results(self.first, other):
            return None
        self.differing[name] += 1
        return Provoked((name,), (0, 0), (1, 1), self.first, other)

    def _found(self, names: Sequence[str], variation: int, first: Run, second: Run | Failure) -> Provoked | None:
        if isinstance(second, Failure):
            self._failed(names, second)
            return None
        differs = _differ(first, second)
        self.trials.update(names)
        if not differs:
            return None
        return self._name(tuple(names), variation, first, second)

    def _failed(self, names: Sequence[str], failure: Failure) -> None:
        for name in names:
            self.notes.setdefault(str(name), f"a run failed: {failure.error}"[:200])

    # ------------------------------------------------------------------------------------------ which one it was

    def _name(self, names: tuple[str, ...], variation: int, first: Run, second: Run) -> Provoked:
        """The one of several circumstances that made two runs differ; all of them where none does so alone."""
        budget = Budget(self.options.diagnose_budget * NAMING_SHARE)
        plain = self._alone((), (0, 0), TO_TELL, budget)
        if plain.counts[0] == TO_TELL:  # it has changed for good: an earlier run left something behind
            self.differing[Circumstance.PROCESS] += 1
            self.trials[Circumstance.PROCESS] += 1
            return replace(plain, names=(str(Circumstance.PROCESS),))
        tries: list[tuple[tuple[str, ...], tuple[int, int], int]] = []
        # Memory is filled on both sides: an earlier run may have left what it was filled with.
        sides = {Circumstance.MEMORY: (1, 2)}
        tries += [((str(name),), sides.get(name, (0, variation)), TO_TELL) for name in _STEADY if name in names]
        threads = (str(Circumstance.THREADS),) if Circumstance.THREADS in names else ()
        if threads:
            tries.append((threads, (0, 0), AGAIN))
        load = str(Circumstance.LOAD)
        tries += [((*kept, load), (0, 1), AGAIN) for kept in dict.fromkeys(((), threads))]
        best = Provoked(tuple(dict.fromkeys((*threads, load, *names))), (0, variation), (1, 1))
        for tried, variations, count in tries:
            if budget.left() <= 0:
                break
            tell_phase(f"stress: {' and '.join(tried)} alone")
            alone = self._alone(tried, variations, count, budget)
            if alone.counts[0]:
                best = alone
                break
        self.differing[best.name] += 1
        return best if best.first is not None else replace(best, first=first, second=second)

    def _alone(self, names: tuple[str, ...], variations: tuple[int, int], count: int, budget: Budget) -> Provoked:
        """Pairs under these circumstances alone. Of one that always brings the same about, pairs without it must agree
        as well."""
        steady = bool(names) and names[0] in _STEADY
        differing = trials = 0
        pair: tuple[Run | None, Run | None] = None, None
        base = self._run(names, variations[0])
        while not isinstance(base, Failure) and trials < count and (budget.left() > 0 or not trials):
            other = self._run(names, variations[1])
            if isinstance(other, Failure):
                break
            trials += 1
            if _differ(base, other):
                differing, pair = differing + 1, (base, other)
            elif steady:
                return Provoked(names, variations, (0, trials))
            if steady and trials < count:
                again = self._run(names, variations[0])
                if isinstance(again, Failure) or _differ(base, again):
                    return Provoked(names, variations, (0, trials))
        return Provoked(names, variations, (differing, trials), *pair)

    # ------------------------------------------------------------------------------------------------------ runs

    def _run(self, names: Sequence[str], variation: int) -> Run | Failure:
        return StressedAttempt(self.attempt, names, (variation, variation), device=self.device)()

    @staticmethod
    def _trace(run: Run) -> Trace:
        assert run.trace is not None
        return run.trace


def _differ(first: Run, second: Run) -> bool:
    try:
        return difference_between(first, second) is not None
    except NotComparableError:
        return True


def differing_results(first: Run, second: Run) -> tuple[str, ...]:
    """The results of two runs in different processes that differ, as far as their digests tell: where strides differ,
    they do not."""
    differing = [name for name, differs in told_by_digests(first, second).items() if differs]
    alone = first.noted.keys() ^ second.noted.keys()
    return (*differing, *(name for name in (*first.noted, *second.noted) if name in alone))


Explain = Callable[[Attempt, Attempt, Outcome], Outcome]
"""The outcome of a pair that differs with its cause, from what makes pairs that differ, and what experiments repeat."""


def latent_outcome(outcome: Outcome, provoked: Provoked, stress: Stress, explain: Explain) -> tuple[str, Outcome]:
    """The circumstance under which a model that passed differs, and all that is known of that."""
    first, second = provoked.first, provoked.second
    assert first is not None
    assert second is not None
    traces = (Stress._trace(first), Stress._trace(second))
    differing, trials = provoked.counts
    plain = replace(
        outcome,
        accuracy=Status.TWO_RUNS_DIFFER,
        circumstance=provoked.name,
        traces=traces,
        first=None,
        stressed=(ExperimentResult(provoked.name, "pair", trials, differing),),
    )
    if provoked.name == Circumstance.PROCESS:
        verdict = find_divergence(*traces, differing=differing_results(first, second))
        found = replace(plain, verdict=verdict, between_processes=True)
        return provoked.name, explain(stress.attempt, stress.attempt, found)
    try:
        difference = difference_between(first, second)
    except NotComparableError:
        difference = None
    verdict = find_divergence(*traces, differing=() if difference is None else difference.names)
    counts = RunCounts(trials, differing, distinct=2)
    found = replace(plain, verdict=verdict, difference=difference, run_counts=counts)
    make = StressedAttempt(stress.attempt, provoked.names, provoked.variations, device=stress.device)
    # Experiments fill memory themselves.
    again = stress.attempt if provoked.names == (Circumstance.MEMORY,) else make
    explained = explain(make, again, found)
    return circumstance_of(provoked.name, explained.diagnosis), explained


def circumstance_of(provoked: str, diagnosis: Diagnosis | None) -> str:
    """What made runs differ that differed under ``provoked``: a clock, the system's entropy or an earlier run of the
    process, where experiments show that it was one of these."""
    if diagnosis is None:
        return provoked
    evidence = diagnosis.evidence
    for name, word in (("clocks", Circumstance.CLOCK), ("entropy", Circumstance.ENTROPY)):
        if any(removes(evidence, name, on) for on in ("call", "pair")) and diagnosis.decision.cause in _READ:
            return str(word)
    return str(Circumstance.PROCESS) if diagnosis.decision.cause == "surviving_state" else provoked


_READ = ("outside_value", "control_flow", "rng", "algorithm_selection", "initial_state", "input_pipeline")
"""Causes that are a value which the model reads."""
