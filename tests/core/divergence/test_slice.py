"""The truth table of the backward slice: which nodes it reaches, which of them are earliest, of which too little is
known."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hashbench.core.divergence.slice import Slice, backward_slice


def sliced(ways: str, differ: str, missing: str, roots: str) -> Slice[str]:
    """Slice a graph written as ``x>a a>b``: ``a`` reads ``x``, ``b`` reads ``a``."""
    read: dict[str, list[str]] = {}
    for way in ways.split():
        source, _, reader = way.partition(">")
        read.setdefault(reader, []).append(source)
    answers = dict.fromkeys(differ.split(), True) | dict.fromkeys(missing.split())
    return backward_slice(roots.split(), lambda node: read.get(node, ()), lambda node: answers.get(node, False))


TABLE = """
no root: a>b | a b | | -> | |
a root that agrees leads nowhere: a>b | a | | b -> | |
a root without predecessors: | a | | a -> a | a |
a chain is walked to its start: a>b b>c | a b c | | c -> a b c | a |
the walk stops where a predecessor agrees: a>b b>c c>d | a c d | | d -> c d | c |
what differs beside the way is not reached: a>c b>c a>side | a c side | | c -> a c | a |
two entries that do not meet are both earliest: a>c b>c | a b c | | c -> a b c | a b |
of two ways back the longer one counts too: a>b b>c a>c | a b c | | c -> a b c | a |
an entry among the roots: a>b | a b | | a b -> a b | a |
two roots, two parts: a>b c>d | a b c d | | b d -> a b c d | a c |
a node that reads itself: a>a a>b | a b | | b -> a b | a |
one argument given twice: a>b a>b | a b | | b -> a b | a |

# several ranks: a collective receives what its ranks gave
another rank's kernel behind a collective: 0.mm>0.all 1.mm>0.all | 0.all 1.mm | | 0.all -> 0.all 1.mm | 1.mm |
both ranks entered: 0.mm>0.all 1.mm>0.all | 0.mm 0.all 1.mm | | 0.all -> 0.all 0.mm 1.mm | 0.mm 1.mm |
from one rank to the other and back: 0.mm>1.sum 1.sum>0.sum | 0.mm 1.sum 0.sum | | 0.sum -> 0.mm 0.sum 1.sum | 0.mm |

# what is missing is said
the other rank has no trace: 0.mm>0.all 1.mm>0.all | 0.all | 1.mm | 0.all -> 0.all | | 0.all
one way is missing, the other one explains: a>c x>c | a c | x | c -> a c | a | c
what is behind a missing node is not walked: a>x x>b | a b | x | b -> b | | b
a missing root: a>x | a | x | x -> | |

# nodes that read each other: none of them is before the others
a circle without an entry: a>b b>a b>c | a b c | | c -> a b c | a b |
a circle with an entry: a>b b>c c>b c>d | a b c d | | d -> a b c d | a |
a circle behind a circle: a>b b>a b>c c>d d>c d>e | a b c d e | | e -> a b c d e | a b |
two circles: a>b b>a c>d d>c b>e d>e | a b c d e | | e -> a b c d e | a b c d |
a circle that reads what is missing: a>b b>a x>a | a b | x | b -> a b | | a
"""
"""``title: who reads whom | what differs | what is missing | roots -> reached | earliest | missing predecessors``."""

CASES = dict(row.split(": ") for row in TABLE.splitlines() if row and not row.startswith("#"))


@pytest.mark.parametrize("row", CASES.values(), ids=CASES)
def test_slice(row: str) -> None:
    given, expected = ([part.strip() for part in side.split("|")] for side in row.split("->"))
    found = sliced(*given)
    assert [" ".join(sorted(nodes)) for nodes in (found.reached, found.frontier, found.open)] == expected
    assert found.missing == set(given[2].split())


def test_what_is_missing_and_not_asked_for_is_not_reported() -> None:
    assert not sliced("x>a a>b", "b", "x", "b").missing


def test_each_node_is_asked_once() -> None:
    """Asking may compare tensors."""
    asked: list[int] = []

    def differs(node: int) -> bool:
        asked.append(node)
        return True

    found = backward_slice([4, 4, 3], lambda node: range(node), differs)
    assert sorted(asked) == [0, 1, 2, 3, 4]
    assert found.reached[4] == (0, 1, 2, 3)


def test_a_long_chain_needs_no_stack() -> None:
    found = backward_slice([50_000], lambda node: range(max(0, node - 1), node), lambda node: node >= 0)
    assert (len(found.reached), found.frontier) == (50_001, (0,))


EACH = st.lists(st.lists(st.integers(0, 8), max_size=2), min_size=9, max_size=9)
STATES = st.lists(st.sampled_from([True, True, True, False, None]), min_size=9, max_size=9)


@given(EACH, STATES, st.lists(st.integers(0, 8), min_size=2, max_size=2))
def test_graphs_by_definition(read: list[list[int]], differ: list[bool | None], roots: list[int]) -> None:
    """By closure over all pairs: who reads whom, directly or not."""
    nodes = range(9)
    found = backward_slice(roots, read.__getitem__, differ.__getitem__)
    before = {(a, b) for b in nodes for a in read[b] if differ[b] and differ[a] is not False}
    for _ in nodes:
        before |= {(a, d) for (a, b), (c, d) in itertools.product(before, before) if b == c}
    reached = {node for node in nodes if differ[node] and any(node == root or (node, root) in before for root in roots)}
    assert set(found.reached) == reached
    assert set(found.frontier) == {b for b in reached if all((b, a) in before for a in nodes if (a, b) in before)}
    assert set(found.open) == {node for node in reached if any(differ[one] is None for one in read[node])}
