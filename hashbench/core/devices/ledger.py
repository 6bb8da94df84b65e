"""Digests on accelerators: choose the hash function of a device, and buffer its results there.

hashbench's functions are in :data:`BUILT_IN`; installed packages add others by the entry-point group
``hashbench.devices``. ``docs/devices.md`` specifies such a function.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import NamedTuple

import torch

from hashbench.core.devices import reference
from hashbench.core.devices.reference import digest_of_bytes, finish
from hashbench.core.errors import HashbenchError, first_line

Accumulate = Callable[[torch.Tensor, torch.Tensor, int], None]
"""``accumulate(tensor, totals, place)``: add the sum over the words of a dense tensor to ``totals[place]``, an
``int64``, on the device of both, asynchronously."""

GROUP = "hashbench.devices"
FALLBACK = "torch ops"
_OLDEST_FOR_TRITON = (7, 0)


class Unfit(Exception):  # noqa: N818 – not an error: another function is taken
    """A function cannot be used for a device; the message says why."""


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """One function for some kinds of devices.

    Args:
        name: name of the function in messages.
        types: torch device types (``cuda``) that it supports.
        load: import the function. Any exception is the reason why it is not used.
    """

    name: str
    types: tuple[str, ...]
    load: Callable[[torch.device], Accumulate]


@dataclass(frozen=True, slots=True)
class DigestPath:
    """Function that computes digests on a device; ``reason`` says why it is only torch's own ops."""

    name: str
    reason: str = ""


def chosen(device: torch.device) -> tuple[DigestPath, Accumulate]:
    """Return the fastest function for a device that can be loaded; functions of installed packages take precedence."""
    reasons = []
    for kind in (*_from_packages(device.type), *BUILT_IN):
        if device.type not in kind.types:
            continue
        try:
            return DigestPath(kind.name), kind.load(device)
        except Exception as error:
            reasons.append(f"{kind.name}: {_first_line(error)}")
    return DigestPath(
        FALLBACK, "; ".join(reasons) or f"nothing faster is known for {device.type}"
    ), reference.accumulate


def _first_line(error: BaseException) -> str:
    """Return the first line of an error, prefixed with its type unless it is one of ours."""
    text = first_line(error)
    return text if isinstance(error, Unfit) else f"{type(error).__name__}: {text}".removesuffix(": ")


def _from_packages(device_type: str) -> tuple[DeviceKind, ...]:
    points = sorted(entry_points(group=GROUP, name=device_type), key=lambda point: point.value)
    return tuple(DeviceKind(point.value, (point.name,), functools.partial(_load_point, point)) for point in points)


def _load_point(point: EntryPoint, _device: torch.device) -> Accumulate:
    return point.load().accumulate  # type: ignore[no-any-return]


def _load_triton(device: torch.device) -> Accumulate:
    if importlib.util.find_spec("triton") is None:
        raise Unfit("it is not installed")
    if device.type == "cuda" and not torch.version.hip:
        capability = torch.cuda.get_device_capability(device)
        if capability < _OLDEST_FOR_TRITON:
            needed, present = (".".join(map(str, version)) for version in (_OLDEST_FOR_TRITON, capability))
            raise Unfit(f"needs compute capability {needed}, this card has {present}")
    from hashbench.core.devices import triton_kernel

    return triton_kernel.accumulate


BUILT_IN = (DeviceKind("triton", ("cuda", "xpu"), _load_triton),)
"""``cuda`` includes ROCm."""


# ------------------------------------------------------------------------------------------------------ the buffer

CHUNK = 1 << 14
"""Sums per chunk of device memory, 128 KiB."""


@dataclass(slots=True, eq=False)
class _Chunk:
    totals: torch.Tensor
    ready: torch.Event | None
    """Event after the zeros were written, on devices with streams."""
    streams: set[int]
    """Streams that have waited for ``ready``."""
    used: int = 0
    host: list[int] | None = None

    def total(self, place: int) -> int:
        """Return one sum; fetch the whole chunk on first use."""
        if self.host is None:
            _wait_for_all(self.totals.device)
            self.host = self.totals[: self.used].tolist()
        return self.host[place]


class Pending(NamedTuple):  # a tuple: one is made for every tensor that an op writes
    """Future of a digest whose sum is still on the device."""

    chunk: _Chunk
    place: int
    nbytes: int

    def resolve(self) -> int:
        """Return the digest, 64 bits, unsigned. Fetches all sums of its chunk at once, and synchronizes the device."""
        return finish(self.chunk.total(self.place), self.nbytes)


class Ledger:
    """Sums over the tensors of one run, on the tensors' devices.

    :meth:`add` launches one kernel and returns at once; no tensor is kept alive. :meth:`read` synchronizes once and
    fetches everything. Thread-safe (autograd has one thread per device). A sum takes 8 bytes. If a function fails on a
    device, torch's own ops replace it there, with a warning.

    Args:
        everywhere: also used for tensors on the CPU.
    """

    def __init__(self, *, everywhere: bool = False) -> None:
        self.everywhere = everywhere
        self._paths: dict[torch.device, tuple[DigestPath, Accumulate]] = {}
        self._chunks: dict[torch.device, list[_Chunk]] = {}
        self._lock = threading.Lock()

    def add(self, tensor: torch.Tensor) -> Pending:
        """Start the digest of a dense tensor. Call it with dispatch modes disabled, on the stream that wrote the
        tensor."""
        device = tensor.device
        with self._lock:
            chunk, accumulate = self._room(device)
            place = chunk.used
            chunk.used += 1
            chunk.host = None
        if chunk.ready is not None:
            _join(chunk, chunk.ready, torch.accelerator.current_stream(device))
        nbytes = tensor.nbytes
        if nbytes:
            try:
                accumulate(tensor, chunk.totals, place)
            except Exception as error:
                self._fall_back(device, accumulate, error)
                chunk.totals[place : place + 1].zero_()
                reference.accumulate(tensor, chunk.totals, place)
        return Pending(chunk, place, nbytes)

    def read(self) -> None:
        """Fetch all sums, one copy for every 16 384 of them."""
        for chunks in self._chunks.values():
            for chunk in chunks:
                chunk.total(0)

    @property
    def nbytes(self) -> int:
        """Memory of the sums on all devices together, in bytes."""
        return sum(chunk.totals.nbytes for chunks in self._chunks.values() for chunk in chunks)

    def path(self, device: torch.device) -> DigestPath:
        """Return the function in use on a device, or the one that would be used."""
        with self._lock:
            return self._path(device)[0]

    def _path(self, device: torch.device) -> tuple[DigestPath, Accumulate]:
        if device not in self._paths:
            self._paths[device] = chosen(device)
        return self._paths[device]

    def _room(self, device: torch.device) -> tuple[_Chunk, Accumulate]:
        chunks = self._chunks.setdefault(device, [])
        if not chunks or chunks[-1].used == CHUNK:
            chunks.append(_new_chunk(device))
        return chunks[-1], self._path(device)[1]

    def _fall_back(self, device: torch.device, failed: Accumulate, error: Exception) -> None:
        """Switch to torch's own ops. Raises if they are what failed, or memory is exhausted."""
        if failed is reference.accumulate or isinstance(error, torch.OutOfMemoryError):
            raise error
        with self._lock:
            path, function = self._path(device)
            if function is not failed:  # another thread has switched already
                return
            reason = f"{path.name}: {_first_line(error)}"
            self._paths[device] = DigestPath(FALLBACK, reason), reference.accumulate
        warnings.warn(f"digests on {device} are made by torch's own ops, which is slow ({reason})", stacklevel=2)


def digest_path(device: torch.device | str) -> DigestPath:
    """Return the function used on a device, after testing it on a few bytes there, which synchronizes.

    Raises:
        HashbenchError: no digest can be computed there, or it differs from ``reference.py``.
    """
    device = torch.device(device)
    return DigestPath("xxhash") if device.type == "cpu" else verified_path(Ledger(), device)


def verified_path(book: Ledger, device: torch.device) -> DigestPath:
    """Return the function that ``book`` uses on a device, after verifying a digest of 251 bytes there."""
    data = bytes(range(1, 252))
    try:
        digest = book.add(torch.tensor(list(data), dtype=torch.uint8).to(device)).resolve()
    except Exception as error:
        raise HashbenchError(
            f"cannot compute digests on {device}",
            consequence=f"nothing can be traced there ({_first_line(error)})",
            tip="`hashbench docs devices` lists what a device must support.",
        ) from error
    path = book.path(device)
    if digest != digest_of_bytes(data):
        raise HashbenchError(
            f"digests on {device} by {path.name} are wrong",
            consequence=f"251 bytes give {digest:016x} instead of {digest_of_bytes(data):016x}",
            tip="Report it with the output of `hashbench env`; without Triton or that package, torch's ops are used.",
        )
    return path


def _new_chunk(device: torch.device) -> _Chunk:
    totals = torch.zeros(CHUNK, dtype=torch.int64, device=device)
    if not _has_streams(device):
        return _Chunk(totals, None, set())
    stream = torch.accelerator.current_stream(device)
    return _Chunk(totals, stream.record_event(), {stream.stream_id})


def _join(chunk: _Chunk, ready: torch.Event, stream: torch.Stream) -> None:
    """Make a stream that uses a chunk for the first time wait (on the device, not the host) until it was zeroed on its
    own stream; and keep its memory from being reused before that stream is done, should the trace be discarded unread.
    """
    if stream.stream_id in chunk.streams:
        return
    stream.wait_event(ready)
    with contextlib.suppress(NotImplementedError):  # the backend's allocator has no streams
        chunk.totals.record_stream(stream)
    chunk.streams.add(stream.stream_id)


def _wait_for_all(device: torch.device) -> None:
    """Synchronize every stream: the copy that follows waits only for the current one."""
    if _has_streams(device):
        torch.accelerator.synchronize(device)


def _has_streams(device: torch.device) -> bool:
    current = torch.accelerator.current_accelerator()
    return current is not None and current.type == device.type
