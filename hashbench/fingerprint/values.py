"""Synthetic numbers that are the same on every machine, and recorded whole numbers in few bytes.

A number is made from the count of its place by integer arithmetic alone (SplitMix64: Steele, Lea and Flood, "Fast
splittable pseudorandom number generators", 2014). Its bits are put together as sign, exponent and significand, so that
nothing is rounded: every value is exact in its dtype, and all bits of its significand are used, so that a sum in
another order comes out differently.
"""

from __future__ import annotations

import base64
import binascii
import functools
import zlib
from typing import Any

import numpy as np
import torch

PERIOD = 1_048_573
"""Numbers repeat after so many, a prime: no dimension of a tensor is a multiple of it."""

_STEP = 7919 * 131
"""How far the numbers of one memory begin behind those of the one before it."""

KEPT_BYTES = 2048
"""Recorded content is kept where it takes so many bytes at most, compressed; of what is larger, the range is."""

KEPT_ELEMENTS = 1 << 20
"""Where it has more elements, nobody tries."""

_FLOATS: dict[torch.dtype, tuple[int, int]] = {
    torch.float64: (11, 52),
    torch.float32: (8, 23),
    torch.bfloat16: (8, 7),
    torch.float16: (5, 10),
    torch.float8_e4m3fn: (4, 3),
    torch.float8_e5m2: (5, 2),
}
"""Bits of the exponent and of the significand."""

_PARTS = {torch.complex128: torch.float64, torch.complex64: torch.float32, torch.complex32: torch.float16}
_WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

ANY, POSITIVE, UNIT = "", ">=0", "0..1"
"""Ranges of synthetic numbers, the widest first: from -4 to 4, from 0 to 4, from 0 to 1."""


class NoValuesError(ValueError):
    """Why a tensor cannot be filled; the text is the reason."""


def scrambled(count: int) -> np.ndarray[Any, Any]:
    """64 scrambled bits for each number from 0 on: the SplitMix64 generator of seed 0."""
    word = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


@functools.cache
def _words() -> np.ndarray[Any, Any]:
    return scrambled(PERIOD)


@functools.lru_cache(maxsize=8)
def _float_bits(dtype: torch.dtype, values: str) -> np.ndarray[Any, Any]:
    """One period of numbers of a floating-point ``dtype`` in the range ``values``, as their bits."""
    exponent_bits, fraction_bits = _FLOATS[dtype]
    bias = (1 << (exponent_bits - 1)) - 1
    words = _words()
    steps = (words >> np.uint64(57)) & np.uint64(3 if values == UNIT else 7)
    exponent = np.uint64(bias - 1 if values == UNIT else bias + 1) - steps
    bits = (exponent << np.uint64(fraction_bits)) | (words & np.uint64((1 << fraction_bits) - 1))
    if values == ANY:
        bits |= (words >> np.uint64(63)) << np.uint64(exponent_bits + fraction_bits)
    return bits.astype(f"u{dtype.itemsize}")


def filled(dtype: torch.dtype, elements: int, *, values: str, number: int) -> torch.Tensor:
    """Flat bytes (``uint8``, on the host) that hold so many ``elements`` of ``dtype`` in the range ``values``; those of
    memory ``number`` of a call begin at another place than those of the others.

    Raises:
        NoValuesError: there are none for this dtype.
    """
    if dtype in _PARTS:
        return filled(_PARTS[dtype], 2 * elements, values=values, number=number)
    if dtype in _FLOATS:
        if values not in (ANY, POSITIVE, UNIT):
            raise NoValuesError(f"{values[:40]!r} is not a range of synthetic numbers")
        period = _float_bits(dtype, values)
    elif dtype in _WHOLE:
        low, high = whole_range(values)
        span = np.uint64(high - low + 1)
        period = (np.int64(low) + (_words() % span).astype(np.int64)).astype(f"i{dtype.itemsize}")
    else:
        raise NoValuesError(f"no synthetic values for {str(dtype).removeprefix('torch.')}")
    out = np.empty(elements, period.dtype)
    begin, done = number * _STEP % PERIOD, 0
    while done < elements:
        part = period[begin : begin + elements - done]
        out[done : done + len(part)] = part
        begin, done = 0, done + len(part)
    return torch.from_numpy(out.view(np.uint8))


def whole_range(values: str) -> tuple[int, int]:
    """The smallest and the largest of whole numbers in a range such as ``-1..9``.

    Raises:
        NoValuesError: it is none, or has more numbers than 63 bits tell apart.
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


def range_of(tensor: torch.Tensor) -> str:
    """The range of synthetic numbers that the content of a floating-point tensor lies in: an op may take no others."""
    if not tensor.numel() or not tensor.is_floating_point() or tensor.itemsize == 1:
        return ANY
    low, high = (float(value) for value in torch.aminmax(tensor.detach()))
    if not low >= 0:  # or not a number
        return ANY
    return UNIT if high <= 1 else POSITIVE


def content_of(tensor: torch.Tensor) -> tuple[str, str]:
    """What a tensor of whole numbers or of bools holds: in few bytes, or else the range that it lies in; the other is
    empty. A content is the width of its numbers and then their compressed bytes: ``1:eNpjZAIAAAYAAw``."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if not flat.numel():
        return "1:", ""
    low, high = (int(value) for value in torch.aminmax(flat.to(torch.int64)))
    if flat.numel() <= KEPT_ELEMENTS:
        width = next((w for w in (1, 2, 4) if -(1 << (8 * w - 1)) <= low and high < 1 << (8 * w - 1)), 8)
        packed = zlib.compress(flat.to(torch.int64).numpy().astype(f"<i{width}").tobytes(), 9)
        if len(packed) <= KEPT_BYTES:
            return f"{width}:{base64.b64encode(packed).decode()}", ""
    return "", f"{low}..{high}"


def content_from(text: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor whose content :func:`content_of` wrote.

    Raises:
        NoValuesError: it is no content, or not of so many elements.
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
    numbers = np.frombuffer(content, f"<i{width}").astype(np.int64)
    return torch.from_numpy(numbers).to(dtype).reshape(shape)
