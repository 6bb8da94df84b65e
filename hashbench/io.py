"""Where this package lies, and writing files so that a crash leaves the old content or the new one, nothing between."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PACKAGE_PARENT = str(Path(__file__).resolve().parents[1])
"""The folder that holds this package: what a Python started with ``-P`` puts on its path to find it."""


def replace_file(path: Path, text: str) -> None:
    """Give ``path`` the content ``text`` (UTF-8) in one step that survives a crash. A link stays one, and so does what
    is no file (``/dev/null``, a pipe), which is simply written to. Raises ``OSError``; ``path`` is then as it was and
    the temporary file is gone."""
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, content: bytes) -> None:
    """:func:`replace_file` for what is no text."""
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    path = Path(os.path.realpath(path))
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def file_digest(path: str | Path) -> str:
    """SHA-256 of a file in hexadecimal digits; empty where there is none that can be read."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return ""


def document_digest(document: Mapping[str, Any]) -> str:
    """What a JSON document says of itself under ``sha256``: the SHA-256 of all else in it, whatever its order."""
    rest = {key: value for key, value in document.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _sync_folder(folder: Path) -> None:
    """Without this a power cut may undo a rename (POSIX; Windows cannot open a folder)."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
