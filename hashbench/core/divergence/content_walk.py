"""Where two runs whose contents are aligned part: back from their results to the first ops whose data agree."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from hashbench.core.divergence.content import ContentAlignment, ContentGraph, Kind, Parting
from hashbench.core.divergence.content_sums import DATA, contents_of, first_alike
from hashbench.core.divergence.slice import Slice, backward_slice

_REGION = 12
"""Ops of a region at most: a reader looks at few."""

_UNKNOWN_END = 5
"""The same where it is not known where both runs do the same again."""

_FAR = 64
"""Ops between a result and where its rows were chosen, at most."""

_AGAIN = 3
"""Ops of the same names in a row behind which both runs do the same again."""


def find_partings(a: ContentGraph, b: ContentGraph, alignment: ContentAlignment) -> tuple[Parting, ...]:
    """Find the ops of two runs that compute something else from data that agree; none if all results agree.

    A parting with neither ``a`` nor ``b`` says that its results differ, and that nothing was found that explains it.

    Args:
        a, b: the runs, with results of the same names.
        alignment: of their contents.
    """
    return _Walk(a, b, alignment).partings()


@dataclass(frozen=True, slots=True)
class _Walked:
    """One run, and the part of it that is not aligned.

    Attributes:
        graph: the run.
        order: place of each node in the order of calls.
        aligned: its nodes that are aligned.
        whole: those of which the other run has the whole content.
        roots: of each aligned node: names of contents that both sides know.
        kin: the same with the names of the tensors that it is a copy of, in part.
        fills: constants that are made of nothing and hold one round number.
        integral: nodes that hold integers only.
        beside: unaligned arithmetic on integers that follows from integers alone, such as that of a mask.
    """

    graph: ContentGraph
    order: Mapping[str, int]
    aligned: frozenset[str]
    whole: frozenset[str]
    roots: Mapping[str, frozenset[str]]
    kin: Mapping[str, frozenset[str]]
    fills: frozenset[str]
    integral: frozenset[str]
    beside: frozenset[str]

    def reads(self, node: str) -> tuple[str, ...]:
        """Return what a node read, each once."""
        return tuple(dict.fromkeys(read for read in self.graph.nodes[node].reads if read in self.graph.nodes))

    def data(self, node: str) -> tuple[str, ...]:
        """Return the reads through which a difference is followed: floating point data if there are any."""
        data = tuple(read for read in self.reads(node) if self.graph.nodes[read].kind in DATA)
        followed = tuple(read for read in data if read not in self.beside)
        if any(read not in self.integral for read in followed):
            return followed
        return tuple(read for read in data if read not in self.beside or self.graph.nodes[read].reads)

    def differing(self, nodes: Iterable[str]) -> tuple[str, ...]:
        """Return what these nodes read and what is not aligned."""
        return tuple(dict.fromkeys(read for node in nodes for read in self.reads(node) if read not in self.aligned))

    def rim(self, node: str) -> frozenset[str]:
        """Return the names of the contents of the aligned data that a node read."""
        return frozenset(name for read in self.data(node) for name in self.roots.get(read, ()))

    def near(self, node: str) -> frozenset[str]:
        """Return the names of these contents and of what they are copies of."""
        return frozenset(name for read in self.data(node) for name in self.kin.get(read, ()))

    def known(self, node: str) -> frozenset[str]:
        """Return the names of all aligned contents that a node read, those of weights too."""
        return frozenset(name for read in self.reads(node) for name in self.roots.get(read, ()))

    def back(self, results: Iterable[str]) -> Slice[str]:
        """Walk back from results that differ, through what is not aligned."""
        return backward_slice(results, self.data, lambda node: node not in self.aligned)

    def origins(self, nodes: Iterable[str]) -> tuple[str, ...]:
        """Return the earliest nodes that are not aligned among those from which ``nodes`` follow."""
        nodes = tuple(nodes)
        walked = backward_slice(nodes, self.reads, lambda node: node not in self.aligned and node not in self.fills)
        return self.sorted(walked.frontier) or self.sorted(nodes)

    def sorted(self, nodes: Iterable[str]) -> tuple[str, ...]:
        """Return nodes in order of calls."""
        return tuple(sorted(nodes, key=self.order.__getitem__))

    def chooser(self, node: str) -> str:
        """Return the copy of a part of a larger tensor from which a node follows; empty if there is none."""
        for _ in range(_FAR):
            data = self.data(node)
            larger = [read for read in data if self.graph.nodes[read].numel > self.graph.nodes[node].numel]
            if self.graph.nodes[node].copies and larger and len(data) == 1:
                return node
            if not data or (node in self.whole):
                return ""
            node = max(data, key=lambda read: self.graph.nodes[read].numel)
        return ""

    def op(self, node: str) -> str:
        """Return the name of an op without overload, the same in place and out of place."""
        return self.graph.nodes[node].op.rpartition(".")[0].rstrip("_") or self.graph.nodes[node].op

    def region(self, firsts: Iterable[str], reached: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
        """Return the unaligned ops that follow from the first ones, themselves included; one node of each call."""
        following = set(firsts)
        for node in self.sorted(reached):
            if not following.isdisjoint(reached[node]):
                following.add(node)
        calls: dict[str, str] = {}
        for node in self.sorted(following):
            if not calls or not self.graph.nodes[node].copies:
                calls.setdefault(node.rpartition(":")[0] or node, node)
        return tuple(calls.values())


class _Walk:
    def __init__(self, a: ContentGraph, b: ContentGraph, alignment: ContentAlignment) -> None:
        self._alignment = alignment
        self._a, self._b = _sides(a, b, alignment)
        self._differ = [name for name in dict.fromkeys([*b.results, *a.results]) if not self._agrees(name)]
        self._back_a, self._back_b = self._back(self._a), self._back(self._b)
        self._reach_a = self._reach(self._a, self._back_a)
        self._reach_b = self._reach(self._b, self._back_b)

    def _back(self, side: _Walked) -> Slice[str]:
        return side.back(side.graph.results[name] for name in self._differ if name in side.graph.results)

    def partings(self) -> tuple[Parting, ...]:
        mates = self._mates()
        merged: dict[object, Parting] = {}
        for group in self._groups(mates):
            parting = self._parting(group, mates)
            same = tuple(self._b.op(node) for node in parting.b), parting.a or group
            earlier = merged.get(same)
            names = dict.fromkeys((*(earlier.results if earlier else ()), *parting.results))
            merged[same] = replace(earlier or parting, results=tuple(names))
        found = sorted(merged.values(), key=self._importance)
        explained = {name for parting in found for name in parting.results}
        return (*found, *(self._unexplained(name) for name in self._differ if name not in explained))

    def _agrees(self, name: str) -> bool:
        """Return whether both results hold the same; what has no moments is the same if it follows from the same.

        A result that only one side has agrees if the other side holds it anywhere.
        """
        a, b = self._a.graph.results.get(name), self._b.graph.results.get(name)
        if a is None or b is None:
            return a in self._a.aligned or b in self._b.aligned
        first, second = self._a.graph.nodes[a], self._b.graph.nodes[b]
        if first.moments is None or second.moments is None:
            return b in self._b.aligned and self._a.roots.get(a) == self._b.roots.get(b)
        return first.moments.agree(second.moments, max(first.tolerance, second.tolerance))

    def _reach(self, side: _Walked, back: Slice[str]) -> dict[str, int]:
        """Return which of the results that differ follow from each node: a bit for each."""
        reach = dict.fromkeys(back.reached, 0)
        for bit, name in enumerate(self._differ):
            if (node := side.graph.results.get(name, "")) in reach:
                reach[node] |= 1 << bit
        for node in reversed(side.sorted(back.reached)):
            for read in back.reached[node]:
                reach[read] |= reach[node]
        return reach

    def _frontier(self, side: _Walked, back: Slice[str]) -> tuple[str, ...]:
        """Return the earliest nodes: ops on data, then draws; leaves only if there is nothing else."""
        nodes = side.sorted(back.frontier)
        ops = tuple(node for node in nodes if side.graph.nodes[node].kind in (Kind.COMPUTED, Kind.RANDOM))
        return ops or nodes

    def _mates(self) -> dict[str, str]:
        """Return for each earliest op of the second run that of the first, if one of its name reads the same data."""
        mates: dict[str, str] = {}
        free = list(self._frontier(self._a, self._back_a))
        for b in self._frontier(self._b, self._back_b):
            same = [a for a in free if self._a.op(a) == self._b.op(b) and self._a.near(a) & self._b.near(b)]
            if same:
                mates[b] = max(same, key=lambda a: self._likeness(a, b))
                free.remove(mates[b])
        return mates

    def _likeness(self, a: str, b: str) -> tuple[int, int, bool]:
        """Return a key that is larger the more two ops read the same."""
        return (
            len(self._a.rim(a) & self._b.rim(b)),
            len(self._a.known(a) & self._b.known(b)),
            self._a.graph.nodes[a].scalars == self._b.graph.nodes[b].scalars,
        )

    def _groups(self, mates: Mapping[str, str]) -> list[tuple[str, ...]]:
        """Join earliest ops that read the same constants, or the same data unless each has its own mate."""
        groups: list[tuple[set[str], set[object]]] = []
        for node in self._frontier(self._b, self._back_b):
            ties: set[object] = set(self._b.origins(self._b.differing([node])))
            if node in mates:
                ties |= set(self._a.origins(self._a.differing([mates[node]])))
            else:
                ties |= {("data", name) for name in self._b.rim(node)}
            ties.add(("call", node.rpartition(":")[0] or node))
            joined = [group for group in groups if group[1] & ties]
            groups = [group for group in groups if not group[1] & ties]
            groups.append(({node}.union(*(g[0] for g in joined)), ties.union(*(g[1] for g in joined))))
        return [self._b.sorted(nodes) for nodes, _ in groups]

    def _parting(self, group: tuple[str, ...], mates: Mapping[str, str]) -> Parting:
        others, firsts = self._counterparts(group, mates), group
        a: tuple[str, ...]
        b: tuple[str, ...]
        agree = self._agree(others, group)
        chosen = next(filter(None, (self._chosen(*pair) for pair in agree)), None)
        if chosen:
            a, b = (chosen[0],), (chosen[1],)
            others, group = a, b
            agree = self._agree(a, b)
        elif others and self._a.op(others[0]) == self._b.op(group[0]):
            a, b = others[:1], group[:1]
        else:
            a, b = self._regions(others, group)
        constants = tuple(
            side.origins(side.differing(firsts)) for side, firsts in ((self._a, others), (self._b, group))
        )
        reach = 0
        for node in firsts:
            reach |= self._reach_b[node]
        results = tuple(name for bit, name in enumerate(self._differ) if reach >> bit & 1)
        return Parting(a, b, agree, (constants[0], constants[1]), results)

    def _counterparts(self, group: tuple[str, ...], mates: Mapping[str, str]) -> tuple[str, ...]:
        """Return the ops of the first run that do what the group does, in order; empty if there are none."""
        if group[0] in mates:
            return tuple(dict.fromkeys(mates[node] for node in group if node in mates))
        near = frozenset[str]().union(*(self._b.near(node) for node in group))
        free = [node for node in self._frontier(self._a, self._back_a) if node not in mates.values()]
        if reading := tuple(node for node in free if self._a.near(node) & near):
            return reading
        op = self._b.op(group[0])
        same = [node.id for node in self._a.graph if node.op == op and self._a.near(node.id) & near]
        readers = [node for node in same if node not in self._a.aligned] or same
        named = [node for node in free if self._a.op(node) == op]
        return tuple([max(readers, key=lambda a: self._likeness(a, group[0]))] if readers else named[:1])

    def _chosen(self, a: str, b: str) -> tuple[str, str] | None:
        """Return where both sides chose other parts of one tensor, of equal size: copies that have no partner."""
        first, second = self._a.graph.nodes[a], self._b.graph.nodes[b]
        if a in self._a.whole or b in self._b.whole or first.numel != second.numel or self._same(a, b):
            return None
        ours, theirs = self._a.chooser(a), self._b.chooser(b)
        if not ours or not theirs or not self._same(self._a.data(ours)[0], self._b.data(theirs)[0]):
            return None
        return ours, theirs

    def _same(self, a: str, b: str) -> bool:
        first, second = self._a.graph.nodes[a], self._b.graph.nodes[b]
        tolerance = max(first.tolerance, second.tolerance)
        return first.moments is None or second.moments is None or first.moments.agree(second.moments, tolerance)

    def _regions(self, firsts_a: tuple[str, ...], firsts_b: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the ops from the first ones to where both runs do the same again: one op on one weight or datum."""
        a = self._a.region(firsts_a, self._back_a.reached)
        b = self._b.region(firsts_b, self._back_b.reached)
        if not a or not b:
            return a[:_UNKNOWN_END], b[:_UNKNOWN_END]
        if skipped := self._skipped(self._a, a, self._b, b[0]):
            return a[:skipped], b[:1]
        if skipped := self._skipped(self._b, b, self._a, a[0]):
            return a[:1], b[:skipped]
        names_a, names_b = ([side.op(node) for node in region] for side, region in ((self._a, a), (self._b, b)))
        for i, node in enumerate(b[1:], 1):
            known = self._b.known(node)
            for j, other in enumerate(a[1:], 1):
                again = names_a[j : j + _AGAIN] == names_b[i : i + _AGAIN] and len(names_b[i : i + _AGAIN]) == _AGAIN
                if again or (names_a[j] == names_b[i] and self._a.known(other) & known):
                    return a[:j][:_REGION], b[:i][:_REGION]
        return a[:_UNKNOWN_END], b[:_UNKNOWN_END]

    def _skipped(self, side: _Walked, region: Sequence[str], other: _Walked, first: str) -> int:
        """Return how many ops of a region the other side leaves out, if it begins with the op that follows them."""
        op, scalars = other.op(first), other.graph.nodes[first].scalars
        for index, node in enumerate(region[1:], 1):
            if side.op(node) == op and (
                side.rim(node) & other.rim(first)
                or (
                    index == 1
                    and side.graph.nodes[node].scalars == scalars
                    and other.near(first) <= side.near(region[0])
                )
            ):
                return index
        return 0

    def _agree(self, firsts_a: Sequence[str], firsts_b: Sequence[str]) -> tuple[tuple[str, str], ...]:
        """Pair what the first ops of both runs read."""
        pairs: dict[tuple[str, str], None] = {}
        given = [read for node in firsts_a for read in self._a.reads(node) if read in self._a.aligned]
        for read in dict.fromkeys(read for node in firsts_b for read in self._b.reads(node)):
            if roots := self._b.roots.get(read):
                same = next((other for other in given if self._a.roots.get(other, frozenset()) & roots), None)
                others = [same] if same else self._alignment.counterparts(read)
                pairs.update(dict.fromkeys((other, read) for other in others[:1]))
        return tuple(pairs)

    def _importance(self, parting: Parting) -> tuple[bool, bool, int, bool, int]:
        """Return the key that sorts: what computes floating point data before draws and masks, then by results."""
        node = self._b.graph.nodes[parting.b[0]]
        return (
            node.kind is not Kind.COMPUTED,
            node.id in self._b.integral,
            -len(parting.results),
            not (parting.a and self._a.op(parting.a[0]) == node.op),
            self._b.order[node.id],
        )

    def _unexplained(self, name: str) -> Parting:
        """Return what is known of a result that no op of the second run explains: the first one goes on, or nothing."""
        bit = 1 << self._differ.index(name)
        firsts = [node for node in self._frontier(self._a, self._back_a) if self._reach_a[node] & bit]
        a, b = self._a.graph.results.get(name), self._b.graph.results.get(name)
        if a and b and b in self._b.aligned and (chosen := self._chosen(a, b)):
            return Parting(chosen[:1], chosen[1:], self._agree(chosen[:1], chosen[1:]), results=(name,))
        if firsts and (b is None or self._alignment.partners.get(b)):
            return Parting(self._a.region(firsts, self._back_a.reached)[:_UNKNOWN_END], (), (), results=(name,))
        if a in self._a.aligned and b and self._alignment.partners.get(b):
            return Parting((a,), (b,), (), results=(name,))
        return Parting((), (), (), results=(name,))


def _sides(a: ContentGraph, b: ContentGraph, alignment: ContentAlignment) -> tuple[_Walked, _Walked]:
    names = _names(a)
    own_b = {
        node: frozenset(names.get(other, other) for other in counterparts)
        for node in alignment.partners
        if (counterparts := alignment.counterparts(node))
    }
    matched = frozenset[str]().union(*own_b.values())
    whole_b = frozenset(node for node, partners in alignment.partners.items() if partners)
    partners = {names.get(node, node) for node in whole_b for node in alignment.partners[node]}
    whole_a = frozenset(node for node in alignment.covered if names.get(node, node) in partners)
    own_a = {node: frozenset({names.get(node, node)}) for node in alignment.covered if names.get(node, node) in matched}
    fused_b = frozenset(node for node, partners in alignment.partners.items() if len(partners) > 1)
    wholes = {names.get(whole, whole) for whole in alignment.part_of.values()}
    fused_a = frozenset(node for node in own_a if names.get(node, node) in wholes)
    return (
        _side(a, alignment.covered, whole_a, own_a, fused_a),
        _side(b, frozenset(alignment.partners), whole_b, own_b, fused_b),
    )


def _side(
    graph: ContentGraph,
    aligned: frozenset[str],
    whole: frozenset[str],
    own: Mapping[str, frozenset[str]],
    fused: frozenset[str],
) -> _Walked:
    with_moments = [node for node in graph if node.moments is not None]
    contents = contents_of(with_moments)
    integral = frozenset(node.id for node, yes in zip(with_moments, contents.integral, strict=True) if yes)
    fills = frozenset(
        node.id
        for node, weak in zip(with_moments, contents.weak, strict=True)
        if weak and node.kind is Kind.CONSTANT and not node.reads
    )
    roots: dict[str, frozenset[str]] = {}
    kin: dict[str, frozenset[str]] = {}
    beside: set[str] = set()
    for node in graph:
        data = [read for read in node.reads if read in graph.nodes and graph.nodes[read].kind in DATA]
        if node.id in aligned:
            read = data or node.reads
            roots[node.id] = own.get(node.id) or frozenset(name for one in read for name in roots.get(one, ()))
            kin[node.id] = frozenset() if node.id in fused else roots[node.id]
            if node.copies:
                kin[node.id] |= frozenset(name for one in read for name in kin.get(one, ()))
        elif node.kind is not Kind.RANDOM and {node.id, *data} <= integral and {*data} <= aligned | beside:
            beside.add(node.id)
    order = {node: index for index, node in enumerate(graph.nodes)}
    return _Walked(graph, order, aligned, whole, roots, kin, fills, integral, frozenset(beside))


def _names(graph: ContentGraph) -> dict[str, str]:
    """Return for each node the first node that holds the same."""
    nodes = [node for node in graph if node.moments is not None]
    return {node.id: nodes[k].id for node, k in zip(nodes, first_alike(contents_of(nodes)), strict=True)}
