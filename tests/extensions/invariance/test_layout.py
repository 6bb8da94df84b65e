"""Layout of items in tensors: cuts, blocks and axes, by shapes alone."""

from __future__ import annotations

import pytest

from hashbench.extensions.invariance.layout import WHOLE, Cut, ItemAxis, ItemSubset

SUBSET = ItemSubset(8, 4)


@pytest.mark.parametrize(
    ("reference", "other", "cuts"),
    [
        ((8, 3), (4, 3), (Cut(0), Cut(0))),
        ((3, 16), (3, 8), (Cut(1), Cut(1))),
        ((8, 8), (8, 8), (WHOLE, WHOLE)),  # as large as the batch, and not the batch
        ((8, 8), (4, 8), (Cut(0), Cut(0))),
        ((8, 8), (4, 4), (Cut(0, 1, ((1, 0, 4),)), Cut(0))),
        ((7, 3), (5, 3), (Cut(0), Cut(0))),  # ragged
        ((8 * 2048, 3), (4 * 2048, 3), (Cut(0), Cut(0))),
        ((8 * 8192, 3), (4 * 8192, 3), (Cut(0, 4), Cut(0, 4))),  # groups of neighbours
        ((8 * 8192,), (4 * 8192,), (Cut(0), Cut(0))),  # an element needs no digest
        ((8, 3), (4, 3, 1), None),
        ((4, 3), (8, 3), None),
    ],
)
def test_a_tensor_is_cut_along_what_scales(
    reference: tuple[int, ...], other: tuple[int, ...], cuts: tuple[Cut, Cut] | None
) -> None:
    assert SUBSET.cuts(reference, other) == cuts


def test_the_blocks_that_a_dimension_may_consist_of() -> None:
    assert SUBSET.outers(8 * 12, 4 * 12) == (1, 2, 3, 4, 6, 12)
    assert SUBSET.outers(8 * 12, 4 * 12, step=12) == (1, 2, 4)
    assert SUBSET.outers(7, 5) == (1,)
    assert (SUBSET.multiple(24, 12), SUBSET.multiple(24, 11), SUBSET.multiple(9, 4)) == (3, 0, 0)


def test_an_axis_knows_its_items() -> None:
    assert ItemAxis(1, outer=2, inner=3).items((5, 24)) == 4
    with pytest.raises(ValueError, match="does not hold whole items"):
        ItemAxis(0, inner=5).items((24,))


def test_reversed_items_are_cut_by_half_of_them() -> None:
    turned = ItemSubset(8, 8, turned=True)
    assert turned.cuts((8, 3), (4, 3)) == (Cut(0), Cut(0))
    assert turned.cuts((8, 8), (4, 4)) is None, "which belongs to which item would be told by two dimensions"
