"""Align what follows from its reads: copies, contents that are equal by chance, and the same op on shared rows."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

import numpy as np

from hashbench.core.divergence.content import ContentGraph, ContentNode, Moments
from hashbench.core.divergence.content_sums import DATA, contents_of, first_alike

Found = MutableMapping[str, tuple[str, ...]]


class Following:
    """Go through a run in order of calls and align what follows from aligned reads alone.

    * A copy of aligned nodes, unless it chose among elements of a constant or set some to zero.
    * A node that holds zeros or one round number, if one of its op on the other side holds the same. A constant of that
      kind needs no op.
    * An op whose rows cannot be compared, because rows are one element long or as long as the padding, if the first run
      calls it with the same scalars on what corresponds to its reads.

    Args:
        graphs: both runs.
        found: the aligned nodes of each; added to.
        part_of, rows: see :class:`~hashbench.core.divergence.content.ContentAlignment`; ``rows`` is added to.
    """

    def __init__(
        self,
        graphs: tuple[ContentGraph, ContentGraph],
        found: tuple[Found, Found],
        part_of: Mapping[str, str],
        rows: Found,
    ) -> None:
        self._graphs, self._found, self._part_of, self._rows = graphs, found, part_of, rows
        self._chances = tuple(_chances(graph) for graph in graphs)
        self._names = _names(graphs[0])
        self._own = {self._names.get(node, node) for node in self._counterparts_of_all()}
        self._calls: dict[tuple[str, str], list[ContentNode]] = {}
        for node in graphs[0]:
            self._calls.setdefault((node.op, node.scalars), []).append(node)

    def copies(self, side: int) -> None:
        """Align nodes of one side."""
        graph, found = self._graphs[side], self._found[side]
        chances, others = self._chances[side], set(self._chances[1 - side].values())
        values = {chance.value for chance in others} | {_NOTHING}
        for node in graph:
            if node.id in found:
                continue
            settled = all(read in found for read in node.reads if read in graph.nodes)
            chance = chances.get(node.id)
            if chance is not None and not chance.data and chance.value in values:
                found[node.id] = ()
            elif not settled or not (node.reads or chance):
                continue
            elif node.moments is None or (node.copies and _holds_all(graph, node)) or (chance and chance in others):
                found[node.id] = ()
            elif side == 1 and (call := self._same_call(node)):
                found[node.id], self._rows[node.id] = (), (call,)
                self._found[0].setdefault(call, ())
                self._own.add(self._names.get(call, call))

    def _same_call(self, node: ContentNode) -> str:
        """Return the call of the first run that this one is a part of, or holds in part; empty if there is none."""
        reads = [self._roots(1, read) for read in node.reads]
        if not node.op or node.copies or not self._by_rows(node):
            return ""
        for other in self._calls.get((node.op, node.scalars), ()):
            if len(other.reads) == len(reads) and node.shape != other.shape and _rows_differ(node, other):
                theirs = [self._roots(0, read) for read in other.reads]
                if all(ours == others or ours & others for ours, others in zip(reads, theirs, strict=True)):
                    return other.id
        return ""

    def _by_rows(self, node: ContentNode) -> bool:
        """Return whether a node read something that corresponds by rows alone."""
        graph = self._graphs[1]
        waiting = list(node.reads)
        while waiting:
            read = waiting.pop()
            if read in self._rows:
                return True
            if not self._found[1].get(read) and read in graph.nodes and graph.nodes[read].copies:
                waiting += graph.nodes[read].reads
        return False

    def _counterparts_of_all(self) -> set[str]:
        mapped = [*self._found[1].values(), *self._rows.values()]
        return {node for nodes in mapped for node in nodes} | set(self._part_of.values())

    def _roots(self, side: int, node: str) -> frozenset[str]:
        """Return names of contents of the first run that a node holds or is a copy of."""
        if side:
            known = self._found[1].get(node) or self._rows.get(node)
            names = {self._names.get(other, other) for other in known or ()}
            if node in self._part_of:
                names = {self._names.get(self._part_of[node], self._part_of[node])}
        else:
            names = {self._names.get(node, node)} & self._own
        entry = self._graphs[side].nodes.get(node)
        if names or entry is None or not entry.copies:
            return frozenset(names)
        return frozenset[str]().union(*(self._roots(side, read) for read in entry.reads))


def _rows_differ(node: ContentNode, other: ContentNode) -> bool:
    return node.rows is None or other.rows is None or node.shape[-1:] != other.shape[-1:]


def _names(graph: ContentGraph) -> dict[str, str]:
    nodes = [node for node in graph if node.moments is not None]
    return {node.id: nodes[k].id for node, k in zip(nodes, first_alike(contents_of(nodes)), strict=True)}


def _holds_all(graph: ContentGraph, node: ContentNode) -> bool:
    """Return whether nothing was chosen or set to zero where that may be the mistake.

    Of data a slice counts as a copy, not what is as large as its origin and holds something else (``triu``). Of
    constants nothing counts but what holds all elements equally often (``cat``, ``expand``).
    """
    known = [graph.nodes[read] for read in dict.fromkeys(node.reads) if read in graph.nodes]
    reads = [read for read in known if read.kind in DATA] or known
    total = sum(read.numel for read in reads)
    moments = [read.moments for read in reads if read.moments is not None]
    if node.moments is None or len(moments) < len(reads):
        return True
    if node.kind in DATA and (total != node.numel or len(reads) != 1):
        return True
    whole, times = sum(moments, _NO_MOMENTS), max(1, node.numel // max(total, 1))
    repeated = sum([whole] * min(times, _MOST), _NO_MOMENTS)
    return node.moments.agree(repeated, node.tolerance) or node.moments.agree(whole, node.tolerance)


_MOST = 4096
_NO_MOMENTS = Moments((0.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 0.0))


@dataclass(frozen=True, slots=True)
class _Chance:
    """What a weak node must have in common with one of the other side; a constant only the value."""

    op: str
    data: bool
    value: tuple[float, ...]


_NOTHING = (0.0, 0.0, 0.0, 0.0)


def _chances(graph: ContentGraph) -> dict[str, _Chance]:
    nodes = [node for node in graph if node.moments is not None]
    contents = contents_of(nodes)
    zero = contents.zero
    chances = {}
    for k in np.flatnonzero(contents.weak).tolist():
        powers = [0.0] * 3 if zero[k] else [float(f"{x:.9g}") for x in contents.sums[k, :3]]
        chances[nodes[k].id] = _Chance(nodes[k].op, nodes[k].kind in DATA, (*powers, float(contents.special[k])))
    return chances
