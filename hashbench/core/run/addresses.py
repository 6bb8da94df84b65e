"""Control where Python allocates small objects: at random addresses, or at the same ones in every process.

Sets iterate in the order of their objects' addresses. Address space randomisation moves whole pages, which keeps that
order, so fresh processes agree about it by themselves; a process that should reproduce another fills different holes
between live objects. Both cases are arranged by allocating memory and keeping it.

This orders objects of one size. Objects of several sizes (as the first thirty of a class are since Python 3.13) come
from pools whose own order is up to the system; it decides between objects that collide in a set.
"""

from __future__ import annotations

import gc
import random
import sys

# Python takes objects of up to 512 bytes from pools of blocks of one size, a multiple of 16.
_BLOCKS = range(48, 513, 16)
_POOL_BYTES = 2**14
_POOLS = 16
_MOST_BLOCKS = 10**6


def arranged_addresses() -> list[bytes]:
    """Allocate memory that determines, while it is kept, the addresses of the next small objects.

    With random string hashes (``PYTHONHASHSEED``) the addresses are random too. With fixed ones, new objects are
    contiguous from the start of a pool.
    """
    gc.collect()  # later it would make other holes
    if sys.flags.hash_randomization:
        return scattered_addresses()
    return [block for size in _BLOCKS for block in _packed(size - sys.getsizeof(b""))]


def scattered_addresses() -> list[bytes]:
    """Allocate memory that puts, while it is kept, the next small objects at addresses in random order."""
    return [block for size in _BLOCKS for block in _scattered(size - sys.getsizeof(b""))]


def _scattered(length: int) -> list[bytes]:
    """Keep every other one of many blocks; the rest is freed in random order, for the next objects."""
    blocks = [bytes(length) for _ in range(_POOLS * _POOL_BYTES // length)]
    drawn = random.Random()
    blocks.sort(key=lambda _: drawn.random())  # much faster than shuffle
    kept = blocks[::2]
    while blocks:
        blocks.pop()
    return kept


def _packed(length: int) -> list[bytes]:
    """Allocate blocks that fill all holes, up to the end of a pool in which they are contiguous."""
    blocks = [bytes(length)]
    stride, in_a_row = (sys.getsizeof(blocks[0]) + 15) // 16 * 16, 0
    while len(blocks) < _MOST_BLOCKS:
        blocks.append(bytes(length))
        follows = id(blocks[-1]) == id(blocks[-2]) + stride
        if not follows and in_a_row >= _POOL_BYTES // stride - 8:  # a pool begins with a header
            break
        in_a_row = in_a_row + 1 if follows else 0
    return blocks
