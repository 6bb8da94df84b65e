"""Ops that torch computes by another formula because a dispatch mode, such as the trace itself, is active.

Such an op gives the same bits in every traced run and perhaps others in an untraced run, so it is no divergence; a row
names it. The ops are data, ``data/mode_dependent_ops.csv``, measured by ``python -m benchmarks.mode_dependent`` on
torch's own op database. A named op *may* give other bits: whether it does depends on its inputs. An op that is not
named was not seen to, on inputs as small as the database has them.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hashbench.records import OpRecord, Trace

TABLE = Path(__file__).parents[1] / "data" / "mode_dependent_ops.csv"
PHASES = ("any", "backward", "no gradient")


@dataclass(frozen=True, slots=True)
class ModeDependentOp:
    """One line of the table.

    ``phase`` says where the formula differs: ``backward`` in the derivative of the op, ``any`` in the op itself, ``no
    gradient`` in the op itself where no derivative of it is computed. ``complex_only`` limits it to complex dtypes.
    ``signature`` is the run of records that betrays it, of which the op is one; empty where the op alone does.
    """

    op: str
    phase: str
    complex_only: bool
    signature: tuple[str, ...] = ()


@cache
def table() -> tuple[ModeDependentOp, ...]:
    """Every op that is known to depend on a mode."""
    with TABLE.open(newline="", encoding="utf-8") as file:
        return tuple(
            ModeDependentOp(line["op"], line["phase"], line["dtypes"] == "complex", tuple(line["signature"].split()))
            for line in csv.DictReader(file)
        )


def mode_dependent(trace: Trace) -> tuple[str, ...]:
    """Names of the ops of a trace that torch may have computed by another formula because the trace was active, in the
    order of the table, each once."""
    derivatives: dict[str, bool] = {}  # by id of a forward record: whether its derivative is complex
    for record in trace.records:
        if record.forward_op:
            derivatives[record.forward_op] = derivatives.get(record.forward_op, False) or _is_complex(record)
    present = {record.op for record in trace.records}
    found = (entry.op for entry in table() if _names(entry) & present and any(_matches(entry, trace, derivatives)))
    return tuple(dict.fromkeys(found))


def _names(entry: ModeDependentOp) -> set[str]:
    """How the op appears in a trace. The derivative of an in-place variant is that of the op."""
    packet, _, overload = entry.op.rpartition(".")
    return {entry.op, f"{packet}_.{overload}"} if entry.phase == "backward" else {entry.op}


def _matches(entry: ModeDependentOp, trace: Trace, derivatives: dict[str, bool]) -> Iterator[bool]:
    names = _names(entry)
    for position, record in enumerate(trace.records):
        if record.op not in names:
            continue
        differentiated = record.id in derivatives
        is_complex = _is_complex(record) or derivatives.get(record.id, False)
        yield (
            (is_complex or not entry.complex_only)
            and (differentiated if entry.phase == "backward" else entry.phase == "any" or not differentiated)
            and _is_in_signature(entry, trace.records, position)
        )


def _is_in_signature(entry: ModeDependentOp, records: tuple[OpRecord, ...], position: int) -> bool:
    if not entry.signature:
        return True
    begin = position - entry.signature.index(entry.op)
    run = records[max(0, begin) : begin + len(entry.signature)]
    return begin >= 0 and tuple(record.op for record in run) == entry.signature


def _is_complex(record: OpRecord) -> bool:
    return any("complex" in output.dtype for output in record.outputs)
