"""Where Python puts small objects: at random addresses, or at the same ones in every process.

A set has the order of its objects' addresses. What the system randomizes are the addresses of whole pages, which leaves
that order as it is, so that fresh processes agree about it by themselves; and where a process is to repeat another one,
other holes between live objects are filled. Both are arranged here, by memory that is kept.

Objects of one size lie in one order then. Those of several sizes, as since Python 3.13 the first thirty of a class are,
lie in pools whose own order stays the system's, which decides between objects that collide in a set.
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
    """Memory that decides, as long as it is kept, where the next small objects lie.

    Where string hashes are random (``PYTHONHASHSEED``), so are the addresses. Where they are fixed, new objects lie one
    behind the other from the start of a pool.
    """
    gc.collect()  # later it would make other holes
    if sys.flags.hash_randomization:
        return scattered_addresses()
    return [block for size in _BLOCKS for block in _packed(size - sys.getsizeof(b""))]


def scattered_addresses() -> list[bytes]:
    """Memory that puts, as long as it is kept, the next small objects at addresses in random order."""
    return [block for size in _BLOCKS for block in _scattered(size - sys.getsizeof(b""))]


def _scattered(length: int) -> list[bytes]:
    """Every other one of many blocks; the rest was freed in random order, and the next objects are put there."""
    blocks = [bytes(length) for _ in range(_POOLS * _POOL_BYTES // length)]
    drawn = random.Random()
    blocks.sort(key=lambda _: drawn.random())  # much faster than shuffle
    kept = blocks[::2]
    while blocks:
        blocks.pop()
    return kept


def _packed(length: int) -> list[bytes]:
    """Blocks that fill all holes, up to the end of a pool in which they lie one behind the other."""
    blocks = [bytes(length)]
    stride, in_a_row = (sys.getsizeof(blocks[0]) + 15) // 16 * 16, 0
    while len(blocks) < _MOST_BLOCKS:
        blocks.append(bytes(length))
        follows = id(blocks[-1]) == id(blocks[-2]) + stride
        if not follows and in_a_row >= _POOL_BYTES // stride - 8:  # a pool begins with a header
            break
        in_a_row = in_a_row + 1 if follows else 0
    return blocks
