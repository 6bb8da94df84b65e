"""Definition of a device digest in integers, and its reference implementation with torch's integer ops.

All arithmetic is modulo 2**64. The bytes of a tensor in memory order, zero-padded to whole 64-bit little-endian words
``w[0], w[1], …``, give

    ``total = sum(mix(w[i] ^ ((i + 1) * GOLDEN)))``
    ``digest = mix((total + nbytes * GOLDEN) ^ LENGTH)``

Every word is mixed with its index before it is added, so the sum depends on positions, while its terms may be added in
any order: blocks, threads and atomic additions of any launch give the same total. Nothing is rounded. ``mix`` is a
bijection of 64-bit words, the finalizer of SplitMix64 (Stafford's variant 13; Steele, Lea and Flood, *Fast Splittable
Pseudorandom Number Generators*, 2014). Two tensors of one size that differ in one word never collide; others collide
with probability about 2**-64, which the tests check by changes that cancel in weaker sums (equal changes in two places,
swaps, signs) and by collisions of truncated digests. Cheaper shifts, by 32 bits each, were tried: among 4 million zero
words, the same flip of bit 31 cancelled in one pair of places; with these in none.
"""

from __future__ import annotations

import torch

WORD_BYTES = 8
GOLDEN = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio, odd: its multiples are evenly distributed."""
SHIFTS = (30, 27, 31)
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
LENGTH = 0xA0761D6478BD642F
"""Domain separator of the last step."""

_ALL_BITS = (1 << 64) - 1


def mix(word: int) -> int:
    """Mix one 64-bit word, bijectively."""
    for shift, factor in zip(SHIFTS, FACTORS, strict=False):
        word ^= word >> shift
        word = word * factor & _ALL_BITS
    return word ^ word >> SHIFTS[-1]


def finish(total: int, nbytes: int) -> int:
    """Compute the digest of a tensor from the sum over its words (signed or not) and its size in bytes."""
    return mix((total + nbytes * GOLDEN & _ALL_BITS) ^ LENGTH)


def digest_of_bytes(data: bytes) -> int:
    """Compute the digest of bytes, word by word in Python: the definition, slow."""
    padded = data + bytes(-len(data) % WORD_BYTES)
    words = [int.from_bytes(padded[at : at + WORD_BYTES], "little") for at in range(0, len(padded), WORD_BYTES)]
    total = sum(mix(word ^ ((place + 1) * GOLDEN & _ALL_BITS)) for place, word in enumerate(words))
    return finish(total & _ALL_BITS, len(data))


def signed(number: int) -> int:
    """Convert an unsigned 64-bit number to torch's ``int64``."""
    number &= _ALL_BITS
    return number - (1 << 64) if number >> 63 else number


# ------------------------------------------------------------------------------------------------ with torch's own ops

AT_ONCE = 1 << 22
"""Words processed at once: about 200 MiB of temporary memory."""


def accumulate(tensor: torch.Tensor, totals: torch.Tensor, place: int = 0, *, words_at_once: int = AT_ONCE) -> None:
    """Add the sum over the words of a dense tensor to ``totals[place]`` (``int64``).

    Both are on one device, which is not synchronized. Only 64-bit integers are required: no float64, which MPS lacks,
    and no uint64.
    """
    data, total = bytes_of(tensor), totals[place : place + 1]
    for start in range(0, data.numel(), words_at_once * WORD_BYTES):
        words = _words(data[start : start + words_at_once * WORD_BYTES])
        first = start // WORD_BYTES + 1
        places = torch.arange(first, first + words.numel(), dtype=torch.int64, device=data.device)
        total += _mix(words ^ (places * signed(GOLDEN))).sum()


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a one-dimensional ``uint8`` view of a dense tensor's memory, in memory order.

    ``tensor`` may have any dtype and any order of dimensions, but no holes and no overlaps.
    """
    view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    start = tensor.storage_offset() * tensor.element_size()
    return view.set_(tensor.untyped_storage(), start, (tensor.nbytes,), (1,))


def alignment(data: torch.Tensor) -> int:
    """Return the largest of 8, 4, 2 and 1 that divides the address of ``data``, in bytes."""
    address = data.data_ptr()  # the first byte of a dense tensor, as strides are never negative
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
    return words ^ (words >> shift & (1 << 64 - shift) - 1)  # logical shift: >> of a signed number extends its sign
