"""Write the lines of a recording. Those of steps wait, for a device must finish first: several are written at once."""

from __future__ import annotations

import atexit
import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Self

from hashbench.devices.ledger import Ledger
from hashbench.errors import HashbenchError
from hashbench.io import tell_unwritten
from hashbench.training import file, parts

FLUSH_SECONDS = 1.0
"""Seconds of steps that a killed run may lose: lines are written once in as many."""

_MOST_WAITING = 256


class WaitingLines:
    """File of a recording, open, and the lines that wait.

    Those that a program leaves are written when it exits, as after an exception of which a trainer tells nobody. A fork
    of the process writes nothing. Where the file cannot be written any more, the recording ends, and not the program.

    Attributes:
        ledger: of the digests in the lines that wait.
        steps: lines of steps that were written.
    """

    def __init__(self, opened: IO[str]) -> None:
        self.ledger = Ledger()
        self._file, self._process, self._lost = opened, os.getpid(), False
        atexit.register(self.flush)
        self._flushed = time.monotonic()
        self._waiting: list[tuple[str, dict[str, Any]]] = []
        self._count, self._sum, self.steps = 0, hashlib.sha256(), 0

    @classmethod
    def create(cls, path: Path, *, tip: str) -> Self:
        """Create the file, and its folder.

        Raises:
            HashbenchError: it exists (then with the tip), or cannot be written.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return cls(path.open("x", encoding="utf-8", newline="\n"))
        except FileExistsError:
            raise HashbenchError(f"{path} holds a recording", consequence="it would be overwritten", tip=tip) from None
        except OSError as error:
            raise HashbenchError(f"cannot write {path}", consequence=error.strerror or str(error)) from error

    def put(self, kind: str, read: dict[str, Any], values: Sequence[Any] | None = None) -> None:
        """Add a line, with the values of losses (tensors or ``None``), and write those that wait once in a while: many
        at once take a third of the time."""
        if values is not None:
            read["loss_value"] = [_Number(value) for value in values]
        self._waiting.append((kind, read))
        if time.monotonic() - self._flushed > FLUSH_SECONDS or len(self._waiting) >= _MOST_WAITING:
            self.flush()

    def write(self, kind: str, content: Mapping[str, Any]) -> None:
        """Write a line now, after those that wait."""
        self.flush()
        self._append(file.line(kind, content))

    def close(self, end: Mapping[str, Any]) -> None:
        """Write the lines that wait and the last one, which checks the others, and close the file."""
        self.flush()
        self.write("end", {**end, "lines": self._count, "sum": file.sum_of(self._sum)})
        atexit.unregister(self.flush)
        with suppress(OSError):  # of what could not be written before
            self._file.close()

    def flush(self) -> None:
        """Write the lines that wait."""
        waiting, self._waiting = self._waiting, []
        self._flushed = time.monotonic()
        with parts.quiet():
            lines = [file.line(kind, {name: _value(one) for name, one in read.items()}) for kind, read in waiting]
        self._append("".join(lines))
        self.steps += sum(kind == "step" for kind, _ in waiting)
        self.ledger = Ledger()

    def _append(self, text: str) -> None:
        if self._lost or os.getpid() != self._process:
            return
        try:
            self._file.write(text)
            self._file.flush()
            self._count += text.count("\n")
            self._sum.update(text.encode())
        except OSError as error:
            self._lost = True
            tell_unwritten(self._file.name, error, "no further step is recorded")


class _Number:
    """Value of a loss, read when its line is written."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _value(read: Any) -> Any:
    if isinstance(read, list):
        return [parts.number(one.value) if isinstance(one, _Number) else parts.content(one) for one in read]
    return parts.content(read)
