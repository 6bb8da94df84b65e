"""Which tensors of two dumps correspond, and what is no correspondence: pure, on arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from hashbench.extensions.implementations.digest import TensorHeader
from hashbench.extensions.implementations.dtypes import Bits
from hashbench.extensions.implementations.dumps.align import align, first_without
from hashbench.extensions.implementations.dumps.dump import DumpedTensor
from hashbench.extensions.implementations.dumps.sketch import Sketch, sketch_of

TOLERANCE = 8 * 2.0**-24
RNG = np.random.default_rng(5)
X, Y, Z = (RNG.normal(size=(2, 6, 16)) for _ in range(3))


@dataclass(frozen=True)
class Held:
    """Float64 arrays; a source of tensors."""

    array: np.ndarray[Any, Any]

    @property
    def headers(self) -> dict[str, TensorHeader]:
        return {"": TensorHeader(self.array.shape, "float64")}

    def read(self, name: str, start: int, stop: int) -> Bits:
        assert not name
        return np.ascontiguousarray(self.array).reshape(-1)[start:stop].view("<u8")


def side(*arrays: Any, names: Sequence[str] = ()) -> list[Sketch]:
    return [
        sketch_of(DumpedTensor(names[place] if names else f"t{place}", Held(np.asarray(each)), ""))
        for place, each in enumerate(arrays)
    ]


PADDED = np.concatenate([X, np.zeros((2, 3, 16))], 1)

SAME: dict[str, tuple[Any, Any, str]] = {
    "the same bits": (X, X, "bit by bit"),
    "rounded": (X, X * (1 + 2.0**-25), "rows"),
    "tokens x width": (X, X.reshape(12, 16) * (1 + 2.0**-25), "rows"),
    "rows in another order": (X, X[::-1] * (1 + 2.0**-25), "rows"),
    "heads apart": (X, X.reshape(2, 6, 2, 8) * (1 + 2.0**-25), "rows"),
    "padded": (X, PADDED, "rows"),
    "packed": (PADDED, X, "rows"),
    "transposed": (X[0], X[0].T * (1 + 2.0**-25), "sums"),
    "short rows": (X[..., :3], X[..., :3] * (1 + 2.0**-25), "sums"),
}


@pytest.mark.parametrize(("a", "b", "how"), SAME.values(), ids=SAME)
def test_the_same_contents_are_partners(a: Any, b: Any, how: str) -> None:
    of_a, of_b = align(side(Y, a), side(b), TOLERANCE)
    assert (of_b[0].places, of_b[0].how, {*of_a}) == ((1,), how, {1})


OTHER: dict[str, tuple[Any, Any]] = {
    "scaled": (X, X * 1.0001),
    "one row": (X, np.concatenate([X[:1], X[1:] * [[[1]] * 5 + [[1.001]]]])),
    "one element": (X, X + np.eye(6, 16) * 1e-3),
    "elements of rows exchanged": (X[0], np.sort(X[0].reshape(-1)).reshape(6, 16)),
    "a NaN": (X, np.where(X.max() > X, X, np.nan)),
    "others": (X, Y),
}


@pytest.mark.parametrize(("a", "b"), OTHER.values(), ids=OTHER)
def test_other_contents_are_not(a: Any, b: Any) -> None:
    assert align(side(a), side(b), TOLERANCE) == ({}, {})


FUSED: dict[str, Any] = {
    "side by side": np.concatenate([X, Y], -1),
    "three": np.concatenate([X, Y, Z], -1),
    "one after another": np.concatenate([X, Y], 0),
}


@pytest.mark.parametrize("whole", FUSED.values(), ids=FUSED)
@pytest.mark.parametrize("turned", [False, True])
def test_a_fused_tensor_is_made_of_its_parts(whole: Any, *, turned: bool) -> None:
    number = whole.size // X.size
    of_parts, of_whole = align(side(X, Y, Z), side(whole), TOLERANCE)
    if turned:
        of_whole, of_parts = align(side(whole), side(X, Y, Z), TOLERANCE)
    assert (of_whole[0].how, of_whole[0].places) == ("fused", tuple(range(number)))
    assert {place: each.how for place, each in of_parts.items()} == dict.fromkeys(range(number), "part")


def test_rows_tell_a_wrong_part_whose_sums_are_right() -> None:
    mixed = np.concatenate([X, Y[:, ::-1]], -1)  # the rows of a part, in another order
    assert align(side(X, Y), side(mixed), TOLERANCE) == ({}, {})


def first(a: list[Sketch], b: list[Sketch], *, ordered: bool = True) -> Any:
    of_a, of_b = align(a, b, TOLERANCE)
    found = first_without(b, a, of_b, of_a, (ordered, ordered))
    return found and (b[found.place].name, found.again)


NEW = [RNG.normal(size=(4, 16)) for _ in range(8)]
WIDE = RNG.normal(size=(4, 32))

FIRST: dict[str, tuple[list[Sketch], list[Sketch], Any]] = {
    "nothing differs": (side(*NEW[:4]), side(*NEW[:4]), None),
    "all behind it differ": (side(*NEW[:4]), side(*NEW[:2], *NEW[4:6], names="pqrs"), ("r", 0)),
    "something else agrees behind it": (side(*NEW[:4]), side(NEW[0], NEW[4], NEW[2], NEW[5], names="pqrs"), ("q", 1)),
    "the other side has none in its place": (side(*NEW[:3]), side(NEW[0], NEW[4], *NEW[1:3]), None),
    "it has one of another size": (side(NEW[0], WIDE, NEW[1]), side(NEW[0], NEW[4], NEW[1]), None),
    "zeros, where the other side has none": (side(*NEW[:2]), side(NEW[0], NEW[1] * 0, names="pq"), ("q", 0)),
    "what is seen again proves nothing": (
        side(NEW[0], NEW[1], NEW[0]),
        side(NEW[0], NEW[4], NEW[0], names="pqr"),
        ("q", 0),
    ),
    "ones behind it prove nothing": (
        side(NEW[0], NEW[1], np.ones((4, 16))),
        side(NEW[0], NEW[4], np.ones((4, 16)), names="pqr"),
        ("q", 0),
    ),
    "a fused tensor with a wrong part": (
        side(*NEW[:3]),
        side(NEW[0], np.hstack([NEW[1], NEW[4]]), names="pq"),
        ("q", 0),
    ),
}


@pytest.mark.parametrize(("a", "b", "expected"), FIRST.values(), ids=FIRST)
def test_the_first_without_a_partner(a: list[Sketch], b: list[Sketch], expected: Any) -> None:
    assert first(a, b) == expected


def test_what_is_dumped_elsewhere_in_every_layer_is_no_mistake() -> None:
    names = ["embed", "0.x", "0.out", "1.x", "1.out", "logits"]
    a = side(NEW[0], NEW[4], NEW[1], NEW[5], NEW[2], NEW[3], names=names)
    b = side(NEW[0], NEW[6], NEW[1], NEW[7], NEW[2], NEW[3] * 2, names=names)
    assert first(a, b) == ("logits", 0)
    assert first(a[:5], b[:5]) is None
