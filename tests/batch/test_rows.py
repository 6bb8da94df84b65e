"""Rows of tensors: how they are cut by what scales between two runs, digested, and compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from hashbench.batch.judged import RowEffect
from hashbench.batch.layout import WHOLE, Cut, ItemAxis, ItemSubset
from hashbench.batch.match import Agreement, Match, TensorRows, match
from hashbench.batch.rows import RowDigests, ShapeNotes, row_digests
from hashbench.check.function import FunctionCall, check_invariance
from hashbench.records import Failure, RunOptions
from tests.batch.programs import compared_runs, random_inputs, runner

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
    "change",
    [
        lambda x: x.to(memory_format=torch.channels_last),
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: torch.stack([x, x], -1)[..., 1],
        lambda x: torch.complex(x, x).conj().conj().real,
    ],
    ids=["channels_last", "transposed", "with holes", "conjugated"],
)
def test_digests_are_of_the_elements_in_logical_order(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    image = torch.randn(4, 3, 5, 5)
    assert row_digests(change(image), Cut(0)) == row_digests(image, Cut(0))


def test_conjugated_rows_are_digested_as_they_read() -> None:
    z = torch.randn(4, 8, dtype=torch.complex64)
    assert row_digests(z.conj(), Cut(0)) == row_digests(z.conj().resolve_conj(), Cut(0))
    assert row_digests(z.conj(), Cut(0)) != row_digests(z, Cut(0))


def test_small_rows_are_their_own_digest() -> None:
    assert row_digests(torch.tensor([1, 2, 3], dtype=torch.int16), Cut(0)) == (b"\1\0\2\0\3\0", 2)
    assert row_digests(torch.tensor([7, 7], dtype=torch.int8)[:1].expand(3), Cut(0)) == (b"\7\7\7", 1)


@pytest.mark.parametrize("tracer", ["native", "python"])
def test_in_place_and_out_are_read_before_and_written_after(tracer: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        torch.mul(x, 2, out=out)
        return out.add_(x)

    inputs = random_inputs(0, 8)
    run_at = runner(function, inputs, batch=8, tracer=tracer)
    notes = ShapeNotes()
    assert not isinstance(run_at(4, notes), Failure)
    rows = RowDigests(SUBSET, notes.shapes, reference=True)
    assert not isinstance(run_at(8, rows), Failure)
    add, x = rows.calls["forward.0//aten.add_.Tensor#0"], inputs["x"]
    doubled, digested = row_digests(x * 2, Cut(0)), row_digests(x, Cut(0))
    assert [(one.content, one.width) for _, one in add.read] == [doubled, digested]
    assert [(one.content, one.width) for one in add.written] == [row_digests(x * 3, Cut(0))]
    assert rows.calls["forward.0//aten.empty_like.default#0"].written == ()


def test_loops_that_call_an_op_as_often_as_there_are_items_are_compared_by_content() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        doubled = [item * 2 for item in x.unbind()]
        return torch.stack([item * 3 for item in doubled])

    found = compared_runs(runner(function, random_inputs(0, 8), batch=8), SUBSET).comparison
    assert (found.not_attributable, found.differing) == ((), ())
    references = [found.judged[f"forward.0//aten.mul.Tensor#{number}"].reference for number in (4, 7)]
    assert references == ["forward.0//aten.mul.Tensor#8", "forward.0//aten.mul.Tensor#11"]


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
def test_what_is_shared_or_at_places_that_follow_from_the_item_is_itemwise(one: Match, itemwise: bool) -> None:
    assert one.itemwise(SUBSET) is itemwise


@pytest.mark.parametrize(
    ("columns", "agreement"),
    [((8, 4), Agreement.DIFFERENT), ((16, 8), Agreement.UNKNOWN), ((7, 5), Agreement.UNKNOWN)],
    ids=["one for each item", "two for each item", "ragged"],
)
def test_rows_of_which_it_is_not_known_which_columns_both_runs_have_are_not_called_different(
    columns: tuple[int, int], agreement: Agreement
) -> None:
    assert matched(torch.zeros(8, columns[0]), torch.ones(4, columns[1])).agreement is agreement


def test_what_was_cut_for_another_call_beside_it_is_not_called_different() -> None:
    """The smaller run makes one range more: the one that the reference has, too, where another one is beside it."""

    def function(x: torch.Tensor) -> torch.Tensor:
        own = torch.arange(3.0 * len(x))
        return x * 2 if len(x) == 8 else x * 2 + 0 * own.sum() + 0 * torch.arange(24.0).sum()

    found = compared_runs(runner(function, random_inputs(0, 8), batch=8), SUBSET).comparison
    twin = found.judged["forward.0//aten.arange.default#1"]
    assert (twin.reference, twin.effect) == ("forward.0//aten.arange.default#0", RowEffect.UNKNOWN)


class Grouped(torch.nn.Module):
    """Attention in which two heads of keys serve four of queries. As the attention of transformers it leaves their
    repetition to the kernel where there is no mask, and the kernel adds in another order."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        keys = input_ids[:, None, :, None] * torch.tensor([1.0, 3.0])[:, None, None].expand(2, 1, 4)
        queries = keys.sum(1, keepdim=True).expand(-1, 4, -1, -1).clone()
        masked = attention_mask is not None and not attention_mask.all()
        return grouped_sum(queries, keys.repeat_interleave(2, dim=1) if masked else keys, masked=masked)


@torch.library.custom_op("rows_test::grouped_sum", mutates_args=())
def grouped_sum(queries: torch.Tensor, keys: torch.Tensor, *, masked: bool) -> torch.Tensor:
    heads = keys.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)
    return (queries + heads).exp() if masked else queries.exp() * heads.exp()


def test_heads_that_one_run_repeats_are_those_of_the_other() -> None:
    options = RunOptions(mode="right-padding-invariance", deterministic="off", diagnose_budget=0)
    given = {"input_ids": torch.linspace(0.1, 1.9, 32).view(2, 16).mul(1000).long()}
    model = FunctionCall(lambda input_ids, attention_mask=None: Grouped()(input_ids / 1000, attention_mask), (), given)
    row = check_invariance(model, "grouped", options)
    assert (row.accuracy, row.kernel) == ("fail_right_padding_invariance", "rows_test.grouped_sum.default"), row.because
    assert (row.shapes, row.reference_shapes) == ("(2,4,8,4)x(2,2,8,4)", "(2,4,16,4)x(2,4,16,4)")


@pytest.mark.parametrize("reference", [True, False])
@pytest.mark.parametrize("repeated", ["each", "all", "not"])
def test_a_dimension_is_shown_once_only_where_it_repeats(repeated: str, *, reference: bool) -> None:
    keys, subset = torch.randn(2, 2, 8, 4), ItemSubset(16, 8, together=True)
    given = {
        "each": keys.repeat_interleave(2, 1),
        "all": keys.repeat(1, 2, 1, 1),
        "not": torch.cat([keys, keys + 1], dim=1),
    }[repeated]
    rows = RowDigests(subset, {}, reference=reference)._rows(given, (2, 2, 16, 4) if not reference else (2, 2, 4, 4))
    assert rows.shape == ((2, 4, 8, 4) if repeated == "not" else (2, 2, 8, 4))
    assert rows.given == (() if repeated == "not" else (2, 4, 8, 4))
    assert repeated == "not" or (rows.content, rows.width) == row_digests(keys, Cut(2))


def test_common_rows_that_differ_are_where_their_items_are() -> None:
    """A call whose item is told by its sign alone: the signs of all are found among those of a larger batch."""
    signs, fewer = torch.tensor([1.0, -1, 1, 1, -1, -1, 1, -1]).mul(0), torch.tensor([-0.0, -0.0, 0.0, 0.0])
    assert matched(signs, fewer).agreement is Agreement.FOUND
    assert matched(signs, fewer).itemwise(SUBSET)
    assert not matched(X, X[:4].flip(0)).itemwise(SUBSET), "rows of their own, at other places"


def test_what_is_known_of_memory_ends_where_it_is_written_or_another_tensor_lies_there() -> None:
    x, rows = torch.ones(8, 3), RowDigests(SUBSET, {}, reference=True)

    def read(node: str) -> TensorRows:
        rows.before(node, torch.ops.aten.neg.default, (x,), {})
        rows.after(node, torch.ops.aten.neg.default, (x,), {}, torch.empty(8, 3))
        return rows.calls[node].read[0][1]

    rows.leaf("input/x", x)
    first = read("a")
    x.numpy()[:] = 2  # another tensor, in memory that torch gives again
    assert read("b") == first, "nobody has said so"
    rows.leaf("buffer/x", x)
    assert read("c").state[0] == "buffer/x"
    rows.before("d", torch.ops.aten.add_.Tensor, (x, 1), {})
    rows.after("d", torch.ops.aten.add_.Tensor, (x, 1), {}, x.add_(1))
    assert (read("e").state, read("e").content) == ((), row_digests(x, WHOLE)[0])
    x.numpy()[:] = 4
    rows.leaf("input/y", x)
    assert read("f").content == row_digests(x, WHOLE)[0]


def test_of_items_in_reverse_order_both_runs_are_cut_by_what_half_of_them_has() -> None:
    turned = ItemSubset(8, 8, turned=True)
    assert turned.cuts((8, 3), (4, 3)) == (Cut(0), Cut(0))
    assert turned.cuts((8, 8), (4, 4)) is None, "which belongs to which item would be told by two dimensions"


def test_groups_of_rows_that_were_moved_are_not_said_to_differ() -> None:
    whole, part = torch.arange(65536.0).view(-1, 2), torch.arange(32768.0).view(-1, 2)
    moved = torch.arange(len(whole)).view(2, -1).t().reshape(-1)  # one of each half in turn
    order = matched(moved, torch.arange(len(part)))
    assert order.agreement is Agreement.FOUND
    assert matched(whole[moved], part, [order]).agreement is Agreement.UNKNOWN
    assert matched(whole + 1, part, [matched(whole[:, 0], part[:, 0])]).agreement is Agreement.DIFFERENT
