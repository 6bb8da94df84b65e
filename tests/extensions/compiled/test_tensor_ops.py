"""Virtualized ops over tensors, called as a buffer's functions call them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch._inductor.ops_handler import OP_NAMES

from hashbench.extensions.compiled import indices, tensor_ops
from hashbench.extensions.compiled.indices import NotComputed

nan, inf = math.nan, math.inf


def _handler(domain: list[int], memories: dict[str, torch.Tensor], **how: Any) -> tuple[Any, tensor_ops.TensorHandler]:
    loops = indices.Indices({})
    arguments = loops.loops([domain])
    handler = tensor_ops.TensorHandler(
        loops,
        reduced=how.get("reduced", 0),
        result=tensor_ops.FlatMemory(torch.zeros(math.prod(domain))),
        read=lambda name: tensor_ops.FlatMemory(memories[name], how.get("known")),
        compute_dtype=lambda dtype: dtype,
        keep_precision=False,
    )
    return arguments[0], handler


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("sorter", [None, torch.tensor([2, 0, 1])])
def test_bucketize(right: bool, sorter: torch.Tensor | None) -> None:
    edges = torch.tensor([0.0, 1.0, 2.0]) if sorter is None else torch.tensor([1.0, 2.0, 0.0])
    x = torch.tensor([0.0, 1.0, 1.5, nan, 9.0, -1.0])
    (index,), handler = _handler([6], {"x": x, "edges": edges, "sorter": sorter if sorter is not None else x})
    found = handler.bucketize(
        handler.load("x", index),
        ("edges", 3, 3, 1),
        handler.constant(0, torch.int32),
        torch.int32,
        right,
        None if sorter is None else ("sorter", 1),
        None if sorter is None else handler.constant(0, torch.int32),
    )
    expected = torch.searchsorted(edges, x, right=right, sorter=sorter)
    assert found.dtype == torch.int32
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("length", [1, 2, 5])
def test_sum_by_exclusive_or(length: int) -> None:
    values = torch.tensor([[5, 3, 9, 1, 7], [1, 1, 2, 2, 4]])[:, :length]
    (row, column), handler = _handler([2, length], {"x": values.reshape(-1)}, reduced=1)
    value = handler.load("x", row * length + column)
    wanted = [eval("^".join(map(str, line))) for line in values.tolist()]
    assert handler.reduction(torch.int64, torch.int64, "xor_sum", value).flatten().tolist() == wanted


def test_welford_of_triples_is_that_of_the_values() -> None:
    x = torch.randn(2, 6)
    (row, column), handler = _handler([2, 6], {"x": x.reshape(-1)}, reduced=1)
    whole = handler.reduction(torch.float32, torch.float32, "welford_reduce", handler.load("x", row * 6 + column))
    halves = [torch.var_mean(x[:, half], 1, correction=0) for half in (slice(0, 2), slice(2, 6))]
    parts = {
        "mean": torch.stack([mean for _, mean in halves], 1).reshape(-1),
        "squares": torch.stack([var * n for (var, _), n in zip(halves, (2, 4), strict=True)], 1).reshape(-1),
        "weight": torch.tensor([2.0, 4.0, 2.0, 4.0]),
    }
    (row, column), handler = _handler([2, 2], parts, reduced=1)
    triple = tuple(handler.load(name, row * 2 + column) for name in parts)
    combined = handler.reduction(torch.float32, torch.float32, "welford_combine", triple)
    for one, other in zip(whole, combined, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("kind", "rows", "index", "value"),
    [
        ("argmax", [[1, 3, 3, 0], [2, 2, 2, 2]], [1, 0], [3, 2]),
        ("argmin", [[1, 0, 0, 3], [2, 2, 2, 2]], [1, 0], [0, 2]),
        ("argmax", [[1, nan, 9, nan], [inf, 0, 0, 0]], [1, 0], [nan, inf]),
        ("argmin", [[1, nan, 0, nan], [-inf, 0, 0, 0]], [1, 0], [nan, -inf]),
    ],
)
def test_selection(kind: str, rows: list[list[float]], index: list[int], value: list[float]) -> None:
    (row, column), handler = _handler([2, 4], {"x": torch.tensor(rows, dtype=torch.float32).reshape(-1)}, reduced=1)
    loaded = handler.load("x", row * 4 + column)
    assert handler.reduction(torch.int64, torch.float32, kind, loaded).flatten().tolist() == index
    wanted = torch.tensor(value, dtype=torch.float32)
    best, where = handler.reduction(torch.float32, torch.float32, f"{kind}_with_value", loaded)
    assert where.flatten().tolist() == index
    for found in (best, handler.reduction(torch.float32, torch.float32, f"{kind}_value", loaded)):
        torch.testing.assert_close(found.flatten(), wanted, equal_nan=True)
    at = handler.index_expr(10 - column, torch.int64)  # an index of its own, from a split reduction
    of_own = handler.reduction(torch.int64, torch.float32, kind, (loaded, at)).flatten().tolist()
    hits = [
        [10 - c for c, x in enumerate(line) if x == v or (x != x and v != v)]
        for line, v in zip(rows, value, strict=True)
    ]
    assert of_own == [min(hit) for hit in hits]


def test_signs_of_the_two_remainders() -> None:
    _, handler = _handler([1], {})
    a, b = (torch.tensor(values) for values in ([7, -7, 7, -7], [4, 4, -4, -4]))
    assert handler.mod(a, b).tolist() == [3, -3, 3, -3]
    assert handler.remainder(a, b).tolist() == [3, 1, -1, -3]


def test_a_store_of_another_mode_is_refused() -> None:
    (index,), handler = _handler([3], {})
    with pytest.raises(NotComputed, match="store with atomic_max"):
        handler.store("x", index, handler.constant(1.0, torch.float32), mode="atomic_max")


def test_a_masked_load_may_lie_outside() -> None:
    (index,), handler = _handler([4], {"x": torch.arange(2.0)})
    inside = handler.index_expr(index, torch.int64) < 2
    value = handler.masked(inside, lambda: handler.load("x", index), -1.0)
    assert value.tolist() == [0.0, 1.0, -1.0, -1.0]
    with pytest.raises(NotComputed, match="reads beyond the 2 elements of x"):
        handler.load("x", index)


def test_a_read_between_the_elements_of_a_strided_buffer_is_said() -> None:
    (index,), handler = _handler([4], {"x": torch.arange(4.0)}, known=torch.tensor([True, False, True, True]))
    with pytest.raises(NotComputed, match="reads between the elements of x"):
        handler.load("x", index)
    assert handler.load("x", index * 0 + 2).tolist() == [2.0]


def test_every_virtualized_op_has_a_function_or_is_refused() -> None:
    refused = set(tensor_ops._REFUSED)
    for name in OP_NAMES - set(vars(tensor_ops.TensorHandler)) - refused:
        assert callable(tensor_ops._function(name)), name
