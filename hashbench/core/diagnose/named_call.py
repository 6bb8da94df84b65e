"""Capture the call of a kernel while its program runs, and replay it in the same process when the program has ended."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from hashbench.core.catalog import Origin
from hashbench.core.diagnose import causes, replay, repro
from hashbench.core.diagnose.calls.call import MIB, CapturedCall, plan_for
from hashbench.core.diagnose.calls.capture import CaptureError, capture
from hashbench.core.diagnose.calls.ops import definition_of
from hashbench.core.diagnose.causes import stats
from hashbench.core.diagnose.driver import COPIES, documented
from hashbench.core.diagnose.replay import facts
from hashbench.core.processes import Budget
from hashbench.core.records import Diagnosis, Evidence, OpRecord, RunOptions

SECONDS = 30.0
"""For all experiments on the call of a kernel."""


@dataclass(frozen=True, slots=True)
class WrittenKernel:
    """What the replays of a call show, once its repro is written.

    Attributes:
        words: ``5 of 20 replays differ (cause, confidence)``.
        definition: file or module that defines a custom op; empty for any other.
        diagnosis: cause and evidence.
    """

    words: str
    definition: str
    diagnosis: Diagnosis


def kernel_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CapturedCall:
    """Capture the call of a kernel, within the memory that is left on this machine.

    Raises:
        CaptureError: it cannot be captured, or a replay would show nothing.
    """
    if plan_for(func).blank:
        raise CaptureError("it allocates memory, of whose content a replay shows nothing")
    limit = min(int(RunOptions().capture_mib * MIB), psutil.virtual_memory().available // COPIES)
    return capture(func, args, kwargs, limit_bytes=limit)


def write_kernel(folder: Path, call: CapturedCall, record: OpRecord | None, *, seen_in: str) -> WrittenKernel:
    """Replay a call, and write its repro into ``folder`` with what that shows.

    Args:
        folder: of the repro.
        call: with node, phase, module, forward op and source of its record.
        record: of the call, as the program made it; ``None``: not known.
        seen_in: words on where.
    """
    recorded = [record.outputs] if record is not None else []
    replays = replay.experiments(call, replays=RunOptions().replays, budget=Budget(SECONDS), recorded=recorded)
    evidence = Evidence(Origin.KERNEL, call=replays.facts, arms=replays.arms)
    diagnosis = Diagnosis(causes.decide(evidence), evidence, rate=stats.rate_of_evidence(evidence))
    diagnosis = documented(diagnosis, call.op, call.forward_op, device=call.device.type)
    difference = None if replays.other is None else facts.difference_of(replays.first, replays.other)
    repro.write_repro(folder, call, diagnosis, difference=difference, seen_in=seen_in)
    repeated, decided = replays.arm("repeat"), diagnosis.decision
    again = f"{repeated.differing} of {repeated.trials} replays differ" if repeated.ran else repeated.note
    definition = definition_of(call.func)
    argument = definition.argument if definition is not None else ""
    words = f"{again} ({decided.cause}, {decided.confidence})"
    if argument and argument == str(Path(sys.argv[0]).resolve()):
        words += "; to replay it elsewhere, define the op in a file of its own"
    return WrittenKernel(words, argument, diagnosis)
