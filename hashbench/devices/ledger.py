"""Where digests wait on their device until the run is over."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from hashbench.devices import reference
from hashbench.devices.formula import finish
from hashbench.devices.memory import bytes_of

Accumulate = Callable[[torch.Tensor, torch.Tensor], None]
"""Adds the sum over the words of the first tensor (``uint8``) to the second (``int64``, one element)."""

CHUNK = 1 << 14
"""Numbers in one piece of device memory, 128 KiB."""


@dataclass(slots=True)
class _Chunk:
    totals: torch.Tensor
    ready: object
    """An event that the zeros were written, on devices with streams."""
    stream: object
    used: int = 0
    host: list[int] | None = None


@dataclass(frozen=True, slots=True)
class Pending:
    """A digest whose number is still on the device; ``resolve`` waits for it."""

    ledger: Ledger = field(repr=False)
    chunk: int
    device: torch.device
    place: int
    nbytes: int

    def resolve(self) -> int:
        """The digest, 64 bits, unsigned. Reads all numbers of its chunk at once, and waits for the device."""
        return finish(self.ledger.total(self.device, self.chunk, self.place), self.nbytes)


class Ledger:
    """The sums over the tensors of one run, on the devices where the tensors are.

    :meth:`add` launches one kernel and returns at once; no tensor is kept alive. :meth:`read` waits once and fetches
    everything. Threads may add at the same time (autograd has one thread for every device). A number takes 8 bytes.

    Args:
        everywhere: whether it is meant for tensors on the CPU as well.
    """

    def __init__(self, *, everywhere: bool = False) -> None:
        self.everywhere = everywhere
        self._functions: dict[torch.device, Accumulate] = {}
        self._chunks: dict[torch.device, list[_Chunk]] = {}
        self._lock = threading.Lock()

    def add(self, tensor: torch.Tensor) -> Pending:
        """Begin the digest of a dense tensor. Call it with dispatch modes off, on the stream that wrote the tensor."""
        device = tensor.device
        with self._lock:
            number, chunk = self._room(device)
            place = chunk.used
            chunk.used += 1
            chunk.host = None
        _wait_for_zeros(chunk, device)
        if tensor.nbytes:
            self._functions[device](bytes_of(tensor), chunk.totals[place : place + 1])
        return Pending(self, number, device, place, tensor.nbytes)

    def read(self) -> None:
        """Fetch all numbers, one copy for every 16 384 of them."""
        for device, chunks in self._chunks.items():
            for number in range(len(chunks)):
                self.total(device, number, 0)

    def total(self, device: torch.device, chunk: int, place: int) -> int:
        """One sum; its whole chunk is fetched if it was not yet."""
        found = self._chunks[device][chunk]
        if found.host is None:
            _wait_for_all(device)
            found.host = found.totals[: found.used].tolist()
        return found.host[place]

    def _room(self, device: torch.device) -> tuple[int, _Chunk]:
        chunks = self._chunks.setdefault(device, [])
        if device not in self._functions:
            self._functions[device] = accumulator(device)
        if not chunks or chunks[-1].used == CHUNK:
            chunks.append(_new_chunk(device))
        return len(chunks) - 1, chunks[-1]


def accumulator(device: torch.device) -> Accumulate:
    """The fastest function for a device: the Triton kernel where Triton has a driver for it, else torch's own ops."""
    if device.type != "cpu" and _has_triton(device):
        from hashbench.devices import triton_kernel

        return triton_kernel.accumulate
    return reference.accumulate


def _has_triton(device: torch.device) -> bool:
    from torch.utils._triton import has_triton

    return device.type in ("cuda", "xpu") and has_triton()


def _new_chunk(device: torch.device) -> _Chunk:
    totals = torch.zeros(CHUNK, dtype=torch.int64, device=device)
    if device.type == "cpu" or not _has_streams(device):
        return _Chunk(totals, None, None)
    module = torch.get_device_module(device)
    stream = module.current_stream(device)
    return _Chunk(totals, stream.record_event(), stream)


def _wait_for_zeros(chunk: _Chunk, device: torch.device) -> None:
    """Let the current stream, not the host, wait until the chunk was zeroed on the stream that made it."""
    if chunk.ready is not None:
        stream = torch.get_device_module(device).current_stream(device)
        if stream != chunk.stream:
            stream.wait_event(chunk.ready)


def _wait_for_all(device: torch.device) -> None:
    """Wait for every stream: the copy that follows waits for the current one alone."""
    if device.type != "cpu" and _has_streams(device):
        torch.get_device_module(device).synchronize(device)


def _has_streams(device: torch.device) -> bool:
    return hasattr(torch.get_device_module(device), "current_stream")
