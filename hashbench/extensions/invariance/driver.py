"""The driver of experiments on items of a batch: one after another within a budget, then remedies, each measured."""

from __future__ import annotations

import abc
import contextlib
import functools
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from hashbench.core.catalog import EXPERIMENTS, Role
from hashbench.core.diagnose.calls.live import captured_environment
from hashbench.core.diagnose.calls.ops import calls_others
from hashbench.core.diagnose.replay.methods import METHODS, ReplayChange
from hashbench.core.diagnose.replay.replayer import UNCHANGED, Context, InapplicableError
from hashbench.core.errors import named_line
from hashbench.core.processes import Budget
from hashbench.core.records import NO_TIME, ExperimentResult
from hashbench.extensions.invariance.cause import CONTROLS, ON, ItemEvidence, MeasuredRemedy
from hashbench.extensions.invariance.item_call import ItemCall
from hashbench.extensions.invariance.layout import NotItemwiseError

REPEATS = 3
"""Runs of the same call that must agree before another one is compared with it."""

FACTORS, POSITIVE_FACTORS = (2.0, -1.0), (2.0, 0.5)
"""By what the other items are multiplied, so that a maximum or a mean over the batch is another one; and where one item
is watched, so that what is masked (0, minus infinity) stays so."""

TIMED, BLOCK_SECONDS, MOST_TIMES = 7, 5e-4, 20
"""Rounds in which two calls are timed in turns, how long each takes there, and how often it is made at most."""

ADVICE = {"same_strides": "make its inputs contiguous"} | {
    name: f"compute {EXPERIMENTS[name].phrase}" for name in CONTROLS
}
"""Changes that are remedies, by the name of the experiment."""


class Experiments(abc.ABC):
    """Experiments on one subject; ``found`` is what they showed so far.

    A subject is the items of a call, a call as two runs made it, or whole runs.

    Args:
        items: of the batch.
        budget: seconds after which no further experiment is started.
        call: that is repeated; ``None``: whole runs are.
    """

    def __init__(self, items: int, budget: float, call: ItemCall | None = None) -> None:
        self.found, self.budget, self._call = ItemEvidence(items), Budget(budget), call

    def evidence(self) -> ItemEvidence:
        """Run all experiments; restore settings, random state and the call's tensors."""
        around = contextlib.nullcontext() if self._call is None else captured_environment(self._call)
        with warnings.catch_warnings(), around:
            warnings.simplefilter("ignore")
            self.run_all()
        return self.found

    @abc.abstractmethod
    def run_all(self) -> None:
        """Run the experiments, the most decisive first, until one decides."""

    def differs(self, change: ReplayChange) -> Iterator[bool]:
        """Yield whether each comparison under the change differs."""
        raise NotImplementedError

    def keep(self, **facts: Any) -> None:
        """Add to what was found."""
        self.found = replace(self.found, **facts)

    def run(self, name: str, outcomes: Callable[[], Iterator[bool]]) -> ExperimentResult:
        """Run an experiment, each of whose comparisons differs or not, and keep what it shows."""
        result = tried(name, outcomes, self.budget)
        self.keep(arms=tuple(sorted((*self.found.arms, result), key=_base_first)))
        return result

    def run_under(self, changes: Mapping[str, ReplayChange], call: ItemCall) -> None:
        """Run an experiment for each change, by name. Keep those that may be advised, with the price of those that
        leave no difference, and the settings that come too late for the call."""
        arms = {name: self.run(name, functools.partial(self.differs, change)) for name, change in changes.items()}
        self.keep(arms=(*self.found.arms, *out_of_reach(call)))
        for name, arm in arms.items():
            if arm.ran and name in ADVICE:
                cost = None if arm.differing else price(call, changes[name].call(call), changes[name].around)
                self.advise(MeasuredRemedy(ADVICE[name], arm.trials, arm.differing, cost))

    def advise(self, remedy: MeasuredRemedy) -> None:
        """Keep a remedy."""
        self.keep(remedies=(*self.found.remedies, remedy))


def _base_first(arm: ExperimentResult) -> bool:
    return EXPERIMENTS[arm.name].role is not Role.BASE


def controls(call: ItemCall) -> dict[str, ReplayChange]:
    """Return the settings that can reach the call."""
    known = {name: METHODS.get(name) for name in CONTROLS}
    return {name: method for name, method in known.items() if isinstance(method, ReplayChange) and applies(name, call)}


def tried(name: str, outcomes: Callable[[], Iterator[bool]], budget: Budget) -> ExperimentResult:
    """Run an experiment, each of whose comparisons differs or not, within the budget."""
    seen: list[bool] = []
    note = ""
    try:
        for differs in outcomes():
            seen.append(differs)
            if budget.left() <= 0:
                note = NO_TIME
                break
    except (NotItemwiseError, InapplicableError) as error:
        note = str(error)
    except Exception as error:  # the op refuses what the experiment asks of it
        note = f"raises: {named_line(error)}"[:200]
    return ExperimentResult(name, ON, len(seen), sum(seen), note=note, raised=note.startswith("raises"))


def applies(name: str, call: ItemCall) -> bool:
    """Return True if the setting can reach the call: only a composite op chooses an implementation of attention."""
    func, method = call.func, METHODS.get(name)
    chooses = not isinstance(func, torch._ops.OpOverload) or calls_others(func)
    return isinstance(method, ReplayChange) and (chooses or not method.inside)


_ATTENTION = frozenset({"query", "key", "value"})


def out_of_reach(call: ItemCall) -> Iterator[ExperimentResult]:
    """Yield the settings that choose the implementation of attention as not run, if the call is one of these
    implementations: the choice was made before it."""
    schema = getattr(call.func, "_schema", None)
    if schema is not None and {argument.name for argument in schema.arguments} >= _ATTENTION:
        for name in CONTROLS:
            if not applies(name, call):
                yield ExperimentResult(name, ON, note="this call is one implementation of attention, chosen before it")


def adds_up(call: ItemCall) -> bool:
    """Return True if the order of additions can matter to the call; not in an op that torch tags as pointwise."""
    return torch.Tag.pointwise not in getattr(call.func, "tags", ())


def price(before: ItemCall, after: ItemCall, setting: Context = UNCHANGED) -> float | None:
    """Return the time of ``after`` under the setting over that of ``before``, run in turns.

    It is the median of the rounds in processor time, so that other processes do not count. If the number of threads
    differs, or an accelerator computes, it is the minimum of each in wall time; ``None`` if that does not resolve it.
    """
    with setting():
        threads = torch.get_num_threads()
    by_clock = threads != torch.get_num_threads() or before.device.type != "cpu"
    clock = time.perf_counter if by_clock else time.process_time
    once = before.run(clock=clock)[1]
    times = min(MOST_TIMES, max(1, round(BLOCK_SECONDS / once))) if once > 0 else MOST_TIMES
    rounds = []
    for _ in range(TIMED):
        first = [before.run(clock=clock)[1] for _ in range(times)]
        with setting():
            second = [after.run(clock=clock)[1] for _ in range(times)]
        rounds.append((min(first), min(second)) if by_clock else (sum(first), sum(second)))
    if by_clock:
        rounds = [(min(each for each, _ in rounds), min(other for _, other in rounds))]
    ratios = [second / first for first, second in rounds if first > 0]
    return statistics.median(ratios) if ratios else None
