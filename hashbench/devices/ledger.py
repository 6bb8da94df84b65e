"""Digests on accelerators: which function makes them on a device, and the buffer there in which they wait.

The functions of hashbench are in :data:`BUILT_IN`; an installed package brings others by the entry-point group
``hashbench.devices``. ``docs/devices.md`` says what such a function must do.
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

from hashbench.devices import reference
from hashbench.devices.reference import digest_of_bytes, finish
from hashbench.errors import HashbenchError, first_line

Accumulate = Callable[[torch.Tensor, torch.Tensor, int], None]
"""``accumulate(tensor, totals, place)``: adds the sum over the words of a dense tensor to ``totals[place]``, an
``int64``, on the device of both, without waiting for it."""

GROUP = "hashbench.devices"
FALLBACK = "torch ops"
_OLDEST_FOR_TRITON = (7, 0)


class Unfit(Exception):  # noqa: N818 – not an error: another function is taken
    """A function cannot be used for a device; the text says why."""


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """One function for some kinds of devices.

    Args:
        name: shown where users are told how digests are made.
        types: torch's names of the devices (``cuda``) that it is for.
        load: imports the function. Whatever it raises is the reason why the device does without.
    """

    name: str
    types: tuple[str, ...]
    load: Callable[[torch.device], Accumulate]


@dataclass(frozen=True, slots=True)
class DigestPath:
    """How digests are made on a device; a ``reason`` says why by nothing faster than torch's own ops."""

    name: str
    reason: str = ""


def chosen(device: torch.device) -> tuple[DigestPath, Accumulate]:
    """The fastest function for a device that can be loaded; what packages bring goes first."""
    reasons = []
    for kind in (*_from_packages(device.type), *BUILT_IN):
        if device.type not in kind.types:
            continue
        try:
            return DigestPath(kind.name), kind.load(device)
        except Exception as error:
            reasons.append(f"{kind.name}: {_in_short(error)}")
    return DigestPath(
        FALLBACK, "; ".join(reasons) or f"nothing faster is known for {device.type}"
    ), reference.accumulate


def _in_short(error: BaseException) -> str:
    """The first line of an error, with its type where it is none of ours."""
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
    from hashbench.devices import triton_kernel

    return triton_kernel.accumulate


BUILT_IN = (DeviceKind("triton", ("cuda", "xpu"), _load_triton),)
"""``cuda`` is ROCm too."""


# ------------------------------------------------------------------------------------------------------ the buffer

CHUNK = 1 << 14
"""Numbers in one piece of device memory, 128 KiB."""


@dataclass(slots=True, eq=False)
class _Chunk:
    totals: torch.Tensor
    ready: torch.Event | None
    """That the zeros were written, on devices with streams."""
    streams: set[int]
    """Those that have waited for it."""
    used: int = 0
    host: list[int] | None = None

    def total(self, place: int) -> int:
        """One sum; all of the chunk are fetched if they were not yet."""
        if self.host is None:
            _wait_for_all(self.totals.device)
            self.host = self.totals[: self.used].tolist()
        return self.host[place]


class Pending(NamedTuple):  # a tuple, for a trace makes one for every tensor that an op writes
    """A digest whose number is still on the device; ``resolve`` waits for it."""

    chunk: _Chunk
    place: int
    nbytes: int

    def resolve(self) -> int:
        """The digest, 64 bits, unsigned. Reads all numbers of its chunk at once, and waits for the device."""
        return finish(self.chunk.total(self.place), self.nbytes)


class Ledger:
    """The sums over the tensors of one run, on the devices where the tensors are.

    :meth:`add` launches one kernel and returns at once; no tensor is kept alive. :meth:`read` waits once and fetches
    everything. Threads may add at the same time (autograd has one thread for every device). A number takes 8 bytes.
    A function that fails on a device is replaced there by torch's own ops, with a warning.

    Args:
        everywhere: whether it is meant for tensors on the CPU as well.
    """

    def __init__(self, *, everywhere: bool = False) -> None:
        self.everywhere = everywhere
        self._paths: dict[torch.device, tuple[DigestPath, Accumulate]] = {}
        self._chunks: dict[torch.device, list[_Chunk]] = {}
        self._lock = threading.Lock()

    def add(self, tensor: torch.Tensor) -> Pending:
        """Begin the digest of a dense tensor. Call it with dispatch modes off, on the stream that wrote the tensor."""
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
        """Fetch all numbers, one copy for every 16 384 of them."""
        for chunks in self._chunks.values():
            for chunk in chunks:
                chunk.total(0)

    @property
    def nbytes(self) -> int:
        """Memory that the numbers take, on all devices together, in bytes."""
        return sum(chunk.totals.nbytes for chunks in self._chunks.values() for chunk in chunks)

    def path(self, device: torch.device) -> DigestPath:
        """How digests were made on a device so far, or would be."""
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
        """Take torch's own ops from now on. Raises where these would not help: they failed, or no memory is left."""
        if failed is reference.accumulate or isinstance(error, torch.OutOfMemoryError):
            raise error
        with self._lock:
            path, function = self._path(device)
            if function is not failed:  # another thread was here before
                return
            reason = f"{path.name}: {_in_short(error)}"
            self._paths[device] = DigestPath(FALLBACK, reason), reference.accumulate
        warnings.warn(f"digests on {device} are made by torch's own ops, which is slow ({reason})", stacklevel=2)


def digest_path(device: torch.device | str) -> DigestPath:
    """How digests are made on a device: tried on a few bytes there, which waits for it.

    Raises:
        HashbenchError: none can be made there, or the digest is not what ``reference.py`` says.
    """
    device = torch.device(device)
    return DigestPath("xxhash") if device.type == "cpu" else tried(Ledger(), device)


def tried(book: Ledger, device: torch.device) -> DigestPath:
    """The path that ``book`` takes on a device, after a digest of 251 bytes was made there and is right."""
    data = bytes(range(1, 252))
    try:
        digest = book.add(torch.tensor(list(data), dtype=torch.uint8).to(device)).resolve()
    except Exception as error:
        raise HashbenchError(
            f"cannot make digests on {device}",
            consequence=f"nothing can be traced there ({_in_short(error)})",
            tip="`hashbench docs devices` says what a device must be able to do.",
        ) from error
    path = book.path(device)
    if digest != digest_of_bytes(data):
        raise HashbenchError(
            f"digests on {device} by {path.name} are wrong",
            consequence=f"251 bytes give {digest:016x} in place of {digest_of_bytes(data):016x}",
            tip="Report it with `hashbench env`. Where Triton or a package made them: uninstalled, torch's own ops do.",
        )
    return path


def _new_chunk(device: torch.device) -> _Chunk:
    totals = torch.zeros(CHUNK, dtype=torch.int64, device=device)
    if not _has_streams(device):
        return _Chunk(totals, None, set())
    stream = torch.accelerator.current_stream(device)
    return _Chunk(totals, stream.record_event(), {stream.stream_id})


def _join(chunk: _Chunk, ready: torch.Event, stream: torch.Stream) -> None:
    """Let a stream that uses a chunk for the first time, not the host, wait until it was zeroed on the stream that made
    it; and let its memory go to nobody else before that stream is done, should the trace be thrown away unread."""
    if stream.stream_id in chunk.streams:
        return
    stream.wait_event(ready)
    with contextlib.suppress(NotImplementedError):  # of a backend whose allocator knows no streams
        chunk.totals.record_stream(stream)
    chunk.streams.add(stream.stream_id)


def _wait_for_all(device: torch.device) -> None:
    """Wait for every stream: the copy that follows waits for the current one alone."""
    if _has_streams(device):
        torch.accelerator.synchronize(device)


def _has_streams(device: torch.device) -> bool:
    current = torch.accelerator.current_accelerator()
    return current is not None and current.type == device.type
