"""The form of the file of a rank's trace: each step is one gzip member, appended at once."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path

import xxhash

from hashbench.core.io import open_file

_HEAD = b"\x1f\x8b\x08"
_HAS_COMMENT = 0x10
_LONGEST_COMMENT = 64
_LEVEL = 3
"""Of compression: 26 bytes a record, in 0.4 of the time that level 6 takes for 22."""


def rank_path(folder: Path, rank: int) -> Path:
    """Return the path of a rank's trace in the folder of a recording."""
    return folder / f"rank{rank}.log.gz"


def run_id(environment: Mapping[str, str], parent: int) -> str:
    """Return what the ranks of one run share, and other runs do not, as far as their launcher tells: 16 digits.

    Args:
        environment: variables of this process.
        parent: id of the parent process, which is common to the ranks where torchrun starts all of them.
    """
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID")
    words = [environment.get(name, "") for name in (*names, "SLURM_STEP_ID")]
    local, size = environment.get("LOCAL_WORLD_SIZE"), environment.get("WORLD_SIZE")
    if local is not None and local == size:
        words.append(str(parent))
    return xxhash.xxh3_64_hexdigest("\0".join(words).encode())


def run_of(path: Path) -> str:
    """Return the :func:`run_id` in a rank's file; ``""`` if it has none, as a file that was unpacked.

    Raises:
        OSError: the file cannot be read.
    """
    with os.fdopen(open_file(path), "rb") as opened:
        head = opened.read(10 + _LONGEST_COMMENT)
    comment, end, _ = head[10:].partition(b"\0")
    if head[:4] != _HEAD + bytes([_HAS_COMMENT]) or not end:
        return ""
    return comment.decode("latin-1")


def without_run(content: bytes) -> bytes:
    """Return the content of a rank's file without its :func:`run_id`: equal texts leave equal bytes."""
    if content[:4] != _HEAD + bytes([_HAS_COMMENT]):
        return content
    return content[content.find(b"\0", 10) + 1 :]


def member(text: str, comment: str = "") -> bytes:
    """Compress text to one gzip member without a time; the comment of a file's first one is its :func:`run_id`."""
    content = text.encode()
    packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    body = packer.compress(content) + packer.flush()
    flags = _HAS_COMMENT if comment else 0
    head = _HEAD + struct.pack("<BIBB", flags, 0, 0, 255) + (comment.encode("latin-1") + b"\0" if comment else b"")
    return head + body + struct.pack("<II", zlib.crc32(content), len(content) & 0xFFFFFFFF)
