"""Reference implementation of the device digest (:mod:`hashbench.devices.formula`) with torch's integer ops.

Slow, and right on every device. Also views of a dense tensor's memory as bytes, without a copy.
"""

from __future__ import annotations

import torch

from hashbench.devices.formula import FACTORS, GOLDEN, SHIFTS, WORD_BYTES, signed

AT_ONCE = 1 << 22
"""Words that are worked on at once: some 200 MiB of temporary memory."""


def accumulate(tensor: torch.Tensor, totals: torch.Tensor, place: int = 0, *, words_at_once: int = AT_ONCE) -> None:
    """Add the sum over the words of a dense tensor to ``totals[place]`` (``int64``).

    Both are on one device, which is not waited for. Nothing here needs more of a device than its 64-bit integers: no
    float64, which MPS lacks, and no uint64.
    """
    data, total = bytes_of(tensor), totals[place : place + 1]
    for start in range(0, data.numel(), words_at_once * WORD_BYTES):
        words = _words(data[start : start + words_at_once * WORD_BYTES])
        first = start // WORD_BYTES + 1
        places = torch.arange(first, first + words.numel(), dtype=torch.int64, device=data.device)
        total += _mix(words ^ (places * signed(GOLDEN))).sum()


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A ``uint8`` view, of one dimension, of the memory that a dense tensor fills, in memory order.

    ``tensor`` may have any dtype and any order of dimensions, but no holes and no overlaps.
    """
    view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    start = tensor.storage_offset() * tensor.element_size()
    return view.set_(tensor.untyped_storage(), start, (tensor.nbytes,), (1,))


def alignment(data: torch.Tensor) -> int:
    """The largest of 8, 4, 2 and 1 that divides the address of ``data``, in bytes."""
    address = data.data_ptr()  # of a dense tensor in any order of dimensions its first byte: no stride is negative
    return next(size for size in (8, 4, 2, 1) if address % size == 0)


def _words(data: torch.Tensor) -> torch.Tensor:
    missing = -data.numel() % WORD_BYTES
    if missing:
        data = torch.cat([data, data.new_zeros(missing)])
    elif alignment(data) < WORD_BYTES:
        data = data.clone()
    return data.view(torch.int64)


def _mix(words: torch.Tensor) -> torch.Tensor:
    for shift, factor in zip(SHIFTS, FACTORS, strict=False):
        words = _folded(words, shift) * signed(factor)
    return _folded(words, SHIFTS[-1])


def _folded(words: torch.Tensor, shift: int) -> torch.Tensor:
    return words ^ (words >> shift & (1 << 64 - shift) - 1)  # the shift of a signed number draws its sign along
