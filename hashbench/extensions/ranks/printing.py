"""Keep what a rank prints, in a file beside its trace, and compare it between two runs."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hashbench.core.io import read_file
from hashbench.core.trace.rank_file import RankFile
from hashbench.extensions.ranks.printed import PrintedDifference, has_numbers, printed_differently

if TYPE_CHECKING:
    from typing_extensions import Buffer

MOST_BYTES = 1 << 24
"""Of the output of a rank that are kept."""


def printed_path(folder: Path, rank: int) -> Path:
    """Return where a rank keeps what it prints."""
    return folder / f"rank{rank}.stdout.txt"


def compare_prints(first: Path, second: Path, ranks: Sequence[int]) -> tuple[PrintedDifference, ...] | None:
    """Compare what the ranks printed in two runs; ``None`` if one of them has kept nothing, or printed no number."""
    found: list[PrintedDifference] = []
    printed = False
    for rank in ranks:
        texts = [_text(printed_path(folder, rank)) for folder in (first, second)]
        if texts[0] is None or texts[1] is None:
            return None
        printed = printed or has_numbers(texts[0]) or has_numbers(texts[1])
        found += printed_differently(rank, texts[0], texts[1])
    return tuple(found) if printed or found else None


def _text(path: Path) -> str | None:
    try:
        return read_file(path).decode(errors="replace")
    except OSError:
        return None


@contextmanager
def keeping_prints(folder: Path, rank: int) -> Iterator[None]:
    """Keep what Python code of this process writes to standard output; that of its children and of C code is not kept.

    The stream still writes to the same descriptor, at once, and so on, as before.
    """
    before = sys.stdout
    try:
        descriptor, buffered = before.fileno(), not before.line_buffering
        kept = RankFile(printed_path(folder, rank), replaces=True)
        kept.open()
    except (AttributeError, OSError, ValueError):  # there is none, or it is no stream of the system
        yield
        return
    before.flush()
    copy = _Copy(descriptor, kept)
    stream = io.TextIOWrapper(
        io.BufferedWriter(copy),
        before.encoding,
        before.errors,
        line_buffering=not buffered,
        write_through=getattr(before, "write_through", False),
    )
    sys.stdout = stream
    try:
        yield
    finally:
        with suppress(OSError, ValueError):
            stream.flush()
        if sys.stdout is stream:
            sys.stdout = before
        copy.end()


class _Copy(io.FileIO):
    """Writes to a descriptor, and the same to a file."""

    def __init__(self, descriptor: int, kept: RankFile) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._kept, self._left = kept, MOST_BYTES

    def write(self, data: Buffer, /) -> Any:
        """Write; what cannot be written to the file is lost to it alone."""
        written = super().write(data)
        if written and self._left and not self._kept.lost:
            part = bytes(memoryview(data).cast("B")[: min(written, self._left)])
            self._left -= len(part)
            self._kept.append(part, "what is printed from now on is not kept")
        return written

    def end(self) -> None:
        """Close the file; go on without it."""
        self._left = 0
        self._kept.close()
