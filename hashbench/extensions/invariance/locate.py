"""Find the kernel that made an item's result depend on its batch: the runs that it takes, and the call captured."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hashbench.core.diagnose.calls.capture import copied, own_copy
from hashbench.core.diagnose.calls.live import CallOutcome, captured_environment
from hashbench.core.divergence.align import align
from hashbench.core.records import Failure, Trace
from hashbench.core.run import distance, outputs
from hashbench.core.run.outcome import Run
from hashbench.core.run.settings import settings
from hashbench.core.trace.arguments import caller_line, tensors_in
from hashbench.core.trace.callbacks import TraceCallback
from hashbench.core.trace.op_schema import plan_of
from hashbench.extensions.invariance.axes import axes_of, counting_places
from hashbench.extensions.invariance.call_pair import CallPair
from hashbench.extensions.invariance.finding import BatchFinding, RowComparison, RowDifference, entry_of, find_sources
from hashbench.extensions.invariance.item_call import ItemCall, items_first
from hashbench.extensions.invariance.judged import JudgedCall, RowRun, RowRuns
from hashbench.extensions.invariance.layout import ItemSubset, NotItemwiseError
from hashbench.extensions.invariance.match import Agreement
from hashbench.extensions.invariance.rows import NodeShapes, RowDigests, ShapeNotes, whole_numbers

RunAt = Callable[[int, TraceCallback], Run | Failure]
"""Makes one traced run of the first so many items, from the reset state, with a callback around every call."""


@dataclass(frozen=True, slots=True)
class PlainRuns:
    """What two runs without row digests showed: the traces of both, and the shapes at the calls of the reference."""

    reference: Trace
    other: Trace
    shapes: NodeShapes


@dataclass(frozen=True, slots=True)
class RowsCompared:
    """Two runs compared call by call. ``runs`` are those that were made for it with row digests, the reference first;
    ``numbers`` the whole numbers that each call of the smaller one was given; ``shapes`` what each of the two was cut
    by, the shapes at the same calls of the other."""

    comparison: RowComparison
    runs: tuple[Run, Run]
    numbers: Mapping[str, tuple[int | None, ...]]
    shapes: tuple[NodeShapes, NodeShapes]


def compare_rows(
    run_at: RunAt, subset: ItemSubset, differing: Sequence[str] = (), *, plain: PlainRuns | None = None
) -> RowsCompared | Failure:
    """Compare two runs call by call; or say why a run failed. Makes a run of each size with row digests.

    Args:
        run_at: makes one traced run of so many items; the results of its trace are the outputs.
        subset: the items of the reference, and of the run whose outputs may differ from it.
        differing: the names of the results that differ, as the trace has them.
        plain: what runs that were made before showed; ``None``: both are made.
    """
    try:
        known = plain if plain is not None else _plain_runs(run_at, subset)
        counterparts = _counterparts(known.reference, known.other)
        shapes = _shapes_of_half(run_at, subset, known.reference) if subset.turned else known.shapes
        there = {node: shapes[twin] for node, twin in counterparts.items() if twin in shapes}
        other = RowDigests(subset, there, reference=False)
        part, part_trace = _traced(run_at, subset.asked, other)
        seen = {twin: other.shapes[node] for node, twin in counterparts.items() if node in other.shapes}
        here = shapes if subset.turned else seen
        reference = RowDigests(subset, here, reference=True)
        whole, whole_trace = _traced(run_at, subset.batch, reference)
    except _RunFailedError as error:
        return error.failure
    rows = RowRun(whole_trace, reference.calls), RowRun(part_trace, other.calls, other.views)
    comparison = find_sources(RowRuns(subset, *rows, counterparts), differing)
    return RowsCompared(comparison, (whole, part), other.numbers, (here, there))


class _RunFailedError(Exception):
    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.error)
        self.failure = failure


def _traced(run_at: RunAt, size: int, watcher: TraceCallback) -> tuple[Run, Trace]:
    """Make a run; raise :class:`_RunFailedError` if it fails."""
    run = run_at(size, watcher)
    if isinstance(run, Failure):
        raise _RunFailedError(run)
    assert run.trace is not None, "runs are traced"
    return run, run.trace


def _shapes_of_half(run_at: RunAt, subset: ItemSubset, reference: Trace) -> NodeShapes:
    """Return the shapes in a run of half the items, by the ids of the reference's records."""
    noted = ShapeNotes()
    counterparts = _counterparts(reference, _traced(run_at, subset.half, noted)[1])
    return {twin: noted.shapes[node] for node, twin in counterparts.items() if node in noted.shapes}


def _plain_runs(run_at: RunAt, subset: ItemSubset) -> PlainRuns:
    noted = ShapeNotes()
    reference = _traced(run_at, subset.batch, noted)[1]
    return PlainRuns(reference, _traced(run_at, subset.asked, TraceCallback())[1], noted.shapes)


def _counterparts(reference: Trace, other: Trace) -> Mapping[str, str]:
    """Map ids of records of the smaller run to those of the reference."""
    pairs = align(other.records, reference.records)
    return {other.records[a].id: reference.records[b].id for a, b in pairs if a is not None and b is not None}


def finding_of(run_at: RunAt, compared: RowsCompared) -> BatchFinding | Failure:
    """Locate the kernel by which an item's result depends on its batch; return why if a run failed.

    Runs the whole batch once more, up to the kernel's call, which is captured.
    """
    comparison, subset = compared.comparison, compared.comparison.runs.subset
    finding = BatchFinding(
        subset.size,
        subset.batch,
        sources=comparison.sources,
        benign=comparison.benign,
        not_attributable=len(comparison.not_attributable),
        detail=comparison.detail,
        coupled=comparison.couples_items,
        drawn=comparison.drawn,
        may_be_drawn=comparison.may_be_drawn,
        entry=entry_of(comparison),
    )
    if not comparison.sources:
        return finding
    node = comparison.sources[0]
    there = comparison.runs.judged[node].reference
    captured = _captured(run_at, subset.batch if there else subset.asked, there or node)
    return captured if isinstance(captured, Failure) else _described(finding, compared, node, captured, run_at)


class _HasCall(BaseException):
    """Ends a run whose call is captured; nothing in a model that handles errors stops it."""


def _captured(run_at: RunAt, size: int, node: str) -> _Capture | Failure:
    """Capture a call in a run of ``size`` items that stops there; return why if the run failed before."""
    captured, run = _Capture(node), None
    with contextlib.suppress(_HasCall):
        run = run_at(size, captured)
    if captured.done:
        return captured
    return run if isinstance(run, Failure) else Failure(f"a further run of {size} items does not call {node}")


class _Capture(TraceCallback):
    """Keeps one call, the tensors that it left, and the line of the caller's code. ``written`` and ``targets``: which
    of the tensors noted as written each tensor is that it left, and that it was given."""

    def __init__(self, node: str) -> None:
        self.func: Any = None
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        self.left: list[torch.Tensor] = []
        self.written: list[int | None] = []
        self.targets: list[int | None] = []
        self.settings: Mapping[str, str] = {}
        self.numbers: tuple[int | None, ...] = ()
        self.tensors = 0
        self.line = ""
        self.done = False
        self._node = node

    def before(self, node: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Copy what the call is given."""
        if node == self._node:
            self.func, self.settings, self.numbers = func, settings(), whole_numbers(args, kwargs)
            live = own_copy(func, args, kwargs)
            self.args, self.kwargs = live.args, live.kwargs
            self.tensors = len(tensors_in([*args, *kwargs.values()]))
            self.line = caller_line(sys._getframe(1))

    def after(self, node: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> None:
        """Copy what it left: what it returned, then what it changed."""
        if node == self._node:
            outcome = CallOutcome(plan_of(func), args, kwargs, output)
            written, left = [id(tensor) for tensor in outcome.written], outcome.left
            self.written = [written.index(id(tensor)) if id(tensor) in written else None for tensor in left]
            given = tensors_in([*args, *kwargs.values()])
            self.targets = [written.index(id(tensor)) if id(tensor) in written else None for tensor in given]
            self.left = [copied(tensor) for tensor in left]
            self.done = True
            raise _HasCall


def _described(
    finding: BatchFinding, compared: RowsCompared, node: str, captured: _Capture, run_at: RunAt
) -> BatchFinding:
    """Add to the finding what the captured call shows."""
    comparison = compared.comparison
    judged, subset = comparison.runs.judged[node], comparison.runs.subset
    record = comparison.runs.records[node]
    finding = replace(
        finding,
        kernel=record.op,
        record=node,
        module=record.module,
        source_line=captured.line,
        shapes=_shapes(comparison.runs.other, node),
    )
    if not judged.reference:
        return finding
    if finding.drawn or finding.may_be_drawn or finding.entry is not None:
        return replace(finding, reference_shapes=_shapes(comparison.runs.reference, judged.reference))
    call, why = _item_call(comparison, judged, compared.numbers.get(node, ()), captured)
    difference = _isolated_difference(call, captured, subset) if call is not None else None
    pair = None
    if difference is None:
        here = _captured(run_at, subset.asked, node)
        if not isinstance(here, Failure):
            difference = _difference(judged, captured, here.left, subset)
            pair = None if subset.turned else _pair(comparison, node, captured, here)
    return replace(
        finding,
        reference_shapes=_shapes(comparison.runs.reference, judged.reference),
        difference=difference or RowDifference(),
        detail="; ".join(filter(None, (finding.detail, why if pair is None else ""))),
        call=call,
        pair=pair,
    )


def _pair(comparison: RowComparison, node: str, there: _Capture, here: _Capture) -> CallPair | None:
    """Return the call as both runs made it; ``None`` if what it wrote differs only by place, or follows from other
    arguments in the other batch."""
    judged, subset = comparison.runs.judged[node], comparison.runs.subset
    if judged.coupled and not subset.together:
        return None
    if there.written != here.written or all(rows.equal for rows in judged.written):
        return None
    whole, part = (
        ItemCall(made.func, made.args, made.kwargs, items, (None,) * made.tensors, (), settings=made.settings)
        for made, items in ((there, subset.batch), (here, subset.size))
    )
    rows = comparison.runs.reference.calls[judged.reference], comparison.runs.other.calls[node]
    return CallPair(whole, part, subset, judged, rows, tuple(there.written))


def _shapes(run: RowRun, node: str) -> str:
    read = [rows.given or rows.shape for _, rows in run.calls[node].read]
    return "x".join(f"({','.join(map(str, shape))})" for shape in read)


def _item_call(
    comparison: RowComparison, judged: JudgedCall, numbers: Sequence[int | None], captured: _Capture
) -> tuple[ItemCall | None, str]:
    """Return the captured call with its item axes, or why these do not suffice to run it on other items."""
    subset, reference = comparison.runs.subset, comparison.runs.reference.calls[judged.reference]
    try:
        axes = axes_of(judged, reference, subset, targets=captured.targets, written=captured.written)
        scaled = counting_places(captured.numbers, numbers, subset)
        arguments = captured.func, captured.args, captured.kwargs
        return ItemCall(*arguments, axes.items, axes.read, axes.left, scaled, captured.settings, axes.watched), ""
    except NotItemwiseError as error:
        return None, str(error)


def _isolated_difference(call: ItemCall, captured: _Capture, subset: ItemSubset) -> RowDifference | None:
    """Measure the distance of the call's rows on fewer items from those in the run; ``None`` if it does not differ
    alone."""
    try:
        with captured_environment(call):
            rows = subset.batch // call.items
            place, number = subset.first // rows, subset.size // rows
            chosen = range(place, place + number)
            left, _ = call.select(chosen[::-1] if subset.turned else chosen).run()
            pairs = [
                (
                    items_first(there, axis, call.items)[place:][:number],
                    _in_order(items_first(here, axis, number), subset),
                )
                if axis is not None
                else (there, here)
                for there, here, axis in zip(captured.left, left, call.outputs, strict=True)
            ]
    except Exception:  # the op refuses fewer items or fills memory of as many, or the call needs more than its tensors
        return None
    return _measured(pairs)


def _in_order(rows: torch.Tensor, subset: ItemSubset) -> torch.Tensor:
    return rows.flip(0) if subset.turned else rows


def _difference(
    judged: JudgedCall, captured: _Capture, left: Sequence[torch.Tensor], subset: ItemSubset
) -> RowDifference | None:
    """Measure the distance of the call's rows in the two runs; ``None`` if they are at other places."""
    if subset.turned:
        return None
    pairs, moved = [], {rows.sizes for rows in judged.read.values() if rows.agreement is Agreement.FOUND}
    for at, there, here in zip(captured.written, captured.left, left, strict=False):
        item = None if at is None else judged.written[at]
        if item is None or item.equal or item.sizes in moved:
            continue
        pairs.append((_part(there, here, subset), here))
    return _measured(pairs)


def _part(there: torch.Tensor, here: torch.Tensor, subset: ItemSubset) -> torch.Tensor:
    """Return the part of a tensor of the reference that corresponds to one of the smaller run."""
    for dim, (long, short) in enumerate(zip(there.shape, here.shape, strict=False)):
        if long > short:
            there = there.narrow(dim, subset.start(long, 1) if subset.multiple(long, short) else 0, short)
    return there


def _measured(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> RowDifference | None:
    """Return the largest differences among pairs of tensors; ``None`` if all are equal."""
    found = [distance.measure(there, here) for there, here in pairs if not outputs.bitwise_equal(there, here)]
    if not found:
        return None
    return RowDifference(
        max((comparison.max_abs for comparison in found if comparison.max_abs is not None), default=None),
        max((comparison.max_relative for comparison in found if comparison.max_relative is not None), default=None),
        max((comparison.max_ulp for comparison in found if comparison.max_ulp is not None), default=None),
    )
