"""What a worker process of an audit does: the ops of one group, one after another, each measured, looked up in torch's
documentation and, where it differs, explained, into a file of its own.

Ops run in their order, so that where the process dies, the first without a file is to blame.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hashbench import causes, replay
from hashbench.catalog import CAUSES, Confidence, Origin, Status
from hashbench.check.function import FunctionCall, check_function, fresh_copy, quiet
from hashbench.errors import named_line
from hashbench.io import from_json, replace_file
from hashbench.processes import Budget, variables
from hashbench.records import Evidence, ModelSpec, Row, RunOptions
from hashbench.replay.call import CapturedCall, CaptureError, capture
from hashbench.repro import torch_docs
from hashbench.repro.torch_docs import NOT_LISTED, Documentation
from hashbench.results.audit_table import (
    VARYING,
    AuditOptions,
    AuditRow,
    AuditVerdict,
    Measured,
    catalog_file,
    op_file,
    write_op,
)
from hashbench.run.outputs import flatten
from hashbench.run.rng import reset_rng_state
from hashbench.run.settings import applied
from hashbench.tools.audit import cases
from hashbench.tools.audit.cases import FLAG, Case, Measurement, Outcomes, gradients, measure
from hashbench.tools.audit.verdict import SETTINGS, verdict
from hashbench.trace.api import HashDebugTrace
from hashbench.trace.arguments import named_tensors
from hashbench.trace.callbacks import TraceCallback
from hashbench.trace.op_schema import plan_of

WORKSPACE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Without it cuBLAS is refused under the flag, as torch documents; the audit asks about kernels, not about that."""

SHARE_OF_ONE = 0.5
"""Part of what is left of an op's budget that the search for one cause may take."""

CAPTURE_BYTES = 2**28
"""The largest call that is captured for experiments; our largest inputs have 16 MiB."""

PAIR_RUNS = 6
"""Runs that the search for a cause compares, so that a difference of every second run shows again."""


def write_catalog(spec: ModelSpec, options: RunOptions) -> Row:
    """Write down every ``(source, op)``, as JSON."""
    replace_file(catalog_file(Path(options.output)), json.dumps(cases.catalog()))
    return _done(spec, options)


def run_group(spec: ModelSpec, options: RunOptions) -> Row:
    """Run the ops that ``spec.arguments`` names and that have no file yet. The process ends itself where one takes
    longer than it may."""
    folder, arguments = Path(options.output), spec.arguments
    asked = from_json(AuditOptions, arguments["options"])
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    with variables(WORKSPACE, unless_set=True):
        for source, op in arguments["ops"]:
            if not op_file(folder, (source, op)).exists():
                faulthandler.dump_traceback_later(arguments["seconds"], exit=True)
                print(f"{source} {op}", flush=True)
                write_op(folder, (source, op), list(rows_of(source, op, asked)))
    faulthandler.cancel_dump_traceback_later()
    return _done(spec, options)


def _done(spec: ModelSpec, options: RunOptions) -> Row:
    return Row(dev=options.device, name=spec.name, batch_size=None, accuracy=Status.PASS, suite=spec.suite)


def rows_of(source: str, op: str, options: AuditOptions) -> Iterator[AuditRow]:
    """Every row of one op."""
    budget, threads = Budget(options.budget), torch.get_num_threads()
    for dtype, made in cases.cases_of(source, op, options):
        if isinstance(made, Exception):
            row = AuditRow(options.device, source, op, dtype, "", "forward", AuditVerdict.FAILS)
            error = f"cannot make its inputs: {named_line(made)}"[:300]
            yield replace(row, off=Measured.NOT_RUN, error=error, threads=threads)
            continue
        for measurement in measure(made, runs=options.runs, seed=options.seed):
            for row in rows_of_case(measurement, options, budget):
                yield replace(row, threads=threads)


def rows_of_case(measurement: Measurement, options: AuditOptions, budget: Budget) -> Iterator[AuditRow]:
    """A row for each pass of one case."""
    case, passes = measurement.case, measurement.passes
    documented = look_up_kernels(case, device=options.device, seed=options.seed)
    for phase in passes["off"]:
        # A backward pass whose forward raised has raised with it.
        outcomes = {name: _reached(of_passes, phase) for name, of_passes in passes.items()}
        reached = [phase] if outcomes["on"] is passes["on"][phase] else ["forward", phase]
        kernels = [each for name in reached for each in documented.passes[name]]
        row = _row(case, phase, outcomes, kernels, options, blank=documented.blank and phase == "forward")
        yield _with_cause(row, case, options, budget)


def _reached(of_passes: Mapping[str, Outcomes], phase: str) -> Outcomes:
    return of_passes[phase] if of_passes[phase].plain or of_passes[phase].error else of_passes["forward"]


def _row(
    case: Case,
    phase: str,
    outcomes: Mapping[str, Outcomes],
    documented: Sequence[Documentation],
    options: AuditOptions,
    *,
    blank: bool,
) -> AuditRow:
    measured = {name: outcomes[name].measured for name in SETTINGS}
    listed = {word for each in documented for word in each.verdicts}
    return AuditRow(
        dev=options.device,
        source=case.source,
        op=case.op,
        dtype=case.dtype,
        sample=case.sample,
        phase=phase,
        verdict=verdict(listed, **measured, blank=blank),
        documented="memory that nobody wrote; filled under the flag" if blank else joined(documented),
        off=measured["off"],
        on=measured["on"],
        unfilled=measured["unfilled"],
        runs=options.runs,
        off_distinct=outcomes["off"].distinct,
        on_distinct=outcomes["on"].distinct,
        unfilled_distinct=outcomes["unfilled"].distinct,
        inputs=case.inputs,
        error=next(filter(None, (outcomes[name].error for name in SETTINGS)), ""),
    )


# ----------------------------------------------------------------------------------------------- documentation


@dataclass(frozen=True, slots=True)
class DocumentedKernels:
    """What torch documents of the kernels of each pass, and whether all that the case returns is ``blank``: memory
    that nobody wrote, as the schemas say."""

    passes: Mapping[str, tuple[Documentation, ...]]
    blank: bool = False


def look_up_kernels(case: Case, *, device: str, seed: int) -> DocumentedKernels:
    """Trace one run and look every kernel up in the installed torch's documentation. Where the call raises, what it ran
    until then counts."""
    trace = HashDebugTrace()
    with quiet(), applied(FLAG["off"]), contextlib.suppress(Exception):
        call = fresh_copy(case.call)
        reset_rng_state(seed)
        with trace:
            value = call()
            if case.differentiable:
                gradients(case, call, value, seed=seed)
        for name, tensor in named_tensors(value):
            trace.add_result(name, tensor)
    finished = trace.finish()
    passes: dict[str, tuple[Documentation, ...]] = {"forward": (), "backward": ()}
    for record in finished.records:
        phase = "backward" if record.phase == "backward" else "forward"
        passes[phase] += (_looked_up(record.op, device, record.forward_op),)
    blank = {record.id for record in finished.records if record.blank}
    results = finished.results
    return DocumentedKernels(passes, blank=bool(results) and all(result.source in blank for result in results))


@functools.cache
def _looked_up(op: str, device: str, backward_of: str) -> Documentation:
    return torch_docs.look_up(op, device=device, backward_of=backward_of)


def joined(documented: Sequence[Documentation]) -> str:
    """What is said of any of the kernels; that others are listed for other devices only where nothing is for this
    one."""
    here = [each.text for each in documented if each.here or not each.readable]
    elsewhere = [f"{NOT_LISTED} for {each.device}" for each in documented if each.elsewhere]
    return "; ".join(dict.fromkeys(here or elsewhere)) or NOT_LISTED


# -------------------------------------------------------------------------------------------------- the cause


def _with_cause(row: AuditRow, case: Case, options: AuditOptions, budget: Budget) -> AuditRow:
    """The row with the kernel whose outputs differed first, and the mechanism with the numbers behind it."""
    setting = next((name for name in SETTINGS if getattr(row, name) in VARYING), "")
    if not setting:
        return row
    if getattr(row, setting) == Measured.FOLLOWS:
        because = "runs agree, and give another result when memory that nobody wrote holds other bytes"
        return replace(row, cause=CAUSES["uninitialized_memory"].name, confidence=Confidence.PROVEN, because=because)
    if budget.left() <= 0:
        return replace(row, because="the cause was not looked for: no time left for this op")
    seconds = budget.left() * SHARE_OF_ONE
    if case.moved:
        return _explained_by_moving(row, case, setting, options, seconds)
    return _explained(row, case, setting, options, seconds)


def _explained(row: AuditRow, case: Case, setting: str, options: AuditOptions, seconds: float) -> AuditRow:
    call = replace(case.call, function=_Pass(case, row.phase, options.seed))
    wanted = RunOptions(
        device=options.device,
        runs=PAIR_RUNS,
        seed=options.seed,
        replays=options.replays,
        diagnose_budget=seconds,
        capture_mib=CAPTURE_BYTES / 2**20,
    )
    with applied(FLAG[setting]), quiet(), torch.enable_grad():
        try:
            found, _ = check_function(call, f"{case.op} {case.sample}", wanted)
        except Exception as error:
            return replace(row, because=f"the search raised {named_line(error)}"[:200])
    if found.accuracy == Status.PASS:
        return replace(row, because=f"{PAIR_RUNS} further runs agree")
    return replace(
        row,
        kernel=found.kernel or found.origin,
        cause=found.cause,
        confidence=found.confidence,
        because=found.because[:300],
    )


@dataclass(frozen=True, slots=True)
class _Pass:
    """One pass of a case as a function of its arguments."""

    case: Case
    phase: str
    seed: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = FunctionCall(self.case.call.function, args, kwargs)
        value = call()
        if self.phase == "forward":
            return dict(flatten(value, "output"))
        return gradients(self.case, call, value, seed=self.seed)


def _explained_by_moving(row: AuditRow, case: Case, setting: str, options: AuditOptions, seconds: float) -> AuditRow:
    """Move the memory under each kernel in turn; the first that gives another result then is to blame."""
    computing = _ComputingCalls()
    with quiet(), applied(FLAG[setting]):
        call = fresh_copy(case.call)
        reset_rng_state(options.seed)
        with HashDebugTrace(watcher=computing):
            call()
    budget = Budget(seconds)
    for captured in computing.calls:
        found = replay.experiments(captured, replays=options.replays, budget=Budget(budget.left()), arms=("moved",))
        if found.arm("moved").differing:
            decided = causes.decide(Evidence(Origin.KERNEL, call=found.facts, arms=found.arms))
            because = decided.because[:300]
            return replace(row, kernel=captured.op, cause=decided.cause, confidence=decided.confidence, because=because)
    return replace(row, because="no kernel alone differs when its memory is moved")


class _ComputingCalls(TraceCallback):
    """Captures every call that computes something."""

    def __init__(self) -> None:
        self.calls: list[CapturedCall] = []

    def before(self, node: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        del node
        if plan_of(func).pattern.name != "VIEW" and not plan_of(func).blank:
            with contextlib.suppress(CaptureError):
                self.calls.append(capture(func, args, kwargs, limit_bytes=CAPTURE_BYTES))
