"""Experiments on one call with items of a batch: other content, numbers and places of its items; other settings; and
the remedies, each measured.

The rows of an item are compared bit by bit with those of the call on all items. A repeated comparison gives the same
result unless the call differs by itself, which is checked first.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from hashbench.core.catalog import EXPERIMENTS
from hashbench.core.diagnose.calls.live import captured_environment
from hashbench.core.diagnose.calls.ops import calls_others
from hashbench.core.diagnose.replay.methods import METHODS, ReplayChange
from hashbench.core.diagnose.replay.replayer import UNCHANGED, Context, InapplicableError
from hashbench.core.errors import named_line
from hashbench.core.processes import Budget
from hashbench.core.records import NO_TIME, ExperimentResult
from hashbench.extensions.invariance.cause import CONTROLS, ON, ItemEvidence, MeasuredRemedy
from hashbench.extensions.invariance.item_call import SEED, ItemCall, Rows
from hashbench.extensions.invariance.layout import NotItemwiseError

REPEATS = 3
"""Runs of the same call that must agree before another one is compared with it."""

SEEDS = 3
"""Other seeds that are tried."""

TIMED, BLOCK_SECONDS, MOST_TIMES = 7, 5e-4, 20
"""Rounds in which two calls are timed in turns, how long each takes there, and how often it is made at most."""

CHEAP_SIZES = 32
"""Up to so many items every number of them is tried; beyond that powers of two, then by bisection."""

WATCHED = 8
"""Items of a batch whose rows are compared with those that they have alone, beside the last one."""

FACTORS, POSITIVE_FACTORS = (2.0, -1.0), (2.0, 0.5)
"""By what the other items are multiplied, so that a maximum or a mean over the batch is another one; and where one item
is watched, so that what is masked (0, minus infinity) stays so."""

MULTIPLES = (2, 4, 8, 16, 32, 64)
"""Numbers of items to whose multiples a batch is padded."""


ADVICE = {"same_strides": "make its inputs contiguous"} | {
    name: f"compute {EXPERIMENTS[name].phrase}" for name in CONTROLS
}
"""Changes that are remedies, by the name of the experiment."""


class Subject(Protocol):
    """What is compared: the items of a call, a call as two runs made it."""

    @property
    def call(self) -> ItemCall:
        """The call of the reference."""

    def differs(self, change: ReplayChange) -> Iterator[bool]:
        """Yield whether each comparison under the change differs."""


def compared_under(
    changes: Mapping[str, ReplayChange], subject: Subject, budget: Budget
) -> tuple[ExperimentResult, ...]:
    """Run an experiment for each change, by name; add the settings that come too late for the call."""
    arms = [tried(name, functools.partial(subject.differs, change), budget) for name, change in changes.items()]
    return (*arms, *out_of_reach(subject.call))


def remedies_among(
    changes: Mapping[str, ReplayChange], call: ItemCall, arms: Iterable[ExperimentResult]
) -> Iterator[MeasuredRemedy]:
    """Yield the changes that may be advised, with the price of those that leave no difference."""
    for arm in arms:
        if arm.ran and arm.name in ADVICE:
            change = changes[arm.name]
            cost = None if arm.differing else price(call, change.call(call), change.around)
            yield MeasuredRemedy(ADVICE[arm.name], arm.trials, arm.differing, cost)


def controls(call: ItemCall) -> dict[str, ReplayChange]:
    """Return the settings that can reach the call."""
    known = {name: METHODS.get(name) for name in CONTROLS}
    return {name: method for name, method in known.items() if isinstance(method, ReplayChange) and applies(name, call)}


def diagnose_item_call(call: ItemCall, *, budget: float = 20.0) -> ItemEvidence:
    """Run the experiments on the call; restore settings, random state and the call's tensors.

    Args:
        call: on as many items as the reference run had.
        budget: seconds after which no further experiment is started.
    """
    with warnings.catch_warnings(), captured_environment(call):
        warnings.simplefilter("ignore")
        return _Items(call, Budget(budget)).evidence()


class _Items:
    """The items of one call. ``reference``: the rows of each; ``sizes``: the numbers of them that are compared."""

    def __init__(self, call: ItemCall, budget: Budget) -> None:
        self.call, self.budget = call, budget
        self.everybody = range(call.items)
        self.watched = self.everybody if call.watched is None else (call.watched,)
        self.reference = call.rows_of(self.everybody)
        self.reduced = not any(axis is not None for axis in call.outputs)
        self.sizes: tuple[int, ...] = ()
        self._tried = functools.partial(tried, budget=budget)

    def differs(self, change: ReplayChange) -> Iterator[bool]:
        """Yield whether each of the ``sizes`` differs, all runs under the change."""
        call = change.call(self.call)
        with change.around():
            reference = call.rows_of(self.everybody)
            for size in self.sizes:
                yield self._rows_differ(call.rows_of(self._some(size)), reference)

    def evidence(self) -> ItemEvidence:
        """Run all experiments, the most decisive first."""
        same = self._tried("same_items", self._same)
        known = ItemEvidence(self.call.items, (same,), reduced=self.reduced)
        if same.differing or not same.ran or self.call.items < 2:
            return known
        content = self._tried("other_content", self._content)
        known = replace(known, arms=(same, content))
        if self.reduced or content.differing:
            return known
        if self._follows_seed():
            number, sizes = self._numbers()
            arms = (same, number, content, self._tried("other_places", self._places))
            return replace(known, arms=arms, sizes=sizes, random=True, follows_seed=True, placed=self._is_placed())
        known = replace(known, random=self.call.draws())
        number, sizes = self._numbers()
        known = replace(known, arms=(same, number, content, self._tried("other_places", self._places)), sizes=sizes)
        with contextlib.suppress(Exception):  # it refuses one item
            smallest, skipped = self._smallest_batch()
            known = replace(known, smallest_batch=smallest, skipped=skipped)
        if not sizes:
            return known
        self.sizes = sizes
        if self._is_counted():
            return replace(known, counted=True)
        self.sizes = _spread(sizes)
        changes = {"exact_values": ReplayChange(call=_exact), **controls(self.call)}
        under = compared_under(changes, self, self.budget)
        remedies = (*self._other_numbers(), *remedies_among(changes, self.call, under))
        return replace(known, arms=(*known.arms, *under), remedies=remedies)

    def _follows_seed(self) -> bool:
        """Return True if rows change with the seed, so that they follow from random numbers that the call draws."""
        reference = tuple(self.reference[item] for item in self.everybody)
        return any(self.call.rows(seed=SEED + further) != reference for further in range(1, SEEDS + 1))

    def _is_placed(self) -> bool:
        """Return True if other items leave the same rows at the same place: these follow from the random numbers
        alone."""
        order = [*self.everybody[1:], 0]
        return self.call.watched is None and self.call.select(order).rows() == (
            tuple(self.reference[item] for item in self.everybody)
        )

    # ------------------------------------------------------------------------------------------ comparisons

    def _compared(self, chosen: Sequence[int]) -> bool:
        """Return True if the rows of a run on these items differ from those in the run on all."""
        return self._rows_differ(self.call.rows_of(chosen), self.reference)

    def _same(self) -> Iterator[bool]:
        return (self._compared(self.everybody) for _ in range(REPEATS))

    def _content(self) -> Iterator[bool]:
        """Yield whether rows of a kept item change with other items beside it: swapped, all copies of it, and
        scaled."""
        count = self.call.items
        for kept in sorted({0, count // 2, count - 1} & {*self.watched}):
            turned = [kept if item == kept else self._next(item, kept) for item in self.everybody]
            for chosen in (turned, [kept] * count) if self.call.watched is None else ():
                yield self.call.select(chosen).rows()[kept] != self.reference[kept]
            for factor in FACTORS if self.call.watched is None else POSITIVE_FACTORS:
                try:
                    rows = self.call.with_scaled_neighbours(kept, factor).rows()
                except Exception:  # outside what the op takes: a probability of 2
                    continue
                yield rows[kept] != self.reference[kept]

    def _next(self, item: int, kept: int) -> int:
        following = (item + 1) % self.call.items
        return following if following != kept else (following + 1) % self.call.items

    def _places(self) -> Iterator[bool]:
        """Yield whether rows change with the order of the items, which gives each other neighbours and another
        place."""
        if self.call.watched is not None:
            raise NotItemwiseError("the items have an order")
        everybody = [*self.everybody]
        shifts = sorted({1, len(everybody) // 2, len(everybody) - 1})
        orders = [everybody[shift:] + everybody[:shift] for shift in shifts]
        return (self._compared(order) for order in [*orders, everybody[::-1]])

    def _numbers(self) -> tuple[ExperimentResult, tuple[int, ...]]:
        """Run with fewer items, the first ones: every number, or powers of two and their neighbours."""
        differing = []

        def outcomes() -> Iterator[bool]:
            for size in _sizes(self.call.items):
                differs = self._compared(self._some(size))
                differing.extend([size] if differs else [])
                yield differs

        return self._tried("other_number", outcomes), tuple(sorted(differing))

    def _is_counted(self) -> bool:
        """Return True if rows agree at all ``sizes`` as long as plain numbers that count items are kept.

        No size of a tensor can be kept so: the program itself computes with the number of items.
        """
        if not self.call.scaled:
            return False
        fixed = ReplayChange(call=lambda call: replace(call, scaled=()))
        result = self._tried("other_number", lambda: self.differs(fixed))
        return result.ran and not result.differing and not result.note

    def _rows_differ(self, rows: Rows, reference: Rows) -> bool:
        return any(rows[item] != reference[item] for item in rows if item in self.watched)

    def _some(self, size: int) -> range:
        """Return the first ``size`` items, or the last ones if the last one is watched."""
        return range(size) if self.call.watched in (None, 0) else self.everybody[-size:]

    def _smallest_batch(self) -> tuple[int | None, bool]:
        """Return the smallest number of items among which one has other rows than alone, and whether smaller numbers
        were skipped."""
        alone: Rows = {}

        def differs(size: int) -> bool:
            rows = self.call.rows_of(self._some(size))
            some = {*range(min(size, WATCHED)), size - 1} if self.call.watched is None else self.watched
            for item in sorted(some):
                if item not in alone:
                    alone[item] = self.call.rows_of([item])[item]
                if rows[item] != alone[item]:
                    return True
            return False

        last = 1
        for size in sorted(_sizes(self.call.items, most=self.call.items)):
            if size > 1 and differs(size):
                low, high = last, size
                while high - low > 1:
                    middle = (low + high) // 2
                    low, high = (low, middle) if differs(middle) else (middle, high)
                return high, size - last > 1
            last = size
            if self.budget.left() <= 0:
                return None, True
        return None, self.call.items > CHEAP_SIZES

    # ---------------------------------------------------------------------------------------------- remedies

    def _other_numbers(self) -> Iterator[MeasuredRemedy]:
        """Yield the numbers of items to compute at once at which rows agree, with their price."""
        call, alone = self.call, self.call.at(1)
        if call.watched is None:
            yield from self._padding(alone)
            one_by_one = self._tried("same_items", self._one_by_one)
            each = price(call, alone)
            words = "compute one item at a time"
            yield MeasuredRemedy(
                words, one_by_one.trials, one_by_one.differing, each and each * call.items, "all at once"
            )

    def _padding(self, alone: ItemCall) -> Iterator[MeasuredRemedy]:
        """Yield padding to the smallest multiple that helps; the batch size itself is tried last."""
        call = self.call
        for multiple in [*(number for number in MULTIPLES if number < call.items), call.items]:
            result = self._tried("other_number", functools.partial(self._padded, multiple))
            if result.ran and not result.differing and not result.note:
                words = f"a multiple of {multiple} items" if multiple < call.items else f"{multiple} items"
                cost = price(alone, call.select([0] * multiple))
                yield MeasuredRemedy(f"pad the batch to {words}", result.trials, 0, cost, "one item")
                return

    def _padded(self, multiple: int) -> Iterator[bool]:
        """Yield for each size, until one differs, whether the fewest items that are padded to ``multiple`` differ.

        The last item is the padding; the reference is all items, padded in the same way.
        """
        reference = self._on_padded(self.call.items, multiple)
        for size in _spread(range(1, self.call.items + 1, multiple), CHEAP_SIZES):
            rows = self._on_padded(size, multiple)
            differs = any(rows[item] != reference[item] for item in range(size))
            yield differs
            if differs:
                return

    def _on_padded(self, size: int, multiple: int) -> Rows:
        return self.call.rows_of([*range(size), *[size - 1] * (-size % multiple)])

    def _one_by_one(self) -> Iterator[bool]:
        for item in sorted({0, self.call.items - 1}):
            first = self.call.rows_of([item])
            yield any(self.call.rows_of([item]) != first for _ in range(REPEATS - 1))


def _exact(call: ItemCall) -> ItemCall:
    if not adds_up(call):
        raise NotItemwiseError("it computes each element by itself, and adds nothing up")
    return call.with_exact_values()


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
    if schema is not None and {one.name for one in schema.arguments} >= _ATTENTION:
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
        rounds = [(min(one for one, _ in rounds), min(other for _, other in rounds))]
    ratios = [second / first for first, second in rounds if first > 0]
    return statistics.median(ratios) if ratios else None


def _sizes(items: int, *, most: int | None = None) -> list[int]:
    """Return numbers of items to try, below ``items`` or up to ``most``: all if these are few, else powers of two and
    their neighbours."""
    last = items - 1 if most is None else most
    if items <= CHEAP_SIZES:
        return [*range(1, last + 1)]
    powers = [2**power for power in range(last.bit_length())]
    beside = [size + step for size in powers for step in (-1, 0, 1)]
    return sorted({*(size for size in beside if 1 <= size <= last), items // 2, last})


def _spread(sizes: Sequence[int], most: int = 4) -> tuple[int, ...]:
    """Return at most ``most`` of these numbers: the first, the last, and some between."""
    if len(sizes) <= most:
        return tuple(sizes)
    return tuple(sizes[round(step * (len(sizes) - 1) / (most - 1))] for step in range(most))
