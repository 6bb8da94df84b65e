"""What was measured against what is documented: one word. Pure.

A documented item may hold under a condition in prose (``when accumulate=False``) that nobody can check. So an item that
explains what was seen is taken to apply, and only where none does is there a finding.
"""

from __future__ import annotations

IDENTICAL = "identical"
DIFFERS = "differs"
FOLLOWS = "follows memory"
"""Runs agree, but results are other ones where memory that nobody wrote holds other bytes."""
RAISES = "raises"
NOT_COMPARABLE = "not comparable"
NOT_RUN = "not run"
MEASURED = (IDENTICAL, DIFFERS, FOLLOWS, RAISES, NOT_COMPARABLE, NOT_RUN)
"""What was seen of one sample under one setting of the flag."""

BECOMES_DETERMINISTIC, SAID_TO_RAISE = "deterministic under the flag", "raises under the flag"


def promises(documented: str) -> frozenset[str]:
    """Which of the two lists of torch's documentation a text of ``repro.torchdocs`` speaks of. What is listed for
    other devices alone is no promise here."""
    if documented.startswith("not listed"):
        return frozenset()
    return frozenset(word for word in (BECOMES_DETERMINISTIC, SAID_TO_RAISE) if word in documented)


def verdict(documented: str, *, off: str, on: str, unfilled: str, blank: bool = False) -> str:
    """The verdict on one sample.

    Args:
        documented: what torch documents, in the words of ``repro.torchdocs``.
        off, on, unfilled: one of :data:`MEASURED` with ``use_deterministic_algorithms`` off, on, and on without its
            filling of memory that nobody wrote.
        blank: all that the op returns is memory that nobody wrote, as its schema says.

    Returns:
        One of ``hashbench.results.audit_table.VERDICTS``. What was not measured is never ``as documented``.

    Raises:
        ValueError: a word that is none of them.
    """
    for word in (off, on, unfilled):
        if word not in MEASURED:
            raise ValueError(f"{word!r} is no measurement")
    if on in (DIFFERS, FOLLOWS):
        return "differs under the flag"
    if off in (RAISES, NOT_RUN):
        return "fails"
    if NOT_COMPARABLE in (off, on, unfilled):
        return "not comparable"
    promised = promises(documented)
    if on in (RAISES, NOT_RUN):
        return "as documented" if on == RAISES and SAID_TO_RAISE in promised else "raises"
    if blank:  # torch documents that the flag fills it
        return "as documented"
    if off in (DIFFERS, FOLLOWS):
        return _verdict_on_a_difference(promised)
    if unfilled in (DIFFERS, FOLLOWS):
        return "differs under the flag"
    return "documented but never seen here" if promised else "as documented"


def _verdict_on_a_difference(promised: frozenset[str]) -> str:
    """Runs differ, and agree under the flag."""
    if BECOMES_DETERMINISTIC in promised:
        return "as documented"
    return "does not raise" if SAID_TO_RAISE in promised else "undocumented nondeterminism"
