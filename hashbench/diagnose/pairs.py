"""Experiments on the whole model: the pair run again under one change at a time.

An arm compares ``replays`` further runs with a first one, all under the same change, and counts those in which the
difference is still there. A difference that enters later than the one being examined is another one and does not count.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from time import perf_counter  # the clocks arm leaves this reference alone

import torch

from hashbench.causes import stats
from hashbench.diagnose.fresh_process import FreshRuns
from hashbench.divergence import find as find_divergence
from hashbench.errors import first_line
from hashbench.processes import Budget
from hashbench.records import Divergence, ExperimentResult, Failure, Trace
from hashbench.replay import controls
from hashbench.run.outcome import Attempt, Run, difference_between, fingerprint
from hashbench.run.outputs import NotComparableError

Change = Callable[[], AbstractContextManager[object]]

PAIR_ARMS: tuple[tuple[str, Change], ...] = (
    ("entropy", controls.constant_entropy),
    ("clocks", controls.ticking_clocks),
    ("one_worker", controls.single_worker_pools),
    ("one_thread", controls.one_thread),
)
"""Arms that are no more than runs inside a context."""

ARM_SHARE = 0.25
"""Part of the time left that one arm may take."""
PATIENCE = 10
"""A rare difference is looked for in so many times as many pairs as were asked for."""
SEEN_OFTEN = 3
"""Differences from which on a rate is known well enough."""
CLEAR = 5
"""Where the difference is still there in each of so many trials, of several outcomes, no more of them can remove it."""


def _is_clear(arm: ExperimentResult) -> bool:
    return arm.differing == arm.trials == CLEAR and arm.distinct != 2  # two: the first may have been an odd one


class Pairs:
    """Runs the arms on one model.

    Args:
        attempt: makes one run.
        original: the divergence being examined; ``None``: any difference counts.
        replays: comparisons an arm makes at most.
        budget: when it is used up, an arm ends early or is not begun.
        device: where the model runs.
    """

    def __init__(
        self, attempt: Attempt, original: Divergence | None, *, replays: int, budget: Budget, device: str = "cpu"
    ) -> None:
        self.attempt, self.original = attempt, original
        self.replays, self.budget = replays, budget
        self.device = torch.device(device)

    def plain(self) -> ExperimentResult:
        """The pair again, with nothing changed: what the other arms are compared with.

        Goes on where the difference is rare, and the other arms are made as long as it takes to tell that it is gone.
        """
        replays = self.replays
        arm = self._runs(
            "pair",
            contextlib.nullcontext,
            replays=PATIENCE * replays,
            enough=lambda arm: arm.trials >= replays and stats.sure_count(arm)[0] >= min(SEEN_OFTEN, replays),
        )
        self.replays = stats.arm_length(arm, asked=replays)
        return arm

    def under(self, name: str, change: Change) -> ExperimentResult:
        """Runs that each happen inside ``change()``."""
        return self._runs(name, change, replays=self.replays)

    def generators(self) -> ExperimentResult:
        """Every generator object alive put back to one state before each run; ``found`` names the one that matters."""
        snapshot = controls.Generators.alive()
        self.attempt()
        moved = snapshot.changed()
        arm = self._runs("generators", lambda: _restoring(snapshot, None), replays=self.replays)
        if not arm.ran or arm.differing or not moved:
            return arm
        return replace(arm, found=", ".join(self._guilty(snapshot, moved)))

    def _guilty(self, snapshot: controls.Generators, moved: Sequence[str]) -> Sequence[str]:
        """Of the generators whose state moves, those whose state must be restored for the runs to agree."""
        if len(moved) == 1:
            return moved
        few = min(3, self.replays)
        alone = [
            name
            for name in moved
            if not self._runs("generators", lambda name=name: _restoring(snapshot, name), replays=few).differing  # type: ignore[misc]
        ]
        return alone or moved

    def untraced(self) -> ExperimentResult:
        """Pairs without a trace, by their results."""
        return self._runs("untraced", contextlib.nullcontext, replays=self.replays, traced=False)

    def poison(self) -> ExperimentResult:
        """Memory that nobody wrote filled with one value or another: trials are runs with the second value, differing
        those whose results follow it. Results that also vary under one value are left out. On an accelerator every run
        begins with what its allocator has free filled, from which kernels take memory for themselves."""
        reserve = controls.reserve_for_a_run(self.device)

        def filled(value: int) -> AbstractContextManager[object]:
            return controls.poisoned_memory(value, device=self.device, reserve=reserve)

        seen: dict[int, list[Mapping[str, object]]] = {value: [] for value in controls.POISONS}
        seconds: list[float] = []
        while len(seconds) < 2 * self.replays and (len(seconds) < 4 or self.budget.left() > seconds[-1]):
            for value in controls.POISONS:
                run, took = self._one(functools.partial(filled, value), traced=True)
                if isinstance(run, Failure):
                    return ExperimentResult("poison", "pair", note=_failed(run))
                seen[value].append(_noted(run))
                seconds.append(took)
        one, two = (_steady(runs) for runs in seen.values())
        follow = [name for name in one if name in two and one[name] != two[name]]
        trials = len(seconds) // 2
        finding = f"{len(follow)} of {len(seen[controls.POISONS[0]][0])} results follow the value" if follow else ""
        differing = trials if follow else 0
        return ExperimentResult(
            "poison", "pair", trials, differing, 1 + bool(follow), statistics.median(seconds), finding
        )

    # --------------------------------------------------------------------------------------------------- runs

    def _runs(
        self,
        name: str,
        change: Change,
        *,
        replays: int,
        traced: bool = True,
        enough: Callable[[ExperimentResult], bool] = _is_clear,
    ) -> ExperimentResult:
        """Runs under ``change`` until there are enough, their share of the time is up, or ``enough`` says so."""
        if self.budget.left() <= 0:
            return ExperimentResult(name, "pair", note="budget")
        left = Budget(self.budget.left() * ARM_SHARE)
        first, took = self._one(change, traced=traced)
        if isinstance(first, Failure):
            return ExperimentResult(name, "pair", note=_failed(first))
        arm, seconds, prints = ExperimentResult(name, "pair", distinct=1, seconds=took), [took], {fingerprint(first)}
        while arm.trials < replays and not enough(arm):
            if (left if arm.trials >= stats.FEWEST else self.budget).left() < took:
                return replace(arm, note=f"{arm.trials} of {replays} trials: budget" if arm.ran else "budget")
            other, took = self._one(change, traced=traced)
            if isinstance(other, Failure):
                return ExperimentResult(name, "pair", note=_failed(other))
            seconds.append(took)
            prints.add(fingerprint(other))
            arm = replace(
                arm,
                trials=arm.trials + 1,
                differing=arm.differing + self._differ(first, other),
                distinct=len(prints) if traced else 0,
                seconds=statistics.median(seconds),
            )
        return arm

    def _one(self, change: Change, *, traced: bool) -> tuple[Run | Failure, float]:
        began = perf_counter()
        with change():
            run = self.attempt(traced=traced)
        return run, perf_counter() - began

    def _differ(self, first: Run, other: Run) -> bool:
        if self.original is not None and _parts_there(self.original, first.trace, other.trace):
            return True
        try:
            difference = difference_between(first, other)
        except NotComparableError:
            return True
        if difference is None or first.trace is None or other.trace is None:
            return difference is not None
        return still_there(
            self.original, find_divergence(first.trace, other.trace, differing=difference.names).divergence
        )


def _parts_there(original: Divergence, first: Trace | None, other: Trace | None) -> bool:
    """Whether two traces differ at the very place of the original difference, which is quick to see."""
    if first is None or other is None:
        return False
    if original.origin == "sequence":
        return [record.id for record in first.records] != [record.id for record in other.records]
    one, two = ({record.id: record.outputs for record in trace.records}.get(original.node) for trace in (first, other))
    return original.origin == "kernel" and one is not None and two is not None and one != two


def still_there(original: Divergence | None, other: Divergence | None) -> bool:
    """Whether a pair shows the difference being examined, or one that enters no later and so may hide it."""
    if other is None or original is None:
        return other is not None
    if original.origin == "sequence" or other.node == original.node:
        return other.origin == original.origin or other.node == original.node
    if other.op_index is None or original.op_index is None:
        return True
    return other.op_index <= original.op_index


def process_arms(fresh: FreshRuns, original: Divergence | None, *, name: str) -> tuple[ExperimentResult, ...]:
    """What runs in fresh processes say: the first runs of all against each other (``name``), and, where each process
    made two, its pair (``within_process``)."""
    if not fresh.processes:
        note = fresh.failures[0] if fresh.failures else "nothing came back"
        return (ExperimentResult(name, "process", note=note[:200]),)
    first = fresh.processes[0][0]
    others = [traces[0] for traces in fresh.processes[1:]]
    arms = [_compared(name, [(first, other) for other in others], original, fresh.note)]
    pairs = [(traces[0], other) for traces in fresh.processes for other in traces[1:]]
    if pairs:
        arms.append(_compared("within_process", pairs, original, fresh.note))
    return tuple(arms)


def _compared(
    name: str, pairs: Sequence[tuple[Trace, Trace]], original: Divergence | None, note: str
) -> ExperimentResult:
    differing = sum(still_there(original, find_divergence(one, other).divergence) for one, other in pairs)
    return ExperimentResult(name, "process", len(pairs), differing, 1 + differing, note=note)


def _failed(run: Failure) -> str:
    return f"a run failed: {first_line(run.error)[:100]}"


def _steady(runs: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """What all of these runs agree on."""
    return {name: value for name, value in runs[0].items() if all(run.get(name) == value for run in runs)}


def _noted(run: Run) -> dict[str, object]:
    return {} if run.trace is None else {result.name: result.digest for result in run.trace.results}


@contextlib.contextmanager
def _restoring(snapshot: controls.Generators, only: str | None) -> Iterator[None]:
    snapshot.restored(only=only)
    yield
