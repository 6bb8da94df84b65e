"""Which record of one run corresponds to which record of another, also where ops were inserted, removed or reordered.

Pure: no torch, no I/O. Records correspond when they are the same op in the same module, phase and iteration, in order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher

from hashbench.records import OpRecord

EDIT_LIMIT = 400
"""Runs that differ by at most so many insertions and removals are aligned exactly, in time ``n + edits²``."""

MATCHER_LIMIT = 3000
"""Longer stretches are aligned by anchors (ids that both have) in n log n; difflib is quadratic in the worst case."""

MATCHER_PAIRS = 100_000
"""So do stretches in which so many pairs of records look alike: 1000 and 2000 calls of one op took difflib 30 s."""

Pair = tuple[int | None, int | None]


def align(first: Sequence[OpRecord], second: Sequence[OpRecord]) -> list[Pair]:
    """Pairs of indices in order; ``(i, None)`` for a record that only the first run has, ``(None, j)`` for the second.

    Every index of both occurs exactly once, in increasing order on both sides.
    """
    keys_a, keys_b = [_key(record) for record in first], [_key(record) for record in second]
    head = _common(keys_a, keys_b)
    tail = _common(keys_a[head:][::-1], keys_b[head:][::-1])
    end_a, end_b = len(keys_a) - tail, len(keys_b) - tail
    pairs: list[Pair] = [(place, place) for place in range(head)]
    pairs += _middle(first, second, keys_a, keys_b, range(head, end_a), range(head, end_b))
    pairs += zip(range(end_a, len(keys_a)), range(end_b, len(keys_b)), strict=True)
    return pairs


def _key(record: OpRecord) -> Hashable:
    return record.phase, record.iteration, record.module, record.op


def _common(left: Sequence[Hashable], right: Sequence[Hashable]) -> int:
    if left == right:
        return len(left)
    return next(place for place in range(len(left) + 1) if left[place : place + 1] != right[place : place + 1])


def _middle(
    first: Sequence[OpRecord],
    second: Sequence[OpRecord],
    keys_a: Sequence[Hashable],
    keys_b: Sequence[Hashable],
    range_a: range,
    range_b: range,
) -> Iterator[Pair]:
    part_a, part_b = keys_a[range_a.start : range_a.stop], keys_b[range_b.start : range_b.stop]
    anchors = _few_edits(part_a, part_b)
    if anchors is None and _quick_for_difflib(part_a, part_b):
        blocks = SequenceMatcher(None, part_a, part_b, autojunk=False).get_matching_blocks()
        anchors = [(block.a + n, block.b + n) for block in blocks for n in range(block.size)]
    elif anchors is None:
        anchors = _anchors([first[i].id for i in range_a], [second[j].id for j in range_b])
    at_a, at_b = range_a.start, range_b.start
    for anchor_a, anchor_b in [*anchors, (len(range_a), len(range_b))]:
        stop_a, stop_b = range_a.start + anchor_a, range_b.start + anchor_b
        yield from ((place, None) for place in range(at_a, stop_a))
        yield from ((None, place) for place in range(at_b, stop_b))
        if stop_a < range_a.stop and stop_b < range_b.stop:
            yield stop_a, stop_b
        at_a, at_b = stop_a + 1, stop_b + 1


def _quick_for_difflib(left: Sequence[Hashable], right: Sequence[Hashable]) -> bool:
    if max(len(left), len(right)) > MATCHER_LIMIT:
        return False
    counts = Counter(right)
    return sum(counts[key] for key in left) <= MATCHER_PAIRS


def _few_edits(left: Sequence[Hashable], right: Sequence[Hashable]) -> list[tuple[int, int]] | None:
    """The longest common subsequence by Myers' greedy algorithm ("An O(ND) Difference Algorithm", 1986), as pairs of
    indices; ``None`` where it leaves more than :data:`EDIT_LIMIT` items over."""
    if abs(len(left) - len(right)) > EDIT_LIMIT:
        return None
    furthest = {1: 0}
    history: list[dict[int, int]] = []
    for edits in range(EDIT_LIMIT + 1):
        history.append(dict(furthest))
        for diagonal in range(-edits, edits + 1, 2):
            x = _step(furthest, diagonal, edits)
            while x < len(left) and x - diagonal < len(right) and left[x] == right[x - diagonal]:
                x += 1
            furthest[diagonal] = x
            if x >= len(left) and x - diagonal >= len(right):
                return _path(history, len(left), len(right))
    return None


def _step(furthest: Mapping[int, int], diagonal: int, edits: int) -> int:
    """How far in ``left`` the last edit brings us on this diagonal, before any matches."""
    if _came_down(furthest, diagonal, edits):
        return furthest[diagonal + 1]
    return furthest[diagonal - 1] + 1


def _came_down(furthest: Mapping[int, int], diagonal: int, edits: int) -> bool:
    return diagonal == -edits or (diagonal != edits and furthest[diagonal - 1] < furthest[diagonal + 1])


def _path(history: Sequence[Mapping[int, int]], x: int, y: int) -> list[tuple[int, int]]:
    matched: list[tuple[int, int]] = []
    for edits in range(len(history) - 1, -1, -1):
        start = _step(history[edits], x - y, edits)
        while x > start:
            x, y = x - 1, y - 1
            matched.append((x, y))
        x, y = (x, y - 1) if _came_down(history[edits], x - y, edits) else (x - 1, y)
    return matched[::-1]


def _anchors(ids_a: Sequence[str], ids_b: Sequence[str]) -> list[tuple[int, int]]:
    """The longest increasing chain of ids that both have (patience sorting); ids are unique within a run."""
    place_in_b = {name: place for place, name in enumerate(ids_b)}
    common = [(place, place_in_b[name]) for place, name in enumerate(ids_a) if name in place_in_b]
    tops: list[int] = []
    top_nodes: list[int] = []
    previous: list[int] = []
    for node, (_, place) in enumerate(common):
        pile = bisect_left(tops, place)
        previous.append(top_nodes[pile - 1] if pile else -1)
        tops[pile : pile + 1] = [place]
        top_nodes[pile : pile + 1] = [node]
    chain: list[tuple[int, int]] = []
    node = top_nodes[-1] if top_nodes else -1
    while node >= 0:
        chain.append(common[node])
        node = previous[node]
    return chain[::-1]
