"""Text for people: on one line, shortened, enumerated; and how often and by how much a row differs, in the same words
in every report."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path

from hashbench.records import Row

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


def spaced(number: int) -> str:
    """``32 768``, with narrow spaces that do not break."""
    return f"{number:,}".replace(",", "\N{NARROW NO-BREAK SPACE}")


def count(number: int, word: str) -> str:
    """``1 model``, ``2 models``."""
    return f"{number} {word}{'' if number == 1 else 's'}"


# ------------------------------------------------------------------------------------------------ a row in words


def rate(row: Row) -> str:
    """``33 of 33 replays``; empty where nothing was counted."""
    if row.rate is None or row.trials is None:
        return ""
    return f"{round(row.rate * row.trials)} of {row.trials} {row.rate_of or 'runs'}"


def how_often(row: Row) -> str:
    """``33 of 33 replays (95 % interval: 91.0% to 100.0%), 34 different outcomes``."""
    text = rate(row)
    if text and bounds(row):
        text += f" (95 % interval: {bounds(row)})"
    return text + (f", {row.distinct} different outcomes" if text and row.distinct else "")


def bounds(row: Row) -> str:
    """``91.0% to 100.0%``: the 95 % interval of the rate; empty where it is not known."""
    return "" if row.rate_low is None or row.rate_high is None else f"{row.rate_low:.1%} to {row.rate_high:.1%}"


def how_much(row: Row) -> str:
    """``101 169 elements (31 %), at most 3.6e-07 apart, 32 768 units in the last place``."""
    parts = []
    if row.differing_elements is not None:
        share = f" ({100 * row.count_variability:.2g} %)" if row.count_variability is not None else ""
        parts.append(f"{spaced(row.differing_elements)} elements{share}")
    if row.max_abs_diff is not None:
        parts.append(f"at most {row.max_abs_diff:.3g} apart")
    if row.max_ulp is not None:
        parts.append(f"{spaced(row.max_ulp)} units in the last place")
    return ", ".join([*parts, *filter(None, [row.representation])])


def deterministic_here(row: Row) -> str:
    """What the deterministic algorithms did, and their price."""
    price = f", takes {row.deterministic_price:.2g}x as long" if row.deterministic_price is not None else ""
    return row.deterministic_here + price if row.deterministic_here else ""


def scope_words(key: Sequence[str]) -> str:
    """``torchvision · training · float32 · cpu``, of a zoo file only its name."""
    suite, *rest = key[:-1]
    return " · ".join(part for part in (suite_words(suite), *rest) if part)


def suite_words(suite: str) -> str:
    """The name of a suite; of the path of a zoo file its last part."""
    return Path(suite).name if "/" in suite else suite
