"""From what was measured of a case to its rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from hashbench.deadline import Budget
from hashbench.errors import named_line
from hashbench.results.audit_table import AuditRow
from hashbench.tools.audit import cases, explaining
from hashbench.tools.audit.cases import Case
from hashbench.tools.audit.measuring import Measured, NotDifferentiableError, Tried, measure
from hashbench.tools.audit.verdict import DIFFERS, FOLLOWS, NOT_RUN, verdict

SHARE_OF_ONE = 0.5
"""Part of what is left of an op's budget that the search for one cause may take."""


@dataclass(frozen=True, slots=True)
class AuditOptions:
    """How every op is run. ``budget``: seconds for the causes of one op; ``threads`` of torch, ``None``: its own
    choice."""

    device: str = "cpu"
    dtypes: tuple[str, ...] = ()
    samples: int = 3
    runs: int = 20
    seed: int = 1337
    budget: float = 10.0
    replays: int = 20
    threads: int | None = None

    @classmethod
    def of(cls, values: dict[str, Any]) -> AuditOptions:
        """From plain JSON values."""
        return cls(**{**values, "dtypes": tuple(values["dtypes"])})


def rows_of(source: str, op: str, options: AuditOptions, *, threads: int) -> Iterator[AuditRow]:
    """Every row of one op."""
    budget = Budget(options.budget)
    asked = cases.cases_of(
        source,
        op,
        dtypes=options.dtypes,
        samples=options.samples,
        device=options.device,
        seed=options.seed,
    )
    for dtype, found in asked:
        if isinstance(found, Exception):
            error = f"cannot make its inputs: {named_line(found)}"[:300]
            yield AuditRow(options.device, source, op, dtype, "", "forward", "fails", off=NOT_RUN, error=error)
            continue
        for one in measure(found, runs=options.runs, seed=options.seed):
            for row in _rows(one, options, budget):
                yield replace(row, threads=threads)


def _rows(one: Measured, options: AuditOptions, budget: Budget) -> Iterator[AuditRow]:
    said = explaining.documented(one.case, device=options.device, seed=options.seed)
    for phase in one.passes["off"]:
        tried = {name: _effective(passes, phase) for name, passes in one.passes.items()}
        if phase == "backward" and tried["off"].error.startswith(_NO_BACKWARD):
            continue
        row = _row(one, phase, tried, said, options)
        yield _with_cause(row, one.case, phase, options, budget)


_NO_BACKWARD = NotDifferentiableError.__name__


def _effective(passes: dict[str, Tried], phase: str) -> Tried:
    """A backward pass whose forward raised has raised as well."""
    tried, forward = passes[phase], passes["forward"]
    return forward if not tried.outcomes and not tried.error else tried


def _row(
    one: Measured, phase: str, tried: dict[str, Tried], said: explaining.Documented, options: AuditOptions
) -> AuditRow:
    case = one.case
    off, on, unfilled = (tried[name].measured for name in ("off", "on", "unfilled"))
    blank = said.blank and phase == "forward"
    # A backward pass whose forward raised has raised with it.
    reached = [phase] if tried["on"] is one.passes["on"][phase] else ["forward", phase]
    text = explaining.joined(said.passes[name] for name in reached)
    return AuditRow(
        dev=options.device,
        source=case.source,
        op=case.op,
        dtype=case.dtype,
        sample=case.sample,
        phase=phase,
        verdict=verdict(text, off=off, on=on, unfilled=unfilled, blank=blank),
        documented="memory that nobody wrote; filled under the flag" if blank else text,
        off=off,
        on=on,
        unfilled=unfilled,
        runs=options.runs,
        off_distinct=tried["off"].distinct,
        on_distinct=tried["on"].distinct,
        unfilled_distinct=tried["unfilled"].distinct,
        inputs=case.inputs,
        error=tried["off"].error or tried["on"].error or tried["unfilled"].error,
    )


def _with_cause(row: AuditRow, case: Case, phase: str, options: AuditOptions, budget: Budget) -> AuditRow:
    setting = next((name for name in ("off", "on", "unfilled") if getattr(row, name) in (DIFFERS, FOLLOWS)), "")
    if not setting:
        return row
    if getattr(row, setting) == FOLLOWS:
        return replace(row, cause="uninitialized_memory", confidence="proven", because=_FOLLOWED)
    if budget.left() <= 0:
        return replace(row, because="the cause was not looked for: no time left for this op")
    found = explaining.explain(
        case,
        phase=phase,
        setting=setting,
        device=options.device,
        seed=options.seed,
        seconds=budget.left() * SHARE_OF_ONE,
        replays=options.replays,
    )
    return replace(
        row, kernel=found.kernel, cause=found.cause, confidence=found.confidence, because=found.because[:300]
    )


_FOLLOWED = "runs agree, and give another result when memory that nobody wrote holds other bytes"
