"""The file to which one rank of a program appends while the program goes on."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

from hashbench.core.io import open_file, tell_unwritten


class RankFile:
    """File of a rank, created by :meth:`open` or the first :meth:`append`.

    What is appended is in it whole; a killed process leaves, at most, the begin of the last part. On a full disk the
    file is as it was before, and the program goes on. A fork of the process writes nothing.

    Args:
        path: of the file; its folder is made.
        replaces: an earlier file of this name; else that is an error.

    Attributes:
        path: of the file.
        size: bytes written.
        lost: why the first part that is missing could not be written; empty if none is.
    """

    def __init__(self, path: Path, *, replaces: bool = False) -> None:
        self.path, self.size, self.lost = path, 0, ""
        self._replaces, self._process = replaces, os.getpid()
        self._descriptor, self._file = -1, (-1, -1)

    def open(self) -> None:
        """Create the file; raise ``OSError`` if that cannot be."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self._replaces:
            self.path.unlink(missing_ok=True)  # another process may still write to the file of an earlier run
        self._descriptor = open_file(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND)
        self._file = _identity(self._descriptor)

    def append(self, content: bytes, consequence: str) -> bool:
        """Return whether this could be appended; the first time that it cannot, say so, and the consequence."""
        if os.getpid() != self._process:
            return False
        left = memoryview(content)
        try:
            if self._descriptor < 0:
                self.open()
            while left:
                left = left[os.write(self._own(), left) :]
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._own(), self.size)
            if not self.lost:
                self.lost = error.strerror or str(error)
                tell_unwritten(self.path, error, consequence)
            return False
        self.size += len(content)
        return True

    def close(self) -> None:
        """Close the file."""
        if os.getpid() == self._process:
            with suppress(OSError):
                os.close(self._own())

    def _own(self) -> int:
        """Return the descriptor; raise ``OSError`` where the program closed it, and may have another file under it."""
        if _identity(self._descriptor) != self._file:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return self._descriptor


def _identity(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino
