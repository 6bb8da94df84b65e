"""Building a trace: ids, phases, and forward ops of backward ops."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hashbench import HashDebugTrace
from hashbench.core.records import OpRecord
from tests.core.trace.mode_helpers import Nested, record, text_of

pytestmark = pytest.mark.usefixtures("seeded", "each_tracer")


def test_phases_and_forward_ops() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    model[0].bias.register_hook(lambda grad: grad * 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    with HashDebugTrace() as trace:
        loss = model(torch.rand(2, 3)).sum()
        loss.backward()
        optimizer.step()
        loss - 2
    tanh = record(trace, "tanh_backward")
    assert (tanh.phase, tanh.module, tanh.forward_op) == ("backward", "Sequential.1", record(trace, "tanh").id)
    assert record(trace, "mm").forward_op == record(trace, "addmm", 1).id
    assert record(trace, "mul").phase == "backward"  # in a hook
    assert {r.phase for r in trace.finish().records if "_foreach" in r.op} == {"optimizer"}
    assert trace.finish().records[-1].phase == "forward"


def test_second_backward_has_the_same_forward_op() -> None:
    with HashDebugTrace() as trace:
        y = torch.rand(3, requires_grad=True).tanh().sum()
        y.backward(retain_graph=True)
        y.backward()
    assert [record(trace, "tanh_backward", n).forward_op for n in (0, 1)] == [record(trace, "tanh").id] * 2


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_module_is_recomputed_in_backward(reentrant: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    with HashDebugTrace() as trace:
        x = torch.rand(2, 3, requires_grad=True)
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    backward = record(trace, "tanh_backward")
    assert backward.phase == record(trace, "tanh", 1).phase == "backward"
    assert record(trace, "tanh", 1).module == "Sequential.1"
    if not reentrant:
        assert backward.module == "Sequential.1"


def test_custom_function_links_backward_to_forward() -> None:
    with HashDebugTrace() as trace:
        Nested.apply(torch.rand(3, requires_grad=True), 0).sum().backward()
    assert record(trace, "clone", 1).forward_op == record(trace, "clone", 0).id


def test_graph_older_than_the_trace_has_no_forward_op() -> None:
    y = torch.rand(3, requires_grad=True).tanh()
    with HashDebugTrace() as trace:
        torch.ones(3).neg()
        y.backward(torch.ones(3))
    assert record(trace, "tanh_backward").forward_op == ""


class Inserting(nn.Module):
    """Two layers, with or without an op of no consequence between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.extra = nn.Linear(3, 3), nn.Linear(3, 3), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        if self.extra:
            y.mean()
        return self.second(y)


def test_inserted_op_changes_only_its_own_line() -> None:
    model, x = Inserting(), torch.rand(2, 3)
    before = text_of(model, x)
    model.extra = True
    after = text_of(model, x)
    added = [line for line in after if line not in before and not line.startswith("end")]
    assert ["aten.mean" in line for line in added] == [True]
    assert [line for line in before if line not in after and not line.startswith("end")] == []


def test_records_equal_those_of_the_constructor() -> None:
    with HashDebugTrace() as trace:
        torch.ones(2).mul_(2)
    for found in trace.finish().records:
        made = OpRecord(**{field.name: getattr(found, field.name) for field in dataclasses.fields(found)})
        assert (type(found), found, hash(found)) == (OpRecord, made, hash(made))
        assert pickle.loads(pickle.dumps(found)) == made
        with pytest.raises(dataclasses.FrozenInstanceError):
            found.op = ""  # type: ignore[misc]
