"""Retry policy: which rows are re-run in isolation, and how the two attempts are reconciled. Pure.

A model that died or ran out of memory while others ran is run again with the machine to itself.
"""

from __future__ import annotations

import textwrap
from dataclasses import replace

from hashbench.catalog import STATUSES, Status
from hashbench.records import Row

_LONGEST = 300


def wants_repetition(row: Row, *, died: bool) -> bool:
    """Whether ``row``, of a worker beside which others ran, says something of which those may be the reason: it ran
    out of memory, or it died without a result (``died``), perhaps because the system was out of memory. A time limit
    that was exceeded is believed: the workers have their own cores, and to wait twice that long, with everything
    else standing still, costs more than it tells."""
    return died or STATUSES[row.accuracy].ran_out_of_memory


def believed(first: Row, second: Row) -> Row:
    """The row of a model whose attempt beside others gave ``first`` and whose attempt alone gave ``second``.

    It is the second one, unless the first had seen two runs differ before it died and the second did not: what was seen
    is not taken back.
    """
    if first.accuracy == Status.TWO_RUNS_DIFFER != second.accuracy:
        return replace(first, retried=_joined(f"alone it ended with {_ending(second)}", second.retried))
    return replace(second, retried=_joined(_ending(first), second.retried))


def _ending(row: Row) -> str:
    """``crashed: killed by SIGKILL``"""
    return textwrap.shorten(f"{row.accuracy}: {row.error}" if row.error else row.accuracy, _LONGEST)


def _joined(*texts: str) -> str:
    return "; ".join(filter(None, texts))
