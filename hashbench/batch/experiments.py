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
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from hashbench.batch.cause import CONTROLS, ON, ItemEvidence, Remedy
from hashbench.batch.item_call import SEED, ItemCall, NotItemwiseError, Rows
from hashbench.calls.live import captured_environment
from hashbench.calls.ops import calls_others
from hashbench.catalog import EXPERIMENTS
from hashbench.errors import named_line
from hashbench.processes import Budget
from hashbench.records import NO_TIME, ExperimentResult
from hashbench.replay.methods import METHODS, Around

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

Setting = Callable[[], AbstractContextManager[object]]


def diagnose_item_call(call: ItemCall, *, budget: float = 20.0, remedies: bool = True) -> ItemEvidence:
    """Run the experiments on the call; restore settings, random state and the call's tensors.

    Args:
        call: on as many items as the reference run had.
        budget: seconds after which no further experiment is started.
        remedies: whether remedies are tried and timed.
    """
    with warnings.catch_warnings(), captured_environment(call):
        warnings.simplefilter("ignore")
        return _Experiments(call, Budget(budget)).evidence(remedies=remedies)


class _Experiments:
    """One call and the results of its experiments so far. ``reference``: the rows of each of its items."""

    def __init__(self, call: ItemCall, budget: Budget) -> None:
        self.call, self.budget = call, budget
        self.everybody = range(call.items)
        self.watched = self.everybody if call.watched is None else (call.watched,)
        self.reference = call.rows_of(self.everybody)
        self.reduced = not any(axis is not None for axis in call.outputs)

    def evidence(self, *, remedies: bool) -> ItemEvidence:
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
        if self._is_counted(sizes):
            return replace(known, counted=True)
        sizes_tried = _spread(sizes)
        controls = [self._control(name, sizes_tried) for name in CONTROLS if applies(name, self.call)]
        exact = self._tried("exact_values", lambda: self._exact(sizes_tried))
        known = replace(known, arms=(*known.arms, exact, *controls, *out_of_reach(self.call)))
        return replace(known, remedies=tuple(self._remedies(known))) if remedies else known

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

    def _compared(self, chosen: Sequence[int], *, only: Sequence[int] | None = None) -> bool:
        """Return True if the rows of a run on these items (of ``only`` these) differ from those in the run on all."""
        rows = self.call.rows_of(chosen)
        return self._rows_differ({item: rows[item] for item in (rows if only is None else only)})

    def _tried(self, name: str, outcomes: Callable[[], Iterator[bool]]) -> ExperimentResult:
        return tried(name, outcomes, self.budget)

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

    def _is_counted(self, sizes: Sequence[int]) -> bool:
        """Return True if rows agree at these numbers of items as long as plain numbers that count items are kept.

        No size of a tensor can be kept so: the program itself computes with the number of items.
        """
        if not self.call.scaled:
            return False
        fixed = replace(self.call, scaled=())
        result = self._tried(
            "other_number", lambda: (self._rows_differ(fixed.rows_of(self._some(size))) for size in sizes)
        )
        return result.ran and not result.differing and not result.note

    def _rows_differ(self, rows: Rows, reference: Rows | None = None) -> bool:
        known = self.reference if reference is None else reference
        return any(rows[item] != known[item] for item in rows if item in self.watched)

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

    def _exact(self, sizes: Sequence[int]) -> Iterator[bool]:
        exact = self.call.with_exact_values()
        if not adds_up(self.call):
            raise NotItemwiseError("it computes each element by itself, and adds nothing up")
        if exact is None:
            raise NotItemwiseError("no floating-point input in plain memory")
        reference = exact.rows_of(self.everybody)
        for size in sizes:
            yield self._rows_differ(exact.rows_of(self._some(size)), reference)

    # ---------------------------------------------------------------------------------------------- settings

    def _control(self, name: str, sizes: Sequence[int]) -> ExperimentResult:
        """Count the numbers of items that differ, all runs under one setting."""
        method = METHODS[name]
        assert isinstance(method, Around)
        return self._tried(name, lambda: self._under(method.change, sizes))

    def _under(self, setting: Setting, sizes: Sequence[int]) -> Iterator[bool]:
        with setting():
            reference = self.call.rows_of(self.everybody)
            for size in sizes:
                yield self._rows_differ(self.call.rows_of(self._some(size)), reference)

    # ---------------------------------------------------------------------------------------------- remedies

    def _remedies(self, known: ItemEvidence) -> Iterator[Remedy]:
        """Yield the remedies that make the rows agree at every number of items that differed, with their price."""
        call, alone = self.call, self.call.at(1)
        if call.watched is None:
            yield from self._padding(alone)
            one_by_one = self._tried("same_items", self._one_by_one)
            each = price(call, alone)
            words = "compute one item at a time"
            yield Remedy(words, one_by_one.trials, one_by_one.differing, each and each * call.items, "all at once")
        for name in CONTROLS:
            arm, method = known.arm(name), METHODS.get(name)
            if arm.ran and isinstance(method, Around):
                cost = None if arm.differing else price(call, call, method.change)
                yield Remedy(f"compute {EXPERIMENTS[name].phrase}", arm.trials, arm.differing, cost)

    def _padding(self, alone: ItemCall) -> Iterator[Remedy]:
        """Yield padding to the smallest multiple that helps; the batch size itself is tried last."""
        call = self.call
        for multiple in [*(number for number in MULTIPLES if number < call.items), call.items]:
            result = self._tried("other_number", functools.partial(self._padded, multiple))
            if result.ran and not result.differing and not result.note:
                words = f"a multiple of {multiple} items" if multiple < call.items else f"{multiple} items"
                cost = price(alone, call.select([0] * multiple))
                yield Remedy(f"pad the batch to {words}", result.trials, 0, cost, "one item")
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
    except NotItemwiseError as error:
        note = str(error)
    except Exception as error:  # the op refuses what the experiment asks of it
        note = f"raises: {named_line(error)}"[:200]
    return ExperimentResult(name, ON, len(seen), sum(seen), note=note, raised=note.startswith("raises"))


def applies(name: str, call: ItemCall) -> bool:
    """Return True if the setting can reach the call: only a composite op chooses an implementation of attention."""
    func, method = call.func, METHODS.get(name)
    chooses = not isinstance(func, torch._ops.OpOverload) or calls_others(func)
    return isinstance(method, Around) and (chooses or not method.inside)


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


def price(before: ItemCall, after: ItemCall, setting: Setting = nullcontext) -> float | None:
    """Return the time of ``after`` under the setting over that of ``before``, run in turns.

    It is the median of the rounds in processor time, so that other processes do not count. If the number of threads
    differs, or an accelerator computes, it is the minimum of each in wall time; ``None`` if that does not resolve it.
    """
    with setting():
        threads = torch.get_num_threads()
    by_clock = threads != torch.get_num_threads() or bool(before.accelerators)
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
