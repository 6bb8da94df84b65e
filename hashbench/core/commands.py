"""Commands that a report proposes, where they follow from files. Imports no torch."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from pathlib import Path

from hashbench.core.io import read_json

CALL_FILE = "call.json"
"""In the folder of a repro: the captured call."""

IMPORTS = "imports"
"""Key of what a repro records: the file, by its name, or the module that defines a custom op."""

_NAME = re.compile(r"\w[\w.-]*")


def replay_command(repro: Path, *, files: Iterable[str] = ()) -> str:
    """Return ``hashbench replay DIR``, with ``--import FILE`` where the program defines the op.

    Args:
        repro: its folder.
        files: paths of Python files with models. A repro knows files by their names alone, as it may travel.
    """
    try:
        name = str(read_json(repro / CALL_FILE)["recorded"].get(IMPORTS, ""))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        name = ""  # the command itself says what is wrong with the folder
    path = next((file for file in files if Path(file).name == name), name)
    return replay_with(repro, path if _NAME.fullmatch(name) else "")


def replay_with(repro: Path, definition: str) -> str:
    """Return ``hashbench replay DIR``, importing the file or module that defines a custom op; empty: there is none."""
    imports = ["--import", definition] if definition else []
    return shlex.join(["hashbench", "replay", *imports, str(repro)])
