"""A trace whose digests wait on their device until the run is over; here the device is the CPU."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tensor_kinds import KINDS

from hashbench import HashDebugTrace
from hashbench.core.devices import ledger
from hashbench.core.devices.ledger import Ledger
from hashbench.core.records import OpRecord, Trace
from hashbench.core.trace.digest import raw_digest
from tests.core.devices.training_steps import STEPS, counting


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.ReLU())


def step(net: torch.nn.Module) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, foreach=True)
    out = net(torch.arange(384.0).reshape(2, 3, 8, 8).sin().to(memory_format=torch.channels_last))
    out.sum().backward()
    optimizer.step()
    return [out, *net.parameters()]


def traced(digests: str) -> Trace:
    net = model()
    with HashDebugTrace(model=net, digests=digests) as trace:
        results = step(net)
    for number, value in enumerate(results):
        trace.add_result(f"result.{number}", value)
    return trace.finish()


def test_the_records_are_those_of_the_fast_digests() -> None:
    fast, device = traced("fast"), traced("device")
    assert [record.id for record in fast.records] == [record.id for record in device.records]
    assert [record.inputs for record in fast.records] == [record.inputs for record in device.records]
    for fast_record, record in zip(fast.records, device.records, strict=True):
        assert [output[:3] for output in fast_record.outputs] == [output[:3] for output in record.outputs]
        if not record.blank:
            assert all(len(output.value) == 16 for output in record.outputs)
            assert all(a.value != b.value for a, b in zip(fast_record.outputs, record.outputs, strict=True))
    assert [leaf.id for leaf in fast.leaves] == [leaf.id for leaf in device.leaves]


def test_no_readback_or_kept_tensor_during_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = []
    monkeypatch.setattr(ledger, "_wait_for_all", fetched.append)
    net = model()
    with HashDebugTrace(model=net, digests="device", inputs=[torch.ones(2)]) as trace:
        gone = weakref.ref((torch.ones(100) * 2).untyped_storage())
        results = step(net)
        gc.collect()
        assert gone() is None
        assert fetched == []
    for number, value in enumerate(results):
        trace.add_result(f"result.{number}", value)
    assert fetched == []
    assert len(trace.finish().records) > 20
    assert len(fetched) == 1


@pytest.mark.parametrize("digests", ["fast", "device"])
def test_a_leaf_that_changed_before_it_was_read_is_noticed(digests: str) -> None:
    net = model()
    trace = HashDebugTrace(model=net, digests=digests)
    net[0].bias.detach().numpy()[:] = 3.0
    with trace:
        net(torch.ones(1, 3, 8, 8))
    assert {leaf.id for leaf in trace.finish().leaves if leaf.initial} == {"parameter/Sequential.0.bias"}


@torch.library.custom_op("hashbench_test_devices::hidden", mutates_args=())
def hidden(x: torch.Tensor, value: float) -> torch.Tensor:
    """Writes what its schema does not declare."""
    x.numpy()[:] = value
    return x.clone()


def with_hidden_writes(digests: str, kind: str) -> Trace:
    with torch.no_grad():
        x = torch.zeros(6)[3:] if kind == "a part of a leaf" else torch.zeros(3)
        with HashDebugTrace(digests=digests, hash_inputs=True) as trace:
            x = x.add(0) if kind == "written by an op" else x
            x.neg()  # reads, and writes nothing
            hidden(x, 0.0)  # writes what is there
            x.exp()
            hidden(x, 7.0)
            hidden(x, 8.0)
            x.sin()
            x.mul_(2)
            x.cos()
    trace.add_result("x", x)
    return trace.finish()


@pytest.mark.parametrize("kind", ["a leaf", "a part of a leaf", "written by an op"])
def test_writes_that_no_schema_declares_are_found(kind: str) -> None:
    """On a device they are known only at the end; the graph is the same."""
    fast, device = with_hidden_writes("fast", kind), with_hidden_writes("device", kind)
    hidden_writes = [record for record in device.records if "hidden" in record.op]
    assert [len(record.outputs) for record in hidden_writes] == [1, 2, 2]
    assert next(one for one in device.records if "sin" in one.op).inputs[0].source == hidden_writes[2].id
    neg, exp = (next(one for one in device.records if f"aten.{op}." in one.op) for op in ("neg", "exp"))
    assert exp.inputs[0].source == neg.inputs[0].source  # the first hidden write changed nothing
    assert all("other" in ref.source or "add" in ref.source for ref in exp.inputs)
    if (
        kind == "a part of a leaf"
    ):  # an op that writes a part makes the whole a leaf: at that time, no write before it is known
        fast, device = (Trace(records=trace.records[:-2]) for trace in (fast, device))
    assert [without_content(one) for one in fast.records] == [without_content(one) for one in device.records]
    assert [result.source for result in fast.results] == [result.source for result in device.results]
    assert [leaf.id for leaf in fast.leaves] == [leaf.id for leaf in device.leaves]


def without_content(record: OpRecord) -> tuple[Any, ...]:
    """The two kinds of digests are never equal."""
    inputs = [tuple(ref)[:4] for ref in record.inputs]
    return record.id, inputs, [found[:3] for found in record.outputs]


@pytest.mark.parametrize(("make", "first", "second"), KINDS)
@pytest.mark.filterwarnings("ignore")
def test_digest_follows_content_for_every_tensor_kind(
    make: Callable[[Any], torch.Tensor], first: Any, second: Any
) -> None:
    def digest_of(tensor: torch.Tensor) -> str:
        trace = HashDebugTrace(digests="device")
        trace.add_result("it", tensor)
        return trace.finish().results[0].digest.value

    assert digest_of(make(first)) == digest_of(make(first)) != digest_of(make(second))


# ------------------------------------------------------------------------------------------ nothing waits


@pytest.mark.parametrize("options", [{}, {"hash_inputs": True, "source_lines": True}], ids=["traced", "inputs hashed"])
@pytest.mark.parametrize("name", STEPS)
def test_a_traced_step_waits_no_more_often_than_the_step_alone(name: str, options: dict[str, Any]) -> None:
    plain, step = STEPS[name]("cpu"), STEPS[name]("cpu")
    with counting() as alone:
        plain()
    trace = HashDebugTrace(digests="device", **options)
    with counting() as traced:
        trace.__enter__()
        step()
        traced = Counter(traced)
        trace.__exit__(None, None, None)
    assert traced == alone
    records = trace.finish().records
    assert {"forward", "backward", "optimizer"} <= {record.phase for record in records}
    assert all(len(found.value) == 16 for record in records if not record.blank for found in record.outputs)


def test_a_step_in_another_thread_waits_no_more_often() -> None:
    def counted(work: Callable[[], Any]) -> Counter[str]:
        with counting() as found:  # torch's modes are per thread
            work()
        return Counter(found)

    plain, step = STEPS["a checkpoint"]("cpu"), STEPS["a checkpoint"]("cpu")
    trace = HashDebugTrace(digests="device")

    def traced() -> None:
        with trace:
            step()

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(counted, traced).result() == pool.submit(counted, plain).result()
    assert "backward" in {record.phase for record in trace.finish().records}


@pytest.mark.parametrize(("make", "first", "_second"), KINDS)
@pytest.mark.filterwarnings("ignore")
def test_no_kind_of_tensor_is_waited_for(make: Callable[[Any], torch.Tensor], first: Any, _second: Any) -> None:
    """Quantized tensors with a scale for the whole keep it on the host."""
    tensor = make(first)
    with counting() as found:
        raw_digest(tensor, Ledger(everywhere=True))
    assert not found


def test_the_count_sees_what_it_is_to_see() -> None:
    with counting() as found:
        tensor = torch.ones(2)
        tensor.sum().item()
        tensor.tolist()
        bool(tensor[0])
        tensor.to(torch.float64)
        torch.equal(tensor, tensor)
    assert set(found) >= {"item", "tolist", "__bool__", "to", "aten::_local_scalar_dense", "aten::_to_copy"}
    assert found["aten::equal"] == 1
