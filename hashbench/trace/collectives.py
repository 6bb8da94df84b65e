"""Outputs of collectives while they are under way: hashed once their Work is done, at the first read or at the end.

A collective returns before its data are there: gloo's threads, or a stream, go on writing. Its outputs are kept until
they are hashed, as its Work keeps them anyway; the storages bear :data:`~hashbench.trace.storage_writers.IN_FLIGHT`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hashbench.devices.ledger import Ledger
from hashbench.trace.digest import Arrival, RawDigest, raw_digest
from hashbench.trace.storage_writers import IN_FLIGHT, get_mark, set_mark, storage_bytes

LIMIT = 60.0
"""Seconds to wait, at the end of a trace, for collectives whose outputs nobody has read."""


@dataclass(frozen=True, slots=True)
class _Exchange:
    """One collective: what it writes, the digests to be, and its Work (``None``: the functional collectives keep it in
    a table of their own, by tensor)."""

    tensors: Sequence[torch.Tensor]
    arrivals: Sequence[Arrival]
    work: Any
    receives_once: bool

    def arrive(self, *, limit: float | None = None) -> bool:
        """Wait for the data, for ``limit`` seconds where one is given; returns whether they are there. A message that
        the program has not waited for is left to it, and a collective that failed never ends.

        ``is_completed`` stays false after a wait for some of gloo's collectives (``reduce_scatter``).
        """
        try:
            if self.work is not None and self.work.is_completed():
                return True
            if self.receives_once:
                return False
            if limit is None or not all(tensor.is_cpu for tensor in self.tensors):
                self._wait()  # on an accelerator only the stream waits
                return True
        except RuntimeError:  # the program's own wait will raise it, too
            return False
        return _ends_within(limit, self._wait)

    def _wait(self) -> None:
        if self.work is not None:
            self.work.wait()
            return
        for tensor in self.tensors:
            torch.ops._c10d_functional.wait_tensor(tensor)


class Collectives:
    """The collectives of one trace whose outputs are not hashed yet, by the number of their record."""

    def __init__(self, token: object, ledger: Ledger) -> None:
        self._token, self._ledger = token, ledger
        self._open: dict[int, _Exchange] = {}

    @property
    def under_way(self) -> bool:
        """Whether outputs wait to be hashed."""
        return bool(self._open)

    def begin(
        self, number: int, tensors: Sequence[torch.Tensor], output: Any, *, receives_once: bool
    ) -> tuple[RawDigest, ...]:
        """The digests to be of what the collective that became record ``number`` writes."""
        arrivals = [Arrival() for _ in tensors]
        kept = [tensor.detach() for tensor in tensors]
        self._open[number] = _Exchange(kept, arrivals, _work_in(output), receives_once)
        for tensor in tensors:
            set_mark(tensor, (self._token, number, IN_FLIGHT))
        return tuple(
            [
                (tensor.dtype, tuple(tensor.shape), _stride(tensor), arrival)
                for tensor, arrival in zip(tensors, arrivals, strict=True)
            ]
        )

    def read(self, number: int, tensor: torch.Tensor) -> None:
        """``tensor`` is about to be read, from a storage that record ``number`` writes to: if it shows what is written,
        wait for that and hash it."""
        exchange = self._open.get(number)
        if exchange is not None and any(_overlap(tensor, other) for other in exchange.tensors):
            self._hash(number, exchange)

    def finish(self) -> None:
        """Wait for all that nobody has read, :data:`LIMIT` seconds at most, and hash it."""
        until = time.monotonic() + LIMIT
        for number, exchange in sorted(self._open.items()):
            self._hash(number, exchange, limit=max(0.0, until - time.monotonic()))
        self._open.clear()

    def _hash(self, number: int, exchange: _Exchange, *, limit: float | None = None) -> None:
        if not exchange.arrive(limit=limit) or self._open.pop(number, None) is None:
            return
        for tensor, arrival in zip(exchange.tensors, exchange.arrivals, strict=True):
            mark = get_mark(tensor)
            if mark is not None and mark[1:] == (number, IN_FLIGHT) and _is_whole(tensor):
                set_mark(tensor, (self._token, number, None))
                arrival.value = raw_digest(tensor, self._ledger)[3]


def _ends_within(limit: float, wait: Callable[[], None]) -> bool:
    """Whether a wait, in a thread of its own, ends within ``limit`` seconds and without an error."""
    ended: list[bool] = []

    def run() -> None:
        with contextlib.suppress(RuntimeError):
            wait()
            ended.append(True)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit)
    return bool(ended)


def _work_in(output: Any) -> Any:
    """The Work that a ``c10d`` op returned, alone or as the last of several."""
    last = output[-1] if isinstance(output, (tuple, list)) and output else output
    if not isinstance(last, torch.ScriptObject):
        return None
    from torch.distributed import Work

    return Work.unbox(last)


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether the tensor's storage still holds all of it: FSDP frees memory by making the storage smaller."""
    try:
        begin, end = _extent(tensor)
        return bool(end - begin + tensor.storage_offset() * tensor.element_size() <= storage_bytes(tensor))
    except (NotImplementedError, RuntimeError):
        return True  # without a storage: sparse


def _stride(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(tensor.stride()) if tensor.layout is torch.strided else ()


def _overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors may share memory; where that cannot be told, they do."""
    try:
        (begin, end), (other_begin, other_end) = _extent(first), _extent(second)
    except (NotImplementedError, RuntimeError):
        return True
    return begin < other_end and other_begin < end


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of the first byte that a tensor shows and of that behind the last."""
    begin = tensor.data_ptr()
    if not tensor.numel():
        return begin, begin
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()
