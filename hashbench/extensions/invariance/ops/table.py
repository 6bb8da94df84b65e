"""The table of an audit of batch invariance, ``invariance.csv``: one row for each op, dtype and sample of inputs. Pure.

``docs/audit.md`` explains every column. An absent value is an empty cell, never a zero.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum

from hashbench.core.records import column, declared
from hashbench.core.report.audits import SOURCES, AuditKind
from hashbench.core.results.rows import RowFormat
from hashbench.extensions.invariance.ops import DTYPES


class Invariance(StrEnum):
    """What became of an item's rows in another batch."""

    INVARIANT = "invariant"
    DEPENDS = "depends on the number"
    PLACE = "depends on the place"
    COUPLED = "coupled"
    RANDOM = "draws random numbers"
    UNSTEADY = "differs by itself"
    NO_AXIS = "no batch axis"
    FAILS = "fails"
    TIMEOUT = "timeout"
    CRASHED = "crashed"


_SIZES = re.compile("([0-9]{1,4}( [0-9]{1,4})*)?")


def is_sizes(text: str) -> bool:
    """Return True for numbers of items, ``1 2 3``, also for none."""
    return _SIZES.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class InvarianceRow:
    """One line of ``invariance.csv``. ``items`` is the number in the reference, ``sizes`` the numbers at which rows
    differ from it, ``widened`` what was made larger in the sample."""

    dev: str
    source: str = field(metadata=declared(noun="source", words=SOURCES))
    op: str
    dtype: str
    sample: str
    widened: str
    verdict: str = field(metadata=declared(noun="verdict", words=tuple(Invariance)))
    items: int | None = None
    sizes: str = column(check=(is_sizes, "numbers of items", "Write them as 1 2 3."))
    smallest_batch: int | None = None
    kernel: str = ""
    shapes: str = ""
    cause: str = ""
    confidence: str = ""
    because: str = ""
    advice: str = ""
    repro: str = ""
    reproduced: str = ""
    inputs: str = ""
    threads: int | None = None
    error: str = ""


_REQUIRED = ("dev", "source", "op", "verdict")

INVARIANCE_ROWS = RowFormat(
    InvarianceRow,
    what="an audit of batch invariance",
    example="an invariance.csv",
    key=("dev", "source", "op", "dtype", "sample", "widened"),
    label=" ".join,
    required=_REQUIRED,
    filled=_REQUIRED,
    whole=(re.compile("[0-9]{1,9}"), "a count"),
)
"""How an :class:`InvarianceRow` is written and read."""


INVARIANCE = AuditKind(
    "an audit with --rows",
    "invariance.csv",
    INVARIANCE_ROWS,
    report="hashbench.extensions.invariance.ops.report",
    measure="hashbench.extensions.invariance.ops.measure:rows_of",
    asked_by="of_rows",
    dtypes=DTYPES,
    sources=("op_db",),
    marks=("sizes", "widened"),
    conditions=("inputs", "threads", "items"),
    runs_repros=True,
)
"""The audit of batch invariance. An item's rows do not depend on luck."""
