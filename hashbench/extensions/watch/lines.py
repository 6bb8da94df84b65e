"""Write the lines of a recording. Those of steps wait, for a device must finish first: several are written at once."""

from __future__ import annotations

import atexit
import hashlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from hashbench.core.devices.ledger import Ledger
from hashbench.core.errors import HashbenchError
from hashbench.core.trace.rank_file import RankFile
from hashbench.extensions.watch import file, parts

FLUSH_SECONDS = 1.0
"""Seconds of steps that a killed run may lose: lines are written once in as many."""

_MOST_WAITING = 256


class WaitingLines:
    """File of a recording, open, and the lines that wait.

    Those that a program leaves are written when it exits, as after an exception of which a trainer tells nobody. Where
    the file cannot be written any more, the recording ends, and not the program.

    Attributes:
        reader: of what the lines that wait hold.
        steps: lines of steps that were written.
    """

    def __init__(self, written: RankFile) -> None:
        self.reader = parts.Reader(Ledger())
        self._file = written
        atexit.register(self.flush)
        self._flushed = time.monotonic()
        self._waiting: list[tuple[str, dict[str, Any]]] = []
        self._count, self._sum, self.steps = 0, hashlib.sha256(), 0
        self._reported: set[tuple[str, str]] = set()

    @classmethod
    def create(cls, path: Path, *, tip: str) -> Self:
        """Create the file, and its folder.

        Raises:
            HashbenchError: it exists (then with the tip), or cannot be written.
        """
        written = RankFile(path)
        try:
            written.open()
        except FileExistsError:
            raise HashbenchError(f"{path} holds a recording", consequence="it would be overwritten", tip=tip) from None
        except OSError as error:
            raise HashbenchError(f"cannot write {path}", consequence=error.strerror or str(error)) from error
        return cls(written)

    def put(self, kind: str, read: dict[str, Any], values: Sequence[Any] | None = None) -> None:
        """Add a line, with the values of losses (tensors or ``None``), and write those that wait once in a while: many
        at once take a third of the time."""
        if values is not None:
            read["loss_value"] = [_Number(value) for value in values]
        if self.reader.unread:
            self._add_unread(read)
        self._waiting.append((kind, read))
        if time.monotonic() - self._flushed > FLUSH_SECONDS or len(self._waiting) >= _MOST_WAITING:
            self.flush()

    def write(self, kind: str, content: Mapping[str, Any]) -> None:
        """Write a line now, after those that wait."""
        self.put(kind, dict(content))
        self.flush()

    def close(self, end: Mapping[str, Any]) -> None:
        """Write the lines that wait and the last one, which checks the others, and close the file."""
        self.flush()
        self.write("end", {**end, "steps": self.steps, "lines": self._count, "sum": file.sum_of(self._sum)})
        atexit.unregister(self.flush)
        self._file.close()

    def flush(self) -> None:
        """Write the lines that wait."""
        waiting, self._waiting = self._waiting, []
        self._flushed = time.monotonic()
        with parts.quiet():
            content = "".join(self._line(kind, read) for kind, read in waiting).encode()
        if not self._file.lost and self._file.append(content, "no further step is recorded"):
            self._count += len(waiting)
            self._sum.update(content)
        self.steps += sum(kind == "step" for kind, _ in waiting)
        self.reader.ledger = Ledger()

    def _add_unread(self, read: dict[str, Any]) -> None:
        """Add to a line what could not be read, where no line before it says so."""
        unread = {what: why for what, why in self.reader.taken().items() if (what, why) not in self._reported}
        self._reported |= unread.items()
        if unread:
            read["unread"] = unread

    def _line(self, kind: str, read: Mapping[str, Any]) -> str:
        """Return a line; without what a device does not give away any more."""
        try:
            return file.line(kind, {name: _value(each) for name, each in read.items()})
        except Exception:
            whole: dict[str, Any] = {}
            for name, item in read.items():
                try:
                    whole[name] = _value(item)
                    file.line(kind, whole)
                except Exception as error:
                    whole.pop(name, None)
                    self.reader.failed(name, error)
            return file.line(kind, whole)


class _Number:
    """Value of a loss, read when its line is written."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _value(read: Any) -> Any:
    if isinstance(read, list):
        return [parts.number(each.value) if isinstance(each, _Number) else parts.content(each) for each in read]
    return parts.content(read)
