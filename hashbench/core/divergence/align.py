"""Align two runs: match their records, and track how much of each storage either run has written.

Records correspond when they are the same op in the same module, phase, iteration and thread, in order. The order is a
guess where ops repeat: of ``relu, relu`` and ``relu`` the first is the partner, also if the program left out that one.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from bisect import bisect_left
from collections.abc import Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hashbench.core.divergence.fills import Pair, fill_series, pair_fills
from hashbench.core.records import Leaf, OpRecord, Ref, TensorDigest, Trace

EDIT_LIMIT = 400
"""Runs that differ by at most this many insertions and removals are aligned exactly, in time ``n + edits²``; others by
anchors (ids that both have) in ``n log n``."""

SECOND = "2:"
"""Prefix of the id of a node that only the second run has."""


def align(first: Sequence[OpRecord], second: Sequence[OpRecord]) -> list[Pair]:
    """Return pairs of indices in order: ``(i, None)`` for a record of the first run alone, ``(None, j)`` of the second.

    Every index of both occurs exactly once, in increasing order on both sides. Records inside other ops are aligned
    within the pair of their callers: the number of calls that one op makes does not shift the matches inside another.
    """
    return list(_with_unmatched(_matched_by_caller(first, second), len(first), len(second)))


def _matched_by_caller(first: Sequence[OpRecord], second: Sequence[OpRecord]) -> list[tuple[int, int]]:
    """Match the program's own calls first, then the records inside each matched pair; return pairs of indices."""
    inside_a, inside_b = _by_caller(first), _by_caller(second)
    matched: list[tuple[int, int]] = []
    callers = [("", "")]
    while callers:
        a, b = callers.pop()
        of_a, of_b = inside_a[a], inside_b[b]
        for index_a, index_b in _matched([first[index] for index in of_a], [second[index] for index in of_b]):
            matched.append((of_a[index_a], of_b[index_b]))
            ids = first[of_a[index_a]].id, second[of_b[index_b]].id
            if ids[0] in inside_a and ids[1] in inside_b:
                callers.append(ids)
    matched.sort()
    in_order = all(before[1] < after[1] for before, after in itertools.pairwise(matched))
    return matched if in_order else _matched(first, second)  # several threads called at the same time


def _by_caller(records: Sequence[OpRecord]) -> Mapping[str, list[int]]:
    """Group the indices of records by the id of the op that contains them; ``""`` for the program's own calls."""
    found: dict[str, list[int]] = {"": []}
    for index, record in enumerate(records):
        found.setdefault(record.inside, []).append(index)
    return found


def _matched(first: Sequence[OpRecord], second: Sequence[OpRecord]) -> list[tuple[int, int]]:
    """Return the pairs of corresponding indices, in increasing order on both sides."""
    keys_a, keys_b = [_key(record) for record in first], [_key(record) for record in second]
    head = _common(keys_a, keys_b)
    tail = _common(keys_a[head:][::-1], keys_b[head:][::-1])
    inner_a, inner_b = slice(head, len(keys_a) - tail), slice(head, len(keys_b) - tail)
    edited = _few_edits(keys_a[inner_a], keys_b[inner_b])
    inner = edited
    if inner is None:
        inner = _anchors([record.id for record in first[inner_a]], [record.id for record in second[inner_b]])
    matched = [(index, index) for index in range(head)]
    matched += [(head + a, head + b) for a, b in inner]
    matched += zip(range(inner_a.stop, len(keys_a)), range(inner_b.stop, len(keys_b)), strict=True)
    return matched if edited is None else _moved(matched, first, second, keys_a, keys_b)


def _moved(
    matched: Sequence[tuple[int, int]],
    first: Sequence[OpRecord],
    second: Sequence[OpRecord],
    keys_a: Sequence[Hashable],
    keys_b: Sequence[Hashable],
) -> list[tuple[int, int]]:
    """Return as many pairs, in which more records agree: what one run alone did may as well lie earlier, where the
    records before it have the same keys as its last ones."""
    pairs = list(matched)
    for index, ((a, b), (next_a, next_b)) in enumerate(itertools.pairwise([*matched, (len(first), len(second))])):
        more_a, more_b = next_a - a - 1, next_b - b - 1
        if bool(more_a) == bool(more_b):
            continue
        gain = best = moved = 0
        for back in range(min(index + 1, EDIT_LIMIT)):
            old_a, old_b = a - back, b - back
            new_a, new_b = old_a + more_a, old_b + more_b
            if pairs[index - back] != (old_a, old_b) or keys_a[new_a] != keys_b[new_b]:
                break
            gain += _agree(first[new_a], second[new_b]) - _agree(first[old_a], second[old_b])
            if gain > best:
                best, moved = gain, back + 1
        for back in range(moved):
            pairs[index - back] = a - back + more_a, b - back + more_b
    return pairs


def _agree(a: OpRecord, b: OpRecord) -> bool:
    return (a.arguments, a.outputs, a.scalar) == (b.arguments, b.outputs, b.scalar)


def _key(record: OpRecord) -> Hashable:
    return record.phase, record.iteration, record.module, record.op, thread_of(record)


def thread_of(record: OpRecord) -> str:
    """Return the program's own thread that made a record (``t0`` of ``…#t0.2``), or ``""`` for the main program."""
    return record.id.rpartition("#")[2].rpartition(".")[0]


def _common(left: Sequence[Hashable], right: Sequence[Hashable]) -> int:
    """Return the length of the common prefix."""
    differing = (index for index, (a, b) in enumerate(zip(left, right, strict=False)) if a != b)
    return next(differing, min(len(left), len(right)))


def _with_unmatched(matched: Sequence[tuple[int, int]], count_a: int, count_b: int) -> Iterator[Pair]:
    """Yield all indices: before each matched pair the unmatched ones of the first run, then those of the second."""
    next_a = next_b = 0
    for a, b in [*matched, (count_a, count_b)]:
        yield from ((index, None) for index in range(next_a, a))
        yield from ((None, index) for index in range(next_b, b))
        if a < count_a:
            yield a, b
        next_a, next_b = a + 1, b + 1


def _few_edits(left: Sequence[Hashable], right: Sequence[Hashable]) -> list[tuple[int, int]] | None:
    """Return the longest common subsequence as pairs of indices, or ``None`` if it leaves more than :data:`EDIT_LIMIT`
    items.

    Myers' greedy algorithm ("An O(ND) Difference Algorithm", 1986).
    """
    if abs(len(left) - len(right)) > EDIT_LIMIT:
        return None
    furthest = {1: 0}
    history: list[dict[int, int]] = []
    for edits in range(EDIT_LIMIT + 1):
        history.append(dict(furthest))
        for diagonal in range(-edits, edits + 1, 2):
            x = _start(furthest, diagonal, edits)
            while x < len(left) and x - diagonal < len(right) and left[x] == right[x - diagonal]:
                x += 1
            furthest[diagonal] = x
            if x >= len(left) and x - diagonal >= len(right):
                return _path(history, len(left), len(right))
    return None


def _start(furthest: Mapping[int, int], diagonal: int, edits: int) -> int:
    """Return the index in ``left`` where the last edit ends on this diagonal, before any matches."""
    if _came_down(furthest, diagonal, edits):
        return furthest[diagonal + 1]
    return furthest[diagonal - 1] + 1


def _came_down(furthest: Mapping[int, int], diagonal: int, edits: int) -> bool:
    return diagonal == -edits or (diagonal != edits and furthest[diagonal - 1] < furthest[diagonal + 1])


def _path(history: Sequence[Mapping[int, int]], x: int, y: int) -> list[tuple[int, int]]:
    matched: list[tuple[int, int]] = []
    for edits in range(len(history) - 1, -1, -1):
        start = _start(history[edits], x - y, edits)
        while x > start:
            x, y = x - 1, y - 1
            matched.append((x, y))
        x, y = (x, y - 1) if _came_down(history[edits], x - y, edits) else (x - 1, y)
    return matched[::-1]


def _anchors(ids_a: Sequence[str], ids_b: Sequence[str]) -> list[tuple[int, int]]:
    """Return the longest increasing chain of common ids (patience sorting); ids are unique within a run."""
    index_in_b = {name: index for index, name in enumerate(ids_b)}
    common = [(index, index_in_b[name]) for index, name in enumerate(ids_a) if name in index_in_b]
    tops: list[int] = []
    top_nodes: list[int] = []
    previous: list[int] = []
    for node, (_, index) in enumerate(common):
        pile = bisect_left(tops, index)
        previous.append(top_nodes[pile - 1] if pile else -1)
        tops[pile : pile + 1] = [index]
        top_nodes[pile : pile + 1] = [node]
    chain: list[tuple[int, int]] = []
    node = top_nodes[-1] if top_nodes else -1
    while node >= 0:
        chain.append(common[node])
        node = previous[node]
    return chain[::-1]


# ------------------------------------------------------------------------------------------- uninitialised memory

OVERWRITING_ALL = frozenset(
    {"copy_", "fill_", "zero_"}
    | {"bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_"}
)
"""In-place ops that write every element and read none of the old content."""

OVERWRITING = OVERWRITING_ALL | {
    *("_index_put_impl_", "index_copy_", "index_fill_", "index_put_", "put_", "scatter_"),
}
"""In-place ops whose result does not depend on the old content."""


def name_of(record: OpRecord) -> str:
    """Return the op without namespace and overload: ``add_`` of ``aten.add_.Tensor``."""
    return record.op.partition(".")[2].partition(".")[0]


def _reads(record: OpRecord, ref: Ref) -> bool:
    """Return True if an op reads the content of this argument: not an ``out=`` buffer (which is passed by name), nor a
    target that it overwrites."""
    if record.collective is not None:
        return not ref.written or ref.argument in record.collective.contributed
    fills = name_of(record) in OVERWRITING or not ref.argument[:1].isdigit()
    return not (ref.written and fills)


def _overwrites_all(record: OpRecord, ref: Ref) -> bool:
    """Return True if an op writes every element of the tensor that it is given as this argument, and reads none."""
    return ref.written and name_of(record) in OVERWRITING_ALL


@dataclass(slots=True)
class _Chain:
    """The writes to one storage so far: its size in bytes, whether a recorded op made it, which one allocated it blank,
    and the parts written."""

    size: int
    made: bool = False
    allocation: str = ""
    covered: int = 0
    parts: set[tuple[object, ...]] = field(default_factory=set)

    def cover(self, offset: int, digest: TensorDigest) -> None:
        part = (offset, digest.dtype, digest.shape, digest.stride)
        size = _bytes(digest)
        self.size = max(self.size, size)
        if part not in self.parts:
            self.parts.add(part)
            self.covered += size

    def is_open(self) -> bool:
        return bool(self.allocation) and self.covered < self.size


class Coverage:
    """How much of each allocation, and of each ``only_filled`` leaf, a trace has written after each record.

    The writers of a storage form a chain, each record naming the one before it. A write covers the bytes of its output;
    two that overlap in part count twice. A record that writes several tensors is represented by the largest.
    """

    def __init__(self, trace: Trace, only_filled: Container[str] = ()) -> None:
        self._chains = {
            leaf.id: _Chain(_bytes(leaf.digest), allocation=leaf.id if leaf.id in only_filled else "")
            for leaf in trace.leaves
        }
        self._sizes = {name: chain.size for name, chain in self._chains.items()}
        self._allocations: dict[str, str] = {}
        self._collectives = {record.id for record in trace.records if record.collective}
        self._contents = {leaf.id: leaf.digest for leaf in trace.leaves}
        for record in trace.records:
            if record.outputs:
                self._enter(record, [ref for ref in record.inputs if ref.written and ref.source in self._chains])
        self._records = trace.records

    def allocation_behind(self, node: str) -> str:
        """Return the op that allocated the memory ``node`` wrote to, while part of it is unwritten; else ``""``."""
        return self._allocations.get(node, "")

    def writes_only_part(self, record: OpRecord, source: str) -> bool:
        """Return True if ``record``, which writes to the tensor that ``source`` wrote, leaves part of it unchanged."""
        return max(map(_bytes, record.outputs), default=0) < self._sizes.get(source, 0)

    def replaces(self, record: OpRecord, ref: Ref) -> bool:
        """Return True if ``record`` and the fills that follow it overwrite the whole of an argument without reading it.

        Never for a collective's output: gloo's Work copies the received data when it is waited for.
        """
        overwrites = _overwrites_all(record, ref) and ref.source not in self._collectives
        return overwrites and (not self.writes_only_part(record, ref.source) or record.id in self._begins)

    def content(self, node: str) -> TensorDigest | None:
        """Return the digest of everything that ``node`` left in its memory, if a single digest covers it."""
        return self._contents.get(node)

    @functools.cached_property
    def _begins(self) -> frozenset[str]:
        """The first of fills that together fill all of a memory."""
        series = ([self._records[index] for index in fills] for fills in fill_series(self._records, _overwrites_all))
        return frozenset(fills[0].id for fills in series if self._fill_all(fills))

    def _fill_all(self, series: Sequence[OpRecord]) -> bool:
        """Return True if fills write every byte of memory that a recorded op made."""
        before, filled = series[0].inputs[0].source, 0
        for begin, end in sorted(_span(fill.inputs[0].offset, digest) for fill in series for digest in fill.outputs):
            filled = max(filled, end) if begin <= filled else filled
        return before in self._chains and self._chains[before].made and filled >= self._sizes[before]

    def _enter(self, record: OpRecord, written: Sequence[Ref]) -> None:
        largest = max(map(_bytes, record.outputs))
        chains = [self._chains[ref.source] for ref in written]
        if not chains or record.blank:
            chains = [_Chain(largest, made=True, allocation=record.id if record.blank else "")]
        else:
            for chain, ref, digest in zip(chains, written, record.outputs[-len(written) :], strict=False):
                chain.cover(ref.offset, digest)
        chain = next((chain for chain in chains if chain.is_open()), chains[0])
        self._chains[record.id] = chain
        self._sizes[record.id] = max(chain.size for chain in chains)
        if chain.is_open():
            self._allocations[record.id] = chain.allocation
        if len(record.outputs) == 1 and largest >= self._sizes[record.id] and not record.blank:
            self._contents[record.id] = record.outputs[0]


def _bytes(digest: TensorDigest) -> int:
    return math.prod(digest.shape) * _item_size(digest.dtype)


def _span(offset: int, digest: TensorDigest) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage and the one past its last; of one with gaps, nothing."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(digest.shape, digest.stride, strict=False))
    item, length = _item_size(digest.dtype), math.prod(digest.shape)
    return offset * item, (offset + length * (extent == length or not digest.stride)) * item


@functools.cache
def _item_size(dtype: str) -> int:
    """Return the bytes of one element, by the first number in the dtype: ``float8_e4m3fn`` has 1, ``bool`` too."""
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits[0]) // 8 if bits is not None else 1)


# ------------------------------------------------------------------------------------------------- two runs as one


@dataclass(frozen=True)
class PairedRuns:
    """Two aligned runs. A node is the id of a record or leaf of the first run, or :data:`SECOND` and the id for one
    that only the second run has.

    Attributes:
        first, second: the traces.
        records: the pairs of records by node, in order.
        position: the index of a node among the records of the first run.
        node_of: the node of an id of the second run.
        reordered: nodes of fills that the runs made in another order
            (:class:`~hashbench.core.divergence.fills.PairedFills`).
    """

    first: Trace
    second: Trace
    records: Mapping[str, tuple[OpRecord | None, OpRecord | None]]
    position: Mapping[str, int]
    node_of: Mapping[str, str]
    reordered: Mapping[str, str] = field(default_factory=dict)

    @property
    def hashed(self) -> bool:
        """True if both runs have digests of inputs."""
        return self.first.hashed_inputs and self.second.hashed_inputs

    @functools.cached_property
    def drawn_inside(self) -> frozenset[str]:
        """The nodes of ops that contain a seeded op: the inner op's generator state is judged, not the outer one's."""
        first = {record.inside for record in self.first.records if record.rng and record.inside}
        second = {self.node_of[record.inside] for record in self.second.records if record.rng and record.inside}
        return frozenset(first | second)

    @functools.cached_property
    def coverage(self) -> Coverage:
        """The write coverage of the first run; computed only once something differs."""
        return Coverage(self.first, self.only_filled)

    @functools.cached_property
    def other_coverage(self) -> Coverage:
        """The write coverage of the second run."""
        return Coverage(self.second, self.only_filled)

    @functools.cached_property
    def only_filled(self) -> Mapping[str, tuple[Leaf, Leaf]]:
        """Leaves whose content differs between the runs and that are written before any op reads them, such as a buffer
        for an ``out=``: their old content has no effect."""
        changed = {
            node: (a, b)
            for node, (a, b) in self.leaves.items()
            if a is not None and b is not None and a.kind == "other" and a.digest != b.digest
        }
        for record in (record for pair in self.records.values() for record in pair if changed and record is not None):
            for ref in record.inputs:
                if ref.source in changed and _reads(record, ref):
                    del changed[ref.source]
        return changed

    @functools.cached_property
    def leaves(self) -> Mapping[str, tuple[Leaf | None, Leaf | None]]:
        """The pairs of leaves by node."""
        others = {self.node_of[leaf.id]: leaf for leaf in self.second.leaves}
        return {leaf.id: (leaf, others.pop(leaf.id, None)) for leaf in self.first.leaves} | {
            node: (None, leaf) for node, leaf in others.items()
        }

    @functools.cached_property
    def opaque(self) -> str:
        """The node of the first record, of either run, that a trace cannot look into, or ``""``."""
        pairs = self.records.items()
        opaque = (node for node, (a, b) in pairs if (a is not None and a.opaque) or (b is not None and b.opaque))
        return next(opaque, "")

    @functools.cached_property
    def order(self) -> Mapping[str, int]:
        """The index of every node, leaves before records."""
        return {node: index for index, node in enumerate([*self.leaves, *self.records])}

    def place(self, node: str) -> float:
        """Return where a node lies among the records of both runs, infinity if nowhere; a leaf lies where it was first
        read."""
        if node in self.leaves:
            index, (first, _) = self.position[node], self.leaves[node]
            records = (self.first if first is not None else self.second).records
            if index >= len(records):
                return float("inf")
            node = records[index].id if first is not None else self.node_of[records[index].id]
        return self.order.get(node, float("inf"))

    def reads(self, node: str) -> Iterator[tuple[str, Ref]]:
        """Yield what a record read, in either run, and the node that wrote it."""
        a, b = self.records.get(node, (None, None))
        if a is not None:
            yield from ((ref.source, ref) for ref in a.inputs)
        if b is not None:
            yield from ((self.node_of[ref.source], ref) for ref in b.inputs)

    def read_by(self, node: str) -> Iterator[str]:
        """Yield the nodes that a record read, in either run."""
        return (source for source, _ in self.reads(node))

    def carried_by(self, node: str) -> Iterator[str]:
        """Yield the nodes from which a difference may have come through a tensor that a record read."""
        a, b = self.records.get(node, (None, None))
        if a is not None and b is not None and len(a.inputs) == len(b.inputs):
            for ref_a, ref_b in zip(a.inputs, b.inputs, strict=True):
                if self.carries(ref_a, ref_b) and not self.replaced(a, b, ref_a, ref_b):
                    yield from (ref_a.source, self.node_of[ref_b.source])
            return
        if a is not None:
            yield from (ref.source for ref in a.inputs if not self._replaced_in_first(a, ref))
        if b is not None:
            yield from (self.node_of[ref.source] for ref in b.inputs if not self._replaced_in_second(b, ref))

    def wrote(self, node: str) -> bool:
        """Return True if either record wrote a tensor or returned a scalar; a view does neither."""
        return any(record is not None and (record.outputs or record.scalar) for record in self.records[node])

    def same_place(self, a: Ref, b: Ref) -> bool:
        """Return True if two reads cover the same part of the same node's output."""
        return a.source == self.node_of[b.source] and a.offset == b.offset

    def same_content(self, a: Ref, b: Ref) -> bool:
        """Return True if reads of different nodes saw equal content, as the reader of an extra copy does."""
        if a.digest and b.digest:
            return a.digest == b.digest
        content = self.coverage.content(a.source)
        return content is not None and content == self.other_coverage.content(b.source)

    def replaced(self, first: OpRecord, second: OpRecord, a: Ref, b: Ref) -> bool:
        """Return True if both records overwrite the whole argument, so that none of its old content survives."""
        return self._replaced_in_first(first, a) and self._replaced_in_second(second, b)

    def _replaced_in_first(self, record: OpRecord, ref: Ref) -> bool:
        return _overwrites_all(record, ref) and self.coverage.replaces(record, ref)

    def _replaced_in_second(self, record: OpRecord, ref: Ref) -> bool:
        return _overwrites_all(record, ref) and self.other_coverage.replaces(record, ref)

    def carries(self, a: Ref, b: Ref) -> bool:
        """Return True if a difference may enter through this argument. A written argument keeps what lies beside the
        write."""
        if a.source == self.node_of[b.source]:
            return a.written or not self.hashed or a.digest != b.digest
        return a.offset != b.offset or not self.same_content(a, b)


def pair(first: Trace, second: Trace, pairs: Iterable[Pair] | None = None) -> PairedRuns:
    """Align two runs, unless the ``pairs`` of their records are given, and assign every record and leaf of both to a
    node."""
    leaves = {leaf.id: leaf.position for leaf in first.leaves}
    node_of = {leaf.id: leaf.id if leaf.id in leaves else SECOND + leaf.id for leaf in second.leaves}
    position = {**{node_of[leaf.id]: leaf.position for leaf in second.leaves}, **leaves}
    records: dict[str, tuple[OpRecord | None, OpRecord | None]] = {}
    last = 0
    aligned = align(first.records, second.records) if pairs is None else [*pairs]
    fills = pair_fills(first.records, second.records, aligned, _overwrites_all)
    for index_a, index_b in fills.pairs:
        a = None if index_a is None else first.records[index_a]
        b = None if index_b is None else second.records[index_b]
        last = last if index_a is None else index_a
        node = a.id if a is not None else SECOND + b.id if b is not None else ""
        if b is not None:
            node_of[b.id] = node
        records[node] = (a, b)
        position[node] = last
    return PairedRuns(first, second, records, position, node_of, fills.reordered)
