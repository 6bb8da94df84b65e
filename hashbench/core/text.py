"""Text for people: one line, shortened, enumerated; numbers as people write them; and the frequency and size of a
difference in the same words in every report."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path

from hashbench.core.catalog import INVARIANCES, Origin, Status
from hashbench.core.errors import bounded
from hashbench.core.records import Row

_FLATTENED = frozenset({"Cc", "Zl", "Zp"})
"""Unicode categories: control characters, line separators, paragraph separators."""


_STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
"""Characters that control a terminal or the direction of text, or that UTF-8 or XML cannot hold: control characters
other than tab and line feed, marks and overrides of direction, line and paragraph separators, lone surrogates,
non-characters."""


def printable(text: str) -> str:
    r"""Return ``text`` with escapes (``\x1b``, ``\u202e``) for all control characters but tab and line feed. All output
    for people passes through this or :func:`one_line`."""
    return _STEERING.sub(lambda match: ascii(match[0])[1:-1], text)


def join_limited(names: Sequence[str], limit: int = 8) -> str:
    """Return the first ``limit`` names, and how many more there are."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def one_line(text: str) -> str:
    r"""Return ``text`` on one line: each run of line breaks, tabs and other control characters becomes one space (none
    at the ends); other characters that :func:`printable` escapes become ``\udcff`` and the like."""
    if text.isprintable():
        return text
    flat = "".join("\n" if unicodedata.category(letter) in _FLATTENED else letter for letter in text)
    parts = filter(None, re.split(r"[ ]*\n[\n ]*", flat))
    return printable(" ".join(parts))


def listed(names: Sequence[str]) -> str:
    """Return ``a, b and c``."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def cut(text: str, length: int) -> str:
    """Return ``text`` in at most ``length`` characters, cut at its end."""
    return text if len(text) <= length else f"{text[: length - 1]}…"


def squeezed(text: str, limit: int = 0) -> str:
    """Return ``text`` with single spaces between words, cut after ``limit`` characters (0: not cut)."""
    words = " ".join(text.split())
    return words[:limit] if limit else words


def shorten(text: str, width: int) -> str:
    """Return ``text`` in at most ``width`` characters, cut in the middle: names differ at their ends."""
    if len(text) <= width:
        return text
    tail = (width - 1) // 2
    return f"{text[: width - 1 - tail]}…{text[len(text) - tail :]}"


def ending(error: BaseException | None) -> str:
    """Return how an exception ends a program, in one line; empty if by itself. To make its text may raise as well.

    >>> ending(SystemExit(3)), ending(ValueError("no\nsuch")), ending(SystemExit(0))
    ('exit code 3', 'ValueError: no such', '')
    """
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return ""
    try:
        if isinstance(error, SystemExit):
            return shorten(f"exit code {one_line(bounded(str(error.code)))}", 200)
        return shorten(f"{type(error).__name__}: {one_line(bounded(str(error)))}", 200)
    except Exception:
        return f"{type(error).__name__}: its text cannot be made"


def spaced(number: int) -> str:
    """Return ``32 768``, with narrow no-break spaces."""
    return f"{number:,}".replace(",", "\N{NARROW NO-BREAK SPACE}")


def count(number: int, word: str) -> str:
    """Return ``1 model`` or ``2 models``."""
    return f"{number} {word}{'' if number == 1 else 's'}"


def format_ranks(ranks: Iterable[int]) -> str:
    """Return ``rank 1`` or ``ranks 0, 2``, the first few of them."""
    named = [str(rank) for rank in ranks]
    return f"rank{'' if len(named) == 1 else 's'} {join_limited(named)}"


# ------------------------------------------------------------------------------------------------------ numbers

_LARGEST_ULP = 2**24
"""Units in the last place above which a distance is no rounding error: a float32 has 24 bits of precision."""


def duration(seconds: float) -> str:
    """Return ``0.4 s``, ``45 s``, ``12 min``, ``3 h 5 min`` or ``2 d 4 h``, rounded to what is shown.

    >>> duration(2.5), duration(89.6), duration(11_100)
    ('2.5 s', '90 s', '3 h 5 min')
    """
    if seconds < 9.95:
        return f"{seconds:.1f}".removesuffix(".0") + " s"
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    hours = round(minutes / 60)
    if minutes < 48 * 60:
        return _two_units(minutes, 60, "h", "min")
    return _two_units(hours, 24, "d", "h")


def _two_units(number: int, size: int, large: str, small: str) -> str:
    rest = f" {number % size} {small}" if number % size else ""
    return f"{number // size} {large}{rest}"


def mebibytes(mib: float) -> str:
    """Return ``820 MiB`` or ``15.9 GiB``.

    >>> mebibytes(819.6), mebibytes(16_282)
    ('820 MiB', '15.9 GiB')
    """
    return f"{mib:.0f} MiB" if mib < 1023.5 else f"{mib / 1024:.1f} GiB"


def percent(share: float) -> str:
    """Return a share of 1 as ``36 %`` or ``3.1 %``; 0 and 100 % are only said of none and of all.

    >>> percent(0.3604), percent(1), percent(0.999), percent(0.031), percent(0.0001)
    ('36 %', '100 %', 'over 99 %', '3.1 %', 'under 0.1 %')
    """
    value = 100 * share
    if 0 < value < 0.1:
        return "under 0.1 %"
    if 99 < value < 100:
        return "over 99 %"
    return f"{value:.1f}".removesuffix(".0") + " %" if value < 9.95 else f"{value:.0f} %"


def ulps(number: int | None, unit: str = "ULP") -> str:
    """Return ``3 ULP``; empty where it is not known or too far to be a matter of rounding.

    >>> ulps(3), ulps(2**24 + 1), ulps(None)
    ('3 ULP', '', '')
    """
    return "" if number is None or number > _LARGEST_ULP else f"{spaced(number) if unit != 'ULP' else number} {unit}"


# ------------------------------------------------------------------------------------------------ a row in words


def is_replayable(row: Row) -> bool:
    """Return True if ``hashbench replay`` takes the repro of a row: not one of two batches, of a collective, nor of a
    compiled program, whose kernels it never compiles."""
    special = row.mode in INVARIANCES or row.backend or row.origin == Origin.COLLECTIVE
    return bool(row.repro) and not special


_SINGULAR = {"runs": "run", "replays": "replay", "pairs": "pair", "processes": "process"}
"""Units of a rate."""


_IN_EVERY_RUN = (Status.FAIL_ACCURACY, Status.COMPILATIONS_DIFFER)
"""Statuses of models whose runs agree: the rate is that of the runs."""


def when(phase: str, iteration: int | None) -> str:
    """Return ``backward, iteration 3``; without the iteration where that is unknown."""
    return phase if iteration is None or not phase else f"{phase}, iteration {iteration}"


def rate(row: Row) -> str:
    """Return ``33 of 33 replays``; empty where no rate is known, or what is wrong shows in every run."""
    if row.rate is None or row.trials is None or row.accuracy in _IN_EVERY_RUN:
        return ""
    of = row.rate_of or "runs"
    return f"{round(row.rate * row.trials)} of {row.trials} {_SINGULAR.get(of, of) if row.trials == 1 else of}"


def how_often(row: Row, often: str = "") -> str:
    """Return ``33 of 33 replays (95 % interval: 91 % to 100 %), 34 different outcomes``; ``often``: the rate in other
    words."""
    text = often or rate(row)
    if row.accuracy == Status.LATENT:
        return text
    if text and bounds(row):
        text += f" (95 % interval: {bounds(row)})"
    return text + (f", {count(row.distinct, 'different outcome')}" if text and row.distinct else "")


def bounds(row: Row) -> str:
    """Return the 95 % interval of the rate, ``91 % to 100 %``; empty where it is unknown."""
    low, high = row.rate_low, row.rate_high
    return "" if low is None or high is None else f"{percent(low)} to {percent(high)}"


def how_much(row: Row) -> str:
    """Return ``101 169 elements (31 %), at most 3.6e-07 apart, 32 768 units in the last place``."""
    parts = []
    if row.differing_elements is not None:
        share = f" ({percent(row.count_variability)})" if row.count_variability is not None else ""
        parts.append(f"{spaced(row.differing_elements)} element{'s' * (row.differing_elements != 1)}{share}")
    if row.max_abs_diff is not None:
        parts.append(f"at most {row.max_abs_diff:.3g} apart")
    parts.append(ulps(row.max_ulp, f"unit{'s' * (row.max_ulp != 1)} in the last place"))
    return ", ".join(filter(None, [*parts, row.representation]))


def deterministic_here(row: Row) -> str:
    """Return the result of the deterministic algorithms, and their price."""
    price = f", {price_words(row.deterministic_price)}" if row.deterministic_price is not None else ""
    return row.deterministic_here + price if row.deterministic_here else ""


_LEAST_PRICE = 2.0
"""Ratio of times from which on a price is reported: for one kernel, the ratio of two medians of 20 replays varied from
0.94 to 1.7 within 16 minutes."""


def price_words(price: float) -> str:
    """Return the price of a remedy that takes ``price`` times as long.

    >>> price_words(1.3), price_words(3.14)
    ('at no cost that could be measured', 'which takes about 3x as long')
    """
    return f"which takes about {price:.0f}x as long" if price >= _LEAST_PRICE else "at no cost that could be measured"


def scope_words(key: Sequence[str]) -> str:
    """Return ``torchvision · training · float32 · cpu``; of a zoo file only its name."""
    suite, *rest = key[:-1]
    return " · ".join(part for part in (suite_words(suite), *rest) if part)


def suite_words(suite: str) -> str:
    """Return the name of a suite; of a path only its last part."""
    return Path(suite).name if "/" in suite else suite


_LONGEST = 500
"""Maximum characters of one text in a failed test's message; names and texts come from the code under test."""


def in_brackets(*parts: str) -> str:
    """Return the parts that are not empty, in brackets."""
    text = ", ".join(filter(None, parts))
    return f" ({text})" if text else ""


def cut_line(text: str) -> str:
    """Return ``text`` on one printable line, cut to the length of a text in a failed test's message."""
    return cut(squeezed(one_line(text)), _LONGEST)


# --------------------------------------------------------------------------------------------------- command lines

MASK = "***"
"""Stands for a secret in a command line that a file keeps."""

_OPTION = re.compile(r"(?P<dashes>-{0,2}\+{0,2})(?P<name>[A-Za-z][\w.-]*)(?P<equals>=?)(?P<value>.*)", re.DOTALL)
_ALONE = frozenset(
    {
        "password",
        "passwd",
        "passphrase",
        "pwd",
        "secret",
        "credential",
        "credentials",
        "auth",
        "bearer",
        "apikey",
        "token",
    }
)
_BEFORE_KEY = frozenset(
    {"api", "access", "private", "secret", "license", "account", "encryption", "signing", "ssh", "wandb"}
)
_NO_SECRET = frozenset({"pad", "eos", "bos", "unk", "mask", "sep", "cls", "special", "image", "stop", "start", "end"})
"""Words before ``token`` by which it is one of a text, as in ``--pad-token``."""

_SHAPES = re.compile(
    r"\b(hf|gh[opsu]|github_pat|glpat|sk|xox[abp])[_-][\w-]{12,}|\bAKIA[A-Z0-9]{12,}|\beyJ[\w-]{10,}\.[\w.-]{10,}"
)
_HEADER = re.compile(r"(?i)\b((?:proxy-)?authorization\s*:\s*(?:bearer|basic|token)?\s*)[^\s'\"]+")
_USER = re.compile(r"\b([a-z][a-z0-9+.-]*://)[^/\s@]+@", re.IGNORECASE)


def masked(command: Sequence[str]) -> tuple[str, ...]:
    """Return a command line with ``***`` in place of the values of options that look like secrets.

    By their names (``--token x``, ``api_key=x``, ``HF_TOKEN=x``) and by well-known shapes (``hf_…``, a URL's user).
    A heuristic: a secret without either, as a password that is an argument of its own, is kept.
    """
    found: list[str] = []
    hides_next = False
    for word in command:
        if hides_next and not word.startswith("--"):
            found.append(MASK)
            hides_next = False
            continue
        part = _OPTION.fullmatch(word)
        secret = part is not None and _names_a_secret(part["name"])
        if part is not None and secret and part["equals"]:
            found.append(f"{part['dashes']}{part['name']}={MASK}")
        else:
            found.append(_USER.sub(rf"\1{MASK}@", _HEADER.sub(rf"\g<1>{MASK}", _SHAPES.sub(MASK, word))))
        hides_next = secret and part is not None and part["dashes"].startswith("-") and not part["equals"]
    return tuple(found)


def _names_a_secret(option: str) -> bool:
    words = [word for word in re.split(r"[^a-z0-9]+", option.lower()) if word]
    pairs = [*zip(["", *words], words, strict=False)]
    return any(
        (word == "key" and before in _BEFORE_KEY) or (word in _ALONE and not (word == "token" and before in _NO_SECRET))
        for before, word in pairs
    )
