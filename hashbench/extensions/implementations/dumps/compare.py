"""Compare two dumps: read them tensor by tensor, align them, say what was found. No torch, but for files of torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hashbench.core.finding import Finding
from hashbench.extensions.implementations.dumps import debugger, files
from hashbench.extensions.implementations.dumps.align import align, first_without
from hashbench.extensions.implementations.dumps.dump import Dump, DumpReader, unreadable
from hashbench.extensions.implementations.dumps.finding import finding_of
from hashbench.extensions.implementations.dumps.sketch import is_number, sketch_of
from hashbench.extensions.implementations.dumps.verdict import FACTORS, ROUNDING, ComparedDump, DumpsVerdict

READERS: Sequence[DumpReader] = (debugger.READER, files.READER)
"""The first that applies reads a dump. Another tool's is a file beside these and a word here."""


def read_dump(path: Path) -> Dump:
    """Find the tensors of a dump.

    Raises:
        HashbenchError: there is none, or it cannot be read.
    """
    if not path.exists():
        raise unreadable(path, "it does not exist", "Check the path.")
    for reader in READERS:
        if reader.applies(path):
            return reader.read(path)
    raise unreadable(path, "no reader knows such a file", "Name a folder of .npy, .pt or .safetensors.")


def judge_dumps(a: Path, b: Path, *, rtol: float | None = None) -> DumpsVerdict:
    """Read and compare two dumps.

    Args:
        a, b: paths; ``a`` is the reference.
        rtol: tolerance of moments; ``None``: by the lowest dtype.

    Raises:
        HashbenchError: one of them cannot be read.
    """
    dumps = read_dump(a), read_dump(b)
    sides = [tuple(sketch_of(each) for each in dump.tensors if is_number(each.header)) for dump in dumps]
    dtypes = {each.header.dtype for side in sides for each in side} & ROUNDING.keys()
    lowest = max(dtypes, key=ROUNDING.__getitem__, default="float64")
    tolerance = FACTORS[lowest] * ROUNDING[lowest] if rtol is None else rtol
    partners = align(sides[0], sides[1], tolerance)
    firsts = [
        first_without(
            *(sides[one], sides[1 - one], partners[one], partners[1 - one]),
            ordered=(dumps[one].of_calls, dumps[1 - one].of_calls),
        )
        for one in (0, 1)
    ]
    made = [
        ComparedDump(
            path, dump, side, tuple(each.name for each in dump.tensors if not is_number(each.header)), of, first
        )
        for path, dump, side, of, first in zip((a, b), dumps, sides, partners, firsts, strict=True)
    ]
    return DumpsVerdict(made[0], made[1], lowest, tolerance, rtol is not None)


def compare_dumps(a: Path, b: Path, *, rtol: float | None = None, limit: int = 20) -> Finding:
    """Return the report of two dumps; see :func:`judge_dumps`. ``limit``: lines of the table, at most."""
    return finding_of(judge_dumps(a, b, rtol=rtol), limit=limit)
