"""A row in words: how often and by how much it differs, where, and on what it is judged. The same in every report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hashbench.records import Row
from hashbench.report.expectations import Judgement
from hashbench.report.history import Interval
from hashbench.results.environments import EnvironmentChange


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


def seen(one: Row | Interval | None) -> str:
    """``eager_two_runs_differ (aten.dot.default, alignment)``: a status with the kernel and the cause."""
    if one is None:
        return "no row"
    what = ", ".join(filter(None, (one.kernel, one.cause)))
    return f"{one.accuracy} ({what})" if what else one.accuracy


def spaced(number: int) -> str:
    """``32 768``, with narrow spaces that do not break."""
    return f"{number:,}".replace(",", "\N{NARROW NO-BREAK SPACE}")


def count(number: int, word: str) -> str:
    """``1 model``, ``2 models``."""
    return f"{number} {word}{'' if number == 1 else 's'}"


def change(one: EnvironmentChange) -> str:
    """``packages.torch: 2.15.0 → 2.16.0``."""
    return f"{one.key}: {one.base or '(none)'} → {one.new or '(none)'}"


def scope_words(key: Sequence[str]) -> str:
    """``torchvision · training · float32 · cpu``, of a zoo file only its name."""
    suite, *rest = key[:-1]
    return " · ".join(part for part in (suite_words(suite), *rest) if part)


def suite_words(suite: str) -> str:
    """The name of a suite; of the path of a zoo file its last part."""
    return Path(suite).name if "/" in suite else suite


def message(one: Judgement) -> str:
    """One line: what is seen, what was expected, and why."""
    now = seen(one.new)
    before = one.base.accuracy if one.base else "nothing"
    since = f" since {one.since}" if one.since else ""
    of = "expected" if one.expected or one.base is None else "last night"
    nights = f", not seen for {count(one.unseen, 'night')}" if one.unseen else ""
    note = f"; {one.note}" if one.note else ""
    link = f" {one.link}" if one.link else ""
    return f"{one.word}: {now} ({of}: {before}{since}{nights}){note}{link}"
