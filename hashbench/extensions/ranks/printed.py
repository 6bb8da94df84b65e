"""What a program prints, compared between two runs: a result, unless it is a clock, a path or an address. Pure.

Lines are compared as a set, since threads print in any order. What looks like a time, a duration, a rate, a path, an
address or a process is left out. That is a guess from the words: ``time 0.3`` is taken for a duration, also where it
is a loss of that name, and ``took 3 of 10`` hides the 3.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from hashbench.core.records import OpRecord, Result, TensorDigest, Trace

_NUMBER = r"[+-]?\d+(?:[.,]\d+)?(?:[eE][+-]?\d+)?"
_MEASURES = "time|took|elapsed|eta|duration|latency|throughput|speed|fps|pid|port|rss|memory|seconds|wall"
_LEFT_OUT = (
    (re.compile(r"\x1b\[[0-9;]*[A-Za-z]"), ""),
    (re.compile(r"\b0x[0-9a-fA-F]+\b"), "<address>"),
    (re.compile(rf"{_NUMBER} ?(?:[kKMGT]?i?B|it|tok\w*|samples?|steps?|items?|s)/(?:s\w*|it|step|batch)\b"), "<rate>"),
    (re.compile(r"(?:[\w.~+@-]*/)+(?=[\w.+@-]*[A-Za-z])[\w.+@-]*"), "<path>"),
    (re.compile(r"\b\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?)?"), "<clock>"),
    (re.compile(r"\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)\w*,? (?:\d+ )?[A-Z][a-z]{2} +\d+"), "<clock>"),
    (re.compile(r"\b\d?\d:\d\d(?::\d\d)?(?:[.,]\d+)?"), "<clock>"),
    (re.compile(r"\b1[5-9]\d{8}(?:\.\d+)?\b"), "<clock>"),
    (re.compile(rf"{_NUMBER} ?(?:ns|us|µs|ms|s|secs?|seconds?|mins?|minutes?|h|hours?)\b"), "<duration>"),
    (re.compile(rf"((?:\b|_)(?:{_MEASURES})(?:_\w+)?\W{{1,3}}){_NUMBER}", re.IGNORECASE), r"\1<measure>"),
)
_SHOWN = 60
_MOST = 100
"""Lines that differ and are looked at."""


@dataclass(frozen=True, slots=True)
class PrintedDifference:
    """A line that a rank prints differently in two runs.

    Attributes:
        rank: global rank.
        line: its number in the first run, from 1; in the second one where the first has no such line.
        kind: ``a number`` or ``the text``; ``a line of one run alone``.
        first, second: the lines; empty where the run has none.
    """

    rank: int
    line: int
    kind: str
    first: str
    second: str

    def words(self) -> str:
        """Format as ``rank 0, line 3, a number: loss 0.5 / loss 0.6``."""
        shown = " / ".join((line[:_SHOWN] or "nothing") for line in (self.first, self.second))
        return f"rank {self.rank}, line {self.line}, {self.kind}: {shown}"


def without_measures(line: str) -> str:
    """Return the line without clocks, durations, rates, paths and addresses.

    >>> without_measures("step 3 loss 0.51 took 0.2 s, 15.1 it/s, saved to /tmp/run1/a.pt at 12:03:11")
    'step 3 loss 0.51 took <duration>, <rate>, saved to <path> at <clock>'
    """
    for pattern, instead in _LEFT_OUT:
        line = pattern.sub(instead, line)
    return line.rstrip()


def has_numbers(text: str) -> bool:
    """Return True if a line has a number that is no measure."""
    return any(re.search(r"\d", without_measures(line)) for line in text.splitlines())


def printed_differently(rank: int, first: str, second: str) -> tuple[PrintedDifference, ...]:
    """Compare what a rank printed in two runs."""
    lines = [list(enumerate(text.splitlines(), 1)) for text in (first, second)]
    forms = [Counter(without_measures(line) for _, line in side) for side in lines]
    extra = [_extra(side, forms[at] - forms[1 - at]) for at, side in enumerate(lines)]
    found = []
    for old, new in list(zip_longest(*extra))[:_MOST]:
        number = (old or new or (0, ""))[0]
        words = old[1].strip() if old else "", new[1].strip() if new else ""
        numbers_alone = re.sub(_NUMBER, "#", words[0]) == re.sub(_NUMBER, "#", words[1])
        kind = "a line of one run alone" if not (old and new) else "a number" if numbers_alone else "the text"
        found.append(PrintedDifference(rank, number, kind, *words))
    return tuple(found)


def _extra(lines: Sequence[tuple[int, str]], left: Counter[str]) -> list[tuple[int, str]]:
    """Return the lines whose forms are in ``left``, as often as they are there; the last ones of a form."""
    found = []
    for number, line in reversed(lines):
        form = without_measures(line)
        if left[form] > 0:
            left[form] -= 1
            found.append((number, line))
    return found[::-1]


def with_printed_results(
    first: Mapping[int, Trace], second: Mapping[int, Trace], printed: Sequence[PrintedDifference]
) -> tuple[dict[int, Trace], dict[int, Trace]]:
    """Return the traces with results for the printed numbers that the program has read out of tensors.

    A number is that of a read where both runs print, rounded, what both have read. A number that is the same by chance
    (``0`` and ``1`` are read often) may add the wrong read: its own origin is then found as that of a result.
    """
    runs = dict(first), dict(second)
    for rank in {difference.rank for difference in printed} & runs[0].keys() & runs[1].keys():
        found = list(
            _reads(runs[0][rank], runs[1][rank], [difference for difference in printed if difference.rank == rank])
        )
        for run, results in zip(runs, zip(*found, strict=True), strict=False):
            run[rank] = replace(run[rank], results=(*run[rank].results, *results))
    return runs


def _reads(first: Trace, second: Trace, printed: Sequence[PrintedDifference]) -> Iterator[tuple[Result, Result]]:
    others = {record.id: record for record in second.records if record.scalar}
    pairs = [(record, others[record.id]) for record in first.records if record.scalar and record.id in others]
    differing = [(old, new) for old, new in pairs if old.scalar != new.scalar]
    for line in printed:
        for old, new in differing:
            if _prints(line.first, old.scalar) and _prints(line.second, new.scalar):
                yield _result(line.line, old), _result(line.line, new)
                break


def _result(line: int, record: OpRecord) -> Result:
    source = record.inputs[0].source if record.inputs else record.id
    return Result(f"printed line {line}", TensorDigest("number", (), (), record.scalar), source)


def _prints(line: str, scalar: str) -> bool:
    """Return True if a line has this number, rounded to the digits that are printed."""
    try:
        value = float(scalar)
    except ValueError:
        return False
    for token in re.findall(_NUMBER, line):
        mantissa, _, exponent = token.replace(",", ".").lower().partition("e")
        decimals = len(mantissa.partition(".")[2]) - int(exponent or 0)
        if abs(float(token.replace(",", ".")) - value) <= 0.5000001 * 10.0**-decimals:
            return True
    return False
