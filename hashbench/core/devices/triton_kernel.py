"""The digest of :mod:`hashbench.core.devices.reference` as a Triton kernel: one launch, one pass over the memory.

Memory is read in place from any address: at one not divisible by 8, words are assembled from the largest units that
its alignment allows.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl

from hashbench.core.devices.reference import FACTORS, GOLDEN, SHIFTS, WORD_BYTES, alignment

BLOCK = 2048
"""Words that a program reads at once."""
PROGRAMS_PER_PROCESSOR = 8

_GOLDEN = tl.constexpr(GOLDEN)
_FACTOR_1, _FACTOR_2 = (tl.constexpr(factor) for factor in FACTORS)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = (tl.constexpr(shift) for shift in SHIFTS)


@triton.jit
def _mix(word):  # type: ignore[no-untyped-def]
    word ^= word >> _SHIFT_1
    word *= _FACTOR_1
    word ^= word >> _SHIFT_2
    word *= _FACTOR_2
    return word ^ (word >> _SHIFT_3)


@triton.jit  # type: ignore[untyped-decorator]
def _units_at(data, per_word: tl.constexpr):  # type: ignore[no-untyped-def]
    """Cast ``data`` to a pointer to unsigned integers of ``8 // per_word`` bytes."""
    if per_word == 1:
        units = data.to(tl.pointer_type(tl.uint64), bitcast=True)
    elif per_word == 2:
        units = data.to(tl.pointer_type(tl.uint32), bitcast=True)
    elif per_word == 4:
        units = data.to(tl.pointer_type(tl.uint16), bitcast=True)
    else:
        units = data
    return units


@triton.jit  # type: ignore[untyped-decorator]
def _words_at(units, at, mask, per_word: tl.constexpr, masked: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load the words at indices ``at``, each of ``per_word`` units."""
    if per_word == 1:
        word = tl.load(units + at, mask=mask, other=0) if masked else tl.load(units + at)
    else:
        part = tl.arange(0, per_word)
        where = units + (at[:, None] * per_word + part[None, :])
        loaded = tl.load(where, mask=mask[:, None], other=0).to(tl.uint64)
        word = tl.sum(loaded << (part * (64 // per_word)).to(tl.uint64)[None, :], axis=1)
    return word.to(tl.uint64)


@triton.jit(do_not_specialize=["place", "words", "tail"])  # type: ignore[untyped-decorator]
def word_sums(  # type: ignore[no-untyped-def]
    data,
    totals,
    place: tl.int32,
    words: tl.int64,
    tail: tl.int32,
    per_word: tl.constexpr,
    block: tl.constexpr,
):
    """Add the sum over ``words`` whole words at ``data``, and the ``tail`` bytes after them, to ``totals[place]``.

    Words are read in units of ``8 // per_word`` bytes. Offsets are 64-bit integers throughout.
    """
    units = _units_at(data, per_word)
    lane = tl.arange(0, block).to(tl.int64)
    keys = (lane + 1).to(tl.uint64) * _GOLDEN
    first = tl.program_id(0).to(tl.int64) * block
    step = tl.num_programs(0).to(tl.int64) * block
    sums = tl.zeros((block,), dtype=tl.uint64)
    while first + block <= words:  # whole blocks need no mask: a thread may load 16 bytes at once
        word = _words_at(units, first + lane, lane < block, per_word, False)
        sums += _mix(word ^ (keys + first.to(tl.uint64) * _GOLDEN))
        first += step
    if first < words:
        inside = first + lane < words
        word = _words_at(units, first + lane, inside, per_word, True)
        sums += tl.where(inside, _mix(word ^ (keys + first.to(tl.uint64) * _GOLDEN)), 0)
    result = tl.sum(sums)
    if (tail > 0) & (tl.program_id(0) == 0):
        byte = tl.arange(0, 8)
        loaded = tl.load(data + words * 8 + byte, mask=byte < tail, other=0).to(tl.uint64)
        word = tl.sum(loaded << (byte * 8).to(tl.uint64))
        result += _mix(word ^ ((words + 1).to(tl.uint64) * _GOLDEN))
    tl.atomic_add(totals + place, result.to(tl.int64, bitcast=True))


def accumulate(
    tensor: torch.Tensor,
    totals: torch.Tensor,
    place: int = 0,
    *,
    block: int = BLOCK,
    programs: int | None = None,
) -> None:
    """Add the sum over the words of a dense tensor to ``totals[place]`` (``int64``).

    Both are on one device, which is not synchronized. ``block`` (words that a program reads at once) and ``programs``
    affect only speed.
    """
    words, tail = divmod(tensor.nbytes, WORD_BYTES)
    per_word = WORD_BYTES // alignment(tensor)
    if programs is None:
        programs = PROGRAMS_PER_PROCESSOR * _processors(tensor.device)
    grid = (max(1, min(programs, -(-words // block))),)
    with _current(tensor.device):
        # Pass any dtype as bytes at an address: one compiled kernel for all, and no view to create.
        word_sums[grid](
            triton.reinterpret(tensor, torch.uint8), totals, place, words, tail, per_word=per_word, block=block
        )


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which the data's device is current, where Triton launches."""
    module = torch.get_device_module(device)
    if device.index is None or device.index == module.current_device():
        return nullcontext()
    return module.device(device)  # type: ignore[no-any-return]


@functools.cache
def _processors(device: torch.device) -> int:
    properties = torch.get_device_module(device).get_device_properties(device)
    for name in ("multi_processor_count", "gpu_subslice_count"):  # CUDA and ROCm; XPU
        if count := getattr(properties, name, 0):
            return int(count)
    return 64
