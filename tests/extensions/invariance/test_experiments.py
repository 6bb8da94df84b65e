"""Experiments on planted ops: what they do with an item's batch is written here, and depends on no processor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from hashbench.core.records import Decision, ExperimentResult
from hashbench.extensions.invariance.cause import ItemEvidence, decide
from hashbench.extensions.invariance.experiments import diagnose_item_call
from hashbench.extensions.invariance.item_call import ItemCall
from hashbench.extensions.invariance.layout import ItemAxis

FIRST = ItemAxis(0)
ROWS = 1 / torch.arange(1.0, 241.0).reshape(8, 30)


def rounded(rows: torch.Tensor) -> torch.Tensor:
    """The sum of each row, which loses its last bits; whole numbers have none to lose."""
    return (rows.sum(1) + 1e4) - 1e4


def exact_by_number(rows: torch.Tensor) -> torch.Tensor:
    """From three rows on another order of addition."""
    return torch.stack([row.sum() if len(rows) < 3 else rounded(row[None])[0] for row in rows])


def by_number(rows: torch.Tensor) -> torch.Tensor:
    """From three rows on another formula."""
    return torch.stack([row.sum() * (1.0 if len(rows) < 3 else 1.001) for row in rows])


@torch.library.custom_op("hashbench_items::pointwise", mutates_args=(), tags=(torch.Tag.pointwise,))
def pointwise(rows: torch.Tensor) -> torch.Tensor:
    """Each element by itself, from three rows on with its last bits rounded away; whole numbers have none to lose."""
    return rows * 1 if len(rows) < 3 else (rows + 1e4) - 1e4


def in_blocks(rows: torch.Tensor) -> torch.Tensor:
    """Whole blocks of four rows in one way, the rest in the other."""
    whole = len(rows) - len(rows) % 4
    return torch.stack([rounded(row[None])[0] if place < whole else row.sum() for place, row in enumerate(rows)])


def scaled(rows: torch.Tensor) -> torch.Tensor:
    return rows / rows.abs().amax()


def alone(rows: torch.Tensor) -> torch.Tensor:
    return torch.stack([row.sum() for row in rows])


def drawing(rows: torch.Tensor) -> torch.Tensor:
    return rows + torch.rand(rows.shape)


class Unsteady:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return rows + self.calls


def diagnosed(function: Callable[..., Any], *, rows: torch.Tensor = ROWS) -> tuple[ItemEvidence, Decision]:
    evidence = diagnose_item_call(ItemCall(function, (rows,), {}, len(rows), (FIRST,), (FIRST,)))
    return evidence, decide(evidence)


def test_dependence_on_the_number_has_smallest_batch_and_remedy() -> None:
    evidence, decision = diagnosed(exact_by_number)

    assert (decision.cause, decision.confidence) == ("shape_dependent_kernel", "proven")
    assert (evidence.smallest_batch, evidence.sizes, evidence.skipped) == (3, (1, 2), False)
    assert evidence.removes("exact_values")
    assert not evidence.removes("one_thread")
    assert "it is the order of addition" in decision.because
    assert "pad the batch to a multiple of 4 items" in decision.advice
    assert "compute one item at a time" in decision.advice
    assert "with one thread" not in decision.advice


def attends(rows: torch.Tensor) -> torch.Tensor:
    """Other bits for few items, unless attention is computed by the math implementation alone."""
    fused = torch.backends.cuda.flash_sdp_enabled()
    return torch.nn.functional.scaled_dot_product_attention(rows, rows, rows) + 2**-10 * (fused and len(rows) < 3)


def test_other_attention_is_a_measured_remedy() -> None:
    evidence, decision = diagnosed(attends, rows=torch.rand(4, 2, 5, 8))

    assert decision.cause == "shape_dependent_kernel"
    assert evidence.removes("sdpa_math")
    assert not evidence.removes("deterministic")
    assert "0 of 2 with the math implementation of attention" in decision.because
    (remedy,) = (one for one in evidence.remedies if one.works and "attention" in one.words)
    assert remedy.words == "compute with the math implementation of attention"
    assert remedy.said() in decision.advice
    assert torch.backends.cuda.flash_sdp_enabled()


def test_other_formulas_are_not_called_the_order_of_addition() -> None:
    evidence, decision = diagnosed(by_number)

    assert decision.cause == "shape_dependent_kernel"
    assert not evidence.removes("exact_values")
    assert "it is the order of addition" not in decision.because


def test_pointwise_ops_have_no_order_of_addition() -> None:
    evidence, decision = diagnosed(torch.ops.hashbench_items.pointwise.default)

    assert (decision.cause, decision.confidence) == ("shape_dependent_kernel", "proven")
    assert evidence.arm("exact_values").note == "it computes each element by itself, and adds nothing up"
    assert "it is the order of addition" not in decision.because


def test_where_an_item_lies_can_decide_too() -> None:
    evidence, decision = diagnosed(in_blocks, rows=ROWS[:6])

    assert decision.cause == "shape_dependent_kernel"
    assert evidence.arm("other_places").differing
    assert "where an item lies in the batch decides too" in decision.because
    assert evidence.smallest_batch == 4


def test_a_scale_over_the_batch_is_coupling_and_no_rounding() -> None:
    evidence, decision = diagnosed(scaled)

    assert (decision.cause, decision.confidence) == ("batch_coupling", "proven")
    assert not evidence.remedies


@pytest.mark.parametrize("choose", [torch.amax, torch.amin], ids=["largest", "smallest"])
def test_items_that_are_all_alike_are_made_larger_and_smaller(choose: Callable[..., Any]) -> None:
    _, decision = diagnosed(lambda rows: rows / choose(rows, 0), rows=torch.ones(4, 3))
    assert decision.cause == "batch_coupling"


def test_a_tensor_reduced_over_the_batch_is_where_its_content_enters() -> None:
    call = ItemCall(torch.ops.aten.amax.default, (ROWS,), {}, 8, (FIRST,), (None,))

    assert decide(diagnose_item_call(call)).cause == "batch_coupling"


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (alone, "0 of 7 other numbers"),
        (drawing, "draws random numbers"),
        (Unsteady(), "differs by itself"),
    ],
    ids=["invariant", "drawing", "unsteady"],
)
def test_no_matter_of_the_batch_is_explained_by_it(function: Callable[..., Any], reason: str) -> None:
    _, decision = diagnosed(function)

    assert (decision.cause, decision.confidence) == ("unknown", "open")
    assert reason in decision.because


def test_beyond_few_items_the_smallest_batch_is_found_by_bisection() -> None:
    def late(rows: torch.Tensor) -> torch.Tensor:
        return alone(rows) * (1.0 if len(rows) < 45 else 1.001)

    evidence, _ = diagnosed(late, rows=1 / torch.arange(1.0, 631.0).reshape(70, 9))

    assert (evidence.smallest_batch, evidence.skipped) == (45, True)


def test_random_state_settings_and_arguments_are_as_before() -> None:
    state, before = torch.get_rng_state(), ROWS.clone()
    diagnosed(drawing)

    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(before, ROWS)


# -------------------------------------------------------------------------------------------------- other items


def test_number_computed_from_the_batch_is_coupling() -> None:
    call = ItemCall(torch.ops.aten.div.Tensor, (ROWS, 8), {}, 8, (FIRST,), (FIRST,), scaled=(1,))
    decision = decide(diagnose_item_call(call))

    assert (decision.cause, decision.confidence) == ("batch_coupling", "proven")
    assert "the argument that counts the items" in decision.because


# --------------------------------------------------------------------------------------------- the decision alone


def arm(name: str, differing: int, trials: int) -> ExperimentResult:
    return ExperimentResult(name, "items", trials, differing)


# ------------------------------------------------------------------------------------ generators among the arguments


def drawn_privately(*, normal: bool, items: int = 8) -> tuple[ItemCall, torch.Generator]:
    """A call that draws six numbers for each item, from a generator that was drawn from before."""
    generator = torch.Generator().manual_seed(3)
    torch.rand(5, generator=generator)
    op = torch.ops.aten.randn.generator if normal else torch.ops.aten.rand.generator
    return ItemCall(op, ([items, 6],), {"generator": generator}, items, (), (FIRST,), scaled=(0,)), generator


@pytest.mark.parametrize(("normal", "cause"), [(True, "batch_coupling"), (False, "unknown")])
def test_generator_arguments_draw_from_one_state(*, normal: bool, cause: str) -> None:
    evidence = diagnose_item_call(drawn_privately(normal=normal)[0])
    assert (evidence.arm("same_items").trials, evidence.arm("same_items").differing) == (3, 0)
    assert evidence.arm("other_number").trials == 7
    assert decide(evidence).cause == cause


# ------------------------------------------------------------------------------- items along several dimensions


def attention_of(weights: torch.Tensor, values: torch.Tensor) -> ItemCall:
    """Two items of two tokens each, of which the first is watched; tokens see what their row of weights says."""
    axes = ItemAxis(1, inner=2, also=(2,)), ItemAxis(1, inner=2)
    return ItemCall(torch.ops.aten.bmm.default, (weights, values), {}, 2, axes, (ItemAxis(1, inner=2),), watched=0)


@pytest.mark.parametrize(("mask", "cause"), [(1.0, "batch_coupling"), (0.0, "unknown")])
def test_a_watched_item_depends_on_others_where_no_mask_hides_them(mask, cause):
    weights = torch.ones(1, 4, 4)
    weights[:, :2, 2:] = mask
    for shown in (weights, weights.expand(3, -1, -1)):  # whose memory is shared
        values = torch.arange(8.0).view(1, 4, 2).expand(len(shown), -1, -1).contiguous()
        assert decide(diagnose_item_call(attention_of(shown, values), budget=20.0)).cause == cause


def test_a_count_of_tokens_before_is_no_rounding():
    counted = torch.ones(2, 6, dtype=torch.int64)
    axis = ItemAxis(1)
    call = ItemCall(torch.ops.aten.cumsum.default, (counted, 1), {}, 6, (axis,), (axis,), watched=5)
    assert decide(diagnose_item_call(call, budget=20.0)).cause == "batch_coupling"


def attended(scores: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return scores.softmax(-1) @ values


def test_masked_values_stay_hidden_from_a_watched_item() -> None:
    scores = torch.zeros(1, 4, 4)
    scores[:, :2, 2:] = float("-inf")
    call = replace(attention_of(scores, torch.arange(8.0).view(1, 4, 2)), func=attended)
    assert decide(diagnose_item_call(call)).cause == "unknown"


@pytest.mark.parametrize(("other", "choose"), [(4.0, torch.amax), (6.0, torch.amin)], ids=["largest", "smallest"])
def test_others_are_made_larger_and_smaller_than_a_watched_item(other: float, choose: Callable[..., Any]) -> None:
    rows = torch.tensor([[5.0, 5.0], [other, other]])
    call = ItemCall(lambda x: x - choose(x, 0), (rows,), {}, 2, (FIRST,), (FIRST,), watched=0)
    assert decide(diagnose_item_call(call)).cause == "batch_coupling"


@pytest.mark.parametrize("watched", [0, 7])
def test_a_watched_item_is_among_the_fewer_items_and_at_its_end(watched: int) -> None:
    evidence = diagnose_item_call(ItemCall(by_number, (ROWS,), {}, 8, (FIRST,), (FIRST,), watched=watched))
    assert (evidence.sizes, evidence.smallest_batch) == ((1, 2), 3)
    assert decide(evidence).cause == "shape_dependent_kernel"
