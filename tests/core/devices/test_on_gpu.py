"""What only a GPU can show. Bodies that mean something on the CPU run there too, with ``digests="device"``."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from hashbench import HashDebugTrace
from hashbench.core.devices import ledger, reference
from hashbench.core.devices.ledger import DigestPath, Ledger, digest_path
from hashbench.core.devices.reference import bytes_of, digest_of_bytes, finish
from hashbench.core.divergence import find
from hashbench.core.records import Trace
from tests.core.devices import interpreted_cases
from tests.core.devices.training_steps import STEPS


def on_gpus(count: int) -> list[pytest.MarkDecorator]:
    """The marks of a test that needs so many GPUs."""
    missing = torch.cuda.device_count() < count
    return [pytest.mark.gpu, pytest.mark.skipif(missing, reason=f"needs {count} GPU{'s' if count > 1 else ''}")]


def gpu(test: Any) -> Any:
    """Marks one test that needs a GPU."""
    for mark in on_gpus(1):
        test = mark(test)
    return test


DEVICES = ["cpu", pytest.param("cuda", marks=on_gpus(1))]
PAIRS = [("cpu", "cpu"), pytest.param(("cuda:0", "cuda:1"), marks=on_gpus(2), id="two GPUs")]


def expected(tensor: torch.Tensor) -> int:
    return digest_of_bytes(bytes(bytes_of(tensor.detach().cpu()).tolist()))


def book() -> Ledger:
    return Ledger(everywhere=True)


def values(trace: Trace) -> list[list[str]]:
    return [[found.value for found in record.outputs] for record in trace.records if not record.blank]


def traced(step: Callable[[], list[torch.Tensor]], **options: Any) -> Trace:
    with HashDebugTrace(digests="device", **options) as trace:
        results = step()
    for number, tensor in enumerate(results):
        trace.add_result(f"result.{number}", tensor)
    return trace.finish()


@contextmanager
def refusing_to_wait() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ------------------------------------------------------------------------------------------------- the kernel


@gpu
def test_digests_on_a_gpu_are_made_by_triton() -> None:
    assert digest_path("cuda") == DigestPath("triton")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", interpreted_cases.DTYPES, ids=str)
def test_every_dtype_and_address(device: str, dtype: torch.dtype) -> None:
    found, data = book(), interpreted_cases.noise(3003).to(device)
    for count in (1, 7, 300):
        tensor = interpreted_cases.noise(count, dtype).to(device)
        assert found.add(tensor).resolve() == expected(tensor)
    for start in range(9):
        part = data[start : start + 2901]
        assert found.add(part).resolve() == expected(part)


@pytest.mark.parametrize("device", DEVICES)
def test_every_order_of_dimensions_is_read_in_memory_order(device: str) -> None:
    tensor, found = torch.randn(2, 3, 5, 7).to(device), book()
    orders = {found.add(tensor.permute(order)).resolve() for order in interpreted_cases.ORDERS}
    assert orders == {expected(tensor)}


@gpu
@pytest.mark.parametrize("count", [2**20 + 3, 2**26 + 5, 2**31 + 11])
def test_large_tensors(count: int) -> None:
    """The kernel and torch's ops on the same memory; a change in the last byte is seen."""
    data = torch.empty(count, dtype=torch.uint8, device="cuda").random_()
    total = torch.zeros(1, dtype=torch.int64, device="cuda")
    reference.accumulate(data, total)
    before = book().add(data).resolve()
    assert before == finish(int(total), count)
    data[-1] += 1
    assert book().add(data).resolve() != before


@gpu
def test_a_kernel_that_fails_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    from hashbench.core.devices import triton_kernel

    tensor = torch.randn(1000, device="cuda")
    right = book().add(tensor).resolve()

    class Broken:
        def __getitem__(self, grid: Any) -> Any:
            raise RuntimeError("no compiler")

    monkeypatch.setattr(triton_kernel, "word_sums", Broken())
    with pytest.warns(UserWarning, match="no compiler"):
        assert book().add(tensor).resolve() == right


# ------------------------------------------------------------------------------------------------- nothing waits


@gpu
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("options", [{}, {"hash_inputs": True}], ids=["traced", "inputs hashed"])
def test_a_traced_step_on_a_gpu_never_waits(name: str, options: dict[str, Any]) -> None:
    traced(STEPS[name]("cuda"), **options)  # compiles the kernels
    plain, step = STEPS[name]("cuda"), STEPS[name]("cuda")
    torch.cuda.synchronize()
    with refusing_to_wait():
        plain()
        with HashDebugTrace(**options) as trace:
            step()
    assert all(len(value) == 16 for outputs in values(trace.finish()) for value in outputs)


@gpu
def test_the_host_is_ahead_of_the_gpu() -> None:
    """Ten digests are asked for while the GPU sleeps; nothing of them is done when the host goes on."""
    tensor, found = torch.randn(1 << 20, device="cuda"), book()
    found.add(tensor).resolve()
    torch.cuda._sleep(2_000_000_000)  # clock cycles: about a second
    asleep = torch.cuda.Event()
    asleep.record()
    pending = [found.add(tensor) for _ in range(10)]
    assert not asleep.query()
    assert {one.resolve() for one in pending} == {expected(tensor)}


@gpu
def test_a_digest_is_of_the_content_on_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stream sleeps, then writes; a digest on another stream would see what was there before."""
    monkeypatch.setattr(ledger, "CHUNK", 4)
    found, streams = book(), [torch.cuda.Stream() for _ in range(3)]
    found.add(torch.ones(9, device="cuda")).resolve()
    tensors = [torch.zeros(100_000, device="cuda") for _ in streams]
    torch.cuda.synchronize()
    pending = []
    for number in range(1, 8):
        for stream, tensor in zip(streams, tensors, strict=True):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(50_000_000)
                tensor.fill_(number)
                pending.append((number, found.add(tensor)))
    for number, one in pending:
        assert one.resolve() == expected(torch.full((100_000,), float(number)))


@gpu
def test_freed_sums_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffer was made on one stream and is still being added to on another when it goes."""
    monkeypatch.setattr(ledger, "CHUNK", 64)
    tensor, other = torch.ones(100, device="cuda"), torch.cuda.Stream()
    book().add(tensor).resolve()
    torch.cuda.synchronize()
    dropped = book()
    dropped.add(tensor)
    with torch.cuda.stream(other):
        torch.cuda._sleep(200_000_000)
        for _ in range(60):
            dropped.add(tensor)
    del dropped
    taken = [torch.full((64,), 5, dtype=torch.int64, device="cuda") for _ in range(50)]
    torch.cuda.synchronize()
    assert all(bool((one == 5).all()) for one in taken)


@pytest.mark.parametrize("devices", PAIRS)
def test_a_model_on_several_devices(devices: tuple[str, str]) -> None:
    """Autograd has a thread for each device."""

    def step() -> list[torch.Tensor]:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(8, 8).to(device) for device in devices]
        hidden = torch.ones(4, 8).to(devices[0])
        for layer, device in [*zip(layers, devices, strict=True)] * 3:
            hidden = layer(hidden.to(device)).relu()
        hidden.sum().backward()
        return [hidden, *(parameter.grad for layer in layers for parameter in layer.parameters())]

    first, second = traced(step), traced(step)
    assert find(first, second).divergence is None
    assert [one.digest for one in first.results] == [one.digest for one in second.results]
    assert [one.digest.value for one in first.results] == [f"{expected(tensor):016x}" for tensor in step()]


# ---------------------------------------------------------------------------------------------- nothing changes


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", STEPS)
def test_a_trace_changes_no_result_and_draws_no_random_number(name: str, device: str) -> None:
    def run(*, with_trace: bool) -> tuple[list[torch.Tensor], torch.Tensor]:
        step = STEPS[name](device)
        torch.manual_seed(5)
        if with_trace:
            with HashDebugTrace(digests="device"):
                results = step()
        else:
            results = step()
        state = torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()  # seed and offset
        return [tensor.detach().cpu() for tensor in results], state

    plain, state = run(with_trace=False)
    results, state_after = run(with_trace=True)
    assert all(torch.equal(one, other) for one, other in zip(plain, results, strict=True))
    assert torch.equal(state, state_after)


@gpu
def test_activations_live_no_longer_than_without_a_trace() -> None:
    """Peak and remaining memory of a forward whose activations of 4 MiB die one after the other."""

    def memory(*, with_trace: bool) -> tuple[int, int]:
        gc.collect()
        data = torch.ones(1 << 20, device="cuda")
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        trace = HashDebugTrace() if with_trace else None
        if trace is not None:
            trace.__enter__()
        for _ in range(30):
            data = data.mul(1.5).add(1).tanh()
        if trace is not None:
            trace.__exit__(None, None, None)
        return torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before

    memory(with_trace=True)  # compiles the kernel
    (peak, rest), (traced_peak, traced_rest) = memory(with_trace=False), memory(with_trace=True)
    chunk = ledger.CHUNK * 8
    assert traced_peak - peak <= chunk + 4096
    assert traced_rest - rest <= chunk + 4096


@gpu
def test_a_hundred_thousand_numbers_take_a_megabyte_of_a_gpu() -> None:
    found, tensor = book(), torch.ones(8, device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    pending = [found.add(tensor) for _ in range(100_000)]
    assert torch.cuda.memory_allocated() - before <= 1_000_000
    assert {one.resolve() for one in pending} == {expected(tensor)}


@pytest.mark.parametrize("device", DEVICES)
def test_two_runs_agree_and_a_change_is_found(device: str) -> None:
    def step(scale: float) -> Callable[[], list[torch.Tensor]]:
        def run() -> list[torch.Tensor]:
            hidden = torch.arange(64.0).to(device).reshape(8, 8).sin()
            return [(hidden @ hidden).mul(scale).relu().cumsum(0)]

        return run

    assert find(traced(step(2)), traced(step(2))).divergence is None
    found = find(traced(step(2)), traced(step(3))).divergence
    assert found is not None
    assert "aten.mul.Tensor" in found.node
