"""``hashbench replay``: the experiments of a repro made again, and what they say now beside what they said then."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from hashbench import causes, replay
from hashbench.io import from_json
from hashbench.processes import Budget
from hashbench.records import Decision, Evidence, ExperimentResult
from hashbench.replay.call import CapturedCall
from hashbench.repro import call_file, count, described


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
        return any(result.differing for result in self.evidence.arms)


def rerun(folder: Path, *, replays: int, budget: float) -> Rerun:
    """Make the experiments on the call of a repro again.

    Args:
        replays: comparisons in each experiment, at least.
        budget: the seconds that they may take together.

    Raises:
        HashbenchError: the folder is not a repro, or asks for what is not here.
    """
    saved = call_file.read(folder)
    try:
        recorded = _recorded(saved.recorded)
    except ValueError as error:
        raise call_file.unusable(folder, error) from None
    replays_made = replay.experiments(saved.call, replays=replays, budget=Budget(budget))
    evidence = Evidence(origin="kernel", call=replays_made.facts, arms=replays_made.arms)
    elsewhere = _elsewhere(saved.call, recorded.environment, saved.moved)
    return Rerun(saved.call.op, evidence, causes.decide(evidence), recorded, elsewhere)


def _recorded(content: Mapping[str, Any]) -> Recorded:
    evidence = from_json(Evidence, content.get("evidence"), where="evidence")
    decision = from_json(Decision, content.get("decision"), where="decision")
    there = from_json(Mapping[str, str], content.get("environment"), where="environment")
    return Recorded(evidence.arms, decision, there)


def _elsewhere(call: CapturedCall, there: Mapping[str, str], moved: Mapping[str, str]) -> tuple[str, ...]:
    """In what this process is another place than the one where the call was recorded."""
    here = {
        "torch": torch.__version__,
        "torch git": str(torch.version.git_version),
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "cores": str(os.cpu_count()),
    }
    lines = [
        f"{key}: {there[key]} there, {value} here" for key, value in here.items() if there.get(key, value) != value
    ]
    threads = torch.get_num_threads()
    if threads != call.threads:
        lines.append(f"threads: {call.threads} there, {threads} here; the call was replayed with {call.threads}")
    for before, now in moved.items():
        lines.append(f"device: {before}, which is not here; the call was replayed on {now}, the first of its kind")
    return tuple(lines)


# ------------------------------------------------------------------------------------------------------ as a text


def as_text(made: Rerun) -> str:
    """The tables and sentences that the command prints."""
    before, now = made.recorded.decision, made.decision
    recorded = {result.name: result for result in made.recorded.arms if result.on == "call"}
    rows = []
    for result in made.evidence.arms:
        phrase, differ, distinct, remarks = described(result)
        then = count(recorded[result.name]) if result.name in recorded else ""
        rows.append((result.name, phrase, differ, distinct, then, remarks))
    headers = ("arm", "what is changed", "differ", "distinct", "recorded", "found")
    named = {"cause": f"{now.cause}, {now.confidence}", "because": now.because, "advice": now.advice}
    lines = [made.op, "", tabulate(rows, headers=headers, disable_numparse=True), ""]
    lines += [f"{name}: {value}" for name, value in named.items() if value]
    agrees = before.cause == now.cause
    lines += ["" if agrees else f"recorded cause: {before.cause}, {before.confidence}: {before.because}"]
    if made.elsewhere:
        lines += ["This is another place than where it was recorded:", *(f"  {line}" for line in made.elsewhere)]
    return "\n".join(lines).rstrip()


def as_json(made: Rerun) -> str:
    """The same for programs: evidence, decision, what was recorded, and the differences in place."""
    return json.dumps({**dataclasses.asdict(made), "reproduced": made.reproduced}, indent=2)
