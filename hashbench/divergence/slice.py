"""The causal slice: everything that differs and from which given results can be reached, walking back. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hashbench.divergence.align import PairedRuns
from hashbench.divergence.introduce import Differences
from hashbench.records import OpRecord, Result


def causal_slice(runs: PairedRuns, found: Differences, roots: Iterable[str]) -> set[str]:
    """The nodes that differ, or pass a difference on, from which a difference may have come to the roots."""
    reached: set[str] = set()
    waiting = list(_differing(found, roots))
    while waiting:
        node = waiting.pop()
        if node in reached:
            continue
        reached.add(node)
        source = found.sources.get(node)
        if source is not None and source.node != node:
            waiting.append(source.node)
        waiting += _differing(found, _edges(runs, found, node))
    return reached


def _differing(found: Differences, nodes: Iterable[str]) -> Iterator[str]:
    return (node for node in nodes if node in found.tainted or node in found.differs)


def _edges(runs: PairedRuns, found: Differences, node: str) -> Iterator[str]:
    """The nodes from which a difference may have come into this one."""
    yield from found.edges.get(node, ())
    a, b = runs.records.get(node, (None, None))
    if a is None or b is None or len(a.inputs) != len(b.inputs):
        yield from runs.read_by(node)
        return
    for ref_a, ref_b in zip(a.inputs, b.inputs, strict=True):
        if runs.carries(ref_a, ref_b):
            yield from (ref_a.source, runs.node_of[ref_b.source])


def roots(runs: PairedRuns, found: Differences, pairs: Iterable[tuple[Result | None, Result | None]]) -> Iterator[str]:
    """The nodes that wrote results; for a result that is a Python value, the records that returned it."""
    for a, b in pairs:
        if a is not None and a.source:
            yield a.source
        if b is not None and b.source:
            yield runs.node_of[b.source]
        for value in (x for x in (a, b) if x is not None and not x.source):
            yield from (node for node in found.scalars if _returned(runs.records[node], value.digest.value))


def _returned(records: tuple[OpRecord | None, OpRecord | None], value: str) -> bool:
    return any(record is not None and record.scalar == value for record in records)
