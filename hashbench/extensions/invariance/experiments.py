"""Experiments on one call with items of a batch: other content, numbers and places of its items; other settings; and
the remedies, each measured.

The rows of an item are compared bit by bit with those of the call on all items. A repeated comparison gives the same
result unless the call differs by itself, which is checked first.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from hashbench.core.diagnose.replay.methods import ReplayChange
from hashbench.extensions.invariance import driver
from hashbench.extensions.invariance.cause import ItemEvidence, MeasuredRemedy
from hashbench.extensions.invariance.item_call import SEED, ItemCall, Rows
from hashbench.extensions.invariance.layout import NotItemwiseError

SEEDS = 3
"""Other seeds that are tried."""

CHEAP_SIZES = 32
"""Up to so many items every number of them is tried; beyond that powers of two, then by bisection."""

WATCHED = 8
"""Items of a batch whose rows are compared with those that they have alone, beside the last one."""

MULTIPLES = (2, 4, 8, 16, 32, 64)
"""Numbers of items to whose multiples a batch is padded."""


def diagnose_item_call(call: ItemCall, *, budget: float = 20.0) -> ItemEvidence:
    """Run the experiments on the call; restore settings, random state and the call's tensors.

    Args:
        call: on as many items as the reference run had.
        budget: seconds after which no further experiment is started.
    """
    return _Items(call, budget).evidence()


class _Items(driver.Experiments):
    """The items of one call. ``reference``: the rows of each; ``sizes``: the numbers of them that are compared."""

    def __init__(self, call: ItemCall, budget: float) -> None:
        super().__init__(call.items, budget, call)
        self.call = call
        self.everybody = range(call.items)
        self.watched = self.everybody if call.watched is None else (call.watched,)
        self.reference: Rows = {}
        self.sizes: tuple[int, ...] = ()

    def differs(self, change: ReplayChange) -> Iterator[bool]:
        """Yield whether each of the ``sizes`` differs, all runs under the change."""
        call = change.call(self.call)
        with change.around():
            reference = call.rows_of(self.everybody)
            for size in self.sizes:
                yield self._rows_differ(call.rows_of(self._some(size)), reference)

    def run_all(self) -> None:
        """Run the experiments until one decides; then find the numbers of items, and what removes the difference."""
        self.reference = self.call.rows_of(self.everybody)
        self.keep(reduced=not any(axis is not None for axis in self.call.outputs))
        same = self.run("same_items", self._same)
        if same.differing or not same.ran or self.call.items < 2:
            return
        content = self.run("other_content", self._content)
        if self.found.reduced or content.differing:
            return
        follows_seed = self._follows_seed()
        self.keep(random=follows_seed or self.call.draws(), follows_seed=follows_seed)
        self.run("other_number", self._numbers)
        self.run("other_places", self._places)
        if follows_seed:
            self.keep(placed=self._is_placed())
            return
        with contextlib.suppress(Exception):  # it refuses one item
            smallest, skipped = self._smallest_batch()
            self.keep(smallest_batch=smallest, skipped=skipped)
        self.sizes = self.found.sizes
        if self.sizes and self._is_counted():
            self.keep(counted=True)
        elif self.sizes:
            self.sizes = _spread(self.sizes)
            self.run_under({"exact_values": ReplayChange(call=_exact), **driver.controls(self.call)}, self.call)
            self._advise_other_numbers()

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
        return (self._compared(self.everybody) for _ in range(driver.REPEATS))

    def _content(self) -> Iterator[bool]:
        """Yield whether rows of a kept item change with other items beside it: swapped, all copies of it, and
        scaled."""
        count = self.call.items
        for kept in sorted({0, count // 2, count - 1} & {*self.watched}):
            turned = [kept if item == kept else self._next(item, kept) for item in self.everybody]
            for chosen in (turned, [kept] * count) if self.call.watched is None else ():
                yield self.call.select(chosen).rows()[kept] != self.reference[kept]
            for factor in driver.FACTORS if self.call.watched is None else driver.POSITIVE_FACTORS:
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

    def _numbers(self) -> Iterator[bool]:
        """Yield whether rows differ with fewer items, the first ones: every number, or powers of two and their
        neighbours. Keep the numbers that differ."""
        for size in _sizes(self.call.items):
            differs = self._compared(self._some(size))
            if differs:
                self.keep(sizes=tuple(sorted((*self.found.sizes, size))))
            yield differs

    def _is_counted(self) -> bool:
        """Return True if rows agree at all ``sizes`` as long as plain numbers that count items are kept.

        No size of a tensor can be kept so: the program itself computes with the number of items.
        """
        if not self.call.scaled:
            return False
        fixed = ReplayChange(call=lambda call: replace(call, scaled=()))
        result = driver.tried("other_number", lambda: self.differs(fixed), self.budget)
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

    def _advise_other_numbers(self) -> None:
        """Keep the numbers of items to compute at once at which rows agree, with their price: padding to the smallest
        multiple that helps, and one by one. The batch size itself is tried last."""
        call, alone = self.call, self.call.at(1)
        if call.watched is not None:
            return
        for multiple in [*(number for number in MULTIPLES if number < call.items), call.items]:
            result = driver.tried("other_number", functools.partial(self._padded, multiple), self.budget)
            if result.ran and not result.differing and not result.note:
                words = f"a multiple of {multiple} items" if multiple < call.items else f"{multiple} items"
                cost = driver.price(alone, call.select([0] * multiple))
                self.advise(MeasuredRemedy(f"pad the batch to {words}", result.trials, 0, cost, "one item"))
                break
        result = driver.tried("same_items", self._one_by_one, self.budget)
        cost = driver.price(call, alone)
        whole = cost and cost * call.items
        words = "compute one item at a time"
        self.advise(MeasuredRemedy(words, result.trials, result.differing, whole, "all at once"))

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
            yield any(self.call.rows_of([item]) != first for _ in range(driver.REPEATS - 1))


def _exact(call: ItemCall) -> ItemCall:
    if not driver.adds_up(call):
        raise NotItemwiseError("it computes each element by itself, and adds nothing up")
    return call.with_exact_values()


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
