"""Text for people: on one line, shortened, enumerated."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

_FLATTENED = frozenset({"Cc", "Zl", "Zp"})
"""Unicode categories: control characters, line separators, paragraph separators."""


def a_few(names: Sequence[str], limit: int = 8) -> str:
    """The first names, and how many more there are."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def one_line(text: str) -> str:
    """``text`` on one line: each run of line breaks, tabs and other control characters becomes one space (none at
    the ends); lone surrogates, which UTF-8 cannot hold, become ``\\udcff`` and the like."""
    if text.isprintable():
        return text
    flat = "".join("\n" if unicodedata.category(letter) in _FLATTENED else letter for letter in text)
    parts = filter(None, re.split(r"[ ]*\n[\n ]*", flat))
    return " ".join(parts).encode("utf-8", "backslashreplace").decode()


def squeezed(text: str, limit: int = 0) -> str:
    """``text`` with single spaces between its words, cut off after ``limit`` characters (0: nowhere)."""
    words = " ".join(text.split())
    return words[:limit] if limit else words


def shorten(text: str, width: int) -> str:
    """``text`` in at most ``width`` characters, cut in the middle: names differ at their ends."""
    if len(text) <= width:
        return text
    tail = (width - 1) // 2
    return f"{text[: width - 1 - tail]}…{text[len(text) - tail :]}"
