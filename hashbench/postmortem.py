"""What is known of a worker that died without a result: how it ended, and its last words."""

from __future__ import annotations

import signal
from pathlib import Path


def describe_end(exit_code: int) -> str:
    """An exit code in words; negative for a signal, as :mod:`multiprocessing` gives it."""
    if exit_code == -signal.SIGKILL:
        return "killed by SIGKILL, which hashbench did not send: most likely the kernel was out of memory"
    if exit_code < 0:
        try:
            return f"killed by {signal.Signals(-exit_code).name}"
        except ValueError:
            return f"killed by signal {-exit_code}"
    return f"ended with exit code {exit_code} and no result"


def last_words(log: Path, *, lines: int = 4, most: int = 65536) -> list[str]:
    """The last lines that a dead worker printed, or the first of its fatal error if Python printed one."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - most))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    words = [line.strip() for line in text.splitlines() if line.strip()]
    fatal = next((index for index, line in enumerate(words) if line.startswith("Fatal Python error")), None)
    return words[-lines:] if fatal is None else words[fatal : fatal + lines]
