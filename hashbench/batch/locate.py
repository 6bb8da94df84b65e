"""Find the kernel that made an item's result depend on its batch: the runs that it takes, and the call captured."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hashbench.batch.finding import Agreement, BatchFinding, Comparison, Judged, Match, RowDifference, RowRun
from hashbench.batch.item_call import ItemCall, NotItemwiseError, copied, copied_leaf, in_force, items_first, left_by
from hashbench.batch.layout import Company, ItemAxis
from hashbench.batch.rows import NodeShapes, RowDigests, ShapeNotes, whole_numbers, written_by
from hashbench.divergence.align import align
from hashbench.records import Failure, Trace
from hashbench.run import outputs
from hashbench.run.outcome import Run
from hashbench.run.settings import settings
from hashbench.trace.arguments import caller_line, mapped
from hashbench.trace.callbacks import TraceCallback
from hashbench.trace.op_schema import plan_of

RunAt = Callable[[int, TraceCallback], Run | Failure]
"""Makes one traced run of the first so many items, from the reset state, with a callback around every call."""


def compare_rows(
    run_at: RunAt, company: Company, differing: Sequence[str] | None = None
) -> tuple[Comparison, ShapeNotes] | Failure:
    """The two runs compared call by call, and what was noted of the smaller one; or why a run failed. Takes three runs:
    two of ``company.size`` items, of which the first only notes shapes, and one of the whole batch.

    ``differing`` are the names of the results that differ, as the trace has them. Default: those whose first dimension
    has as many items as the run, and whose rows are not equal.
    """
    noted = ShapeNotes()
    first = run_at(company.size, noted)
    if isinstance(first, Failure):
        return first
    made = _row_runs(run_at, company, noted.shapes, {})
    if isinstance(made, Failure):
        return made
    whole, part = made
    counterparts = _counterparts(whole.trace, part.trace)
    if any(here != there for here, there in counterparts.items()):
        again = _row_runs(run_at, company, noted.shapes, counterparts)
        if isinstance(again, Failure):
            return again
        whole, part = again
    names = differing_results(whole.results, part.results, company) if differing is None else tuple(differing)
    return Comparison(company, whole.rows, part.rows, counterparts, names), noted


@dataclass(frozen=True, slots=True)
class _Made:
    rows: RowRun
    results: Mapping[str, Any]

    @property
    def trace(self) -> Trace:
        return self.rows.trace


def _row_runs(
    run_at: RunAt, company: Company, shapes: NodeShapes, counterparts: Mapping[str, str]
) -> tuple[_Made, _Made] | Failure:
    """The reference and the smaller run with row digests. ``counterparts`` are the ids in the reference of records that
    have others there."""
    expected = {there: shapes[here] for here, there in counterparts.items() if here in shapes}
    reference = RowDigests(company, expected if counterparts else shapes, reference=True)
    whole = run_at(company.batch, reference)
    if isinstance(whole, Failure):
        return whole
    seen = {here: reference.shapes[there] for here, there in counterparts.items() if there in reference.shapes}
    other = RowDigests(company, seen if counterparts else reference.shapes, reference=False)
    part = run_at(company.size, other)
    if isinstance(part, Failure):
        return part
    assert whole.trace is not None, "rows are digested in traced runs"
    assert part.trace is not None, "rows are digested in traced runs"
    return (
        _Made(RowRun(whole.trace, reference.calls), whole.results),
        _Made(RowRun(part.trace, other.calls), part.results),
    )


def _counterparts(reference: Trace, other: Trace) -> Mapping[str, str]:
    """The ids in the reference of the records of the smaller run that have one there."""
    pairs = align(other.records, reference.records)
    return {other.records[a].id: reference.records[b].id for a, b in pairs if a is not None and b is not None}


def differing_results(reference: Mapping[str, Any], other: Mapping[str, Any], company: Company) -> tuple[str, ...]:
    """The names of the tensors whose first dimension has as many items as the run, and whose items are not equal."""
    return tuple(
        name
        for name, value in other.items()
        if isinstance(value, torch.Tensor)
        and value.shape[:1] == (company.size,)
        and not outputs.bitwise_equal(_first_items(reference.get(name), company), value)
    )


def _first_items(value: Any, company: Company) -> Any:
    if not isinstance(value, torch.Tensor) or value.shape[:1] != (company.batch,):
        return None
    return value[company.first : company.first + company.size]


def benign_records(run_at: RunAt, *, batch: int, size: int) -> tuple[str, ...] | Failure:
    """The ids of the records in which a difference entered between a run of ``batch`` items and one of ``size``, of a
    model whose outputs are equal; or why a run failed."""
    compared = compare_rows(run_at, Company(batch, size), ())
    return compared if isinstance(compared, Failure) else compared[0].benign


def locate(
    run_at: RunAt, *, batch: int, size: int, differing: Sequence[str] | None = None, first: int = 0
) -> BatchFinding | Failure:
    """Where an item's result came to depend on its batch; or why a run failed.

    Takes a run of ``size`` items that notes shapes, one of each size with row digests, and one of the whole batch in
    which the kernel's call is captured.

    Args:
        run_at: makes one traced run of so many items; the results of its trace are the outputs.
        batch, size: items of the reference and of the run whose outputs differ from it.
        differing: names of the outputs that differ; see :func:`compare_rows`.
        first: the item of the reference with which the smaller run begins.
    """
    company = Company(batch, size, first)
    compared = compare_rows(run_at, company, differing)
    if isinstance(compared, Failure):
        return compared
    comparison, noted = compared
    finding = BatchFinding(
        size,
        batch,
        sources=comparison.sources,
        benign=comparison.benign,
        not_attributable=len(comparison.not_attributable),
        detail=comparison.detail,
        coupled=comparison.coupled,
    )
    if not comparison.sources:
        return finding
    node = comparison.sources[0]
    there = comparison.judged[node].reference
    captured = _Capture(there or node)
    run = run_at(batch if there else size, captured)
    if isinstance(run, Failure):
        return run
    return _described(finding, comparison, node, noted, captured, run_at)


class _Capture(TraceCallback):
    """Keeps one call, the tensors that it left, and the line of the caller's code."""

    def __init__(self, node: str) -> None:
        self.func: Any = None
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        self.left: list[torch.Tensor] = []
        self.written: list[int | None] = []
        self.settings: Mapping[str, str] = {}
        self.numbers: tuple[int | None, ...] = ()
        self.line = ""
        self._node = node

    def before(self, node: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Copy what the call is given."""
        if node == self._node:
            self.func, self.settings, self.numbers = func, settings(), whole_numbers(args, kwargs)
            self.args, self.kwargs = mapped(tuple(args), copied_leaf), mapped(dict(kwargs), copied_leaf)
            self.line = caller_line(sys._getframe(1))

    def after(self, node: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> None:
        """Copy what it left: what it returned, then what it changed."""
        if node == self._node:
            plan = plan_of(func)
            written = [id(tensor) for tensor in written_by(plan, args, kwargs, output)]
            left = left_by(func, args, kwargs, output)
            self.written = [written.index(id(tensor)) if id(tensor) in written else None for tensor in left]
            self.left = [copied(tensor) for tensor in left]


def _described(
    finding: BatchFinding, comparison: Comparison, node: str, noted: ShapeNotes, captured: _Capture, run_at: RunAt
) -> BatchFinding:
    """The finding with all that the captured call tells."""
    judged, company = comparison.judged[node], comparison.company
    record = next(record for record in comparison.other.trace.records if record.id == node)
    finding = replace(
        finding,
        kernel=record.op,
        record=node,
        module=record.module,
        source_line=captured.line,
        shapes=_shapes(comparison.other, node),
    )
    if not judged.reference:
        return finding
    call, why = _item_call(comparison, judged, noted.numbers.get(node, ()), captured)
    difference = _isolated_difference(call, captured, company) if call is not None else None
    if difference is None:
        there = _Capture(node)
        run = run_at(company.size, there)
        difference = None if isinstance(run, Failure) else _difference(judged, captured, there.left, company)
    return replace(
        finding,
        reference_shapes=_shapes(comparison.reference, judged.reference),
        difference=difference or RowDifference(),
        detail="; ".join(filter(None, (finding.detail, why))),
        call=call,
    )


def _shapes(run: RowRun, node: str) -> str:
    read = [rows.shape for _, rows in run.calls[node].read]
    return "x".join(f"({','.join(map(str, shape))})" for shape in read)


def _item_call(
    comparison: Comparison, judged: Judged, numbers: Sequence[int | None], captured: _Capture
) -> tuple[ItemCall | None, str]:
    """The captured call with what is known of its items; or why that is not enough to repeat it on others."""
    company = comparison.company
    reference = comparison.reference.calls[judged.reference]
    matches = [judged.read.get(path) for path, _ in reference.read]
    cuts = [rows.cut.dim if rows.cut is not None else None for _, rows in reference.read]
    written = [None if at is None else judged.written[at] for at in captured.written]
    dims = [None if at is None or (cut := reference.written[at].cut) is None else cut.dim for at in captured.written]
    if not all(one is None or one.itemwise(company) for one in [*matches, *written]):
        return None, "the call cannot be repeated on other items: which rows belong to which is not the same for all"
    scaled = tuple(
        at
        for at, (there, here) in enumerate(zip(captured.numbers, numbers, strict=False))
        if there is not None and here is not None and there != here and company.multiple(there, here)
    )
    inherited = [one for one in matches if one is not None]
    try:
        return (
            ItemCall(
                captured.func,
                captured.args,
                captured.kwargs,
                company.batch,
                tuple(_axis(one, dim, company, ()) for one, dim in zip(matches, cuts, strict=True)),
                tuple(_axis(one, dim, company, inherited) for one, dim in zip(written, dims, strict=True)),
                scaled,
                captured.settings,
            ),
            "",
        )
    except NotItemwiseError as error:
        return None, str(error)


def _axis(one: Match | None, dim: int | None, company: Company, inherited: Sequence[Match]) -> ItemAxis | None:
    """Where the items of a tensor are; a dimension whose rows differ is laid out as one of its size that was read."""
    if one is None or one.sizes is None or dim is None:
        return None
    outers = one.outers or next((other.outers for other in inherited if other.sizes == one.sizes), frozenset())
    outer = min(outers, default=1)
    return ItemAxis(dim, outer, company.multiple(*one.sizes) // outer)


def _isolated_difference(call: ItemCall, captured: _Capture, company: Company) -> RowDifference | None:
    """How far the call's rows on fewer items are from those in the run; ``None`` where it does not differ alone."""
    try:
        with in_force(call):
            left, _ = call.select(range(company.first, company.first + company.size)).run()
    except Exception:  # the op refuses fewer items, or the call needs more than its tensors
        return None
    return _measured(
        [
            (
                items_first(there, axis, company.batch)[company.first :][: company.size],
                items_first(here, axis, company.size),
            )
            if axis is not None
            else (there, here)
            for there, here, axis in zip(captured.left, left, call.outputs, strict=True)
        ]
    )


def _difference(
    judged: Judged, captured: _Capture, left: Sequence[torch.Tensor], company: Company
) -> RowDifference | None:
    """How far the rows of the call in the two runs are apart; ``None`` where they stand at other places."""
    pairs, moved = [], {one.sizes for one in judged.read.values() if one.agreement is Agreement.FOUND}
    for at, there, here in zip(captured.written, captured.left, left, strict=False):
        one = None if at is None else judged.written[at]
        if one is None or one.equal or one.sizes in moved:
            continue
        pairs.append((_part(there, here, company), here))
    return _measured(pairs)


def _part(there: torch.Tensor, here: torch.Tensor, company: Company) -> torch.Tensor:
    """What of a tensor of the reference stands beside one of the smaller run."""
    for dim, (long, short) in enumerate(zip(there.shape, here.shape, strict=False)):
        if long > short:
            there = there.narrow(dim, company.start(long, 1) if company.multiple(long, short) else 0, short)
    return there


def _measured(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> RowDifference | None:
    """The largest differences among pairs of tensors; ``None`` where all are equal."""
    found = [outputs.measure(there, here) for there, here in pairs if not outputs.bitwise_equal(there, here)]
    if not found:
        return None
    return RowDifference(
        max((one.max_abs for one in found if one.max_abs is not None), default=None),
        max((one.max_relative for one in found if one.max_relative is not None), default=None),
        max((one.max_ulp for one in found if one.max_ulp is not None), default=None),
    )
