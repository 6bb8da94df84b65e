"""Two traces of models that need not run the same ops, to the first place at which they part. Pure: no torch.

``divergence.find`` judges two runs of one model, which should agree in every bit. Here the executions may have other
ops, fewer ops (fused, folded, compiled), and values that are only close. So how well two records agree is given by the
caller, who has the values; and records correspond

1. as ``alignment.align`` finds them: the same op in the same module, phase and iteration, in order. Where the modules'
   paths say nothing (compiled code has none), by op, phase and iteration alone: whichever aligns more ops;
2. what is left over between two that correspond: the last op of a module in one, and of the same module in the other,
   if what they leave has the same shape. One *replaces* the other (a quantized linear layer a plain one).

From the results that differ, the graphs are walked back through whatever differs. The earliest place of both executions
that differs is one end of the answer. From there the walk goes on, through ops that only one execution has, to where
everything that is read agrees: that is the other end, and nearly always the same place. A difference that meets
agreement on every way to a result has healed and is not blamed: a convolution with a batch norm folded into it differs
from the plain one, and what reads the batch norm agrees again.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hashbench.divergence.align import Pair, align
from hashbench.records import Leaf, OpRecord, Ref, Trace
from hashbench.tools.numeric.findings import Parting


class Agreement(enum.IntEnum):
    """How well two values agree."""

    BITWISE = 0
    WITHIN = 1
    BEYOND = 2


LEVELS = {"bitwise": Agreement.WITHIN, "tolerance": Agreement.BEYOND}
"""From which agreement on two values count as different."""


@dataclass(frozen=True, slots=True)
class Node:
    """A place in one or both executions: records that correspond, or a leaf. ``place`` orders them."""

    place: int
    a: OpRecord | Leaf | None
    b: OpRecord | Leaf | None
    replaced: bool = False


def find(
    first: Trace,
    second: Trace,
    *,
    level: str,
    agreement: Callable[[str, str], Agreement],
    differing: Sequence[str],
) -> Parting:
    """Where two executions part.

    Args:
        first, second: their traces, with names of modules, leaves and results that correspond.
        level: ``tolerance`` or ``bitwise``.
        agreement: of what two records or leaves, given by the ids in the first and in the second trace, left.
        differing: names of the results that differ at this level; at least one.
    """
    return _Search(first, second, LEVELS[level], agreement).parting(level, differing)


class _Search:
    def __init__(
        self, first: Trace, second: Trace, threshold: Agreement, agreement: Callable[[str, str], Agreement]
    ) -> None:
        self.first, self.second = first, second
        self.threshold, self.agreement = threshold, agreement
        self.nodes = list(_nodes(first, second))
        self.node_of_a = {node.a.id: node for node in self.nodes if node.a is not None}
        self.node_of_b = {node.b.id: node for node in self.nodes if node.b is not None}
        self.differs = {node.place for node in self.nodes if self._differs(node)}

    def parting(self, level: str, differing: Sequence[str]) -> Parting:
        reached = self._back_from(self._sources(differing))
        known = min((node for node in reached if _is_pair(node)), key=_place_of, default=None)
        way = reached if known is None else self._back_from([known])
        entered = [node for node in way if not any(p.place in self.differs for p in self._read_by(node))]
        records = [node for node in self.nodes if isinstance(node.a or node.b, OpRecord)]
        places = {node.place for node in reached}
        found = Parting(
            level,
            "unseen",
            op="",
            module="",
            phase="",
            iteration=0,
            detail=f"no recorded op explains that {differing[0]} differs",
            healed=sum(
                1 for node in records if _is_pair(node) and node.place in self.differs and node.place not in places
            ),
            aligned=sum(1 for node in records if _is_pair(node)),
            only_before=sum(1 for node in records if node.b is None),
            only_after=sum(1 for node in records if node.a is None),
        )
        if not entered:
            return found
        node = min(entered, key=_place_of)
        until = _named(known) if known is not None and node is not known else ""
        return self._described(replace(found, until=until), node)

    def _differs(self, node: Node) -> bool:
        """Whether what is left at a node differs. An op that only one execution runs does, unless it leaves nothing; a
        tensor that only one reads does not, for the op that reads it says more."""
        a, b = node.a, node.b
        if a is None or b is None:
            return isinstance(a or b, OpRecord) and not _is_silent(a or b)
        if isinstance(a, OpRecord) and isinstance(b, OpRecord):
            if a.scalar != b.scalar:
                return True
            if _is_silent(a) and _is_silent(b):
                return False
        return self.agreement(a.id, b.id) >= self.threshold

    def _sources(self, differing: Sequence[str]) -> list[Node]:
        """What wrote the results that differ."""
        found = []
        for trace, known in ((self.first, self.node_of_a), (self.second, self.node_of_b)):
            sources = {result.name: result.source for result in trace.results}
            found += [known[sources[name]] for name in differing if sources.get(name)]
        return found

    def _back_from(self, nodes: Sequence[Node]) -> list[Node]:
        """Whatever differs and leads to one of these, which are among them if they do."""
        waiting, found = list(nodes), dict[int, Node]()
        while waiting:
            node = waiting.pop()
            if node.place in self.differs and node.place not in found:
                found[node.place] = node
                waiting.extend(self._read_by(node))
        return list(found.values())

    def _read_by(self, node: Node) -> Iterator[Node]:
        for record, known in ((node.a, self.node_of_a), (node.b, self.node_of_b)):
            if isinstance(record, OpRecord):
                yield from (known[ref.source] for ref in record.inputs if not self._is_target(ref, known))

    def _is_target(self, ref: Ref, known: Mapping[str, Node]) -> bool:
        """Whether ``ref`` is memory that the op only fills: that of ``out=``, which compiled code allocates unseen."""
        source = known[ref.source].a or known[ref.source].b
        return ref.written and isinstance(source, Leaf) and source.kind == "other"

    # ------------------------------------------------------------------------------------------------- words

    def _described(self, found: Parting, node: Node) -> Parting:
        record = node.a or node.b
        if isinstance(record, Leaf):
            return self._described_leaf(found, node, record)
        if not isinstance(record, OpRecord):
            return found
        a, b = (item if isinstance(item, OpRecord) else None for item in (node.a, node.b))
        kind = "only before" if b is None else "only after" if a is None else "replaced" if node.replaced else "op"
        index = None if a is None else next(n for n, item in enumerate(self.first.records) if item.id == a.id)
        return replace(
            found,
            kind=kind,
            op=record.op,
            module=record.module,
            phase=record.phase,
            iteration=record.iteration,
            detail=_detail(kind, a, b),
            before=_call(a),
            after=_call(b),
            name="" if a is None else a.id,
            other="" if b is None else b.id,
            index=index,
        )

    def _described_leaf(self, found: Parting, node: Node, leaf: Leaf) -> Parting:
        trace = self.first if node.a is not None else self.second
        reader = trace.records[leaf.position] if leaf.position < len(trace.records) else None
        name = leaf.id.partition("/")[2]
        what = f"the {leaf.kind} {name}" if leaf.kind != "other" else f"a tensor that no recorded op wrote ({leaf.id})"
        return replace(
            found,
            kind=leaf.kind,
            op=reader.op if reader is not None else "",
            module=reader.module if reader is not None else "",
            phase=reader.phase if reader is not None else "",
            iteration=reader.iteration if reader is not None else 0,
            detail=f"{what} holds other values",
            name=leaf.id,
            other=leaf.id,
            index=leaf.position if node.a is not None else None,
        )


def _place_of(node: Node) -> int:
    return node.place


def _named(node: Node) -> str:
    """A place in words."""
    record = node.a or node.b
    if not isinstance(record, OpRecord):
        return "" if record is None else f"the {record.kind} {record.id.partition('/')[2]}"
    return f"{record.op}{f' in {record.module}' if record.module else ''} ({record.phase})"


def _is_pair(node: Node) -> bool:
    return node.a is not None and node.b is not None


def _is_silent(item: OpRecord | Leaf | None) -> bool:
    """A view, which writes nothing, or an allocation, whose content is no result."""
    return isinstance(item, OpRecord) and (item.blank or not (item.outputs or item.scalar))


def _detail(kind: str, a: OpRecord | None, b: OpRecord | None) -> str:
    if a is None or b is None:
        return f"only the execution {kind.removeprefix('only ')} runs this op, and everything that it reads agrees"
    if kind == "replaced":
        return f"{b.op} in place of {a.op}, and what they read agrees"
    if a.arguments != b.arguments:
        return "its other arguments differ"
    if [ref.argument for ref in a.inputs] != [ref.argument for ref in b.inputs]:
        return "it is given other tensors"
    return "what it leaves differs although everything that it reads agrees"


def _call(record: OpRecord | None) -> str:
    return "" if record is None else f"{record.op}({record.arguments})"


# ----------------------------------------------------------------------------------------------- correspondence


def _nodes(first: Trace, second: Trace) -> Iterator[Node]:
    """Leaves, then records, in order of execution."""
    leaves_b = {leaf.id: leaf for leaf in second.leaves}
    leaves: list[tuple[Leaf | None, Leaf | None]] = [(leaf, leaves_b.pop(leaf.id, None)) for leaf in first.leaves]
    leaves += [(None, leaf) for leaf in leaves_b.values()]
    pairs, replaced = correspondence(first.records, second.records)
    at: dict[int, list[tuple[Leaf | None, Leaf | None]]] = {}
    place_a = {a: place for place, (a, _) in enumerate(pairs) if a is not None}
    place_b = {b: place for place, (_, b) in enumerate(pairs) if b is not None}
    for one, other in leaves:
        place = place_a.get(one.position) if one is not None else place_b.get(other.position) if other else None
        at.setdefault(len(pairs) if place is None else place, []).append((one, other))
    count = 0
    for place in range(len(pairs) + 1):
        for one, other in at.get(place, ()):
            yield Node(count, one, other)
            count += 1
        if place < len(pairs):
            a, b = pairs[place]
            record_a = None if a is None else first.records[a]
            record_b = None if b is None else second.records[b]
            yield Node(count, record_a, record_b, replaced=(a, b) in replaced)
            count += 1


def correspondence(first: Sequence[OpRecord], second: Sequence[OpRecord]) -> tuple[list[Pair], set[Pair]]:
    """The records that correspond, in order, and which of these pairs replace one op by another."""
    by_module = align(first, second)
    by_op = align([replace(record, module="") for record in first], [replace(record, module="") for record in second])
    pairs = max((by_module, by_op), key=_matches)  # of equals the first
    return _with_replacements(pairs, first, second)


def _matches(pairs: Sequence[Pair]) -> int:
    return sum(1 for a, b in pairs if a is not None and b is not None)


def _with_replacements(
    pairs: Sequence[Pair], first: Sequence[OpRecord], second: Sequence[OpRecord]
) -> tuple[list[Pair], set[Pair]]:
    found: list[Pair] = []
    replaced: set[Pair] = set()
    stretch: list[Pair] = []
    for pair in [*pairs, (-1, -1)]:
        if pair[0] is None or pair[1] is None:
            stretch.append(pair)
            continue
        joined = _replacements(stretch, first, second)
        replaced |= joined
        found += _joined(stretch, joined)
        stretch = []
        if pair != (-1, -1):
            found.append(pair)
    return found, replaced


def _replacements(stretch: Sequence[Pair], first: Sequence[OpRecord], second: Sequence[OpRecord]) -> set[Pair]:
    """In one stretch without correspondence: by module, the last op that wrote something in each of the two."""
    last_a = {_place(first[a]): a for a, _ in stretch if a is not None and not _is_silent(first[a])}
    last_b = {_place(second[b]): b for _, b in stretch if b is not None and not _is_silent(second[b])}
    pairs = sorted((last_a[place], last_b[place]) for place in last_a if place in last_b)
    found: set[Pair] = set()
    reached = -1
    for a, b in pairs:
        if b > reached and _shapes(first[a]) == _shapes(second[b]):
            found.add((a, b))
            reached = b
    return found


def _place(record: OpRecord) -> tuple[str, int, str]:
    return record.phase, record.iteration, record.module


def _shapes(record: OpRecord) -> tuple[int, ...]:
    return record.outputs[0].shape if record.outputs else ()


def _joined(stretch: Sequence[Pair], joined: set[Pair]) -> Iterator[Pair]:
    """The stretch with replacements as pairs; what stood before them stays before them, on both sides."""
    left_a = [a for a, _ in stretch if a is not None]
    left_b = [b for _, b in stretch if b is not None]
    for end_a, end_b in [*sorted(joined), (None, None)]:
        while left_a and (end_a is None or left_a[0] < end_a):
            yield left_a.pop(0), None
        while left_b and (end_b is None or left_b[0] < end_b):
            yield None, left_b.pop(0)
        if end_a is not None:
            yield left_a.pop(0), left_b.pop(0)
