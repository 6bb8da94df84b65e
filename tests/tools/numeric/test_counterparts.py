"""Which ops of two executions may be taken for the same; with whole traces, see ``test_first_difference.py``."""

from __future__ import annotations

import pytest

from hashbench.tools.numeric.counterparts import are_alike


@pytest.mark.parametrize(
    ("a", "b", "alike"),
    [
        ((2, 7, 32), (14, 32), True),
        ((1, 11, 1), (11,), True),
        ((7, 8), (14, 4), False),
        ((7, 8), (8, 7), False),
        ((7, 8), (7, 4), False),
        ((), (1,), True),
    ],
    ids=["joined", "ones", "equally many by chance", "turned", "fewer", "one element"],
)
def test_shapes_are_alike_where_dimensions_are_only_joined(
    a: tuple[int, ...], b: tuple[int, ...], *, alike: bool
) -> None:
    assert are_alike(a, b) is alike
    assert are_alike(b, a) is alike
