"""Generate synthetic numbers that are the same on every machine, and encode recorded integers compactly.

A number is generated from its index by integer arithmetic alone (SplitMix64: Steele, Lea and Flood, "Fast splittable
pseudorandom number generators", 2014). Its bits are assembled as sign, exponent and significand, so that nothing is
rounded: every value is exact in its dtype, and all bits of its significand are used, so that summing in another order
gives another result. The period is 1,114,112 numbers. Custom ops always get numbers from 0 to 1, since they may use
them as unchecked indices (``roi_align``).
"""

from __future__ import annotations

import base64
import binascii
import functools
import itertools
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hashbench.core.diagnose.calls.call import LINE
from hashbench.core.trace.digest import dtype_name
from hashbench.extensions.fingerprint.distance import FLOATS

PERIOD = 17 * 2**16
"""Period of the numbers: a million. Rows of a matrix repeat after this divided by its greatest common divisor with
their length: rows of 4096 numbers after 272, of 768 after 4,352, of 1000 after 139,264."""

_STEP = 7919 * 131
"""Distance between the starts of successive memories, before :func:`_begin` rounds it down."""

KEPT_BYTES = 2048
"""Maximum compressed size of recorded content; of larger content the range is recorded."""

KEPT_ELEMENTS = 1 << 20
"""Maximum number of elements that are compressed."""

_PIECE = 1 << 16
"""Bytes compressed before the size limit is checked."""

_PAGE = 4096

_FIRST = 4096
"""Elements checked before all others: most tensors have a negative number among them."""

_PARTS = {torch.complex128: torch.float64, torch.complex64: torch.float32, torch.complex32: torch.float16}
_WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

ANY, POSITIVE, UNIT = "", ">=0", "0..1"
"""Ranges of synthetic numbers, the widest first: from -4 to 4, from 0 to 4, from 0 to 1."""


class NoValuesError(ValueError):
    """A tensor cannot be filled; the message is the reason."""


def scrambled(count: int) -> np.ndarray[Any, Any]:
    """Return the first ``count`` 64-bit outputs of the SplitMix64 generator with seed 0."""
    word = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


@functools.cache
def _words() -> np.ndarray[Any, Any]:
    return scrambled(PERIOD)


@functools.lru_cache(maxsize=8)
def _float_bits(dtype: torch.dtype, values: str) -> np.ndarray[Any, Any]:
    """Return the bits of one period of numbers of a floating-point ``dtype`` in the range ``values``.

    Raises:
        NoValuesError: the dtype is not supported, or the range unknown.
    """
    if dtype_name(dtype) not in FLOATS:
        raise NoValuesError(f"no synthetic values for {dtype_name(dtype)}")
    if values not in (ANY, POSITIVE, UNIT):
        raise NoValuesError(f"{values[:40]!r} is not a range of synthetic numbers")
    exponent_bits, fraction_bits = FLOATS[dtype_name(dtype)]
    bias = (1 << (exponent_bits - 1)) - 1
    words = _words()
    steps = (words >> np.uint64(57)) & np.uint64(3 if values == UNIT else 7)
    exponent = np.uint64(bias - 1 if values == UNIT else bias + 1) - steps
    bits = (exponent << np.uint64(fraction_bits)) | (words & np.uint64((1 << fraction_bits) - 1))
    if values == ANY:
        bits |= (words >> np.uint64(63)) << np.uint64(exponent_bits + fraction_bits)
    return bits.astype(f"u{dtype.itemsize}")


def filled(dtype: torch.dtype, elements: int, *, values: str, number: int) -> torch.Tensor:
    """Return so many ``elements`` as flat bytes (``uint8``, on the host), as written by :func:`fill`."""
    (out,) = Arena().rooms([elements * dtype.itemsize], repetition=-1)
    fill(out, dtype, values=values, number=number)
    return torch.from_numpy(out)


def fill(out: np.ndarray[Any, Any], dtype: torch.dtype, *, values: str, number: int) -> None:
    """Write numbers of ``dtype`` in the range ``values`` to flat bytes.

    Each memory ``number`` of a call starts at a different place of the period.

    Raises:
        NoValuesError: the dtype is not supported.
    """
    dtype = _PARTS.get(dtype, dtype)
    elements = len(out) // dtype.itemsize
    begin = _begin(number)
    if dtype in _WHOLE:
        low, high = whole_range(values)
        words = _words()
        if begin + elements <= PERIOD:  # as nearly always: to make a whole period takes ten milliseconds
            words, begin = words[begin : begin + elements], 0
        period = (np.int64(low) + (words % np.uint64(high - low + 1)).astype(np.int64)).astype(f"i{dtype.itemsize}")
    else:
        period = _float_bits(dtype, values)
    _repeat(period, out.view(period.dtype), begin=begin)


def _begin(number: int) -> int:
    """Return the start of memory ``number`` within the period, a multiple of 64 numbers."""
    return number * _STEP % PERIOD // LINE * LINE


_AHEAD = 2**30
"""Bytes. Below this, twice the needed memory is allocated for later calls."""


class Arena:
    """Reusable memory for successive calls, as large as the largest: fresh memory costs ten times a write to it."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def rooms(self, sizes: Sequence[int], *, repetition: int) -> list[np.ndarray[Any, Any]]:
        """Return buffers of these sizes, replacing the previous ones.

        Each is aligned to 64, none touch, and the first has a different offset (modulo 4096) in each of 64 repetitions.
        """
        begins = [0, *itertools.accumulate(size + LINE + -size % LINE for size in sizes)]
        needed = begins.pop() + 2 * _PAGE
        memory = self._memory
        if needed > len(memory):
            self._memory = np.empty(0, np.uint8)  # given back first
            memory = self._memory = np.empty(max(needed, min(2 * needed, _AHEAD)), np.uint8)
        start = -memory.ctypes.data % _PAGE + repetition * LINE % _PAGE
        return [memory[start + begin : start + begin + size] for begin, size in zip(begins, sizes, strict=True)]


def _repeat(period: np.ndarray[Any, Any], numbers: np.ndarray[Any, Any], *, begin: int) -> None:
    """Write a period of numbers repeatedly, starting at ``begin``."""
    done = 0
    while done < len(numbers):
        part = period[begin : begin + len(numbers) - done]
        numbers[done : done + len(part)] = part
        begin, done = 0, done + len(part)


def whole_range(values: str) -> tuple[int, int]:
    """Parse a range of integers such as ``-1..9``; return the smallest and the largest.

    Raises:
        NoValuesError: it is no range, or spans more than 63 bits.
    """
    low, dots, high = values.partition("..")
    try:
        ends = int(low), int(high)
    except ValueError:
        raise NoValuesError(f"{values[:40]!r} is not a range of whole numbers") from None
    if not dots or not -(2**62) <= ends[0] <= ends[1] < 2**62:
        raise NoValuesError(f"{values[:40]!r} is not a range of whole numbers")
    return ends


# ------------------------------------------------------------------------------------------------ what was recorded


def bits_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """View the bits of a strided tensor as unsigned integers with its strides, on the host without copying.

    An element of 16 bytes becomes two, in a last dimension. Uses no torch kernel: that may be the one that changed.
    """
    plain = tensor.detach()
    if plain.itemsize not in _INTEGERS:
        plain = torch.view_as_real(plain)
    host = plain if plain.is_cpu else plain.cpu()
    return host.view(_INTEGERS[host.itemsize]).numpy().view(f"u{host.itemsize}")


def range_of(tensor: torch.Tensor) -> str:
    """Return the narrowest synthetic range that contains a floating-point tensor: an op may accept no other values."""
    if not tensor.numel() or tensor.itemsize == 1 or dtype_name(tensor.dtype) not in FLOATS:
        return ANY
    exponent_bits, fraction_bits = FLOATS[dtype_name(tensor.dtype)]
    unit, infinity = ((1 << (exponent_bits - 1)) - 1) << fraction_bits, ((1 << exponent_bits) - 1) << fraction_bits
    bits, negative = bits_of(tensor), 1 << (8 * tensor.itemsize - 1)
    if int(bits.flat[:_FIRST].max()) > negative or (largest := int(bits.max())) > negative:
        return ANY
    if largest == negative:  # a zero with a sign
        largest = max(int(bits.view(f"i{tensor.itemsize}").max()), 0)
    return UNIT if largest <= unit else POSITIVE if largest <= infinity else ANY


def content_of(tensor: torch.Tensor) -> tuple[str, str]:
    """Encode an integer or bool tensor: as content if it is small, else as a range; the other is empty.

    Content is the width of the numbers and their compressed bytes: ``1:eNpjZAIAAAYAAw``.

    Raises:
        NoValuesError: the dtype is not supported.
    """
    if tensor.dtype not in _WHOLE:
        raise NoValuesError(f"no synthetic values for {dtype_name(tensor.dtype)}")
    if not tensor.numel():
        return "1:", ""
    numbers = bits_of(tensor).view(_whole_kind(tensor.dtype))
    low, high = int(numbers.min()), int(numbers.max())
    if numbers.size <= KEPT_ELEMENTS:
        width = next((w for w in (1, 2, 4) if -(1 << (8 * w - 1)) <= low and high < 1 << (8 * w - 1)), 8)
        packed = _compressed(numbers.astype(f"<i{width}").tobytes())
        if packed:
            return f"{width}:{base64.b64encode(packed).decode()}", ""
    return "", f"{low}..{high}"


def _compressed(content: bytes) -> bytes:
    """Compress to at most :data:`KEPT_BYTES`; return nothing if that is exceeded."""
    encoder, packed = zlib.compressobj(9), b""
    for start in range(0, len(content), _PIECE):
        packed += encoder.compress(content[start : start + _PIECE])
        if len(packed) > KEPT_BYTES:
            return b""
    packed += encoder.flush()
    return packed if len(packed) <= KEPT_BYTES else b""


def _whole_kind(dtype: torch.dtype) -> str:
    """Return NumPy's name of an integer dtype; bools are one byte."""
    return f"{'u' if dtype in (torch.bool, torch.uint8) else 'i'}{dtype.itemsize}"


def content_from(text: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Decode a tensor encoded by :func:`content_of`.

    Raises:
        NoValuesError: it is damaged, or has another number of elements.
    """
    width, colon, packed = text.partition(":")
    elements = int(np.prod(shape, dtype=object))
    if not colon or width not in ("1", "2", "4", "8") or elements > KEPT_ELEMENTS or dtype not in _WHOLE:
        raise NoValuesError("a recorded content is damaged")
    size = int(width) * elements
    try:
        decoder = zlib.decompressobj()
        content = decoder.decompress(base64.b64decode(packed, validate=True), size + 1) if size else b""
    except (zlib.error, binascii.Error, ValueError):
        raise NoValuesError("a recorded content is damaged") from None
    if len(content) != size:
        raise NoValuesError("a recorded content has another size than its tensor")
    numbers = np.frombuffer(content, f"<i{width}").astype(_whole_kind(dtype)).reshape(shape)
    return torch.from_numpy(numbers).view(dtype)
