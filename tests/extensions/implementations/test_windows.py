"""Tensors inside vectors: sums over windows, on numbers written by hand."""

from __future__ import annotations

import numpy as np
import pytest

from hashbench.extensions.implementations.windows import Guest, find, mixed_from


def guest(*elements: int) -> Guest:
    return Guest(len(elements), sum(elements) % 2**64)


def words(*elements: int) -> np.ndarray:
    return np.array(elements, np.uint64)


HOST = (5, 2**64 - 1, 7, 11, 13, 2**63, 17)


@pytest.mark.parametrize(
    ("guests", "parts", "gaps"),
    [
        ({"a": guest(5, 2**64 - 1, 7), "b": guest(11, 13, 2**63, 17)}, {"a": 0, "b": 3}, ()),
        ({"b": guest(13, 2**63), "a": guest(2**64 - 1, 7)}, {"a": 1, "b": 4}, ((0, 1), (3, 4), (6, 7))),
        ({"a": guest(1, 2)}, {}, ((0, 7),)),
        ({"a": guest(7, 11), "b": guest(7, 11)}, {"a": 2}, ((0, 2), (4, 7))),  # one place is for one of them
        ({"a": guest(5)}, {}, ((0, 7),)),  # a single element says nothing
        ({"a": guest(*HOST)}, {}, ((0, 7),)),  # a whole one is no part
    ],
)
def test_what_lies_in_a_vector(
    guests: dict[str, Guest], parts: dict[str, int], gaps: tuple[tuple[int, int], ...]
) -> None:
    found = find(words(*HOST), guests)
    assert (found.parts, found.gaps) == (parts, gaps)


def test_two_or_three_tensors_that_are_mixed() -> None:
    guests = {"q": guest(5, 13, 17), "k": guest(7, 2**63), "v": guest(11, 2**64 - 1), "x": guest(1, 2)}
    assert {*mixed_from(guest(*HOST), guests)} == {"q", "k", "v"}
    assert {*mixed_from(guest(7, 11, 2**63, 2**64 - 1), guests)} == {"k", "v"}
    assert mixed_from(guest(7, 11, 2**63, 0), guests) == ()
