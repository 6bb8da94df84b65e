"""The truth table of the backward slice: which nodes it reaches, which of them are earliest, of which too little is
known."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping

import pytest

from hashbench.compare.slice import Slice, backward_slice


def sliced(ways: str, *, differ: str, roots: str, missing: str = "") -> Slice[str]:
    """Slice a graph written as ``x>a a>b``: ``a`` reads ``x``, ``b`` reads ``a``."""
    read: dict[str, list[str]] = {}
    for way in ways.split():
        source, _, reader = way.partition(">")
        read.setdefault(reader, []).append(source)
    unknown = set(missing.split())
    return backward_slice(
        roots.split(),
        lambda node: read.get(node, ()),
        lambda node: None if node in unknown else node in differ.split(),
    )


def told(nodes: Iterable[str]) -> str:
    return " ".join(sorted(nodes))


CASES: Mapping[str, tuple[dict[str, str], str, str, str]] = {
    # what is given; what is reached; the earliest of these; those of which a predecessor is missing
    "no root": ({"ways": "a>b", "differ": "a b", "roots": ""}, "", "", ""),
    "a root that agrees leads nowhere": ({"ways": "a>b", "differ": "a", "roots": "b"}, "", "", ""),
    "a root without predecessors": ({"ways": "", "differ": "a", "roots": "a"}, "a", "a", ""),
    "a chain is walked to its start": ({"ways": "a>b b>c", "differ": "a b c", "roots": "c"}, "a b c", "a", ""),
    "the walk stops where a predecessor agrees": (
        {"ways": "a>b b>c c>d", "differ": "a c d", "roots": "d"},
        "c d",
        "c",
        "",
    ),
    "what differs beside the way is not reached": (
        {"ways": "a>c b>c a>side", "differ": "a c side", "roots": "c"},
        "a c",
        "a",
        "",
    ),
    "two entries that do not meet are both earliest": (
        {"ways": "a>c b>c", "differ": "a b c", "roots": "c"},
        "a b c",
        "a b",
        "",
    ),
    "of two ways back the longer one counts too": (
        {"ways": "a>b b>c a>c", "differ": "a b c", "roots": "c"},
        "a b c",
        "a",
        "",
    ),
    "an entry among the roots": ({"ways": "a>b", "differ": "a b", "roots": "a b"}, "a b", "a", ""),
    "two roots, two parts": ({"ways": "a>b c>d", "differ": "a b c d", "roots": "b d"}, "a b c d", "a c", ""),
    "a node that reads itself": ({"ways": "a>a a>b", "differ": "a b", "roots": "b"}, "a b", "a", ""),
    "one argument given twice": ({"ways": "a>b a>b", "differ": "a b", "roots": "b"}, "a b", "a", ""),
    # several ranks: a collective receives from all that its ranks gave
    "the other rank's kernel is behind a collective": (
        {"ways": "0.relu>0.reduce 1.relu>0.reduce", "differ": "0.reduce 1.relu", "roots": "0.reduce"},
        "0.reduce 1.relu",
        "1.relu",
        "",
    ),
    "both ranks entered": (
        {"ways": "0.relu>0.reduce 1.relu>0.reduce", "differ": "0.relu 0.reduce 1.relu", "roots": "0.reduce"},
        "0.reduce 0.relu 1.relu",
        "0.relu 1.relu",
        "",
    ),
    "from one rank to the other and back": (
        {"ways": "0.relu>1.sum 1.sum>0.sum", "differ": "0.relu 1.sum 0.sum", "roots": "0.sum"},
        "0.relu 0.sum 1.sum",
        "0.relu",
        "",
    ),
    # what is missing is said
    "the other rank has no trace": (
        {"ways": "0.relu>0.reduce 1.relu>0.reduce", "differ": "0.reduce", "missing": "1.relu", "roots": "0.reduce"},
        "0.reduce",
        "",
        "0.reduce",
    ),
    "one way is missing, the other one explains": (
        {"ways": "a>c x>c", "differ": "a c", "missing": "x", "roots": "c"},
        "a c",
        "a",
        "c",
    ),
    "what is behind a missing node is not walked": (
        {"ways": "a>x x>b", "differ": "a b", "missing": "x", "roots": "b"},
        "b",
        "",
        "b",
    ),
    "a missing root": ({"ways": "a>x", "differ": "a", "missing": "x", "roots": "x"}, "", "", ""),
    # nodes that read each other: none of them is before the others
    "a circle without an entry": ({"ways": "a>b b>a b>c", "differ": "a b c", "roots": "c"}, "a b c", "a b", ""),
    "a circle with an entry": (
        {"ways": "a>b b>c c>b c>d", "differ": "a b c d", "roots": "d"},
        "a b c d",
        "a",
        "",
    ),
    "a circle behind a circle": (
        {"ways": "a>b b>a b>c c>d d>c d>e", "differ": "a b c d e", "roots": "e"},
        "a b c d e",
        "a b",
        "",
    ),
    "two circles": (
        {"ways": "a>b b>a c>d d>c b>e d>e", "differ": "a b c d e", "roots": "e"},
        "a b c d e",
        "a b c d",
        "",
    ),
    "a circle that reads what is missing": (
        {"ways": "a>b b>a x>a", "differ": "a b", "missing": "x", "roots": "b"},
        "a b",
        "",
        "a",
    ),
}


@pytest.mark.parametrize(("given", "reached", "frontier", "unexplained"), CASES.values(), ids=CASES)
def test_slice(given: dict[str, str], reached: str, frontier: str, unexplained: str) -> None:
    found = sliced(**given)
    assert (told(found.reached), told(found.frontier), told(found.open)) == (reached, frontier, unexplained)
    assert found.missing == set(given.get("missing", "").split())


def test_what_is_missing_and_not_asked_for_is_not_reported() -> None:
    assert not sliced("x>a a>b", differ="b", roots="b", missing="x").missing


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


@pytest.mark.parametrize("seed", range(20))
def test_random_graphs_by_definition(seed: int) -> None:
    """By closure over all pairs: who reads whom, directly or not."""
    chosen = random.Random(seed)
    nodes = range(9)
    read = {node: chosen.sample(nodes, chosen.randint(0, 2)) for node in nodes}
    differ = {node: chosen.choice((True, True, True, False, None)) for node in nodes}
    roots = chosen.sample(nodes, 2)
    found = backward_slice(roots, read.__getitem__, differ.__getitem__)
    before = {(a, b) for b in nodes for a in read[b] if differ[b] and differ[a] is not False}
    for _ in nodes:
        before |= {(a, d) for (a, b), (c, d) in itertools.product(before, before) if b == c}
    reached = {node for node in nodes if differ[node] and any(node == root or (node, root) in before for root in roots)}
    assert set(found.reached) == reached
    assert set(found.frontier) == {b for b in reached if all((b, a) in before for a in nodes if (a, b) in before)}
    assert set(found.open) == {node for node in reached if any(differ[one] is None for one in read[node])}
