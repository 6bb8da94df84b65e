"""Describe nodes of two runs: ops, source lines, inputs, samples of values, and the columns of the page."""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from hashbench.core.divergence.content import EXACT, ContentAlignment, Parting
from hashbench.core.records import OpRecord
from hashbench.extensions.implementations.pair.record import RecordedRun
from hashbench.extensions.implementations.pair.verdict import OpPlace, PartedPlace

SAMPLES = 4
"""Elements that are shown."""

_READS_PARTS = "It reads a partial sum: a reduction over the ranks is missing before it, or this belongs behind one."

MOST_DIMENSIONS = 5
"""Of tensors whose dimensions are permuted to compare their elements."""


def parted_place(
    a: RecordedRun,
    b: RecordedRun,
    parting: Parting,
    ours: Mapping[str, torch.Tensor],
    theirs: Mapping[str, torch.Tensor],
) -> PartedPlace:
    """Describe a parting, with a sample of the values that its first ops wrote."""
    one, other = place_of(a, parting.a), place_of(b, parting.b)
    values: tuple[tuple[str, float, float], ...] = ()
    share = None
    if parting.a and parting.b and parting.a[0] in ours and parting.b[0] in theirs:
        value = theirs[parting.b[0]]
        like = arranged(ours[parting.a[0]], value)
        values, share = sample(like, value) if like is not None else ((), None)
    read = [(run, node) for pair in parting.agree for run, node in zip((a, b), pair, strict=True)]
    return PartedPlace(
        one,
        other,
        tuple((text_of(a, i), text_of(b, j)) for i, j in parting.agree),
        tuple(_constants(a, b, parting, one, other)),
        values,
        share=share,
        note=_READS_PARTS if any(run.outputs[node].partial for run, node in read) else "",
    )


def place_of(run: RecordedRun, nodes: Sequence[str]) -> OpPlace | None:
    """Return the place of a region; ``None`` if it has no op."""
    records: dict[str, OpRecord] = {}
    for node in nodes:
        record = run.record_of(node)
        if record is not None:
            records[record.id] = record
    if not records:
        return None
    first = next(iter(records.values()))
    output = next(run.outputs[node].text for node in nodes if run.outputs[node].record == first.id)
    return OpPlace(
        first.op,
        first.module,
        source_of(first),
        first.phase,
        tuple(record.op for record in records.values()),
        output,
        first.arguments,
        tuple(records),
    )


def source_of(record: OpRecord) -> str:
    """Return ``file:line code`` of the line that called an op; empty if it is not known."""
    where, _, _ = record.source.partition(" ")
    file, _, line = where.rpartition(":")
    # Read anew: another file of this name may be known from another folder. Cells of a notebook are in memory alone.
    lines = linecache.getlines(file) if file.startswith("<") else linecache.updatecache(file)
    code = lines[int(line) - 1].strip() if line.isdigit() and 0 < int(line) <= len(lines) else ""
    return f"{where} {code}".strip()


def text_of(run: RecordedRun, node: str) -> str:
    """Return what a node is: its op or name, dtype and shape."""
    output = run.outputs[node]
    return f"{run.graph.nodes[node].op or output.record} {output.text}"


def sample(ours: torch.Tensor, theirs: torch.Tensor) -> tuple[tuple[tuple[str, float, float], ...], float | None]:
    """Return the elements that differ most, with their places in (b), and the share of elements that differ; nothing
    where they do not correspond."""
    if ours.shape != theirs.shape or not ours.numel() or ours.is_complex() or theirs.is_complex():
        return (), None
    a, b = ours.to(torch.float64).reshape(-1), theirs.to(torch.float64).reshape(-1)
    apart = (a - b).abs().nan_to_num(nan=0.0, posinf=torch.inf)
    differing = apart > EXACT * torch.maximum(a.abs(), b.abs())
    shown = torch.topk(apart, min(SAMPLES, len(apart))).indices.sort().values
    values = tuple(
        (_index(int(place), theirs.shape), float(a[place]), float(b[place])) for place in shown if apart[place] > 0
    )
    return values, float(differing.double().mean())


def arranged(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor | None:
    """Return ``ours`` in the shape of ``theirs``: of all permutations of its dimensions that with the smallest median
    difference; ``None`` if the numbers of elements differ. A guess where both hold something else."""
    if ours.shape == theirs.shape:
        return ours
    if ours.numel() != theirs.numel() or not ours.numel() or ours.is_complex() or theirs.is_complex():
        return None
    wanted = theirs.to(torch.float64)
    found: list[tuple[float, torch.Tensor]] = []
    for first in (ours, theirs):
        if first.dim() > MOST_DIMENSIONS:
            continue
        for order in itertools.permutations(range(first.dim())):
            if first is ours:
                tried = ours.permute(order).reshape(theirs.shape)
            else:  # the inverse of permuting and reshaping theirs
                back = [order.index(place) for place in range(len(order))]
                tried = ours.reshape([theirs.shape[place] for place in order]).permute(back)
            distance = (tried.to(torch.float64) - wanted).abs().nan_to_num(nan=0.0, posinf=torch.inf)
            found.append((float(distance.median()), tried))
    return min(found, key=lambda item: item[0], default=(0.0, None))[1]


def columns(run: RecordedRun) -> tuple[tuple[str, str], ...]:
    """Return the ops of a run in order: record id and text."""
    ops = (record for record in run.trace.records if not record.inside)
    return tuple((record.id, f"{record.op}{f' in {record.module}' * bool(record.module)}") for record in ops)


def joined(a: RecordedRun, b: RecordedRun, alignment: ContentAlignment) -> tuple[tuple[str, str], ...]:
    """Return pairs of records that hold the same, (a) and (b)."""
    pairs = (
        (a.outputs[ours].record, b.outputs[node].record)
        for node, partners in alignment.partners.items()
        for ours in partners
        if a.graph.nodes[ours].op and b.graph.nodes[node].op
    )
    return tuple(dict.fromkeys(pairs))


def _constants(
    a: RecordedRun, b: RecordedRun, parting: Parting, one: OpPlace | None, other: OpPlace | None
) -> Iterator[tuple[str, str, str]]:
    if one is not None and other is not None and one.op == other.op and one.scalars != other.scalars:
        yield "scalar arguments", one.scalars, other.scalars
    first, second = parting.constants
    for ours, theirs in zip(first, second, strict=False):
        yield "constant", _made_at(a, ours), _made_at(b, theirs)
    for extra in first[len(second) :]:
        yield "constant", _made_at(a, extra), ""
    for extra in second[len(first) :]:
        yield "constant", "", _made_at(b, extra)


def _made_at(run: RecordedRun, node: str) -> str:
    record = run.record_of(node)
    source = source_of(record) if record is not None else ""
    scalars = f" ({record.arguments})" if record is not None and record.arguments else ""
    return f"{text_of(run, node)}{scalars}{f' at {source}' if source else ''}"


def _index(place: int, shape: Sequence[int]) -> str:
    return str([int(each) for each in np.unravel_index(place, tuple(shape))])
