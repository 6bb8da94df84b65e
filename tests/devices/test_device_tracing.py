"""A trace whose digests wait on their device until the run is over; here the device is the CPU."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hashbench import HashDebugTrace
from hashbench.devices import Ledger, ledger
from hashbench.divergence import find
from hashbench.records import Trace


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.ReLU())


def step(net: torch.nn.Module, *, noise: float = 0.0) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, foreach=True)
    out = net(torch.ones(2, 3, 8, 8).to(memory_format=torch.channels_last))
    (out * (1 + noise)).sum().backward()
    optimizer.step()
    return [out, *net.parameters()]


def traced(digests: str, work: Callable[[torch.nn.Module], Any] = step) -> Trace:
    net = model()
    with HashDebugTrace(model=net, digests=digests) as trace:
        results = work(net)
    for number, value in enumerate(results):
        trace.add_result(f"result.{number}", value)
    return trace.finish()


def test_two_runs_are_equal_and_a_change_is_found_at_the_same_op() -> None:
    for digests in ("fast", "device"):
        same = find(traced(digests), traced(digests))
        assert same.divergence is None
        changed = find(traced(digests), traced(digests, lambda net: step(net, noise=0.5)))
        assert changed.divergence is not None
        assert changed.divergence.origin == "outside"
        assert "aten.mul.Tensor" in changed.divergence.node


def test_the_records_are_those_of_the_fast_digests() -> None:
    fast, device = traced("fast"), traced("device")
    assert [record.id for record in fast.records] == [record.id for record in device.records]
    assert [record.inputs for record in fast.records] == [record.inputs for record in device.records]
    for one, other in zip(fast.records, device.records, strict=True):
        assert [found[:3] for found in one.outputs] == [found[:3] for found in other.outputs]
        if not other.blank:
            assert all(len(found.value) == 16 for found in other.outputs)
            assert all(a.value != b.value for a, b in zip(one.outputs, other.outputs, strict=True))
    assert [leaf.id for leaf in fast.leaves] == [leaf.id for leaf in device.leaves]


def test_nothing_is_read_back_while_the_model_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = []
    monkeypatch.setattr(ledger, "_wait_for_all", fetched.append)
    net = model()
    with HashDebugTrace(model=net, digests="device", inputs=[torch.ones(2)]) as trace:
        results = step(net)
        assert fetched == []
    for number, value in enumerate(results):
        trace.add_result(f"result.{number}", value)
    assert fetched == []
    assert len(trace.finish().records) > 20
    assert len(fetched) == 1


def test_no_activation_is_kept_alive() -> None:
    with HashDebugTrace(digests="device"):
        gone = weakref.ref((torch.ones(100) * 2).untyped_storage())
        gc.collect()
        assert gone() is None


@pytest.mark.parametrize("digests", ["fast", "device"])
def test_a_leaf_that_changed_before_it_was_read_is_noticed(digests: str) -> None:
    net = model()
    trace = HashDebugTrace(model=net, digests=digests)
    net[0].bias.detach().numpy()[:] = 3.0
    with trace:
        net(torch.ones(1, 3, 8, 8))
    assert {leaf.id for leaf in trace.finish().leaves if leaf.initial} == {"parameter/Sequential.0.bias"}


def test_writes_that_no_schema_declares_are_found() -> None:
    @torch.library.custom_op("hashbench_test_devices::hidden", mutates_args=())
    def hidden(x: torch.Tensor) -> torch.Tensor:
        x.numpy()[:] = 7.0
        return x.clone()

    for digests in ("fast", "device"):
        with HashDebugTrace(digests=digests, hash_inputs=True) as trace:
            hidden(torch.zeros(3))
        record = next(one for one in trace.finish().records if "hidden" in one.op)
        assert len(record.outputs) == 2


KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "compressed": lambda: torch.eye(3).to_sparse_csr(),
    "expanded": lambda: torch.arange(3.0).expand(4, 3),
    "strided": lambda: torch.arange(20.0)[::3],
    "conjugate": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "zero tensor": lambda: torch._efficientzerotensor((2, 2)),
    "float8": lambda: torch.arange(5.0).to(torch.float8_e4m3fn),
    "quantized": lambda: torch.quantize_per_tensor(torch.arange(4.0), 0.1, 0, torch.quint8),
}


OTHERS: dict[str, Callable[[], torch.Tensor]] = {
    "sparse": lambda: torch.eye(3).mul(2).to_sparse(),
    "compressed": lambda: torch.eye(3).mul(2).to_sparse_csr(),
    "expanded": lambda: torch.arange(1.0, 4.0).expand(4, 3),
    "strided": lambda: torch.arange(20.0)[1::3],
    "conjugate": lambda: torch.randn(3, dtype=torch.complex64),
    "zero tensor": lambda: torch.ones(2, 2),
    "float8": lambda: torch.arange(1, 6.0).to(torch.float8_e4m3fn),
    "quantized": lambda: torch.quantize_per_tensor(torch.arange(4.0), 0.2, 0, torch.quint8),
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_every_kind_of_tensor_has_a_digest_that_follows_its_content(name: str) -> None:
    def digest_of(tensor: torch.Tensor) -> str:
        trace = HashDebugTrace(digests="device")
        trace.add_result("it", tensor)
        return trace.finish().results[0].digest.value

    torch.manual_seed(1)
    first = KINDS[name]()
    torch.manual_seed(1)
    again, other = KINDS[name](), OTHERS[name]()
    assert other.dtype == first.dtype
    assert digest_of(first) == digest_of(again) != digest_of(other)


class Waits(TorchDispatchMode):
    """Counts what waits for a device: reading a scalar, and copies to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten._to_copy.default)
        return func(*args, **(kwargs or {}))


def test_the_reference_itself_reads_no_number() -> None:
    book, waits = Ledger(everywhere=True), Waits()
    with waits:
        book.add(torch.randn(33))
        assert waits.count == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_a_training_step_on_a_gpu_is_traced_without_a_wait() -> None:
    torch.zeros(1, device="cuda")
    HashDebugTrace()._ledger.add(torch.ones(9, device="cuda"))  # compiles the kernel
    net = model().cuda()
    data = torch.ones(2, 3, 8, 8, device="cuda")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with HashDebugTrace(model=net) as trace:
        torch.cuda.set_sync_debug_mode("error")
        try:
            net(data).sum().backward()
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(len(found.value) == 16 for record in trace.finish().records for found in record.outputs)
