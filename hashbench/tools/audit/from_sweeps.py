"""Kernels that differed, or that torch refused, in real models: rows of an audit from the rows of sweeps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from hashbench.catalog import Kind, kind_of
from hashbench.records import Row
from hashbench.results.audit_table import AuditRow
from hashbench.results.load import load_sweep
from hashbench.tools.audit.verdict import DIFFERS, IDENTICAL, NOT_RUN, RAISES, verdict

_EXPERIMENT = {"off": "nondeterministic", "on": "deterministic_fill", "unfilled": "deterministic"}


def rows_from(folders: Iterable[Path], *, device: str) -> tuple[AuditRow, ...]:
    """The rows that sweeps on a device of this type add: one for every model whose results differ by a kernel, and one
    for every op that torch refused under the flag.

    Raises:
        HashbenchError: one of ``folders`` holds no sweep.
    """
    found = [row for folder in folders for row in load_sweep(folder).rows if row.dev.partition(":")[0] == device]
    return tuple(made for row in found for made in audit_rows(row))


def audit_rows(row: Row) -> Iterator[AuditRow]:
    """What one row of a sweep says of kernels; nothing for most."""
    if kind_of(row.accuracy) is Kind.DIFFER and row.origin == "kernel" and row.kernel:
        yield _differing(row)
    if row.nondeterministic_op and kind_of(row.accuracy) is Kind.PASS:
        yield _refused(row)


def measured(row: Row, setting: str) -> str:
    """What the captured call did under one setting of the flag; where no experiment says, what the model's runs did."""
    result = row.evidence.result(_EXPERIMENT[setting], "call")
    if result.ran:
        return DIFFERS if result.differing else IDENTICAL
    if result.raised:
        return RAISES
    runs_are = "off" if row.deterministic == "off" else "on"
    if row.deterministic == "warn" and setting != "off":  # torch refused an op, and all ran again
        return RAISES if row.nondeterministic_op else NOT_RUN
    return DIFFERS if setting == runs_are or (row.deterministic == "warn" and setting == "off") else NOT_RUN


def _differing(row: Row) -> AuditRow:
    off, on, unfilled = (measured(row, setting) for setting in ("off", "on", "unfilled"))
    said = row.deterministic_doc or "not listed"
    made = _made(row, row.kernel, documented=said, off=off, on=on, unfilled=unfilled)
    return replace(made, cause=row.cause, confidence=row.confidence, because=row.because[:300])


def _refused(row: Row) -> AuditRow:
    from hashbench.repro.torch_docs import documented  # imports torch, and is needed here only

    said = documented(row.nondeterministic_op, device=row.dev)
    return _made(row, row.nondeterministic_op, documented=said, off=IDENTICAL, on=RAISES, unfilled=RAISES)


def _made(row: Row, kernel: str, *, documented: str, off: str, on: str, unfilled: str) -> AuditRow:
    return AuditRow(
        dev=row.dev,
        source="sweep",
        op=kernel,
        dtype=row.dtype,
        sample=f"{row.suite}/{row.name} {row.mode}".strip(),
        phase="backward" if row.phase == "backward" else "forward",
        verdict=verdict(documented, off=off, on=on, unfilled=unfilled),
        documented=documented,
        off=off,
        on=on,
        unfilled=unfilled,
        runs=row.runs,
        kernel=kernel,
        threads=row.threads,
    )
