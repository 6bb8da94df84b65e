"""Twenty layouts that hold the same weights, and thirty mistakes in them."""

from __future__ import annotations

import pytest

from hashbench.extensions.implementations.compare import compare_weights
from hashbench.extensions.implementations.state import state_of
from hashbench.extensions.implementations.verdict import WeightsVerdict
from tests.extensions.implementations.layouts import LAYOUTS, PLANTED, State, decoder


def compared(a: State, b: State) -> WeightsVerdict:
    return compare_weights(state_of(a, "a"), state_of(b, "b"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_same_weights_in_another_layout_are_equal(name: str) -> None:
    layout = LAYOUTS[name]
    original = layout.original(decoder())
    other = layout.make({key: each.clone() for key, each in original.items()})
    for verdict in (compared(original, other), compared(other, original)):
        assert verdict.differences == ()
        assert verdict.unknown == ()
        assert verdict.equal


@pytest.mark.parametrize("name", PLANTED)
def test_a_mistake_is_named(name: str) -> None:
    planted = PLANTED[name]
    layout = LAYOUTS[planted.layout]
    original = layout.original(decoder())
    other = layout.make({key: each.clone() for key, each in original.items()})
    planted.spoil(other)
    verdict = compared(original, other)
    assert len(verdict.differences) == 1 + planted.more, verdict.differences
    first = verdict.differences[0]
    assert first.kind == planted.kind, verdict.differences
    assert {*planted.names} <= {*first.a, *first.b}
    if planted.differing is not None:
        assert first.differing == planted.differing


@pytest.mark.parametrize("name", PLANTED)
def test_a_mistake_is_named_whichever_side_has_it(name: str) -> None:
    planted = PLANTED[name]
    layout = LAYOUTS[planted.layout]
    original = layout.original(decoder())
    other = layout.make({key: each.clone() for key, each in original.items()})
    planted.spoil(other)
    first = compared(other, original).differences[0]
    assert first.kind == planted.kind
    assert {*planted.names} <= {*first.a, *first.b}


def test_there_are_thirty_mistakes_and_twenty_layouts() -> None:
    assert len(PLANTED) >= 30
    assert len(LAYOUTS) >= 20
