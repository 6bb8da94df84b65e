"""Experiments on whole runs: other content in the neighbours of an item, and other numbers of items.

They decide where no call alone shows how an item's result depends on its batch: where another number of items takes
other ops, or reads other memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from hashbench.core.processes import Budget
from hashbench.core.records import ExperimentResult, Failure, Trace
from hashbench.core.run import outputs
from hashbench.core.run.outcome import Run
from hashbench.core.trace.callbacks import TraceCallback
from hashbench.extensions.invariance.cause import ON, ItemEvidence
from hashbench.extensions.invariance.experiments import FACTORS, tried
from hashbench.extensions.invariance.finding import Entry
from hashbench.extensions.invariance.layout import NotItemwiseError
from hashbench.extensions.invariance.locate import RowsCompared
from hashbench.extensions.invariance.match import CallRows, TensorRows
from hashbench.extensions.invariance.rows import RowDigests


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Other content for the items after the first ``kept``: scaled by ``factor``, or copies of the first item if that
    is ``None``."""

    kept: int
    factor: float | None = None

    def change(self, items: torch.Tensor) -> None:
        """Change them in a tensor whose first dimension holds the items."""
        with torch.no_grad():
            others = items[self.kept :]
            if self.factor is None:
                others.copy_(items[:1].expand_as(others))
            elif items.is_floating_point() or items.is_complex():
                others.mul_(self.factor)


class RunBeside(Protocol):
    """Makes one traced run of the first ``size`` items from the reset state, some with other content."""

    def __call__(
        self, size: int, *, watcher: TraceCallback | None = None, beside: Neighbours | None = None
    ) -> Run | Failure: ...


def diagnose_runs(
    run_at: RunBeside, compared: RowsCompared, entry: Entry, *, repeated: int, budget: float
) -> ItemEvidence:
    """Run the whole program with other content of neighbours and with other numbers of items.

    Args:
        run_at: makes the runs.
        compared: the run on all items, and that on fewer.
        entry: where the difference is read.
        repeated: how many times the two runs were repeated and agreed.
        budget: seconds after which no further run is started.
    """
    return _Experiments(run_at, compared, entry, Budget(budget)).evidence(repeated)


class _Experiments:
    def __init__(self, run_at: RunBeside, compared: RowsCompared, entry: Entry, budget: Budget) -> None:
        self.run_at, self.compared, self.entry, self.budget = run_at, compared, entry, budget
        self.subset = compared.comparison.runs.subset

    def evidence(self, repeated: int) -> ItemEvidence:
        same = ExperimentResult("same_items", ON, repeated, 0)
        content = tried("other_content", self._content, self.budget)
        if content.differing:
            return ItemEvidence(self.subset.batch, (same, content))
        number, smallest = self._numbers()
        return ItemEvidence(self.subset.batch, (same, number, content), smallest_batch=smallest)

    # ---------------------------------------------------------------------------------------- content

    def _content(self) -> Iterator[bool]:
        """Yield whether kept items change with other content beside them: in the run on all items beside those of the
        smaller run, and in the smaller run beside the first."""
        sides = [(True, self.subset.batch, self.subset.size), (False, self.subset.size, 1)]
        trials = 0
        for of_all, size, kept in sides:
            for factor in (None, *FACTORS) if size > kept else ():
                differs = self._differs(size, Neighbours(kept, factor), of_all=of_all)
                if differs is not None:
                    trials += 1
                    yield differs
        if not trials:
            raise NotItemwiseError("no run with other content in the other items shows what it changes here")

    def _differs(self, size: int, beside: Neighbours, *, of_all: bool) -> bool | None:
        """Return True if the kept items read other values than before; ``None`` if that shows nothing: the run fails,
        nothing has other content, or it differs before."""
        runs = self.compared.comparison.runs
        known = runs.reference if of_all else runs.other
        rows = RowDigests(self.subset, self.compared.shapes[0 if of_all else 1], reference=of_all)
        run = self.run_at(size, watcher=rows, beside=beside)
        if isinstance(run, Failure) or run.trace is None or _inputs(run.trace) == _inputs(known.trace):
            return None
        kept = _KeptItems(size, beside.kept)
        earlier = [
            kept.same_written(known.calls[node], rows.calls.get(node))
            for node in (pair[1 if of_all else 0] for pair in self.entry.before)
        ]
        if not all(earlier):
            return None
        there = [
            kept.same_read(known.calls[node], rows.calls.get(node), path)
            for node, path in ((read[1 if of_all else 0], read[2]) for read in self.entry.reads)
        ]
        results = self.compared.runs[0 if of_all else 1].results
        there += [kept.same_items(results.get(name), run.results.get(name)) for name in self.entry.results]
        if any(one is False for one in there):
            return True
        return None if not there or None in there else False

    # ---------------------------------------------------------------------------------------- numbers

    def _numbers(self) -> tuple[ExperimentResult, int | None]:
        """Find the numbers of items that run other ops than all items, and the smallest that runs others than one
        item."""
        batch, size, node = self.subset.batch, self.subset.size, self.entry.node
        if not node:
            return ExperimentResult("other_number", ON, 1, 1), None
        seen = {size: True, batch: False}

        def makes(number: int) -> bool:
            if number not in seen:
                run = self.run_at(number, watcher=TraceCallback(), beside=Neighbours(number))
                if isinstance(run, Failure) or run.trace is None:
                    raise NotItemwiseError(f"a run of {number} items failed")
                seen[number] = any(record.id == node for record in run.trace.records)
            return seen[number]

        smallest = None
        try:
            alone = makes(1)
            low, high = (1, size) if makes(size) != alone else (size, batch)
            while high - low > 1 and self.budget.left() > 0:
                middle = (low + high) // 2
                low, high = (middle, high) if makes(middle) == alone else (low, middle)
            smallest = high if high - low == 1 and makes(high) != alone else None
        except NotItemwiseError:
            pass
        trials = [number for number in seen if number != batch]
        return ExperimentResult("other_number", ON, len(trials), sum(seen[number] for number in trials)), smallest


@dataclass(frozen=True, slots=True)
class _KeptItems:
    """The first ``kept`` of the ``items`` of two runs that have the same number of them."""

    items: int
    kept: int

    def same_written(self, one: CallRows, other: CallRows | None) -> bool | None:
        """Return True if all that a call wrote is the same for the kept items; ``None`` if unknown."""
        if other is None or len(one.written) != len(other.written):
            return None
        found = [self._same(*pair) for pair in zip(one.written, other.written, strict=True)]
        return None if None in found else all(found)

    def same_read(self, one: CallRows, other: CallRows | None, path: str) -> bool | None:
        """Return the same for an argument that it read."""
        there = dict(other.read) if other is not None else {}
        return self._same(dict(one.read)[path], there[path]) if path in there else None

    def same_items(self, one: object, other: object) -> bool | None:
        """Return the same for a result whose first dimension holds the items."""
        if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
            return None
        if one.shape[:1] != (self.items,) or other.shape[:1] != (self.items,):
            return None
        return outputs.bitwise_equal(one[: self.kept], other[: self.kept])

    def _same(self, one: TensorRows, other: TensorRows) -> bool | None:
        if one._replace(given=()) == other._replace(given=()):
            return True
        if (one.shape, one.cut, one.width) != (other.shape, other.cut, other.width) or one.cut is None:
            return None
        if one.cut.dim is None:
            return False
        rows, rest = divmod(one.shape[one.cut.dim] // one.cut.step, self.items)
        if rest or not rows:
            return None
        return any(
            self._part(one, outer) == self._part(other, outer) for outer in range(1, rows + 1) if not rows % outer
        )

    def _part(self, one: TensorRows, outer: int) -> Sequence[bytes]:
        """Return the rows of the kept items, of a dimension of ``outer`` blocks."""
        block = len(one.content) // outer
        return [one.content[block * at :][: block // self.items * self.kept] for at in range(outer)]


def _inputs(trace: Trace) -> dict[str, object]:
    return {leaf.id: leaf.digest for leaf in trace.leaves if leaf.kind == "input"}
