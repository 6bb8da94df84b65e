"""Rows of an audit: what a worker process measures of the ops of one group, and what sweeps of real models add.

Every sample is measured, looked up in torch's documentation and, where it differs, explained. A documented item may
hold under a condition in prose (``when accumulate=False``) that nobody can check. So an item that explains what was
seen is taken to apply, and only where none does is there a finding.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch

from hashbench.core.catalog import CAUSES, Confidence, Kind, Origin, Status, kind_of
from hashbench.core.check.function import FunctionCall, check_function, fresh_copy, quiet
from hashbench.core.diagnose import causes, replay
from hashbench.core.diagnose.calls.call import CapturedCall
from hashbench.core.diagnose.calls.capture import CaptureError, capture
from hashbench.core.diagnose.repro import torch_docs
from hashbench.core.diagnose.repro.torch_docs import NOT_LISTED, Documentation
from hashbench.core.errors import named_line
from hashbench.core.io import from_json, replace_file
from hashbench.core.processes import Budget, variables
from hashbench.core.records import BATCH_INVARIANCE, Evidence, ModelSpec, Row, RunOptions
from hashbench.core.report.audits import MeasureOp
from hashbench.core.results.load import load_sweep
from hashbench.core.run.leaves import flatten
from hashbench.core.run.rng import reset_rng_state
from hashbench.core.run.settings import applied
from hashbench.core.trace.api import HashDebugTrace
from hashbench.core.trace.arguments import named_tensors
from hashbench.core.trace.callbacks import TraceCallback
from hashbench.core.trace.op_schema import plan_of
from hashbench.tools.audit import cases
from hashbench.tools.audit.audit_table import (
    DETERMINISM,
    VARYING,
    AuditOptions,
    AuditRow,
    AuditVerdict,
    Shown,
    op_file,
    write_op,
)
from hashbench.tools.audit.cases import FLAG, Case, Measurement, Outcomes, gradients, measure

WORKSPACE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Without it cuBLAS is refused under the flag, as torch documents; the audit asks about kernels, not about that."""

SHARE_OF_ONE = 0.5
"""Part of what is left of an op's budget that the search for one cause may take."""

CAPTURE_BYTES = 2**28
"""The largest call that is captured for experiments; our largest inputs have 16 MiB."""

PAIR_RUNS = 6
"""Runs that the search for a cause compares, so that a difference of every second run shows again."""

LONGEST_REASON = 300


# --------------------------------------------------------------------------------------------- a worker's entry points


def write_catalog(path: str) -> None:
    """Write every ``(source, op)`` that there is to audit, as JSON."""
    replace_file(Path(path), json.dumps(cases.catalog()))


def run_group(spec: ModelSpec, options: RunOptions) -> Row:
    """Run the ops that ``spec.arguments`` names and that have no file yet, in their order, so that where the process
    dies, the first without a file is to blame. The process ends itself where one takes longer than it may.

    ``measure`` of the arguments: the target of what an extension measures of an op in place of this module.
    """
    asked, target = from_json(AuditOptions, spec.arguments["options"]), spec.arguments["measure"]
    if not target:
        return run_ops(spec, options, lambda source, op: rows_of(source, op, asked))
    measure: MeasureOp = resolve_name(target)
    how: Mapping[str, Any] = {"device": asked.device, "budget": asked.budget, "folder": Path(options.output)}
    return run_ops(spec, options, lambda source, op: measure((source, op), cases.cases_of(source, op, asked), **how))


def run_ops(spec: ModelSpec, options: RunOptions, rows: Callable[[str, str], Iterable[Any]]) -> Row:
    """Write the rows of each op of a group that has no file yet; the row says that the worker came to its end, or as an
    error why it cannot write."""
    folder, arguments = Path(options.output), spec.arguments
    ended = Row(dev=options.device, name=spec.name, batch_size=None, accuracy=Status.PASS, suite=spec.suite)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    with variables(WORKSPACE, unless_set=True):
        for source, op in arguments["ops"]:
            if not op_file(folder, (source, op)).exists():
                faulthandler.dump_traceback_later(arguments["seconds"], exit=True)
                print(f"{source} {op}", flush=True)
                made = list(rows(source, op))
                try:
                    write_op(folder, (source, op), made)
                except OSError as error:
                    return replace(ended, accuracy=Status.CRASHED, error=error.strerror or str(error))
    faulthandler.cancel_dump_traceback_later()
    return ended


# -------------------------------------------------------------------------------------------------- rows of one op


def rows_of(source: str, op: str, options: AuditOptions) -> Iterator[AuditRow]:
    """Yield every row of one op."""
    budget, threads = Budget(options.budget), torch.get_num_threads()
    for dtype, made in cases.cases_of(source, op, options):
        if isinstance(made, str):
            cells = {"dtype": dtype, "off": Shown.NOT_RUN, "error": made, "threads": threads}
            yield DETERMINISM.row(options.device, (source, op), AuditVerdict.FAILS, **cells)
            continue
        for measurement in measure(made, runs=options.runs, seed=options.seed):
            for row in rows_of_case(measurement, options, budget):
                yield replace(row, threads=threads)


def rows_of_case(measurement: Measurement, options: AuditOptions, budget: Budget) -> Iterator[AuditRow]:
    """Yield a row for each pass of one case."""
    case, passes = measurement.case, measurement.passes
    documented, only_blank = look_up_kernels(case, device=options.device, seed=options.seed, tracer=options.tracer)
    for phase in passes["off"]:
        # A backward pass whose forward raised has raised with it.
        off, on, unfilled = outcomes = [_reached(passes[setting], phase) for setting in FLAG]
        reached = [phase] if on is passes["on"][phase] else ["forward", phase]
        kernels = [each for name in reached for each in documented[name]]
        listed = {word for each in kernels for word in each.verdicts}
        blank = only_blank and phase == "forward"
        row = AuditRow(
            dev=options.device,
            source=case.source,
            op=case.op,
            dtype=case.dtype,
            sample=case.sample,
            phase=phase,
            verdict=verdict(listed, off=off.measured, on=on.measured, unfilled=unfilled.measured, blank=blank),
            documented="memory that nobody wrote; filled under the flag" if blank else joined(kernels),
            off=off.measured,
            on=on.measured,
            unfilled=unfilled.measured,
            runs=options.runs,
            off_distinct=off.distinct,
            on_distinct=on.distinct,
            unfilled_distinct=unfilled.distinct,
            inputs=case.inputs,
            error=next(filter(None, (each.error for each in outcomes)), ""),
        )
        yield replace(row, **_cause(case, row, options, budget))


def _reached(of_passes: Mapping[str, Outcomes], phase: str) -> Outcomes:
    return of_passes[phase] if of_passes[phase].plain or of_passes[phase].error else of_passes["forward"]


def verdict(listed: Collection[str], *, off: str, on: str, unfilled: str, blank: bool = False) -> AuditVerdict:
    """Return the verdict on one sample. A sample that was not measured is never ``as documented``.

    Args:
        listed: which of the two lists of torch's documentation name it, as
            :attr:`~hashbench.core.diagnose.repro.torch_docs.Documentation.verdicts` has them.
        off, on, unfilled: one of :class:`Shown` under each of the settings of
            :data:`~hashbench.tools.audit.cases.FLAG`.
        blank: all that the op returns is memory that nobody wrote, as its schema says.

    Raises:
        ValueError: a word that is none of them.
    """
    off, on, unfilled = Shown(off), Shown(on), Shown(unfilled)
    if on in VARYING:
        return AuditVerdict.UNDER_THE_FLAG
    if off in (Shown.RAISES, Shown.NOT_RUN):
        return AuditVerdict.FAILS
    if Shown.NOT_COMPARABLE in (off, on, unfilled):
        return AuditVerdict.NOT_COMPARABLE
    if on in (Shown.RAISES, Shown.NOT_RUN):
        explained = on == Shown.RAISES and torch_docs.RAISES in listed
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


# ----------------------------------------------------------------------------------------------- documentation


def look_up_kernels(
    case: Case, *, device: str, seed: int, tracer: str = "auto"
) -> tuple[dict[str, list[Documentation]], bool]:
    """Look up what the installed torch documents of every kernel of each pass, as one traced run shows them, and
    whether all that the case returns is memory that nobody wrote, as the schemas say. Where the call raises, what it
    ran until then counts."""
    trace = HashDebugTrace(tracer=tracer)
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
    passes: dict[str, list[Documentation]] = {"forward": [], "backward": []}
    for record in finished.records:
        phase = "backward" if record.phase == "backward" else "forward"
        passes[phase].append(_looked_up(record.op, device, record.forward_op))
    blank = {record.id for record in finished.records if record.blank}
    results = finished.results
    return passes, bool(results) and all(result.source in blank for result in results)


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


def _cause(case: Case, row: AuditRow, options: AuditOptions, budget: Budget) -> dict[str, Any]:
    """Return the columns that say which kernel's outputs differed first, the mechanism, and the numbers behind it."""
    setting = next((name for name in FLAG if getattr(row, name) in VARYING), "")
    if not setting:
        return {}
    if getattr(row, setting) == Shown.FOLLOWS:
        because = "runs agree, and give another result when memory that nobody wrote holds other bytes"
        return {"cause": CAUSES["uninitialized_memory"].name, "confidence": Confidence.PROVEN, "because": because}
    if budget.left() <= 0:
        return {"because": "the cause was not looked for: no time left for this op"}
    search = _moved_kernel if case.moved else _differing_kernel
    return search(case, row.phase, setting, options, budget.left() * SHARE_OF_ONE)


def _differing_kernel(case: Case, phase: str, setting: str, options: AuditOptions, seconds: float) -> dict[str, Any]:
    """Check the pass as any function is checked."""

    def one_pass(*args: Any, **kwargs: Any) -> Any:
        call = FunctionCall(case.call.function, args, kwargs)
        value = call()
        if phase == "forward":
            return dict(flatten(value, "output"))
        return gradients(case, call, value, seed=options.seed)

    wanted = RunOptions(
        device=options.device,
        runs=PAIR_RUNS,
        seed=options.seed,
        replays=options.replays,
        diagnose_budget=seconds,
        capture_mib=CAPTURE_BYTES / 2**20,
        tracer=options.tracer,
    )
    with applied(FLAG[setting]), quiet(), torch.enable_grad():
        try:
            row, _ = check_function(replace(case.call, function=one_pass), f"{case.op} {case.sample}", wanted)
        except Exception as error:
            return {"because": f"the search raised {named_line(error)}"[:200]}
    if row.accuracy == Status.PASS:
        return {"because": f"{PAIR_RUNS} further runs agree"}
    because = row.because[:LONGEST_REASON]
    return {"kernel": row.kernel or row.origin, "cause": row.cause, "confidence": row.confidence, "because": because}


def _moved_kernel(case: Case, phase: str, setting: str, options: AuditOptions, seconds: float) -> dict[str, Any]:
    """Move the memory under each kernel in turn; the first that gives another result then is to blame."""
    del phase  # such cases have no backward pass
    computing = _ComputingCalls()
    with quiet(), applied(FLAG[setting]):
        call = fresh_copy(case.call)
        reset_rng_state(options.seed)
        with HashDebugTrace(watcher=computing, tracer=options.tracer):
            call()
    budget = Budget(seconds)
    for captured in computing.calls:
        tested = replay.experiments(captured, replays=options.replays, budget=Budget(budget.left()), arms=("moved",))
        if tested.arm("moved").differing:
            decided = causes.decide(Evidence(Origin.KERNEL, call=tested.facts, arms=tested.arms))
            because = decided.because[:LONGEST_REASON]
            return {"kernel": captured.op, "cause": decided.cause, "confidence": decided.confidence, "because": because}
    return {"because": "no kernel alone differs when its memory is moved"}


class _ComputingCalls(TraceCallback):
    """Captures every call that computes something."""

    def __init__(self) -> None:
        self.calls: list[CapturedCall] = []

    def before(self, node: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        del node
        if plan_of(func).pattern.name != "VIEW" and not plan_of(func).blank:
            with contextlib.suppress(CaptureError):
                self.calls.append(capture(func, args, kwargs, limit_bytes=CAPTURE_BYTES))


# ----------------------------------------------------------------------------------------------- rows of sweeps

_EXPERIMENTS = {"off": "nondeterministic", "on": "deterministic_fill", "unfilled": "deterministic"}


def rows_of_sweeps(folders: Iterable[Path], *, device: str) -> tuple[AuditRow, ...]:
    """Return the rows that sweeps on a device of this type add: one for every model whose results differ by a kernel,
    and one for every op that torch refused under the flag, with what the installed torch documents of it.

    Raises:
        HashbenchError: one of ``folders`` holds no sweep.
    """
    rows = (row for folder in folders for row in load_sweep(folder).rows)
    return tuple(made for row in rows if row.dev.partition(":")[0] == device for made in _rows_of_model(row))


def _rows_of_model(row: Row) -> Iterator[AuditRow]:
    if row.mode == BATCH_INVARIANCE:  # two runs of one batch agree
        return
    if kind_of(row.accuracy) is Kind.DIFFER and row.origin == Origin.KERNEL and row.kernel:
        yield _row_of_model(row, row.kernel, *(measured_in_sweep(row, setting) for setting in FLAG))
    if row.nondeterministic_op and kind_of(row.accuracy) is Kind.PASS:
        yield _row_of_model(row, row.nondeterministic_op, Shown.IDENTICAL, Shown.RAISES, Shown.RAISES)


def measured_in_sweep(row: Row, setting: str) -> Shown:
    """Return what the captured call did under one setting of the flag; where no experiment says, what the model's runs
    did."""
    result = row.evidence.result(_EXPERIMENTS[setting], "call")
    if result.ran:
        return Shown.DIFFERS if result.differing else Shown.IDENTICAL
    if result.raised:
        return Shown.RAISES
    if row.deterministic == "warn" and setting != "off":  # torch refused an op, and all ran again
        return Shown.RAISES if row.nondeterministic_op else Shown.NOT_RUN
    of_the_runs = "off" if row.deterministic in ("off", "warn") else "on"
    return Shown.DIFFERS if setting == of_the_runs else Shown.NOT_RUN


def _row_of_model(row: Row, kernel: str, off: Shown, on: Shown, unfilled: Shown) -> AuditRow:
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
        because=row.because[:LONGEST_REASON],
        threads=row.threads,
    )
