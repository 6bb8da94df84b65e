"""Which record of one run corresponds to which record of another, also where ops were inserted, removed or reordered.

Pure: no torch, no I/O. Records correspond when they are the same op in the same module, phase and iteration, in order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterator, Sequence
from difflib import SequenceMatcher

from hashbench.records import OpRecord

MATCHER_LIMIT = 3000
"""Longer stretches are aligned by anchors (ids that both have) in n log n; difflib is quadratic in the worst case."""

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
    if len(range_a) <= MATCHER_LIMIT and len(range_b) <= MATCHER_LIMIT:
        part_a, part_b = keys_a[range_a.start : range_a.stop], keys_b[range_b.start : range_b.stop]
        blocks = SequenceMatcher(None, part_a, part_b, autojunk=False).get_matching_blocks()
        anchors = [(block.a + n, block.b + n) for block in blocks for n in range(block.size)]
    else:
        anchors = _anchors([first[i].id for i in range_a], [second[j].id for j in range_b])
    at_a, at_b = range_a.start, range_b.start
    for anchor_a, anchor_b in [*anchors, (len(range_a), len(range_b))]:
        stop_a, stop_b = range_a.start + anchor_a, range_b.start + anchor_b
        yield from ((place, None) for place in range(at_a, stop_a))
        yield from ((None, place) for place in range(at_b, stop_b))
        if stop_a < range_a.stop and stop_b < range_b.stop:
            yield stop_a, stop_b
        at_a, at_b = stop_a + 1, stop_b + 1


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
