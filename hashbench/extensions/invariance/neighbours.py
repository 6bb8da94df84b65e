"""Experiments on whole runs: other content in the neighbours of an item, and other numbers of items.

They decide where no call alone shows how an item's result depends on its batch: where another number of items takes
other ops, or reads other memory.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from hashbench.core.records import ExperimentResult, Failure
from hashbench.core.run import outputs
from hashbench.core.run.outcome import Run
from hashbench.core.trace.callbacks import TraceCallback
from hashbench.extensions.invariance.cause import ON, ItemEvidence
from hashbench.extensions.invariance.driver import FACTORS, Experiments
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


RunBeside = Callable[..., Run | Failure]
"""Makes one traced run of so many items from the reset state, with a ``watcher`` around every call; some items have the
content that ``beside`` says."""


def diagnose_runs(
    run_at: RunBeside, compared: RowsCompared, entry: Entry, *, repeated: int, budget: float
) -> ItemEvidence:
    """Run the whole program with different content of neighbours and with other numbers of items.

    Args:
        run_at: makes the runs.
        compared: the run on all items, and that on fewer.
        entry: where the difference is read.
        repeated: how many times the two runs were repeated and agreed.
        budget: seconds after which no further run is started.
    """
    return _WholeRuns(run_at, compared, entry, repeated, budget).evidence()


class _WholeRuns(Experiments):
    def __init__(self, run_at: RunBeside, compared: RowsCompared, entry: Entry, repeated: int, budget: float) -> None:
        self.subset = compared.comparison.runs.subset
        super().__init__(self.subset.batch, budget)
        self.run_at, self.compared, self.entry = run_at, compared, entry
        self.keep(arms=(ExperimentResult("same_items", ON, repeated, 0),))

    def run_all(self) -> None:
        """Run the program with different content; if that shows nothing, with other numbers of items."""
        if not self.run("other_content", self._content).differing:
            self.run("other_number", self._numbers)

    # ---------------------------------------------------------------------------------------- content

    def _content(self) -> Iterator[bool]:
        """Yield whether kept items change with different content beside them: in the run on all items beside those of
        the smaller run, and in the smaller run beside the first."""
        sides = [(True, self.subset.batch, self.subset.size), (False, self.subset.size, 1)]
        trials = 0
        for of_all, size, kept in sides:
            for factor in (None, *FACTORS) if size > kept else ():
                differs = self._differs(size, Neighbours(kept, factor), of_all=of_all)
                if differs is not None:
                    trials += 1
                    yield differs
        if not trials:
            raise NotItemwiseError("no run with different content in the other items shows what it changes here")

    def _differs(self, size: int, beside: Neighbours, *, of_all: bool) -> bool | None:
        """Return True if the kept items read other values than before; ``None`` if that shows nothing: the run fails,
        nothing has other content, or it differs before."""
        side = 0 if of_all else 1
        runs, before = self.compared.comparison.runs, self.compared.runs[side]
        known = (runs.reference, runs.other)[side].calls
        rows = RowDigests(self.subset, self.compared.shapes[side], reference=of_all)
        run = self.run_at(size, watcher=rows, beside=beside)
        if isinstance(run, Failure) or run.trace is None or _inputs(run) == _inputs(before):
            return None
        kept, node_of = _KeptItems(size, beside.kept), operator.itemgetter(1 - side)
        writers = map(node_of, self.entry.before)
        if not all(kept.same_written(known[node], rows.calls.get(node)) for node in writers):
            return None
        reads = ((node_of(read), read[2]) for read in self.entry.reads)
        there = [kept.same_read(known[node], rows.calls.get(node), path) for node, path in reads]
        there += [kept.same_items(before.results.get(name), run.results.get(name)) for name in self.entry.results]
        if False in there:
            return True
        return None if None in there or not there else False

    # ---------------------------------------------------------------------------------------- numbers

    def _numbers(self) -> Iterator[bool]:
        """Yield whether runs of other numbers of items make the op that only the smaller run makes. Keep the smallest
        number that differs from one item in that."""
        yield True  # the smaller run
        if not self.entry.node:
            return
        size, alone = self.subset.size, True
        with contextlib.suppress(NotItemwiseError):
            if size > 1:
                alone = self._makes(1)
                yield alone
            low, high = (size, self.subset.batch) if alone else (1, size)
            while high - low > 1:
                middle = (low + high) // 2
                made = self._makes(middle)
                yield made
                low, high = (middle, high) if made == alone else (low, middle)
            self.keep(smallest_batch=high)

    def _makes(self, number: int) -> bool:
        """Return True if a run of so many items makes the op.

        Raises:
            NotItemwiseError: the run fails.
        """
        run = self.run_at(number, watcher=TraceCallback(), beside=Neighbours(number))
        if isinstance(run, Failure) or run.trace is None:
            raise NotItemwiseError(f"a run of {number} items failed")
        return any(record.id == self.entry.node for record in run.trace.records)


@dataclass(frozen=True, slots=True)
class _KeptItems:
    """The first ``kept`` of the ``items`` of two runs that have the same number of them."""

    items: int
    kept: int

    def same_written(self, rows: CallRows, other: CallRows | None) -> bool | None:
        """Return True if all that a call wrote is the same for the kept items; ``None`` if unknown."""
        if other is None or len(rows.written) != len(other.written):
            return None
        found = [self._same(*pair) for pair in zip(rows.written, other.written, strict=True)]
        return None if None in found else all(found)

    def same_read(self, rows: CallRows, other: CallRows | None, path: str) -> bool | None:
        """Return the same for an argument that it read."""
        there = dict(other.read) if other is not None else {}
        return self._same(dict(rows.read)[path], there[path]) if path in there else None

    def same_items(self, first: object, other: object) -> bool | None:
        """Return the same for a result whose first dimension holds the items."""
        if not isinstance(first, torch.Tensor) or not isinstance(other, torch.Tensor):
            return None
        if first.shape[:1] != (self.items,) or other.shape[:1] != (self.items,):
            return None
        return outputs.bitwise_equal(first[: self.kept], other[: self.kept])

    def _same(self, first: TensorRows, other: TensorRows) -> bool | None:
        if first._replace(given=()) == other._replace(given=()):
            return True
        if (first.shape, first.cut, first.width) != (other.shape, other.cut, other.width) or first.cut is None:
            return None
        if first.cut.dim is None:
            return False
        rows, rest = divmod(first.shape[first.cut.dim] // first.cut.step, self.items)
        if rest or not rows:
            return None
        return any(
            self._part(first, outer) == self._part(other, outer) for outer in range(1, rows + 1) if not rows % outer
        )

    def _part(self, rows: TensorRows, outer: int) -> Sequence[bytes]:
        """Return the rows of the kept items, of a dimension of ``outer`` blocks."""
        block = len(rows.content) // outer
        return [rows.content[block * at :][: block // self.items * self.kept] for at in range(outer)]


def _inputs(run: Run) -> Mapping[str, object]:
    """Return the digests of a run's inputs, by id."""
    return {leaf.id: leaf.digest for leaf in run.trace.leaves if leaf.kind == "input"} if run.trace else {}
