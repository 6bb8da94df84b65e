"""Item axes of a call: what is needed to repeat it on other items, on matches written by hand."""

from __future__ import annotations

import pytest

from hashbench.extensions.invariance.axes import CallAxes, axes_of, counting_places
from hashbench.extensions.invariance.judged import JudgedCall, RowEffect
from hashbench.extensions.invariance.layout import WHOLE, Cut, ItemAxis, ItemSubset, NotItemwiseError
from hashbench.extensions.invariance.match import Agreement, CallRows, Match, TensorRows

HALF = ItemSubset(8, 4)
LAST = ItemSubset(8, 4, first=4, together=True)
ROWS = TensorRows("float32", (8, 3), Cut(0))
WEIGHT = TensorRows("float32", (3, 3), WHOLE)
SAME, SHARED = Match(Agreement.SAME, (8, 4), frozenset({1})), Match(Agreement.SAME)
OTHER, UNKNOWN = Match(Agreement.DIFFERENT, (8, 4)), Match(Agreement.UNKNOWN)


def axes(read: Match, left: Match, *, subset: ItemSubset = HALF, coupled: str = "") -> CallAxes:
    judged = JudgedCall(RowEffect.ORIGIN, "mm#0", {"0": read, "1": SHARED}, (left,), coupled)
    reference = CallRows((("0", ROWS), ("1", WEIGHT)), (ROWS,))
    return axes_of(judged, reference, subset, targets=[None, None], written=[0, None])


def test_items_lie_along_the_dimension_that_scales_with_the_batch() -> None:
    assert axes(SAME, OTHER) == CallAxes(8, (ItemAxis(0), None), (ItemAxis(0), None), None)


def test_rows_that_differ_are_laid_out_as_an_input_of_their_size() -> None:
    blocks = Match(Agreement.SAME, (16, 8), frozenset({2}))
    assert axes(blocks, Match(Agreement.DIFFERENT, (16, 8))).left[0] == ItemAxis(0, outer=2)


def test_tokens_of_the_smaller_run_are_one_item_that_is_watched() -> None:
    assert axes(SAME, OTHER, subset=LAST) == CallAxes(2, (ItemAxis(0, inner=4), None), (ItemAxis(0, inner=4), None), 1)


def test_memory_that_a_call_fills_holds_items_as_it_leaves_them() -> None:
    judged = JudgedCall(RowEffect.ORIGIN, "mm#0", {"0": SAME}, (OTHER,))
    reference = CallRows((("0", ROWS), ("out", ROWS)), (ROWS,))
    assert axes_of(judged, reference, HALF, targets=[None, 0], written=[0]).read == (ItemAxis(0), ItemAxis(0))


def test_tokens_for_tokens_are_an_items_in_both_dimensions() -> None:
    subset, mask = ItemSubset(12, 6, together=True), TensorRows("bool", (2, 12, 12), None)
    scores = Match(Agreement.DIFFERENT, (12, 6), frozenset({1}), several=True)
    written = TensorRows("float32", (2, 12, 12), Cut(1, 1, ((2, 0, 6),)))
    judged = JudgedCall(RowEffect.ORIGIN, "add#0", {"0": SHARED}, (scores,))
    reference = CallRows((("0", WEIGHT), ("mask", mask)), (written,))
    of_both = ItemAxis(1, 1, 6, (2,))
    found = axes_of(judged, reference, subset, targets=[None, None], written=[0])
    assert (found.read, found.left) == ((None, of_both), (of_both,))


@pytest.mark.parametrize(
    ("read", "left", "subset", "coupled", "why"),
    [
        (Match(Agreement.FOUND, (8, 4), order=1), OTHER, HALF, "", "which rows belong to which"),
        (SAME, UNKNOWN, HALF, "", "which rows belong to which"),
        (SAME, OTHER, ItemSubset(8, 3, together=True), "", "^$"),
        (SAME, OTHER, LAST, "8 and 4", "its other arguments differ"),
    ],
    ids=["what it reads", "what it leaves", "no whole number of parts", "arguments that depend on the place"],
)
def test_a_call_is_not_repeated_on_other_items_for(
    read: Match, left: Match, subset: ItemSubset, coupled: str, why: str
) -> None:
    with pytest.raises(NotItemwiseError, match=why):
        axes(read, left, subset=subset, coupled=coupled)


def test_numbers_that_count_items_are_multiples_in_both_runs() -> None:
    assert counting_places([8, 16, 3, 8, None], [4, 8, 3, 5, 4], HALF) == (0, 1)
