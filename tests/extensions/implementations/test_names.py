"""What names say of tensors once most are matched: pure decisions on names."""

from __future__ import annotations

import pytest

from hashbench.extensions.implementations.names import (
    ExpectedNames,
    braced,
    disordered,
    exchanged,
    joined,
    outliers,
    signature,
    split,
    strays,
)


@pytest.mark.parametrize("name", ["a", "layers.3.w1.weight", "0.1.2", "a..0"])
def test_a_template_with_its_numbers_is_the_name(name: str) -> None:
    assert joined(*split(name)) == name


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ((), ""),
        (("a",), "a"),
        (("a", "a"), "a"),
        (("l.q.w", "l.k.w"), "l.{q,k}.w"),
        (("a", "b", "c", "d", "e"), "{a,b,c,d,…}"),
        (("aa", "aaa"), "aa{,a}"),
    ],
)
def test_names_are_shown_once(names: tuple[str, ...], text: str) -> None:
    assert braced(names) == text


def test_a_tensor_is_expected_where_others_of_its_kind_are() -> None:
    pairs = [("layers.0.up", "blocks.1.up"), ("layers.1.up", "blocks.2.up")]
    there = ExpectedNames.of(pairs, {"blocks.3.up", "same"})
    assert [there.name(name) for name in ("layers.2.up", "layers.3.up", "same", "other.2.up")] == [
        "blocks.3.up",
        "",
        "same",
        "",
    ]


def rows(*pairs: str) -> list[tuple[str, str]]:
    return [(one, other) for one, _, other in (pair.partition(" ") for pair in pairs)]


@pytest.mark.parametrize(
    ("pairs", "circles"),
    [
        (rows("a b", "b a", "c c"), [{"a", "b"}]),
        (rows("a b", "b c", "c a"), [{"a", "b", "c"}]),
        (rows("a.0 x.0", "a.1 x.2", "a.2 x.1", "a.3 x.3"), [{"a.1", "a.2"}]),
        (rows("a.0 x.0", "a.1 x.1", "a.2 x.2"), []),
        (rows("a.0 x.1", "a.1 x.2", "a.2 x.3"), []),  # all are shifted
        (rows("0.w x.0.w", "1.w x.1.w", "2.w x.2.w", "4.w x.3.w", "5.w x.4.w"), []),  # a number was left out
        (rows("a x", "b y"), []),
        (rows("a.0 x.1", "a.1 x.0"), []),  # as many say one as the other
        (rows("a.0.q x.0.q", "a.0.k x.0.v", "a.0.v x.0.k", "a.1.k x.1.k", "a.1.v x.1.v", "a.2.k x.2.k", "a.2.v x.2.v"),
         [{"a.0.k", "a.0.v"}]),
    ],
)  # fmt: skip
def test_tensors_in_each_others_places(pairs: list[tuple[str, str]], circles: list[set[str]]) -> None:
    found = exchanged(pairs, {other for _, other in pairs})
    assert [{one for one, _ in circle} for circle in found] == circles


@pytest.mark.parametrize(
    ("pairs", "found"),
    [
        (rows("l.0.q x.0", "l.0.k x.0", "l.1.q x.1", "l.1.k x.1", "l.2.q x.2", "l.2.k x.2"), []),
        (rows("l.0.q x.0", "l.0.k x.0", "l.1.q x.2", "l.1.k x.2", "l.2.q x.1", "l.2.k x.1", "l.3.q x.3", "l.3.k x.3"),
         rows("l.1.q x.2", "l.1.k x.2", "l.2.q x.1", "l.2.k x.1")),
        (rows("l.0.q x.0", "l.0.k x.1", "l.1.q x.1", "l.1.k x.0", "l.2.q x.2", "l.2.k x.2"),
         rows("l.0.k x.1", "l.1.k x.0")),
        (rows("l.0.q r0.0", "l.0.q r1.0", "l.1.q r0.1", "l.1.q r1.1"), []),  # each is in both
        (rows("l.0.e.0 x.0", "l.0.e.1 x.0", "l.1.e.0 x.1", "l.1.e.1 x.1"), []),
    ],
)  # fmt: skip
def test_parts_that_are_in_another_whole(pairs: list[tuple[str, str]], found: list[tuple[str, str]]) -> None:
    assert strays(pairs) == found


def test_what_is_unlike_most_of_its_kind() -> None:
    same = [(f"a.{n}", f"x.{n}", "transposed") for n in range(3)]
    assert [*outliers([*same, ("a.3", "x.3", "unchanged"), ("b", "y", "unchanged")])] == [
        ("a.3", "x.3", "unchanged", "transposed")
    ]
    assert [*outliers([("a.0", "x.0", "transposed"), ("a.1", "x.1", "unchanged")])] == []


def test_the_order_of_parts() -> None:
    assert signature(("l.4.q", "l.4.k")) == signature(("l.7.q", "l.7.k"))
    assert signature(("l.4.q", "l.4.k")) != signature(("l.4.k", "l.4.q"))
    assert signature(("l.0.w", "l.1.w")) == signature(("l.2.w", "l.3.w"))
    assert signature(("l.0.e.0", "l.0.e.1")) != signature(("l.1.e.1", "l.1.e.0"))
    orders = {f"x.{n}": (f"l.{n}.q", f"l.{n}.k", f"l.{n}.v") for n in range(3)}
    assert [*disordered(orders)] == []
    orders["x.1"] = ("l.1.q", "l.1.v", "l.1.k")
    assert [*disordered(orders)] == [("x.1", ("l.1.v", "l.1.k"), "most of its kind")]
    del orders["x.2"]
    ((whole, moved, unlike),) = disordered(orders)
    assert (whole, moved) == ("x.1", ("l.1.v", "l.1.k"))
    assert "nothing says which is right" in unlike


def test_the_only_one_of_its_kind_has_its_parts_in_the_order_of_their_numbers() -> None:
    assert [*disordered({"w": ("l.0", "l.1", "l.2", "l.10"), "e": ("e.0.up", "e.0.down", "e.1.up", "e.1.down")})] == []
    assert [*disordered({"w": ("l.0", "l.1", "l.10", "l.2")})] == [("w", ("l.10", "l.2"), "the numbers in their names")]
    assert [*disordered({"w": ("l.2.q", "l.2.v", "l.2.k")})] == []
