"""Runs under perturbations: made and timed, their pairs counted; and which perturbation makes two of them differ.

If none does it alone, as far as there was time to try, none is blamed: pairs under all of them together are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter, process_time
from typing import Any

import torch

from hashbench.core.catalog import Perturbation
from hashbench.core.check.subject import Subject
from hashbench.core.diagnose import fresh_process
from hashbench.core.diagnose.causes import stats
from hashbench.core.diagnose.replay import controls
from hashbench.core.processes import Budget, QuietBudget, tell_phase
from hashbench.core.records import NO_TIME, ExperimentResult, Failure, RunOptions
from hashbench.core.run.leaves import NotComparableError
from hashbench.core.run.outcome import Given, Run, RunMaker, results_that_differ

SHORT_SECONDS = 1.0
"""Seconds of an idle machine that stressed runs of this process may take in any case: small models are run often."""
PATIENCE = 10
"""Factor on wall time for a busy machine."""
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


@dataclass(frozen=True, slots=True)
class StressPlan:
    """What is stressed.

    Attributes:
        subject: what is run.
        options: the device, and the budget of the diagnosis.
        level: the deterministic level in force.
        first: the first run of the plain pair.
        seconds: of the plain pair, from the load of the model on.
    """

    subject: Subject
    options: RunOptions
    level: str
    first: Run
    seconds: float

    @property
    def device(self) -> torch.device:
        """The device of its runs."""
        return torch.device(self.options.device)

    def naming_budget(self) -> Budget:
        """Start the time for finding the perturbation."""
        seconds = max(NAMING_SECONDS, self.options.diagnose_budget * NAMING_SHARE)
        return QuietBudget(seconds, most=max(PATIENCE * NAMING_SECONDS, self.options.diagnose_budget))


Counts = tuple[int, int]
"""Differing pairs, and all of them."""


@dataclass(frozen=True, slots=True)
class Provoked:
    """Two runs that differ under perturbations.

    Attributes:
        names: the perturbations.
        variations: of the two runs; twice the same: they differ by chance.
        counts: of pairs like this one.
        first, second: the two runs; the second may have failed.
        makes_it: the perturbations that make the difference, if not all do.
        note: why it may be another one: :data:`~hashbench.core.records.NO_TIME` if time ran out.
    """

    names: tuple[str, ...]
    variations: tuple[int, int]
    counts: Counts
    first: Run | None = field(default=None, repr=False)
    second: Run | Failure | None = field(default=None, repr=False)
    makes_it: tuple[str, ...] = ()
    note: str = ""

    @property
    def name(self) -> str:
        """Reported name."""
        names = self.makes_it or self.names
        return names[0] if len(names) == 1 else str(Perturbation.TOGETHER)


class StressedAttempt:
    """Makes runs under ``names``, in the ``variations`` in turn.

    If chance decides, the second variation changes each time, since two runs of one variation may agree.
    """

    def __init__(
        self, attempt: RunMaker, names: Sequence[str], variations: tuple[int, int], *, device: torch.device
    ) -> None:
        self.attempt, self.names, self.variations, self.device = attempt, names, variations, device
        self.made = 0

    def __call__(self, given: Given | None = None, **how: Any) -> Run | Failure:
        variation = self.variations[self.made % 2]
        if self.made % 2 and varies(self.names, self.variations):
            variation += self.made // 2
        self.made += 1
        with controls.provoked(self.names, variation, device=self.device):
            return self.attempt(given, **how)


def varies(names: Sequence[str], variations: tuple[int, int]) -> bool:
    """Return True if runs under these ``names`` differ only in what chance decides, which varies from run to run."""
    steady = any(controls.CONDITIONS[name].sides for name in names)
    return _by_chance(names) and variations[0] != variations[1] and not steady


def _by_chance(names: Sequence[str]) -> bool:
    return any(controls.CONDITIONS[name].by_chance for name in names)


class StressedRuns:
    """Makes the runs of a plan, and times them.

    Attributes:
        took, spent: seconds of the last run, and of all.
        computing, computed: the same without what other work on the machine added.
    """

    def __init__(self, plan: StressPlan) -> None:
        self.plan = plan
        self.took = self.spent = self.computing = self.computed = 0.0

    def __call__(self, names: Sequence[str], variation: int) -> Run | Failure:
        began, computed = perf_counter(), process_time()
        try:
            make = StressedAttempt(self.plan.subject.attempt, names, (variation, variation), device=self.plan.device)
            return make()
        finally:
            self.took = perf_counter() - began
            self.spent += self.took
            self.computing = min(self.took, process_time() - computed)
            self.computed += self.computing

    @property
    def is_short(self) -> bool:
        """Whether one more run takes little time."""
        computed, spent = self.computed + self.computing, self.spent + self.took
        return computed <= SHORT_SECONDS and spent <= PATIENCE * SHORT_SECONDS

    @contextmanager
    def fresh(self, threads: int) -> Iterator[Callable[[], Run | Failure | None]]:
        """Start a run in a fresh process with ``threads`` threads, beside this one if there is a server.

        Yields a function that waits for the run, or returns why there is none; ``None``: no process builds the subject.
        """
        plan = self.plan
        if plan.subject.spec is None:
            yield lambda: None
            return
        with fresh_process.begun(
            plan.subject.spec,  # built with as many threads as the model of this process
            replace(plan.options, tracer=plan.first.tracer, threads=torch.get_num_threads()),
            level=plan.level,
            processes=1,
            runs=1,
            fixed_order=False,
            threads=threads,
            target=plan.subject.target,
        ) as waited:
            yield lambda: self._waited(waited)

    def _waited(self, waited: Callable[[float], fresh_process.FreshRuns]) -> Run | Failure:
        tell_phase("stress: a fresh process")
        fresh = waited(max(PROCESS_SECONDS, self.plan.seconds))
        if fresh.processes:
            return Run(fresh.processes[0][0], {})
        return Failure(fresh.failures[0] if fresh.failures else "nothing came back")


class PairTally:
    """Counts pairs under each perturbation; ``pairs`` are those under several of them."""

    def __init__(self) -> None:
        self.trials: Counter[str] = Counter()
        self.differing: Counter[str] = Counter()
        self.notes: dict[str, str] = {}
        self.pairs = 0

    def of_processes(self, first: Run | None, second: Run | Failure | None, counts: Counts = (1, 1)) -> Provoked:
        """Count a difference between processes, or by what an earlier run left behind, and return it."""
        self.differing[Perturbation.PROCESS] += 1
        self.trials[Perturbation.PROCESS] = max(1, self.trials[Perturbation.PROCESS])
        return Provoked((str(Perturbation.PROCESS),), (0, 0), counts, first, second)

    def results(self) -> tuple[ExperimentResult, ...]:
        """Return the number of pairs made under each perturbation, and of those that differ."""
        known = [str(name) for name in Perturbation if name in self.trials or name in self.notes]
        return tuple(
            ExperimentResult(name, "pair", self.trials[name], self.differing[name], note=self.notes.get(name, ""))
            for name in known
        )


@dataclass(frozen=True, slots=True)
class PerturbationSearch:
    """Finds the one perturbation of several that made two runs differ."""

    runs: StressedRuns
    tally: PairTally
    budget: Budget

    @property
    def note(self) -> str:
        """Why another perturbation may be the one."""
        return NO_TIME if self.budget.left() <= 0 else ""

    def name(self, names: tuple[str, ...], variations: tuple[int, int], first: Run, second: Run) -> Provoked:
        """Return the perturbation; if none was seen to do it alone, all of them with the count of differing pairs."""
        if found := self.alone(names):
            return found
        note = self.note
        tell_phase("stress: all perturbations again")
        differing, trials = self._pairs(names, variations, (AGAIN, AGAIN)).counts
        return Provoked(names, variations, (1 + differing, self.tally.pairs + trials), first, second, note=note)

    def alone(self, names: Sequence[str]) -> Provoked | None:
        """Find the perturbation that makes runs differ alone, too."""
        plain = self._pairs((), (0, 0), (TO_TELL, TO_TELL))
        if plain.counts[0] == TO_TELL:  # each run finds what the one before it left behind
            return self.tally.of_processes(plain.first, plain.second, plain.counts)
        if plain.counts == (0, TO_TELL) and (later := self._persistent_change()) is not None:
            return self.tally.of_processes(self.runs.plan.first, later)
        seen: dict[tuple[str, ...], Counts] = {(): plain.counts}
        for tried, sides, pairs in _tries(names):
            if self.budget.left() <= 0:
                return None
            tell_phase(f"stress: {' and '.join(tried)} alone")
            alone = self._pairs(tried, sides, pairs)
            steady = controls.CONDITIONS[tried[0]].sides
            if not steady:
                seen[tried] = _sum(seen.get(tried, (0, 0)), alone.counts)
            if alone.counts[0] and (makes_it := tried if steady else self._contributing(tried, seen)):
                found = replace(alone, makes_it=makes_it)
                if found.name != Perturbation.TOGETHER:
                    self.tally.differing[found.name] += 1
                return found
        return None

    def _persistent_change(self) -> Run | None:
        """Return a plain run if it and all further ones differ from the plain pair: an earlier run of the process left
        state behind. ``None`` if one of them agrees."""
        later: Run | None = None
        for _ in range(TO_TELL):
            run = self.runs((), 0)
            if isinstance(run, Failure) or not differ(self.runs.plan.first, run):
                return None
            later = run
        return later

    def _contributing(self, names: tuple[str, ...], seen: dict[tuple[str, ...], Counts]) -> tuple[str, ...]:
        """Remove each perturbation in turn; keep those whose removal lowers the rate significantly.

        ``seen`` holds the counts of further pairs without each, and is updated.
        """
        makes_it = []
        for name in names:
            others = tuple(other for other in names if other != name)
            tell_phase(f"stress: without {name}")
            needed = min(stats.trials_needed(seen[names], level=stats.ONE_OF_FEW), MOST_WITHOUT)
            more = needed - seen.get(others, (0, 0))[1]
            if more > 0 and self.budget.left() > 0:
                without = self._pairs(others, (0, int(_by_chance(others))), (more, more))
                seen[others] = _sum(seen.get(others, (0, 0)), without.counts)
            if stats.fewer(seen[names], seen.get(others, (0, 0)), level=stats.ONE_OF_FEW):
                makes_it.append(name)
        return tuple(makes_it)

    def _pairs(self, names: tuple[str, ...], variations: tuple[int, int], pairs: tuple[int, int]) -> Provoked:
        """Make pairs under these perturbations alone: a few, and ``pairs`` of them if one differs.

        If all of them differ, pairs without the perturbation must agree as well.
        """
        steady = len(names) == 1 and bool(controls.CONDITIONS[names[0]].sides)
        differing = trials = 0
        few, most = pairs
        pair: tuple[Run | None, Run | None] = None, None
        base = self.runs(names, variations[0])
        while (
            not isinstance(base, Failure)
            and trials < (most if differing else few)
            and (self.budget.left() > 0 or not trials)
        ):
            other = self.runs(names, variations[1] + (trials if varies(names, variations) else 0))
            if isinstance(other, Failure):
                break
            trials += 1
            if differ(base, other):
                differing, pair = differing + 1, (base, other)
            elif steady:
                return Provoked(names, variations, (0, trials))
            if steady and trials < most:
                again = self.runs(names, variations[0])
                if isinstance(again, Failure) or differ(base, again):
                    return Provoked(names, variations, (0, trials))
        return Provoked(names, variations, (differing, trials), *pair)


def _tries(names: Sequence[str]) -> Iterator[tuple[tuple[str, ...], tuple[int, int], tuple[int, int]]]:
    """Yield perturbations to try alone, with the variations and the numbers of pairs: first the steady ones, of which
    few pairs tell, the one applied last first."""
    conditions = {str(name): controls.CONDITIONS[name] for name in reversed(controls.WITHIN_A_RUN) if name in names}
    for name, condition in conditions.items():
        for sides in condition.sides:
            yield (name,), sides, (TO_TELL, TO_TELL)
    always = tuple(name for name, condition in conditions.items() if condition.always)
    chance = [name for name, condition in conditions.items() if condition.by_chance]
    for few in (FEW, AGAIN):
        if always:
            yield always, (0, 0), (few, AGAIN)
        for kept in dict.fromkeys(((), always)):
            for name in chance:
                yield (*kept, name), (0, 1), (few, AGAIN)


def _sum(counts: Counts, other: Counts) -> Counts:
    return counts[0] + other[0], counts[1] + other[1]


def differ(first: Run, second: Run) -> bool:
    """Return True if results of two runs differ, or cannot be compared."""
    try:
        return bool(results_that_differ(first, second))
    except NotComparableError:
        return True
