"""Rows of a tensor compared in two runs: equal, moved, different, or unknown."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from hashbench.extensions.invariance.layout import Cut, ItemSubset
from hashbench.extensions.invariance.match import Agreement, Match, TensorRows, match
from hashbench.extensions.invariance.rows import row_digests

SUBSET = ItemSubset(8, 4)


def rows_of(tensor: torch.Tensor, cut: Cut) -> TensorRows:
    return TensorRows(str(tensor.dtype), tuple(tensor.shape), cut, *row_digests(tensor, cut))


def matched(
    reference: torch.Tensor, other: torch.Tensor, inherited: Sequence[Match] = (), *, subset: ItemSubset = SUBSET
) -> Match:
    cuts = subset.cuts(tuple(reference.shape), tuple(other.shape))
    assert cuts is not None
    return match(rows_of(reference, cuts[0]), rows_of(other, cuts[1]), subset, inherited)


X = torch.randn(8, 6, 5, generator=torch.Generator().manual_seed(1))


CHANGED = X[:4].clone().index_fill_(2, torch.tensor(0), 9.0)


READ = Match(Agreement.SAME, (48, 24), frozenset({1}))


@pytest.mark.parametrize(
    ("reference", "other", "inherited", "agreement", "outers"),
    [
        (X, X[:4], (), Agreement.SAME, {1}),
        (X, CHANGED, (), Agreement.DIFFERENT, set()),
        (X.permute(1, 0, 2), X[:4].permute(1, 0, 2), (), Agreement.SAME, {1}),
        (X.flatten(0, 1), X[:4].flatten(0, 1), (), Agreement.SAME, {1}),
        (X.transpose(0, 1).flatten(0, 1), X[:4].transpose(0, 1).flatten(0, 1), (), Agreement.SAME, {6}),
        (torch.cat([X, -X]), torch.cat([X[:4], -X[:4]]), (), Agreement.SAME, {2}),
        (X.flatten(0, 1), CHANGED.flatten(0, 1), (), Agreement.UNKNOWN, set()),
        (X.flatten(0, 1), CHANGED.flatten(0, 1), (READ,), Agreement.DIFFERENT, set()),
        (X.flip(0), X[:4].flip(0), (), Agreement.FOUND, set()),
        (X[:7], X[:5], (), Agreement.SAME, {1}),
        (X[:7], CHANGED[:3], (), Agreement.UNKNOWN, set()),
        (X[:1].expand(8, -1, -1), X[:1].expand(4, -1, -1), (), Agreement.SAME, {1}),
        (X.sum(0), X[:4].sum(0), (), Agreement.DIFFERENT, set()),
        (X, X[:4].double(), (), Agreement.UNKNOWN, set()),
        (X[:, :0], X[:4, :0], (), Agreement.SAME, {1}),
    ],
)
def test_how_rows_compare(
    reference: torch.Tensor, other: torch.Tensor, inherited: Sequence[Match], agreement: Agreement, outers: set[int]
) -> None:
    found = matched(reference, other, inherited)
    assert (found.agreement, found.outers) == (agreement, outers)


def test_items_may_begin_later_in_the_reference() -> None:
    subset = ItemSubset(8, 4, first=2)
    assert matched(X, X[2:6], subset=subset).agreement is Agreement.SAME
    assert matched(X, X[:4], subset=subset).agreement is Agreement.FOUND
    assert matched(X.flatten(0, 1), X[2:6].flatten(0, 1), subset=subset).outers == {1}


def test_common_rows_prove_nothing() -> None:
    tokens = torch.tensor([1, 0, 1, 1, 0, 0, 1, 0])
    found = matched(tokens, torch.tensor([0, 0, 1, 1]))
    assert found.equal
    assert not found.surely_equal
    assert matched(X.flip(0), X[:4].flip(0)).surely_equal


def test_wide_rows_may_come_several_times() -> None:
    twice = torch.cat([X.flip(0), X])
    several = matched(twice, torch.cat([X[:4].flip(0), X[:4]]).flip(0))
    assert (several.agreement, several.surely_equal) == (Agreement.FOUND, True)
    narrow = matched(twice[:, 0, 0], twice[[8, 7, 10, 5, 9, 6, 11, 4], 0, 0])
    assert (narrow.agreement, narrow.surely_equal) == (Agreement.FOUND, False)


@pytest.mark.parametrize(
    ("one", "itemwise"),
    [
        (Match(Agreement.SAME, (16, 8)), True),
        (Match(Agreement.SAME, (7, 5)), False),  # ragged: whose rows they are does not follow from the item
        (Match(Agreement.SAME, (16, 8), several=True), False),
        (Match(Agreement.SAME), True),
        (Match(Agreement.UNKNOWN), False),
    ],
)
def test_shared_or_placed_by_item_is_itemwise(one: Match, itemwise: bool) -> None:
    assert one.itemwise(SUBSET) is itemwise


@pytest.mark.parametrize(
    ("columns", "agreement"),
    [((8, 4), Agreement.DIFFERENT), ((16, 8), Agreement.UNKNOWN), ((7, 5), Agreement.UNKNOWN)],
    ids=["one for each item", "two for each item", "ragged"],
)
def test_rows_with_unknown_columns_are_not_different(columns: tuple[int, int], agreement: Agreement) -> None:
    assert matched(torch.zeros(8, columns[0]), torch.ones(4, columns[1])).agreement is agreement


def test_common_rows_that_differ_are_where_their_items_are() -> None:
    """A call whose item is told by its sign alone: the signs of all are found among those of a larger batch."""
    signs, fewer = torch.tensor([1.0, -1, 1, 1, -1, -1, 1, -1]).mul(0), torch.tensor([-0.0, -0.0, 0.0, 0.0])
    assert matched(signs, fewer).agreement is Agreement.FOUND
    assert matched(signs, fewer).itemwise(SUBSET)
    assert not matched(X, X[:4].flip(0)).itemwise(SUBSET), "rows of their own, at other places"


def test_groups_of_rows_that_were_moved_are_not_said_to_differ() -> None:
    whole, part = torch.arange(65536.0).view(-1, 2), torch.arange(32768.0).view(-1, 2)
    moved = torch.arange(len(whole)).view(2, -1).t().reshape(-1)  # one of each half in turn
    order = matched(moved, torch.arange(len(part)))
    assert order.agreement is Agreement.FOUND
    assert matched(whole[moved], part, [order]).agreement is Agreement.UNKNOWN
    assert matched(whole + 1, part, [matched(whole[:, 0], part[:, 0])]).agreement is Agreement.DIFFERENT
