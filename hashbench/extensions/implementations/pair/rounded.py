"""Where rounding parts: both sides in their own dtype, compared where they hold the same in float64."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from hashbench.core.divergence.align import align
from hashbench.core.divergence.content import ContentAlignment, ContentGraph
from hashbench.core.divergence.content_sums import contents_of, first_alike
from hashbench.core.divergence.slice import backward_slice
from hashbench.core.run.distance import relative, unit_roundoff
from hashbench.core.run.rounding import LIMIT, References, measure
from hashbench.extensions.implementations.pair.moments import LARGEST
from hashbench.extensions.implementations.pair.places import arranged, place_of, sample, text_of
from hashbench.extensions.implementations.pair.record import RecordedRun
from hashbench.extensions.implementations.pair.sides import GRADIENT
from hashbench.extensions.implementations.pair.verdict import ComparedResult, PartedPlace

SHOWN = 4
"""Places that are described, at most."""

_COARSE = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class LowPair:
    """Both sides in their own dtype, beside their runs in float64.

    Attributes:
        wide: the runs in float64.
        low: those in their own dtype.
        nodes: of each side: node in the low run of each node of the wide run.
    """

    wide: tuple[RecordedRun, RecordedRun]
    low: tuple[RecordedRun, RecordedRun]
    nodes: tuple[Mapping[str, str], Mapping[str, str]]


def low_pair(wide: tuple[RecordedRun, RecordedRun], low: tuple[RecordedRun, RecordedRun]) -> LowPair:
    """Find the same nodes in the runs of each side: casts that one of them lacks do not matter."""
    return LowPair(wide, low, (_same_nodes(wide[0], low[0]), _same_nodes(wide[1], low[1])))


def _same_nodes(wide: RecordedRun, low: RecordedRun) -> dict[str, str]:
    records = {
        wide.trace.records[i].id: low.trace.records[j].id
        for i, j in align(wide.trace.records, low.trace.records)
        if i is not None and j is not None
    }
    ours = wide.graph.nodes
    found = {name: name for name in ours if not ours[name].op and _same_shape(wide, low, name, name)}
    for name, output in wide.outputs.items():
        if output.record in records and name in ours:
            other = f"{records[output.record]}:{output.index}"
            if _same_shape(wide, low, name, other):
                found[name] = other
    return found


def _same_shape(wide: RecordedRun, low: RecordedRun, name: str, other: str) -> bool:
    found = low.graph.nodes.get(other)
    return found is not None and found.shape == wide.graph.nodes[name].shape


@dataclass(frozen=True, slots=True)
class ContentPairs:
    """Nodes of the low runs that hold the same in float64.

    Attributes:
        alternatives: of each node of (b) in float64: for each part, the nodes of (a) in its own dtype that hold it.
        own: its node in its own dtype.
    """

    alternatives: Mapping[str, tuple[tuple[str, ...], ...]]
    own: Mapping[str, str]

    def apart(self, pair: LowPair, node: str) -> bool:
        """Return whether the bits of a node of (b) differ from those of (a)."""
        digests = pair.low[0].digests
        parts, mine = self.alternatives[node], pair.low[1].digests[self.own[node]]
        if len(parts) == 1:
            return all(digests.get(other) != mine for other in parts[0])
        return all(sum(digests.get(part[pick], 0) for part in parts) % 2**64 != mine for pick in (0, -1))


def content_pairs(pair: LowPair, alignment: ContentAlignment) -> ContentPairs:
    """Collect what can be compared."""
    a, b = pair.wide
    same = _groups(a.graph)
    alternatives: dict[str, tuple[tuple[str, ...], ...]] = {}
    own: dict[str, str] = {}
    for node, partners in alignment.partners.items():
        mine = pair.nodes[1].get(node)
        parts = tuple(
            tuple(low for other in same.get(partner, (partner,)) if (low := pair.nodes[0].get(other)) is not None)
            for partner in partners
        )
        if mine is not None and mine in pair.low[1].digests and parts and all(parts) and b.graph.nodes[node].op:
            alternatives[node], own[node] = parts, mine
    return ContentPairs(alternatives, own)


def _groups(graph: ContentGraph) -> dict[str, tuple[str, ...]]:
    """Return for each node those that hold the same, itself included."""
    nodes = [node for node in graph if node.moments is not None]
    groups: defaultdict[int, list[str]] = defaultdict(list)
    first = first_alike(contents_of(nodes), weak=True)
    for node, index in zip(nodes, first, strict=True):
        groups[index].append(node.id)
    place = {name: (node.copies or not node.op, index) for index, (name, node) in enumerate(graph.nodes.items())}
    return {
        node.id: tuple(sorted(groups[index], key=place.__getitem__)) for node, index in zip(nodes, first, strict=True)
    }


def first_apart(pair: LowPair, pairs: ContentPairs) -> tuple[str, ...]:
    """Return the nodes of (b) whose bits differ from those of (a), and which read nothing that differs."""
    graph = pair.wide[1].graph
    nearest = _nearest(graph, pairs.alternatives.keys())
    roots = [node for result in graph.results.values() for node in nearest(result, including=True)]
    return backward_slice(roots, nearest, lambda node: pairs.apart(pair, node)).frontier


def _nearest(graph: ContentGraph, known: Iterable[str]) -> Callable[..., list[str]]:
    wanted = set(known)

    def nearest(node: str, *, including: bool = False) -> list[str]:
        todo = [node] if including else list(graph.nodes[node].reads)
        seen, found = set(), []
        while todo:
            each = todo.pop()
            if each in seen:
                continue
            seen.add(each)
            if each in wanted:
                found.append(each)
            else:
                todo += graph.nodes[each].reads
        return found

    return nearest


def rounded_place(
    pair: LowPair,
    pairs: ContentPairs,
    node: str,
    ours: Mapping[str, torch.Tensor],
    theirs: Mapping[str, torch.Tensor],
    exact: torch.Tensor | None,
) -> PartedPlace:
    """Describe a node at which rounding parts.

    Args:
        pair, pairs: both low runs beside those in float64, and what can be compared.
        node: of (b) in float64.
        ours, theirs: values of the low runs.
        exact: its value in float64.
    """
    a, b = pair.low
    mine, parts = pairs.own[node], pairs.alternatives[node]
    inputs = tuple((text_of(b, read), text_of(b, read)) for read in b.graph.nodes[mine].reads if b.graph.nodes[read].op)
    place, value = place_of(b, [mine]), theirs.get(mine)
    if len(parts) > 1 or value is None:
        return PartedPlace(place_of(a, [part[0] for part in parts]), place, inputs)
    same = {other: like for other in parts[0] if other in ours and (like := arranged(ours[other], value)) is not None}
    if not same:
        return PartedPlace(place_of(a, [parts[0][0]]), place, inputs)
    units, _, other = min((apart_by(like, value), place, name) for place, (name, like) in enumerate(same.items()))
    values, share = sample(same[other], value)
    note = _note(same[other], value) or _judged(same[other], value, exact)
    return PartedPlace(place_of(a, [other]), place, inputs, values=values, units=units, share=share, note=note)


def _judged(ours: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor | None) -> str:
    """Say if one side is farther from float64 than rounding explains, by the judge of compiled kernels."""
    if exact is None or exact.shape != theirs.shape or not theirs.is_floating_point() or ours.dtype != theirs.dtype:
        return ""
    exactly = exact.to(torch.float64)

    def rounded(seed: int, units: float) -> torch.Tensor:
        draw = torch.empty_like(exactly).uniform_(-units, units, generator=torch.Generator().manual_seed(seed))
        return exactly * (1.0 + unit_roundoff(theirs.dtype) * draw)

    ratios = [
        measure(value, References(own, lambda: exactly, rounded)).ratio
        for value, own in ((ours, theirs), (theirs, ours))
    ]
    for side, ratio in zip(("(a)", "(b)"), ratios, strict=True):
        if ratio > LIMIT:
            return f"{side} is {ratio:.0f} times farther from float64 than the other side and one rounding explain."
    return ""


def apart_by(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the largest difference of two tensors of one shape, in units of rounding of the coarser dtype.

    The unit of an element is the unit roundoff times its magnitude plus the root mean square of all.
    """
    if not (ours.is_floating_point() and theirs.is_floating_point()):
        return 0.0 if torch.equal(ours, theirs) else torch.inf
    roundoff = max(unit_roundoff(ours.dtype), unit_roundoff(theirs.dtype))
    a, b = ours.to(torch.float64), theirs.to(torch.float64)
    apart = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())
    usual = torch.where(a.abs() < LARGEST, a, 0.0)
    unit = roundoff * (usual.abs() + usual.square().mean().sqrt())
    quotient = torch.where(apart == 0, 0.0, apart / unit)
    return float(quotient.nan_to_num(nan=torch.inf).max()) if quotient.numel() else 0.0


def _note(ours: torch.Tensor, theirs: torch.Tensor) -> str:
    """Say where one side has a lower dtype, or only values of one."""
    if ours.dtype != theirs.dtype:
        names = (str(value.dtype).removeprefix("torch.") for value in (ours, theirs))
        return "(a) holds it in {}, (b) in {}.".format(*names)
    for side, value, other in (("(b)", theirs, ours), ("(a)", ours, theirs)):
        for dtype in _COARSE:
            finer = value.is_floating_point() and torch.finfo(value.dtype).eps < torch.finfo(dtype).eps
            if finer and _is_of(value, dtype) and not _is_of(other, dtype):
                name = str(dtype).removeprefix("torch.")
                return f"Each value of {side} is one of {name}: it was rounded to that dtype."
    return ""


def _is_of(value: torch.Tensor, dtype: torch.dtype) -> bool:
    return bool((value.to(dtype).to(value.dtype) == value).all())


def compared_results(a: RecordedRun, b: RecordedRun, names: Mapping[str, str]) -> tuple[ComparedResult, ...]:
    """Compare results of the low runs by name of (b)."""
    return tuple(_compared(theirs, a.results[ours], b.results[theirs]) for theirs, ours in names.items())


def compared_gradients(pair: LowPair, pairs: ContentPairs) -> tuple[ComparedResult, ...]:
    """Compare the gradients of parameters of (b) with those of (a) that hold the same in float64.

    Gradients of parts of a parameter are compared by their digests alone.
    """
    (a, b), found = pair.low, []
    held = {node: name for name, node in a.graph.results.items() if name.startswith(GRADIENT)}
    for full_name, node in pair.wide[1].graph.results.items():
        name = full_name.removesuffix(" (b)")
        if not name.startswith(GRADIENT) or name not in b.results:
            continue
        parts = pairs.alternatives.get(node, ())
        ours = next((held[other] for part in parts[:1] for other in part if len(parts) == 1 and other in held), None)
        if ours is not None:
            found.append(_compared(name, a.results[ours], b.results[name]))
        elif node not in pairs.alternatives:
            found.append(ComparedResult(name, None))
        elif not pairs.apart(pair, node):
            found.append(ComparedResult(name, 0.0, 0.0))
        else:
            found.append(ComparedResult(name, None))
    return tuple(found)


def _compared(name: str, ours: torch.Tensor, theirs: torch.Tensor) -> ComparedResult:
    if ours.numel() != theirs.numel() or ours.is_meta or theirs.is_meta:
        return ComparedResult(name, None)
    ours = ours.reshape(theirs.shape)
    if not ours.is_complex() and torch.equal(ours.to(torch.float64), theirs.to(torch.float64)):
        return ComparedResult(name, 0.0, 0.0)
    return ComparedResult(name, apart_by(ours, theirs), relative(theirs, ours))
