"""Last writers of storages: views, parts of leaves, recycled addresses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hashbench import HashDebugTrace
from hashbench.core.divergence import find
from tests.core.trace.mode_helpers import record, value

pytestmark = pytest.mark.usefixtures("seeded", "each_tracer")


def test_parts_of_one_storage_are_two_leaves() -> None:
    whole = torch.rand(8)
    first, second = whole[:4], whole[4:]
    with HashDebugTrace() as trace:
        first + second
        first + first
    assert [leaf.digest.value for leaf in trace.finish().leaves] == [value(first), value(second)]


def test_expanded_leaf_does_not_hide_its_storage() -> None:
    whole = torch.rand(4)
    expanded, rest = whole[:1].expand(4), whole[2:]
    with HashDebugTrace() as trace:
        expanded + 1
        rest + 1
    assert [leaf.digest.value for leaf in trace.finish().leaves][1:] == [value(rest)]


def test_partly_written_leaf_keeps_its_unwritten_part() -> None:
    traces = []
    for rest in (2.0, 3.0):
        whole = torch.tensor([1.0, 1.0, rest, rest])
        with HashDebugTrace() as trace:
            whole[:2].add_(1)
            result = whole[2:] + 1
        trace.add_result("output", result)
        traces.append(trace.finish())
    found = find(*traces).divergence
    assert found is not None
    assert (found.origin, found.node) == ("outside", "other/#0")


@pytest.mark.parametrize(
    "through",
    [
        pytest.param(lambda x: x, id="directly"),
        pytest.param(lambda x: x.t()[2], id="a view of a view"),
        pytest.param(lambda x: x.detach(), id="detach"),
        pytest.param(lambda x: x.data, id="data"),
        pytest.param(lambda x: torch.empty(0).set_(x), id="set_"),
        pytest.param(lambda x: nn.Parameter(x), id="a parameter"),
        pytest.param(lambda x: x.unflatten(0, (2, 2)), id="unflatten"),
    ],
)
def test_reader_refers_to_last_writer(through: Any) -> None:
    with HashDebugTrace() as trace:
        x = torch.ones(4, 4) * 2
        y = through(x)
        y + 1
        x.mul_(3)
        y - 1
    assert record(trace, "add").inputs[0].source == record(trace, "mul").id
    assert record(trace, "mul_").inputs[0] == record(trace, "mul_").inputs[0]._replace(
        source=record(trace, "mul").id, written=True
    )
    assert record(trace, "sub").inputs[0].source == record(trace, "mul_").id
    assert record(trace, "sub").inputs[0].offset == y.storage_offset()


def test_reused_address_is_another_tensor() -> None:
    with HashDebugTrace() as trace:
        for number in range(20):
            x = torch.ones(1000) * number
            del x
            torch.from_numpy(np.full(1000, number, dtype=np.float32)) + 1
    for number in range(20):
        assert record(trace, "add", number).inputs[0].source == f"other/#{number}"


WAYS: dict[str, Callable[[torch.Tensor, int], object]] = {
    "a row is filled": lambda v, i: v.__setitem__(i, 1.0),
    "a row is copied": lambda v, i: v.__setitem__(i, torch.ones(3)),
    "a row is added to": lambda v, i: v[i].add_(1),
    "narrow": lambda v, i: v.narrow(0, i, 1).add_(1),
    "other strides": lambda v, i: v.as_strided((3,), (1 + 3 * i,)).add_(1),
    "more of it": lambda v, i: v[: i + 1].add_(1),
    "a view of a view": lambda v, i: v.t()[1:][i].add_(1),
    "after another write": lambda v, i: (v[i], v.add_(1))[0].add_(1),
    "an output": lambda v, i: torch.add(torch.ones(3), 1, out=v[i]),
    "one of a list": lambda v, i: torch._foreach_add_([v[i], torch.zeros(3)], 1.0),
    "an optimizer's row": lambda v, i: torch.optim.SGD([_with_grad(v[i])], lr=1.0).step(),
}
"""Writes of the same to a part of ``v`` that ``i`` says."""


def _with_grad(row: torch.Tensor) -> nn.Parameter:
    parameter = nn.Parameter(row.detach())
    parameter.grad = torch.ones_like(row)
    return parameter


@pytest.mark.parametrize("hash_inputs", [False, True], ids=["", "inputs hashed"])
@pytest.mark.parametrize("write", WAYS.values(), ids=WAYS)
def test_an_equal_write_to_another_part_is_led_back_to_the_view(
    write: Callable[[torch.Tensor, int], object], hash_inputs: bool
) -> None:
    traces = []
    for i in range(2):
        with HashDebugTrace(hash_inputs=hash_inputs) as trace:
            memory = torch.zeros(3, 3)
            write(memory, i)
            result = memory * 2
        trace.add_result("output", result)
        traces.append(trace.finish())
    found = find(*traces).divergence
    assert found is not None
    assert (found.origin, found.opaque_producer) == ("outside", False)
    assert found.kernel in ("aten.select.int", "aten.slice.Tensor", "aten.as_strided.default")
    assert find(*reversed(traces)).divergence.kernel == found.kernel  # type: ignore[union-attr]


READS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "more of it": lambda v, i: v[: i + 1].sum(),
    "another order": lambda v, i: v.permute((0, 1) if i else (1, 0)) @ torch.arange(3.0),
    "different shape": lambda v, i: v.view((9, 1) if i else (1, 9)).sum(0).pow(2).sum(),
    "another row, written since": lambda v, i: (v[i], v.add_(1))[0] * 2,
}
"""Reads of a part of ``v`` that ``i`` says."""


@pytest.mark.parametrize("hash_inputs", [False, True], ids=["", "inputs hashed"])
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_read_of_another_part_is_led_back_to_the_view(
    read: Callable[[torch.Tensor, int], torch.Tensor], hash_inputs: bool
) -> None:
    traces = []
    for i in range(2):
        with HashDebugTrace(hash_inputs=hash_inputs) as trace:
            result = read(torch.arange(9.0).view(3, 3).relu(), i)
        trace.add_result("output", result)
        traces.append(trace.finish())
    found = find(*traces).divergence
    assert found is not None
    assert (found.origin, found.opaque_producer) == ("outside", False)
    assert found.kernel in ("aten.select.int", "aten.slice.Tensor", "aten.permute.default", "aten.view.default")
