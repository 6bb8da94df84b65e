"""Run pairs of a model that passed under perturbations that must not matter, to find differences that luck hides.

All perturbations share one run, with more threads than cores, which is compared with a run of a fresh process with as
many threads: two runs show whether anything differs. As long as there is time, further runs in other variations follow;
if the number of threads is the plain pair's, its first run is the other side. If a pair differs, further pairs find the
perturbation, each provoked alone. If none does it alone, as far as there was time to try, none is blamed: pairs under
all of them together are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter, process_time

import torch

from hashbench.catalog import Confidence, Origin, Perturbation, Status
from hashbench.causes import stats
from hashbench.causes.evidence import removes
from hashbench.check.subject import Given, RunMaker, Subject
from hashbench.diagnose import fresh_process
from hashbench.divergence import find as find_divergence
from hashbench.processes import (
    Budget,
    QuietBudget,
    available_memory_mib,
    peak_memory_mib,
    return_free_memory,
    tell_phase,
)
from hashbench.records import (
    NO_TIME,
    Decision,
    Diagnosis,
    Divergence,
    Evidence,
    ExperimentResult,
    Failure,
    RunCounts,
    RunOptions,
    Trace,
    Verdict,
)
from hashbench.replay import controls
from hashbench.run.leaves import NotComparableError
from hashbench.run.outcome import Outcome, Run, difference_between, results_that_differ, told_by_digests
from hashbench.trace.callbacks import TraceCallback

SHARE = 1.3
"""Time limit of the stressed runs, but for the first two, as a share of the plain pair's."""
SHORT_SECONDS = 1.0
"""Seconds of an idle machine that stressed runs of this process may take in any case: small models are run often."""
PATIENCE = 10
"""Factor on wall time for a busy machine."""
MOST = 6
"""Maximum of stressed runs of this process."""
AGAIN, FEW = 10, 2
"""Pairs in which a difference is looked for again to tell what provokes it: at first a few under each perturbation."""
TO_TELL = 3
"""Pairs that must all differ if only one perturbation is changed."""
NAMING_SHARE = 0.3
"""Time limit for finding the perturbation, as a share of the diagnosis budget."""
NAMING_SECONDS = 5.0
"""Minimum of that limit, in seconds."""
MOST_WITHOUT = 60
"""Maximum of pairs without a perturbation, to show that it makes the difference."""
PROCESS_SECONDS = 120.0
"""Time limit of a fresh process, or the time of the plain pair if that is longer."""

TOGETHER = tuple(name for name in controls.WITHIN_A_RUN if name != Perturbation.THREADS)
"""Perturbations that share one run with the threads of the plain pair."""
_STEADY = (Perturbation.MEMORY, Perturbation.ADDRESS, Perturbation.COLLECTOR)
"""Deterministic perturbations: the same variation always has the same effect."""
_SIDES = {Perturbation.MEMORY: ((1, 2),), Perturbation.COLLECTOR: ((2, 1),), Perturbation.ADDRESS: ((0, 1), (1, 2))}
"""Variations of those that are provoked on both sides: an earlier run may have left what memory was filled with, left
alone the collector runs when it happens to, and foreign memory lies where it happens to. Objects, whose order is random
in each variation of ``address``, lie alike in runs that are left alone."""


@dataclass(frozen=True, slots=True)
class Provoked:
    """A perturbation (or set) under which two runs differed, in these ``variations`` (twice the same: by chance), with
    the counts of pairs, and two such runs, of which the second may have failed."""

    names: tuple[str, ...]
    variations: tuple[int, int]
    counts: tuple[int, int]
    first: Run | None = field(default=None, repr=False)
    second: Run | Failure | None = field(default=None, repr=False)
    makes_it: tuple[str, ...] = ()
    """The perturbations that make the difference, if not all do."""
    note: str = ""
    """Why it may be another one: :data:`~hashbench.records.NO_TIME` if time ran out."""

    @property
    def name(self) -> str:
        """Reported name."""
        names = self.makes_it or self.names
        return names[0] if len(names) == 1 else str(Perturbation.TOGETHER)


class StressedAttempt:
    """Makes runs under ``names``, in the ``variations`` in turn.

    If load is provoked by chance, the second variation changes each time, since two runs of one variation may agree.
    """

    def __init__(
        self, attempt: RunMaker, names: Sequence[str], variations: tuple[int, int], *, device: torch.device
    ) -> None:
        self.attempt, self.names, self.variations, self.device = attempt, names, variations, device
        self.made = 0

    def __call__(
        self,
        given: Given | None = None,
        *,
        number: int | None = None,
        traced: bool = True,
        diagnosing: bool = False,
        watcher: TraceCallback | None = None,
    ) -> Run | Failure:
        variation = self.variations[self.made % 2]
        if self.made % 2 and varies(self.names, self.variations):
            variation += self.made // 2
        self.made += 1
        with controls.provoked(self.names, variation, device=self.device):
            return self.attempt(given, number=number, traced=traced, diagnosing=diagnosing, watcher=watcher)


def varies(names: Sequence[str], variations: tuple[int, int]) -> bool:
    """Return True if runs under these ``names`` differ only in load, which varies from run to run."""
    return Perturbation.LOAD in names and variations[0] != variations[1] and not set(names) & set(_STEADY)


class Stress:
    """Makes the stressed runs of one model.

    Args:
        subject: what is run.
        options: the device, and what the diagnosis may take.
        level: the deterministic level in force.
        first: the first run of the plain pair.
        seconds: what the plain pair took, from which the model was loaded on.
    """

    def __init__(
        self,
        subject: Subject,
        options: RunOptions,
        level: str,
        *,
        first: Run,
        seconds: float,
    ) -> None:
        self.subject, self.options, self.level = subject, options, level
        self.first, self.seconds = first, seconds
        self.device = torch.device(options.device)
        self.began = perf_counter()
        self.took = self.spent = 0.0
        """Seconds of the last stressed run, and of all."""
        self.computing = self.computed = 0.0
        """The same but for what other work on the machine added."""
        self.trials: Counter[str] = Counter()
        self.differing: Counter[str] = Counter()
        self.notes: dict[str, str] = {}
        self.pairs = 0
        """Pairs under several perturbations so far."""

    def look(self) -> Provoked | None:
        """Return what first made two runs differ, else ``None``."""
        found = self._look()
        if found is not None and found.name == Perturbation.TOGETHER:
            self.differing[found.name], self.trials[found.name] = found.counts
        return found

    def _look(self) -> Provoked | None:
        self.began = perf_counter()
        names = (Perturbation.THREADS, *TOGETHER)
        with self._fresh(controls.oversubscribed()) as waited:
            beside = peak_memory_mib() <= available_memory_mib() / 2  # of the run and of the process, at the same time
            other = None
            if not beside:
                return_free_memory()
                other = waited()
            tell_phase("stress: run 1")
            first = self._run(names, 1)
            other = waited() if beside and isinstance(first, Run) else other
        if isinstance(first, Failure):
            return self._raised(names, 1, first)
        return self._other_process(names, first, other) or self._further_runs(names, first)

    def results(self) -> tuple[ExperimentResult, ...]:
        """Return the number of pairs made under each perturbation, and of those that differ."""
        known = [str(name) for name in Perturbation if name in self.trials or name in self.notes]
        return tuple(
            ExperimentResult(name, "pair", self.trials[name], self.differing[name], note=self.notes.get(name, ""))
            for name in known
        )

    # ------------------------------------------------------------------------------------------------- stages

    def _other_process(self, names: tuple[str, ...], first: Run, other: Run | None) -> Provoked | None:
        """Compare the ``other`` run, of a fresh process, with ``first``; without one, a run of this process."""
        if other is None:
            tell_phase("stress: run 2")
            return self._found(names, (0, 1), self._run(names, 0), first)
        self.trials.update((*names, Perturbation.PROCESS))
        if not differing_results(other, first):
            return None
        tell_phase("stress: what differs between processes")
        base, later = self._run(names, 0), self._run((), 0)
        if isinstance(base, Failure) or isinstance(later, Failure):
            return self._of_processes(other, first)
        self.pairs += 1
        if _differ(base, first):
            return self._name(names, (0, 1), base, first)
        if _differ(self.first, later):  # as an earlier run left it
            return self._of_processes(self.first, later)
        with self._fresh(torch.get_num_threads()) as waited:
            again = waited()
        if again is not None and differing_results(self.first, again):
            return self._of_processes(self.first, again)
        budget = self._budget()
        return self._alone_of(names, (0, 1), budget) or replace(self._of_processes(other, first), note=_note_of(budget))

    def _further_runs(self, names: tuple[str, ...], first: Run) -> Provoked | None:
        """Make runs in other variations while there is time."""
        for variation in range(2, MOST + 1):
            if perf_counter() + self.took > self.began + SHARE * self.seconds and not self._is_short:
                return None
            tell_phase(f"stress: run {variation}")
            if variation == 2:
                found = self._found(TOGETHER, (0, 1), self.first, self._run(TOGETHER, 1))
            else:
                found = self._found(names, (1, variation), first, self._run(names, variation))
            if found is not None:
                return found
        return None

    @property
    def _is_short(self) -> bool:
        """Whether one more run takes little time."""
        computed, spent = self.computed + self.computing, self.spent + self.took
        return computed <= SHORT_SECONDS and spent <= PATIENCE * SHORT_SECONDS

    @contextmanager
    def _fresh(self, threads: int) -> Iterator[Callable[[], Run | None]]:
        """Start a run in a fresh process with ``threads`` threads, beside this one if there is a server.

        Yields a function that waits for the run; it returns ``None``, and the reason is noted, if there is none.
        """
        if self.subject.spec is None:
            yield lambda: None
            return
        with fresh_process.begun(
            self.subject.spec,  # built with as many threads as the model of this process
            replace(self.options, tracer=self.first.tracer, threads=torch.get_num_threads()),
            level=self.level,
            processes=1,
            runs=1,
            fixed_order=False,
            threads=threads,
            target=self.subject.target,
        ) as waited:
            yield lambda: self._run_of(waited)

    def _run_of(self, waited: Callable[[float], fresh_process.FreshRuns]) -> Run | None:
        tell_phase("stress: a fresh process")
        fresh = waited(max(PROCESS_SECONDS, self.seconds))
        if fresh.processes:
            return Run(fresh.processes[0][0], {})
        self.notes[Perturbation.PROCESS] = fresh.failures[0] if fresh.failures else "nothing came back"
        return None

    def _persistent_change(self) -> Run | None:
        """Return a plain run if it and all further ones differ from the plain pair: an earlier run of the process left
        state behind. ``None`` if one of them agrees."""
        later: Run | None = None
        for _ in range(TO_TELL):
            run = self._run((), 0)
            if isinstance(run, Failure) or not _differ(self.first, run):
                return None
            later = run
        return later

    def _of_processes(
        self, first: Run | None, second: Run | Failure | None, counts: tuple[int, int] = (1, 1)
    ) -> Provoked:
        self.differing[Perturbation.PROCESS] += 1
        self.trials[Perturbation.PROCESS] = max(1, self.trials[Perturbation.PROCESS])
        return Provoked((str(Perturbation.PROCESS),), (0, 0), counts, first, second)

    def _found(
        self, names: Sequence[str], variations: tuple[int, int], first: Run | Failure, second: Run | Failure
    ) -> Provoked | None:
        for variation, run in zip(variations, (first, second), strict=True):
            if isinstance(run, Failure):
                return self._raised(names, variation, run)
        assert isinstance(first, Run)
        assert isinstance(second, Run)
        self.trials.update(names)
        self.pairs += 1
        return self._name(tuple(names), variations, first, second) if _differ(first, second) else None

    def _raised(self, names: Sequence[str], variation: int, failure: Failure) -> Provoked | None:
        """Find the single perturbation that reproduces the exception, which a plain run does not raise.

        Out of memory is no finding: these runs need more of it.
        """
        note = f"a run failed: {failure.error}"[:200]
        for name in names:
            self.notes.setdefault(str(name), note)
        if failure.out_of_memory or isinstance(plain := self._run((), 0), Failure):
            return None
        for name in names:
            tell_phase(f"stress: {name} alone")
            alone = [self._run((name,), variation) for _ in range(2)]
            if all(isinstance(run, Failure) and not run.out_of_memory for run in alone):
                self.trials[name] += 1
                self.differing[name] += 1
                return Provoked((str(name),), (0, variation), (2, 2), plain, alone[0])
        return None

    # ------------------------------------------------------------------------------------------ which one it was

    def _name(self, names: tuple[str, ...], variations: tuple[int, int], first: Run, second: Run) -> Provoked:
        """Find the one perturbation of several that made two runs differ; if none was seen to do so alone, return all
        of them with the count of differing pairs."""
        budget = self._budget()
        if found := self._alone_of(names, variations, budget):
            return found
        note = _note_of(budget)
        tell_phase("stress: all perturbations again")
        again = self._alone(names, variations, (AGAIN, AGAIN), budget)
        differing, trials = again.counts
        return Provoked(names, variations, (1 + differing, self.pairs + trials), first, second, note=note)

    def _budget(self) -> Budget:
        """Return the time for finding the perturbation."""
        seconds = max(NAMING_SECONDS, self.options.diagnose_budget * NAMING_SHARE)
        return QuietBudget(seconds, most=max(PATIENCE * NAMING_SECONDS, self.options.diagnose_budget))

    def _alone_of(self, names: tuple[str, ...], variations: tuple[int, int], budget: Budget) -> Provoked | None:
        """Find the one perturbation of several that makes runs differ alone, too."""
        plain = self._alone((), (0, 0), (TO_TELL, TO_TELL), budget)
        if plain.counts[0] == TO_TELL:  # each run finds what the one before it left behind
            return self._of_processes(plain.first, plain.second, plain.counts)
        if plain.counts == (0, TO_TELL) and (later := self._persistent_change()) is not None:
            return self._of_processes(self.first, later)
        seen: dict[tuple[str, ...], tuple[int, int]] = {(): plain.counts}
        tries: list[tuple[tuple[str, ...], tuple[int, int], tuple[int, int]]]
        tries = [
            ((str(name),), sides, (TO_TELL, TO_TELL))
            for name in _STEADY
            if name in names
            for sides in _SIDES.get(name, (variations,))
        ]
        threads = (str(Perturbation.THREADS),) if Perturbation.THREADS in names else ()
        load = str(Perturbation.LOAD)
        by_chance = [((*kept, load), (0, 1)) for kept in dict.fromkeys(((), threads))]
        if threads:
            by_chance.insert(0, (threads, (0, 0)))
        tries += [(*tried, (few, AGAIN)) for few in (FEW, AGAIN) for tried in by_chance]
        for tried, sides, pairs in tries:
            if budget.left() <= 0:
                return None
            tell_phase(f"stress: {' and '.join(tried)} alone")
            alone = self._alone(tried, sides, pairs, budget)
            steady = tried[0] in _STEADY
            if not steady:
                seen[tried] = _sum(seen.get(tried, (0, 0)), alone.counts)
            if alone.counts[0] and (makes_it := tried if steady else self._contributing(tried, seen, budget)):
                found = replace(alone, makes_it=makes_it)
                if found.name != Perturbation.TOGETHER:
                    self.differing[found.name] += 1
                return found
        return None

    def _contributing(
        self, names: tuple[str, ...], seen: dict[tuple[str, ...], tuple[int, int]], budget: Budget
    ) -> tuple[str, ...]:
        """Remove each perturbation in turn; keep those whose removal lowers the rate significantly.

        ``seen`` holds the counts of further pairs without each, and is updated.
        """
        makes_it = []
        for name in names:
            others = tuple(other for other in names if other != name)
            tell_phase(f"stress: without {name}")
            needed = min(stats.trials_needed(seen[names], level=stats.ONE_OF_FEW), MOST_WITHOUT)
            more = needed - seen.get(others, (0, 0))[1]
            if more > 0 and budget.left() > 0:
                without = self._alone(others, (0, int(Perturbation.LOAD in others)), (more, more), budget)
                seen[others] = _sum(seen.get(others, (0, 0)), without.counts)
            if stats.fewer(seen[names], seen.get(others, (0, 0)), level=stats.ONE_OF_FEW):
                makes_it.append(name)
        return tuple(makes_it)

    def _alone(
        self, names: tuple[str, ...], variations: tuple[int, int], pairs: tuple[int, int], budget: Budget
    ) -> Provoked:
        """Make pairs under these perturbations alone: a few, and ``pairs`` of them if one differs.

        If all of them differ, pairs without the perturbation must agree as well.
        """
        steady = len(names) == 1 and names[0] in _STEADY
        differing = trials = 0
        few, most = pairs
        pair: tuple[Run | None, Run | None] = None, None
        base = self._run(names, variations[0])
        while (
            not isinstance(base, Failure)
            and trials < (most if differing else few)
            and (budget.left() > 0 or not trials)
        ):
            other = self._run(names, variations[1] + (trials if varies(names, variations) else 0))
            if isinstance(other, Failure):
                break
            trials += 1
            if _differ(base, other):
                differing, pair = differing + 1, (base, other)
            elif steady:
                return Provoked(names, variations, (0, trials))
            if steady and trials < most:
                again = self._run(names, variations[0])
                if isinstance(again, Failure) or _differ(base, again):
                    return Provoked(names, variations, (0, trials))
        return Provoked(names, variations, (differing, trials), *pair)

    # ------------------------------------------------------------------------------------------------------ runs

    def _run(self, names: Sequence[str], variation: int) -> Run | Failure:
        began, computed = perf_counter(), process_time()
        try:
            return StressedAttempt(self.subject.attempt, names, (variation, variation), device=self.device)()
        finally:
            self.took = perf_counter() - began
            self.spent += self.took
            self.computing = min(self.took, process_time() - computed)
            self.computed += self.computing

    @staticmethod
    def _trace(run: Run) -> Trace:
        assert run.trace is not None
        return run.trace


def _note_of(budget: Budget) -> str:
    return NO_TIME if budget.left() <= 0 else ""


def _sum(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return one[0] + other[0], one[1] + other[1]


def _differ(first: Run, second: Run) -> bool:
    try:
        return bool(results_that_differ(first, second))
    except NotComparableError:
        return True


def differing_results(first: Run, second: Run) -> tuple[str, ...]:
    """Return the results of two runs in different processes whose digests differ; with other strides digests tell
    nothing."""
    differing = [name for name, differs in told_by_digests(first, second).items() if differs]
    alone = first.noted.keys() ^ second.noted.keys()
    return (*differing, *(name for name in (*first.noted, *second.noted) if name in alone))


Explain = Callable[[RunMaker, RunMaker, Outcome], Outcome]
"""The outcome of a pair that differs with its cause, from what makes pairs that differ, and what experiments repeat."""


def latent_outcome(outcome: Outcome, provoked: Provoked, stress: Stress, explain: Explain) -> tuple[str, Outcome]:
    """Return the perturbation under which a passing model differs, and the outcome with the cause."""
    first, second = provoked.first, provoked.second
    assert first is not None
    assert second is not None
    if isinstance(second, Failure):
        return provoked.name, _raising(outcome, provoked, second)
    traces = (Stress._trace(first), Stress._trace(second))
    differing, trials = provoked.counts
    plain = replace(
        outcome,
        accuracy=Status.TWO_RUNS_DIFFER,
        perturbation=provoked.name,
        traces=traces,
        first=None,
        stressed=(ExperimentResult(provoked.name, "pair", trials, differing, note=provoked.note),),
    )
    if provoked.name == Perturbation.PROCESS:
        verdict = find_divergence(*traces, differing=differing_results(first, second))
        found = replace(plain, verdict=verdict, between_processes=True)
        return provoked.name, explain(stress.subject.attempt, stress.subject.attempt, found)
    try:
        difference = difference_between(first, second)
    except NotComparableError:
        difference = None
    verdict = find_divergence(*traces, differing=() if difference is None else difference.names)
    counts = RunCounts(trials, differing, distinct=2)
    found = replace(plain, verdict=verdict, difference=difference, run_counts=counts)
    make = StressedAttempt(stress.subject.attempt, provoked.names, provoked.variations, device=stress.device)
    # Experiments fill memory themselves.
    again = stress.subject.attempt if provoked.names == (Perturbation.MEMORY,) else make
    explained = explain(make, again, found)
    return perturbation_of(provoked.name, explained.diagnosis), explained


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
        stressed=(ExperimentResult(provoked.name, "pair", trials, differing),),
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
