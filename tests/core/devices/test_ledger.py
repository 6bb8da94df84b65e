"""Sums that wait on their device: read in bulk, never keeping a tensor."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch

from hashbench.core.devices import ledger
from hashbench.core.devices.ledger import Ledger
from hashbench.core.devices.reference import bytes_of, digest_of_bytes


def expected(tensor: torch.Tensor) -> int:
    return digest_of_bytes(bytes(bytes_of(tensor).tolist()))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 5),
        torch.randn(3, 5).t(),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(10)[3:8],
        torch.arange(9, dtype=torch.uint8)[1:],
        torch.tensor(2.5),
        torch.zeros(0, 4),
        torch.randn(4, dtype=torch.complex64),
    ],
    ids=["rows", "columns", "channels last", "offset", "odd address", "scalar", "empty", "complex"],
)
def test_digest_is_that_of_the_memory(tensor: torch.Tensor) -> None:
    assert Ledger().add(tensor).resolve() == expected(tensor)


def test_sum_is_of_the_moment_it_was_added() -> None:
    tensor, book = torch.zeros(4), Ledger()
    before = book.add(tensor)
    tensor += 1
    after = book.add(tensor)
    zeros, ones = expected(torch.zeros(4)), expected(torch.ones(4))
    assert (before.resolve(), after.resolve()) == (zeros, ones)
    assert (book.add(tensor).resolve(), before.resolve()) == (ones, zeros)


def test_numbers_are_fetched_once_for_every_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "CHUNK", 8)
    waits: list[torch.device] = []
    monkeypatch.setattr(ledger, "_wait_for_all", waits.append)
    book = Ledger()
    tensors = [torch.full((3,), float(number)) for number in range(20)]
    pending = [book.add(tensor) for tensor in tensors]
    assert waits == []
    book.read()
    assert len(waits) == 3
    assert [one.resolve() for one in pending] == [expected(tensor) for tensor in tensors]
    assert len(waits) == 3


def test_no_tensor_is_kept() -> None:
    book, tensor = Ledger(), torch.randn(100)
    gone = weakref.ref(tensor.untyped_storage())
    pending = book.add(tensor)
    del tensor
    assert gone() is None
    assert pending.resolve()


def test_threads_may_add_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "CHUNK", 16)
    book, start = Ledger(), threading.Barrier(4)
    found: dict[float, list[ledger.Pending]] = {float(number): [] for number in range(4)}

    def work(value: float) -> None:
        start.wait()
        for _ in range(100):
            found[value].append(book.add(torch.full((2,), value)))

    threads = [threading.Thread(target=work, args=(value,)) for value in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for value, pending in found.items():
        assert {one.resolve() for one in pending} == {expected(torch.full((2,), value))}


def test_a_hundred_thousand_numbers_take_a_megabyte() -> None:
    assert -(-100_000 // ledger.CHUNK) * ledger.CHUNK * 8 < 1_000_000
