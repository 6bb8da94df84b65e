"""Which kernels a case ran, what torch documents of them, and for a case that differs which kernel did it and why."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hashbench import causes, replay
from hashbench.check.function import FunctionCall, check_function, fresh_copy
from hashbench.errors import named_line
from hashbench.processes import Budget
from hashbench.records import Evidence, OpRecord, RunOptions, Trace, op_of
from hashbench.replay.call import CapturedCall, CaptureError, capture
from hashbench.repro import torch_docs
from hashbench.run.outputs import flatten
from hashbench.run.rng import reset_rng_state
from hashbench.run.settings import applied
from hashbench.tools.audit.cases import Case
from hashbench.tools.audit.measuring import FLAG, gradients, quiet
from hashbench.trace.api import HashDebugTrace
from hashbench.trace.arguments import named_tensors
from hashbench.trace.callbacks import TraceCallback
from hashbench.trace.op_schema import plan_of

CAPTURE_BYTES = 2**28
"""The largest call that is captured for experiments; our largest inputs have 16 MiB."""

PAIR_RUNS = 6
"""Runs that the search for a cause compares, so that a difference of every second run shows again."""


@dataclass(frozen=True, slots=True)
class Documented:
    """What torch documents of the kernels of each pass, and whether all that the case returns is ``blank``: memory
    that nobody wrote, as the schemas say."""

    passes: Mapping[str, str]
    blank: bool = False


def documented(case: Case, *, device: str, seed: int) -> Documented:
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
    made = trace.finish()
    passes = {
        phase: joined(_text(record, device) for record in made.records if (record.phase == "backward") == backward)
        for phase, backward in (("forward", False), ("backward", True))
    }
    return Documented(passes, blank=_is_blank(made))


def _is_blank(trace: Trace) -> bool:
    blank = {record.id for record in trace.records if record.blank}
    return bool(trace.results) and all(result.source in blank for result in trace.results)


def _text(record: OpRecord, device: str) -> str:
    return _looked_up(record.op, device, op_of(record.forward_op))


@functools.cache
def _looked_up(op: str, device: str, backward_of: str) -> str:
    return torch_docs.documented(op, device=device, backward_of=backward_of)


def joined(texts: Iterable[str]) -> str:
    """What is said of any of the kernels; what is listed for other devices only where nothing is for this one."""
    said = list(dict.fromkeys(texts))
    here = [text for text in said if not text.startswith(torch_docs.NOT_LISTED)]
    elsewhere = [text.partition(" (")[0] for text in said if text != torch_docs.NOT_LISTED]
    return "; ".join(here or dict.fromkeys(elsewhere)) or torch_docs.NOT_LISTED


# -------------------------------------------------------------------------------------------------- the cause


@dataclass(frozen=True, slots=True)
class Explained:
    """The kernel whose outputs differed first, and the mechanism with the numbers behind it; empty: not found."""

    kernel: str = ""
    cause: str = ""
    confidence: str = ""
    because: str = ""


def explain(case: Case, *, phase: str, setting: str, device: str, seed: int, seconds: float, replays: int) -> Explained:
    """Find the kernel that makes ``phase`` of a case differ under a setting of the flag, and its cause, within
    ``seconds``."""
    if case.moved:
        return _explain_moved(case, setting=setting, seed=seed, seconds=seconds, replays=replays)
    options = RunOptions(
        device=device,
        runs=PAIR_RUNS,
        seed=seed,
        replays=replays,
        diagnose_budget=seconds,
        capture_mib=CAPTURE_BYTES / 2**20,
    )
    call = replace(case.call, function=_Step(case, phase, seed))
    with applied(FLAG[setting]), _unheard():
        try:
            row, _ = check_function(call, f"{case.op} {case.sample}", options)
        except Exception as error:
            return Explained(because=f"the search raised {named_line(error)}"[:200])
    if row.accuracy == "pass":
        return Explained(because=f"{PAIR_RUNS} further runs agree")
    return Explained(row.kernel or row.origin, row.cause, row.confidence, row.because)


@dataclass(frozen=True, slots=True)
class _Step:
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


def _explain_moved(case: Case, *, setting: str, seed: int, seconds: float, replays: int) -> Explained:
    """Move the memory under each kernel in turn; the first that gives another result then is to blame."""
    catcher = _CatchAll()
    with quiet(), applied(FLAG[setting]):
        call = fresh_copy(case.call)
        reset_rng_state(seed)
        with HashDebugTrace(watcher=catcher):
            call()
    budget = Budget(seconds)
    for captured in catcher.calls:
        found = replay.experiments(captured, replays=replays, budget=Budget(budget.left()), arms=("moved",))
        if found.arm("moved").differing:
            decided = causes.decide(Evidence("kernel", call=found.facts, arms=found.arms))
            return Explained(captured.op, decided.cause, decided.confidence, decided.because)
    return Explained(because="no kernel alone differs when its memory is moved")


class _CatchAll(TraceCallback):
    """Captures every call that computes something."""

    def __init__(self) -> None:
        self.calls: list[CapturedCall] = []

    def before(self, node: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        del node
        if plan_of(func).pattern.name != "VIEW" and not plan_of(func).blank:
            with contextlib.suppress(CaptureError):
                self.calls.append(capture(func, args, kwargs, limit_bytes=CAPTURE_BYTES))


@contextlib.contextmanager
def _unheard() -> Any:
    """What a thousand replays say on standard output and error is said already."""
    nowhere = io.StringIO()
    with quiet(), contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere), torch.enable_grad():
        yield
