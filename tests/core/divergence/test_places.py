"""Parts of a memory: what lies apart, and when two runs left the same in it."""

from __future__ import annotations

import pytest

from hashbench.core.divergence.places import Parts, Place, Written
from hashbench.core.records import Ref


def written(offset: int, content: str = "a", shape: tuple[int, ...] = (3,), stride: tuple[int, ...] = (1,)) -> Written:
    place = Place(offset, "float32", shape, stride)
    return Written(Ref("0", "x", offset, written=True), place, content)


@pytest.mark.parametrize(
    ("first", "second", "agree"),
    [
        pytest.param([written(0)], [written(0)], True, id="the same"),
        pytest.param([written(0)], [written(3)], False, id="another part"),
        pytest.param([written(0), written(3)], [written(3), written(0)], True, id="another order"),
        pytest.param([written(0), written(3, "b")], [written(3), written(0, "b")], False, id="other contents"),
        pytest.param([written(0), written(2)], [written(2), written(0)], False, id="parts that overlap"),
        pytest.param(
            [written(at, stride=(2,)) for at in (0, 1)],
            [written(at, stride=(2,)) for at in (1, 0)],
            True,
            id="columns in another order",
        ),
        pytest.param(
            [written(at, stride=(2,)) for at in (0, 2)],
            [written(at, stride=(2,)) for at in (2, 0)],
            False,
            id="columns that overlap",
        ),
        pytest.param(
            [written(at, shape=(1 << 16,), stride=(2,)) for at in (0, 1)],
            [written(at, shape=(1 << 16,), stride=(2,)) for at in (1, 0)],
            False,
            id="too many elements with gaps to count",
        ),
        pytest.param(
            [written(0), written(3), written(0, "b")],
            [written(3), written(0), written(0, "b")],
            True,
            id="a part written twice",
        ),
    ],
)
def test_runs_that_left_the_same_in_each_part_agree(first: list[Written], second: list[Written], agree: bool) -> None:
    parts = Parts()
    for a, b in zip(first, second, strict=True):
        parts.add(a, b)
    assert parts.agree() == agree


@pytest.mark.parametrize(
    ("offset", "dtype", "before"),
    [(6, "float32", True), (5, "float32", False), (0, "float32", False), (6, "uint8", False)],
)
def test_what_is_read_behind_all_parts_is_beside_them(offset: int, dtype: str, before: bool) -> None:
    parts = Parts()
    parts.add(written(0), written(3))
    assert parts.lie_before(offset, [dtype]) == before


def test_a_place_in_words() -> None:
    assert str(Place(3, "float32", (2, 3), (3, 1))) == "offset 3 shape [2, 3]"
    assert str(Place(0, "float32", (3,), (3,))) == "offset 0 shape [3] stride [3]"
    assert Place(7, "float32", (0,), (1,)).end == 7
