"""Write the lines of a recording. Those of steps wait, for a device must finish first: several are written at once."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

from hashbench.devices.ledger import Ledger
from hashbench.errors import HashbenchError
from hashbench.training import file, parts

FLUSH_SECONDS = 1.0
"""Seconds of steps that a killed run may lose: lines are written once in as many."""

_MOST_WAITING = 256


class WaitingLines:
    """File of a recording, open, and the lines that wait.

    Attributes:
        ledger: of the digests in the lines that wait.
    """

    def __init__(self, opened: IO[str]) -> None:
        self.ledger = Ledger()
        self._file = opened
        self._flushed = time.monotonic()
        self._waiting: list[tuple[str, dict[str, Any]]] = []

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
            self._flush()

    def write(self, kind: str, content: Mapping[str, Any]) -> None:
        """Write a line now, after those that wait."""
        self._flush()
        self._file.write(file.line(kind, content))
        self._file.flush()

    def close(self, end: Mapping[str, Any]) -> None:
        """Write the lines that wait and the last one, and close the file."""
        self.write("end", end)
        self._file.close()

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._flushed = time.monotonic()
        with parts.quiet():
            for kind, read in waiting:
                self._file.write(file.line(kind, {name: _value(one) for name, one in read.items()}))
        self._file.flush()
        self.ledger = Ledger()


class _Number:
    """Value of a loss, read when its line is written."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _value(read: Any) -> Any:
    if isinstance(read, list):
        return [parts.number(one.value) if isinstance(one, _Number) else parts.content(one) for one in read]
    return parts.content(read)
