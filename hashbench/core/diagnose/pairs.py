"""Experiments on the whole model: run the pair again under one change at a time.

An experiment compares ``replays`` further runs with a first one, all under the same change, and counts those in which
the difference is still there. A difference that enters later than the one being examined is another one and does not
count.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import TypeVar

import torch

from hashbench.core.catalog import Origin
from hashbench.core.diagnose.causes import stats
from hashbench.core.diagnose.fresh_process import FreshRuns
from hashbench.core.diagnose.replay import controls
from hashbench.core.diagnose.replay.replayer import UNCHANGED, Context
from hashbench.core.divergence import find as find_divergence
from hashbench.core.errors import first_line
from hashbench.core.processes import Budget, tell_phase
from hashbench.core.records import (
    NO_TIME,
    OTHER_WEIGHTS,
    Divergence,
    ExperimentResult,
    Failure,
    RunCounts,
    TensorDigest,
    Trace,
)
from hashbench.core.run.leaves import NotComparableError
from hashbench.core.run.outcome import Run, RunMaker, fingerprint, results_that_differ

CONTROLS: Mapping[str, Context] = {
    "entropy": controls.constant_entropy,
    "clocks": controls.ticking_clocks,
    "one_worker": controls.single_worker_pools,
    "no_collector": controls.no_collector,
    "one_thread": controls.one_thread,
}
"""Experiments that only run the model inside a context."""

SHARE = 0.25
"""Share of the remaining time for one experiment."""
PATIENCE = 10
"""Factor on the requested pairs while no difference is seen, or on the runs per difference of the sweep."""
SEEN_OFTEN = 3
"""Differences after which a rate is known well enough."""
CLEAR = 5
"""Trials that all differ, with several outcomes, after which no further trial can show a removal."""


def _is_clear(result: ExperimentResult) -> bool:
    return result.differing == result.trials == CLEAR and result.distinct != 2  # two: the first may have been odd


class Pairs:
    """Runs the experiments on one model.

    Args:
        attempt: makes one run.
        original: the divergence being examined; ``None``: any difference counts.
        replays: upper limit of comparisons in an experiment.
        budget: when it is used up, an experiment ends early or does not begin.
        device: where the model runs.
        counts: of the runs of the sweep: how rare the difference is.
    """

    def __init__(
        self,
        attempt: RunMaker,
        original: Divergence | None,
        *,
        replays: int,
        budget: Budget,
        device: str = "cpu",
        counts: RunCounts | None = None,
    ) -> None:
        self.attempt, self.original, self.counts = attempt, original, counts
        self.replays, self.budget = replays, budget
        self.device = torch.device(device)

    def plain(self) -> ExperimentResult:
        """Run the pair again unchanged: the baseline of the other experiments.

        Continues for a rare difference until its rate is known, and lengthens the other experiments accordingly.
        """
        asked = self.replays
        patience = stats.trials_to_see(self.counts, asked=PATIENCE * asked, times=PATIENCE)

        def wanted(result: ExperimentResult) -> int:
            sure, _ = stats.sure_count(result)
            if sure >= min(SEEN_OFTEN, asked):
                return asked
            return stats.MOST_TRIALS if sure else patience

        result = self._runs("pair", UNCHANGED, wanted=wanted)
        self.replays = stats.arm_length(result, asked=asked)
        return result

    def under(self, name: str) -> ExperimentResult:
        """Run inside the context of that name in :data:`CONTROLS`."""
        return self._runs(name, CONTROLS[name])

    def generators(self) -> ExperimentResult:
        """Restore every live generator object before each run; ``found`` names the one that matters."""
        noted = controls.Generators.alive()
        self.attempt()
        moved = noted.changed()
        result = self._runs("generators", lambda: _restoring(noted, None))
        if not result.ran or result.differing or not moved:
            return result

        def agrees(name: str) -> bool:
            change = functools.partial(_restoring, noted, name)
            return not self._runs("generators", change, wanted=lambda _: min(3, self.replays)).differing

        return replace(result, found=", ".join(moved if len(moved) == 1 else list(filter(agrees, moved)) or moved))

    def fixed_sources(self) -> ExperimentResult:
        """Receive each message from the rank that it came from in a further run."""
        sources = controls.FixedSources()
        noted, _ = self._one(sources, traced=True)
        if isinstance(noted, Failure):
            return _failed("fixed_source", noted)
        if not sources.count:
            return ExperimentResult("fixed_source", "pair", note="no receive from any source")
        return self._runs("fixed_source", sources)

    def untraced(self) -> ExperimentResult:
        """Compare the results of untraced pairs."""
        return self._runs("untraced", UNCHANGED, traced=False)

    def poison(self, *, among: Sequence[str] = ()) -> ExperimentResult:
        """Fill uninitialised memory with one of two values; a result that follows the value depends on it.

        Trials are runs with the second value, differing those whose results follow it (at least one of ``among``, if
        given). Results that also vary under one value are ignored: the values alternate without a period, so that
        nothing left by one run for the next can follow them. On an accelerator every run begins by filling the
        allocator's free blocks, from which kernels take workspace.
        """
        reserve = controls.reserve_for_a_run(self.device)
        seen: dict[int, list[Mapping[str, object]]] = {value: [] for value in controls.POISONS}
        seconds: list[float] = []
        following: Sequence[str] = ()
        while len(seconds) < 2 * self.replays and (len(seconds) < 4 or self.budget.left() > seconds[-1]):
            if among and len(seconds) >= 2 * CLEAR and not following:
                break  # what varies under one value does so for good
            for value, digests in _in_turn(list(seen.items()), len(seconds) // 2):
                change = functools.partial(controls.poisoned_memory, value, device=self.device, reserve=reserve)
                tell_phase(f"poison: run {len(seconds) + 1}")
                run, took = self._one(change, traced=True)
                if isinstance(run, Failure):
                    return _failed("poison", run)
                digests.append(run.noted)
                seconds.append(took)
            first, two = (_steady(runs) for runs in seen.values())
            following = [name for name in first if name in two and first[name] != two[name]]
            following = following if not among or set(among) & set(following) else ()
        trials, results = len(seconds) // 2, seen[controls.POISONS[0]][0]
        counts = (trials, trials, 2) if following else (trials, 0, 1)
        found = f"{len(following)} of {len(results)} results follow the value" if following else ""
        note = NO_TIME if trials < min(CLEAR, self.replays) and not following else ""
        return ExperimentResult("poison", "pair", *counts, statistics.median(seconds), found, note)

    # --------------------------------------------------------------------------------------------------- runs

    def _runs(
        self,
        name: str,
        change: Context,
        *,
        wanted: Callable[[ExperimentResult], int] | None = None,
        traced: bool = True,
    ) -> ExperimentResult:
        """Run under ``change`` until there are as many trials as ``wanted`` after those so far, or the time share is
        up.

        Default: as many as were asked for, or until it is clear that the difference stays.
        """
        wanted = wanted or (lambda result: CLEAR if _is_clear(result) else self.replays)
        if self.budget.left() <= 0:
            return ExperimentResult(name, "pair", note=NO_TIME)
        left = Budget(self.budget.left() * SHARE)
        tell_phase(f"{name}: run 1")
        first, took = self._one(change, traced=traced)
        if isinstance(first, Failure):
            return _failed(name, first)
        result, seconds, prints = ExperimentResult(name, "pair", distinct=1, seconds=took), [took], {fingerprint(first)}
        while result.trials < wanted(result):
            if (left if result.trials >= stats.FEWEST else self.budget).left() < took:
                return replace(result, note=NO_TIME)
            tell_phase(f"{name}: run {result.trials + 2}")
            other, took = self._one(change, traced=traced)
            if isinstance(other, Failure):
                return _failed(name, other)
            seconds.append(took)
            prints.add(fingerprint(other))
            result = replace(
                result,
                trials=result.trials + 1,
                differing=result.differing + self._differ(first, other),
                distinct=len(prints) if traced else 0,
                seconds=statistics.median(seconds),
            )
        return result

    def _one(self, change: Context, *, traced: bool) -> tuple[Run | Failure, float]:
        began = perf_counter()
        with change():
            run = self.attempt(traced=traced)
        return run, max(0.0, perf_counter() - began)  # a model may have stopped the clock or set it back

    def _differ(self, first: Run, other: Run) -> bool:
        if self.original is not None and _parts_there(self.original, first.trace, other.trace):
            return True
        try:
            names = results_that_differ(first, other)
        except NotComparableError:
            return True
        if not names or first.trace is None or other.trace is None:
            return bool(names)
        verdict = find_divergence(first.trace, other.trace, differing=names, draws_first=False)
        return still_there(self.original, verdict.divergence)


def _parts_there(original: Divergence, first: Trace | None, other: Trace | None) -> bool:
    """Return True if two traces differ at the original divergence itself, which is cheap to check."""
    if first is None or other is None:
        return False
    if original.origin == Origin.SEQUENCE:
        return [record.id for record in first.records] != [record.id for record in other.records]
    left, two = ({record.id: record.outputs for record in trace.records}.get(original.node) for trace in (first, other))
    return original.origin == Origin.KERNEL and left is not None and two is not None and left != two


def still_there(original: Divergence | None, other: Divergence | None) -> bool:
    """Return True if a pair shows the difference being examined, or one that enters no later and so may hide it."""
    if other is None or original is None:
        return other is not None
    if original.origin == Origin.SEQUENCE or other.node == original.node:
        return other.origin == original.origin or other.node == original.node
    if other.op_index is None or original.op_index is None:
        return True
    return other.op_index <= original.op_index


def of_same_weights(fresh: FreshRuns, traces: Sequence[Trace]) -> FreshRuns:
    """Discard processes whose model or inputs have different content than those of ``traces``, the runs of one process.

    Runs of one process share the model's initial state; fresh processes share it only if it is built deterministically.
    Content that differs between runs of one process is the difference under examination, and is not compared here.
    """
    kept = tuple(process for process in fresh.processes if not _built_otherwise(traces, process))
    others = len(fresh.processes) - len(kept)
    return FreshRuns(kept, (*fresh.failures, *[OTHER_WEIGHTS] * others))


def _built_otherwise(traces: Sequence[Trace], process: Sequence[Trace]) -> bool:
    """Return True if a parameter, buffer or input differs between two processes but not between the runs of either."""
    ours, theirs = (_constant_contents(runs) for runs in (traces, process))
    return any(contents.isdisjoint(theirs.get(name, contents)) for name, contents in ours.items())


def _constant_contents(runs: Sequence[Trace]) -> dict[str, frozenset[TensorDigest]]:
    """Return, by name, the parameters, buffers and inputs with the same initial content in every run.

    Several digests where several parts of one were read.
    """
    contents = [_initial_contents(run) for run in runs]
    common = set.intersection(*map(set, contents)) if contents else set()
    return {
        name: contents[0][name] for name in common if all(content[name] == contents[0][name] for content in contents)
    }


def _initial_contents(trace: Trace) -> dict[str, frozenset[TensorDigest]]:
    named: dict[str, set[TensorDigest]] = {}
    for leaf in trace.leaves:
        if leaf.kind in ("parameter", "buffer", "input"):
            digest = leaf.digest._replace(value=leaf.initial or leaf.digest.value)
            named.setdefault(leaf.id.partition("#")[0], set()).add(digest)
    return {name: frozenset(digests) for name, digests in named.items()}


def process_results(fresh: FreshRuns, original: Divergence | None, *, name: str) -> tuple[ExperimentResult, ...]:
    """Return the results of runs in fresh processes: all first runs against each other (``name``), and, if each process
    made two runs, its pair (``within_process``)."""
    note = (fresh.failures[0] if fresh.failures else "nothing came back")[:200]
    if not fresh.processes:
        return (ExperimentResult(name, "process", note=note),)
    (first, *_), *others = fresh.processes
    pairs = {
        name: [(first, traces[0]) for traces in others],
        "within_process": [(traces[0], other) for traces in fresh.processes for other in traces[1:]],
    }
    results = []
    for experiment, compared in pairs.items():
        differing = sum(
            still_there(original, find_divergence(first, other, draws_first=False).divergence)
            for first, other in compared
        )
        if compared or experiment == name:
            counts = len(compared), differing, 1 + differing
            results.append(ExperimentResult(experiment, "process", *counts, note="" if compared else note))
    return tuple(results)


_T = TypeVar("_T")


def _in_turn(both: Sequence[_T], turn: int) -> Sequence[_T]:
    """Order two items for this turn by the Thue–Morse sequence."""
    return both[:: -1 if turn.bit_count() % 2 else 1]


def _failed(name: str, run: Failure) -> ExperimentResult:
    return ExperimentResult(name, "pair", note=f"a run failed: {first_line(run.error)[:100]}")


def _steady(runs: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Return the entries on which all runs agree."""
    return {name: value for name, value in runs[0].items() if all(run.get(name) == value for run in runs)}


@contextlib.contextmanager
def _restoring(noted: controls.Generators, only: str | None) -> Iterator[None]:
    noted.restored(only=only)
    yield
