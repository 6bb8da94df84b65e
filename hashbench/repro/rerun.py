"""``hashbench replay``: the experiments of a repro made again, and what they say now beside what they said then."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from hashbench import causes, replay
from hashbench.catalog import EXPERIMENTS
from hashbench.errors import HashbenchError
from hashbench.processes import Budget
from hashbench.records import Decision, Evidence, ExperimentResult
from hashbench.replay.call import CapturedCall
from hashbench.repro import call_file, report
from hashbench.repro.call_values import BadCallError, integer_at, list_at, mapping_at, text_at


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a repro says of the experiments when it was written."""

    arms: tuple[ExperimentResult, ...]
    decision: Decision
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Rerun:
    """The experiments made again: what they decide now, what was recorded, and in which ways this is another place."""

    op: str
    evidence: Evidence
    decision: Decision
    recorded: Recorded
    elsewhere: tuple[str, ...]

    @property
    def reproduced(self) -> bool:
        """Whether any outcome differed."""
        return any(arm.differing for arm in self.evidence.arms)


def rerun(folder: Path, *, replays: int, budget: float) -> Rerun:
    """Make the experiments on the call of a repro again.

    Args:
        replays: comparisons in each arm, at least.
        budget: the seconds that they may take together.

    Raises:
        HashbenchError: the folder is no repro, or asks for what is not here.
    """
    saved = call_file.read(folder)
    call, recorded = saved.call, _recorded(saved.recorded, folder)
    replays_made = replay.experiments(call, replays=replays, budget=Budget(budget))
    evidence = Evidence(origin="kernel", call=replays_made.facts, arms=replays_made.arms)
    elsewhere = (*_elsewhere(call, recorded.environment), *_moved(saved.moved))
    return Rerun(call.op, evidence, causes.decide(evidence), recorded, elsewhere)


def _recorded(found: Mapping[str, Any], folder: Path) -> Recorded:
    try:
        decision = mapping_at(found, "decision")
        arms = tuple(_arm(entry) for entry in list_at(mapping_at(found, "evidence"), "arms"))
        there = mapping_at(found, "environment")
        texts = {name: text_at(there, name) for name in there}
        return Recorded(arms, Decision(*(text_at(decision, name) for name in Decision.__slots__)), texts)
    except BadCallError as error:
        consequence = f"nothing was run ({error})"
        raise HashbenchError(f"cannot use the repro in {folder}", consequence=consequence, tip=call_file.TIP) from None


def _arm(entry: Any) -> ExperimentResult:
    return ExperimentResult(
        text_at(entry, "name"),
        text_at(entry, "on"),
        trials=integer_at(entry, "trials"),
        differing=integer_at(entry, "differing"),
        distinct=integer_at(entry, "distinct"),
        found=text_at(entry, "found"),
        note=text_at(entry, "note"),
    )


def _elsewhere(call: CapturedCall, there: Mapping[str, str]) -> tuple[str, ...]:
    """In what this process is another place than the one where the call was recorded."""
    here = {
        "torch": torch.__version__,
        "torch git": str(torch.version.git_version),
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "cores": str(os.cpu_count()),
    }
    told = [
        f"{name}: {there[name]} there, {value} here" for name, value in here.items() if there.get(name, value) != value
    ]
    threads = torch.get_num_threads()
    if threads != call.threads:
        told.append(f"threads: {call.threads} there, {threads} here; the call was replayed with {call.threads}")
    return tuple(told)


def _moved(moved: Mapping[str, str]) -> list[str]:
    return [
        f"device: {there}, which is not here; the call was replayed on {here}, the first of its kind"
        for there, here in moved.items()
    ]


# ------------------------------------------------------------------------------------------------------ as a text


def as_text(made: Rerun) -> str:
    """The tables and sentences that the command prints."""
    before = made.recorded.decision
    agrees = before.cause == made.decision.cause
    lines = [made.op, "", _table(made.evidence.arms, made.recorded.arms), ""]
    lines += report.summary(made.decision)
    lines += ["" if agrees else f"recorded cause: {before.cause}, {before.confidence}: {before.because}"]
    if made.elsewhere:
        lines += ["This is another place than where it was recorded:", *(f"  {told}" for told in made.elsewhere)]
    return "\n".join(lines).rstrip()


def _table(arms: Sequence[ExperimentResult], recorded: Sequence[ExperimentResult]) -> str:
    before = {arm.name: arm for arm in recorded if arm.on == "call"}
    rows = [
        (
            arm.name,
            EXPERIMENTS[arm.name].phrase,
            report.count(arm),
            arm.distinct if arm.ran else "",
            report.count(before[arm.name]) if arm.name in before else "",
            report.remarks(arm),
        )
        for arm in arms
    ]
    headers = ("arm", "what is changed", "differ", "distinct", "recorded", "found")
    return tabulate(rows, headers=headers, disable_numparse=True)


def as_json(made: Rerun) -> str:
    """The same for programs: evidence, decision, what was recorded, and the differences in place."""
    return json.dumps({**dataclasses.asdict(made), "reproduced": made.reproduced}, indent=2)
