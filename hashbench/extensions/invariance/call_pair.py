"""Experiments on one call as both runs made it, each alone, with the strides and row order of its run.

For calls in which the items of the smaller run are not the first of the reference: rows have another order in memory,
or belong to tokens sorted by expert. Rows are compared as the runs compared them.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from hashbench.core.diagnose.calls.capture import copied
from hashbench.core.diagnose.replay.methods import ReplayChange
from hashbench.core.run import outputs
from hashbench.core.trace.digest import dtype_name
from hashbench.extensions.invariance import driver
from hashbench.extensions.invariance.cause import ItemEvidence
from hashbench.extensions.invariance.experiments import diagnose_item_call
from hashbench.extensions.invariance.item_call import ItemCall
from hashbench.extensions.invariance.judged import JudgedCall
from hashbench.extensions.invariance.layout import Cut, ItemSubset, NotItemwiseError
from hashbench.extensions.invariance.match import Agreement, CallRows, Match, TensorRows, match, places
from hashbench.extensions.invariance.rows import row_digests

_NEAR = 0.05
"""Rows of the same item differ by less than this share of the largest number in them."""

_MOST = 8
"""The largest whole number that replaces an element."""


@dataclass(frozen=True, slots=True, eq=False)
class CallPair:
    """The call of the reference and that of the smaller run, neither with item axes.

    ``rows`` are the rows noted of both, ``judged`` how they compare, ``written`` the indices, among the tensors noted,
    of the tensors that the call leaves.
    """

    reference: ItemCall
    other: ItemCall
    subset: ItemSubset
    judged: JudgedCall
    rows: tuple[CallRows, CallRows]
    written: tuple[int | None, ...]


def diagnose(call: ItemCall | None, pair: CallPair | None, *, budget: float) -> ItemEvidence | None:
    """Run the experiments on the call with other items of its batch, and, if these show no difference, on the call as
    both runs made it; ``None`` if it could be captured in neither way."""
    evidence = None if call is None else diagnose_item_call(call, budget=budget)
    if pair is None or (evidence is not None and evidence.explained):
        return evidence
    more = _Pair(pair, budget).evidence()
    if evidence is None:
        return more
    known = {arm.name for arm in evidence.arms if arm.ran or not more.arm(arm.name).ran}
    new = tuple(arm for arm in more.arms if arm.name not in known)
    return replace(evidence, arms=(*evidence.arms, *new), remedies=more.remedies)


class _Pair(driver.Experiments):
    """A call as two runs made it; what it reads in each, by path."""

    def __init__(self, pair: CallPair, budget: float) -> None:
        super().__init__(pair.subset.batch, budget, pair.reference)
        self.pair, self.call = pair, pair.reference
        self.read = dict(pair.rows[0].read), dict(pair.rows[1].read)

    def run_all(self) -> None:
        """Run the experiments until one decides; then find what removes the difference."""
        first = self.call.run()[0]
        same = self.run("same_items", lambda: (not _equal(self.call.run()[0], first) for _ in range(driver.REPEATS)))
        unchanged = itertools.repeat(ReplayChange(), driver.REPEATS)
        alone = self.run("as_in_runs", lambda: itertools.chain.from_iterable(map(self.differs, unchanged)))
        if alone.differing and not same.differing and not self.run("other_content", self._content).differing:
            self.run_under(self._changes(), self.call)

    def _changes(self) -> dict[str, ReplayChange]:
        made, sides = {}, (self.pair.reference, self.pair.other)
        if not all(tensor.is_contiguous() for side in sides for tensor in side.tensors if not tensor.is_sparse):
            contiguous = functools.partial(_changed, change=lambda _, tensor: tensor.contiguous())
            made["same_strides"] = ReplayChange(call=contiguous)
        if driver.adds_up(self.call):
            made["exact_values"] = ReplayChange(call=functools.partial(_changed, change=_whole_numbers(self.call)))
        return made | driver.controls(self.call)

    # ------------------------------------------------------------------------------------------ comparisons

    def differs(self, change: ReplayChange) -> Iterator[bool]:
        """Yield whether rows that differed in the runs differ between the two calls alone, under the change."""
        pair = self.pair
        with change.around():
            both = [change.call(side).run()[0] for side in (pair.reference, pair.other)]
        yield any(itertools.starmap(self._rows_differ, zip(pair.written, *both, strict=True)))

    def _rows_differ(self, at: int | None, whole: torch.Tensor, part: torch.Tensor) -> bool:
        pair = self.pair
        if at is None or pair.judged.written[at].equal:
            return False
        cuts = [run.written[at].cut for run in pair.rows]
        inherited = tuple(pair.judged.read.values())
        return not match(_rows(whole, cuts[0]), _rows(part, cuts[1]), pair.subset, inherited).equal

    def _content(self) -> Iterator[bool]:
        """Yield whether rows change with different content in the rows that only the reference has."""
        reference = _changed(self.pair.reference, _written_out)
        before = reference.run()[0]
        kept: Kept = {read.sizes: self._kept(path, read) for path, read in self.pair.judged.read.items() if read.sizes}
        if not kept:
            raise NotItemwiseError("all that it reads is the same in both runs")
        if any(read.agreement is Agreement.FOUND for read in self.pair.judged.read.values()):
            self._require_places(before, kept)
        paths = [*self.read[0]]
        for factor in driver.POSITIVE_FACTORS if self.pair.subset.together else driver.FACTORS:

            def change(place: int, tensor: torch.Tensor, factor: float = factor) -> torch.Tensor:
                path = paths[place]
                read = self.pair.judged.read.get(path)
                cut = self.read[0][path].cut
                if read is None or not read.sizes or cut is None:
                    return tensor
                return _in_place_of(
                    tensor, tensor.where(_is_part(tensor, cut, kept[read.sizes]), _other(tensor, factor))
                )

            compared = [*self._outputs(before, _changed(reference, change).run()[0], kept)]
            if not compared:
                raise NotItemwiseError("which rows of what it leaves are the other run's is not known")
            yield any(
                not outputs.bitwise_equal(_part(old, cut, where), _part(new, cut, where))
                for old, new, cut, where in compared
            )

    def _outputs(
        self, first: Sequence[torch.Tensor], second: Sequence[torch.Tensor], kept: Kept
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, Cut, Sequence[int]]]:
        for at, tensor, other in zip(self.pair.written, first, second, strict=True):
            cut = None if at is None else self.pair.rows[0].written[at].cut
            if at is not None and cut is not None:
                sizes = self.pair.judged.written[at].sizes
                if sizes is None or sizes in kept:
                    yield tensor, other, cut, kept.get(sizes, ())

    def _kept(self, path: str, match: Match) -> Sequence[int]:
        """Return which rows of the input at ``path`` of the reference are those of the smaller run."""
        whole, part = self.read[0][path], self.read[1][path]
        if match.agreement is Agreement.FOUND:
            return places(whole.content, part.content, whole.width) or ()
        assert match.sizes is not None
        assert whole.cut is not None
        outer, step = min(match.outers, default=1), whole.cut.step
        long, short = (size // outer // step for size in match.sizes)
        start = self.pair.subset.start(match.sizes[0], outer) // step
        return [block * long + start + row for block in range(outer) for row in range(short)]

    def _require_places(self, before: Sequence[torch.Tensor], kept: Kept) -> None:
        """Raise unless rows that were found at other places are still, up to rounding, where they were read."""
        there = self.pair.other.run()[0]
        for whole, part, cut, where in self._outputs(before, there, kept):
            row = _part(whole, cut, where).double()
            if row.shape != part.shape or not torch.allclose(
                row, part.double(), _NEAR, _NEAR * float(part.abs().max())
            ):
                raise NotItemwiseError("which of its rows are the other run's is not known")


Kept = Mapping[tuple[int, int] | None, Sequence[int]]
"""Sizes of a dimension in both runs → the rows of the reference that are those of the smaller run."""

TensorChange = Callable[[int, torch.Tensor], torch.Tensor]
"""Replacement of a tensor argument, by its index among these."""


def _changed(side: ItemCall, change: TensorChange) -> ItemCall:
    numbers = itertools.count()
    return side.with_tensors(lambda tensor: change(next(numbers), tensor))


def _whole_numbers(reference: ItemCall) -> TensorChange:
    """Return a change that replaces each element by a small whole number, the same for equal ones in both calls."""
    largest = [float(tensor.detach().abs().max()) if tensor.numel() else 0.0 for tensor in reference.tensors]

    def change(place: int, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or not 0 < largest[place] < math.inf:
            return tensor
        return _in_place_of(tensor, (tensor * (_MOST / largest[place])).round().clamp(-_MOST, _MOST).add(0.0))

    return change


def _in_place_of(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return ``values`` with the strides of ``tensor``, by which kernels are selected; expanded rows become rows of
    their own."""
    return copied(_written_out(0, tensor)).copy_(values)


def _written_out(_: int, tensor: torch.Tensor) -> torch.Tensor:
    shown = any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))
    return tensor.contiguous() if shown else tensor


def _other(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Return other content: floating-point numbers scaled, booleans inverted, whole numbers (they may be places)
    kept."""
    if tensor.dtype is torch.bool:
        return ~tensor
    return tensor * factor if tensor.is_floating_point() or tensor.is_complex() else tensor


def _part(tensor: torch.Tensor, cut: Cut, rows: Sequence[int]) -> torch.Tensor:
    """Return the part of a tensor of the reference that the smaller run has."""
    for dim, start, length in cut.narrowed:
        tensor = tensor.narrow(dim, start, length)
    return tensor if cut.dim is None else tensor.index_select(cut.dim, _indices(cut, rows))


def _is_part(tensor: torch.Tensor, cut: Cut, rows: Sequence[int]) -> torch.Tensor:
    """Return a mask of that part."""
    mask = torch.zeros(tensor.shape, dtype=torch.bool)
    part = mask
    for dim, start, length in cut.narrowed:
        part = part.narrow(dim, start, length)
    if cut.dim is None:
        part.fill_(True)
    else:
        part.index_fill_(cut.dim, _indices(cut, rows), True)
    return mask.to(tensor.device)


def _indices(cut: Cut, rows: Sequence[int]) -> torch.Tensor:
    return torch.tensor([row * cut.step + place for row in rows for place in range(cut.step)], dtype=torch.int64)


def _rows(tensor: torch.Tensor, cut: Cut | None) -> TensorRows:
    content, width = (b"", 0) if cut is None else row_digests(tensor, cut)
    return TensorRows(dtype_name(tensor.dtype), tuple(tensor.shape), cut, content, width)


def _equal(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> bool:
    return all(outputs.bitwise_equal(tensor, other) for tensor, other in zip(first, second, strict=True))
