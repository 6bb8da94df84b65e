"""Sorting by counters from which threads draw numbers: a Triton kernel, in a file that only its user imports."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 64
"""Elements of one program. Many small programs: which of them draws first is left to the device."""


@triton.jit
def hand_out(keys, next_slot, order, count, block: tl.constexpr):
    """Write the place of each element to the slot that the counter of its key gives next."""
    place = tl.program_id(0) * block + tl.arange(0, block)
    inside = place < count
    key = tl.load(keys + place, mask=inside, other=0)
    slot = tl.atomic_add(next_slot + key, 1, mask=inside)
    tl.store(order + slot, place, mask=inside)


def order_by_key(keys: torch.Tensor, count: int) -> torch.Tensor:
    """The places of ``keys`` (``int64``, below ``count``), sorted by key; those of equal keys in any order."""
    sizes = torch.bincount(keys, minlength=count)
    next_slot = (sizes.cumsum(0) - sizes).contiguous()
    order = torch.empty_like(keys)
    hand_out[(triton.cdiv(len(keys), BLOCK),)](keys, next_slot, order, len(keys), block=BLOCK)
    return order
