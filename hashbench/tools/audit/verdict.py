"""What was measured of a sample against what is documented, also of the samples that rows of sweeps are.

A documented item may hold under a condition in prose (``when accumulate=False``) that nobody can check. So an item that
explains what was seen is taken to apply, and only where none does is there a finding.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from hashbench.catalog import Kind, Origin, kind_of
from hashbench.records import Row
from hashbench.repro import torch_docs
from hashbench.results.audit_table import VARYING, AuditRow, AuditVerdict, Measured
from hashbench.results.load import load_sweep

SETTINGS = ("off", "on", "unfilled")
"""The columns for ``use_deterministic_algorithms`` off, on, and on without its filling of memory that nobody wrote."""


def verdict(listed: Collection[str], *, off: str, on: str, unfilled: str, blank: bool = False) -> AuditVerdict:
    """The verdict on one sample. What was not measured is never ``as documented``.

    Args:
        listed: which of the two lists of torch's documentation name it, as
            :attr:`~hashbench.repro.torch_docs.Documentation.verdicts` has them.
        off, on, unfilled: one of :class:`Measured` under each of :data:`SETTINGS`.
        blank: all that the op returns is memory that nobody wrote, as its schema says.

    Raises:
        ValueError: a word that is none of them.
    """
    off, on, unfilled = Measured(off), Measured(on), Measured(unfilled)
    if on in VARYING:
        return AuditVerdict.UNDER_THE_FLAG
    if off in (Measured.RAISES, Measured.NOT_RUN):
        return AuditVerdict.FAILS
    if Measured.NOT_COMPARABLE in (off, on, unfilled):
        return AuditVerdict.NOT_COMPARABLE
    if on in (Measured.RAISES, Measured.NOT_RUN):
        explained = on == Measured.RAISES and torch_docs.RAISES in listed
        return AuditVerdict.AS_DOCUMENTED if explained else AuditVerdict.RAISES
    if blank:  # torch documents that the flag fills it
        return AuditVerdict.AS_DOCUMENTED
    if off in VARYING:
        if torch_docs.BECOMES_DETERMINISTIC in listed:
            return AuditVerdict.AS_DOCUMENTED
        return AuditVerdict.DOES_NOT_RAISE if torch_docs.RAISES in listed else AuditVerdict.UNDOCUMENTED
    if unfilled in VARYING:
        return AuditVerdict.UNDER_THE_FLAG
    return AuditVerdict.NEVER_SEEN if listed else AuditVerdict.AS_DOCUMENTED


# ----------------------------------------------------------------------------------------------- rows of sweeps

_EXPERIMENTS = {"off": "nondeterministic", "on": "deterministic_fill", "unfilled": "deterministic"}


def rows_from(folders: Iterable[Path], *, device: str) -> tuple[AuditRow, ...]:
    """The rows that sweeps on a device of this type add: one for every model whose results differ by a kernel, and one
    for every op that torch refused under the flag, with what the installed torch documents of it.

    Raises:
        HashbenchError: one of ``folders`` holds no sweep.
    """
    rows = (row for folder in folders for row in load_sweep(folder).rows)
    return tuple(made for row in rows if row.dev.partition(":")[0] == device for made in _audit_rows(row))


def _audit_rows(row: Row) -> Iterator[AuditRow]:
    if kind_of(row.accuracy) is Kind.DIFFER and row.origin == Origin.KERNEL and row.kernel:
        yield _audit_row(row, row.kernel, *(measured_in_sweep(row, setting) for setting in SETTINGS))
    if row.nondeterministic_op and kind_of(row.accuracy) is Kind.PASS:
        yield _audit_row(row, row.nondeterministic_op, Measured.IDENTICAL, Measured.RAISES, Measured.RAISES)


def measured_in_sweep(row: Row, setting: str) -> Measured:
    """What the captured call did under one setting of the flag; where no experiment says, what the model's runs did."""
    result = row.evidence.result(_EXPERIMENTS[setting], "call")
    if result.ran:
        return Measured.DIFFERS if result.differing else Measured.IDENTICAL
    if result.raised:
        return Measured.RAISES
    if row.deterministic == "warn" and setting != "off":  # torch refused an op, and all ran again
        return Measured.RAISES if row.nondeterministic_op else Measured.NOT_RUN
    of_the_runs = "off" if row.deterministic in ("off", "warn") else "on"
    return Measured.DIFFERS if setting == of_the_runs else Measured.NOT_RUN


def _audit_row(row: Row, kernel: str, off: Measured, on: Measured, unfilled: Measured) -> AuditRow:
    documentation = torch_docs.look_up(kernel, device=row.dev, backward_of=row.forward_op)
    return AuditRow(
        dev=row.dev,
        source="sweep",
        op=kernel,
        dtype=row.dtype,
        sample=f"{row.suite}/{row.name} {row.mode}".strip(),
        phase="backward" if row.phase == "backward" else "forward",
        verdict=verdict(documentation.verdicts, off=off, on=on, unfilled=unfilled),
        documented=documentation.text,
        off=off,
        on=on,
        unfilled=unfilled,
        runs=row.runs,
        kernel=kernel,
        cause=row.cause,
        confidence=row.confidence,
        because=row.because[:300],
        threads=row.threads,
    )
