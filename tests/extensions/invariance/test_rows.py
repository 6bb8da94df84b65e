"""Rows of tensors: how they are cut by what scales between two runs, digested, and compared."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hashbench.core.check.function import FunctionCall
from hashbench.core.records import Failure, RunOptions
from hashbench.extensions.invariance.facts import BatchFacts
from hashbench.extensions.invariance.function import check_invariance
from hashbench.extensions.invariance.layout import WHOLE, Cut, ItemSubset
from hashbench.extensions.invariance.match import TensorRows
from hashbench.extensions.invariance.rows import RowDigests, ShapeNotes, row_digests
from tests.extensions.invariance.programs import random_inputs, runner

SUBSET = ItemSubset(8, 4)


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
    facts = row.of(BatchFacts)
    assert (facts.shapes, facts.reference_shapes) == ("(2,4,8,4)x(2,2,8,4)", "(2,4,16,4)x(2,4,16,4)")


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


def test_known_memory_ends_with_a_write_or_a_new_tensor() -> None:
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
