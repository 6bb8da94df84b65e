"""Compare two checks: the stages that differ, and why; as a report. Pure: imports no torch."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from hashbench.core.errors import HashbenchError
from hashbench.core.finding import Finding, Table
from hashbench.core.io import to_json
from hashbench.core.records import Decision, Divergence
from hashbench.core.text import one_line
from hashbench.tools.pipeline.evidence import StageEvidence, gather
from hashbench.tools.pipeline.observed import MOMENTS, TRACE_FILE, CheckRecord, moved
from hashbench.tools.pipeline.pairs import CheckPair
from hashbench.tools.pipeline.reasons import decide
from hashbench.tools.pipeline.stages import DIFFERS, FOLLOWS, UNSEEN, StageVerdict, compare_stages


@dataclass(frozen=True, slots=True)
class StageFinding:
    """A stage that differs independently of earlier ones, and why: the likeliest first."""

    stage: str
    reasons: tuple[Decision, ...]


SEEDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "python": ("Python", "random.seed(seed)"),
        "numpy": ("NumPy", "numpy.random.seed(seed)"),
        "torch": ("torch", "torch.manual_seed(seed)"),
    }
)
"""Name and seeding call of each global generator whose first state is random in every process."""


@dataclass(frozen=True, slots=True)
class Seeding:
    """The global generators that ``set_seed`` seeds, and those that a difference was drawn from and that it does not.

    Attributes:
        seeded: names in :data:`SEEDS`.
        unseeded: likewise; never empty.
        advice: the missing lines.
    """

    seeded: tuple[str, ...]
    unseeded: tuple[str, ...]
    advice: str

    @property
    def sentence(self) -> str:
        """``set_seed seeds Python and NumPy, and not torch``."""
        seeded, unseeded = ([SEEDS[name][0] for name in names] for names in (self.seeded, self.unseeded))
        if not seeded:
            return f"{' and '.join(unseeded)} {'are' if unseeded[1:] else 'is'} not seeded"
        return f"set_seed seeds {' and '.join(seeded)}, and not {' or '.join(unseeded)}"


@dataclass(frozen=True, slots=True)
class PipelineVerdict:
    """The comparison of two checks.

    Attributes:
        stages: all stages in order, the environment first.
        findings: one entry for each stage that differs and does not follow from an earlier one.
        first: the first stage that differs; empty where the pipeline repeats. Never the environment: where nothing else
            differs, it had no effect.
        divergence: the first divergence of the two traces.
        seeding: the generators that the findings drew from and that the pipeline does not seed, if any.
    """

    stages: tuple[StageVerdict, ...]
    findings: tuple[StageFinding, ...]
    first: str
    divergence: Divergence | None
    seeding: Seeding | None = None

    @property
    def repeats(self) -> bool:
        """Whether every recorded stage is equal, the environment aside."""
        return not self.first


def compare(
    first: CheckRecord, second: CheckRecord, *, hash_order: Mapping[str, bool | None] | None = None
) -> PipelineVerdict:
    """Compare two checks of the same pipeline.

    Args:
        first, second: as returned by :func:`observed.read`.
        hash_order: for each stage whether its difference disappears with an equal hash seed, where the caller tested
            that.

    Raises:
        HashbenchError: they recorded different numbers of batches, or neither recorded anything that can be compared.
    """
    pair = CheckPair(first.seen, second.seen)
    steps = pair.of(lambda seen: seen.batches.asked_for)
    if steps[0] != steps[1]:
        raise HashbenchError(
            f"the checks are of {steps[0]} and {steps[1]} steps",
            consequence="nothing was compared",
            tip="Make both with the same `steps`.",
        )
    stages = compare_stages(pair)
    judged = [stage for stage in stages.values() if stage.name != "environment"]
    if all(stage.status == UNSEEN for stage in judged):
        raise HashbenchError(
            f"neither {first.name} nor {second.name} saw anything that can be compared",
            consequence="that is not the same as equal",
            tip="Let the loader yield tensors, arrays, images or plain values.",
        )
    used: dict[str, StageEvidence] = {}
    for stage in judged:
        if stage.status != DIFFERS:
            continue
        tried = _hash_order(stage.name, first, second) if hash_order is None else hash_order.get(stage.name)
        evidence = replace(gather(pair, stages, stage), hash_order=tried)
        if tried and any(earlier.hash_order for earlier in [*used.values()][:1]) and not evidence.hash_calls:
            stages[stage.name] = replace(stage, status=FOLLOWS)  # labels in the order of a set
        else:
            used[stage.name] = evidence
    findings = tuple(StageFinding(name, decide(evidence)) for name, evidence in used.items())
    seeding = _missing_seeding(used, pair)
    return PipelineVerdict(tuple(stages.values()), findings, next(iter(used), ""), pair.divergence, seeding)


def _hash_order(stage: str, first: CheckRecord, second: CheckRecord) -> bool | None:
    """Derive from the checks' own reruns and hash seeds whether the hash seed decides this stage."""
    repetitions = [check.repetition for check in (first, second) if check.repetition is not None]
    for repetition in repetitions:
        if repetition.first == stage and repetition.hash_order is not None:
            return repetition.hash_order
    around = [check.seen.surroundings for check in (first, second)]
    if around[0].hash_seed == around[1].hash_seed:
        return False
    by_us = all(side.hash_seed_by == "hashbench" for side in around)
    return False if by_us and len(repetitions) == 2 and all(item.repeats for item in repetitions) else None


def _missing_seeding(used: Mapping[str, StageEvidence], pair: CheckPair) -> Seeding | None:
    """Return the generators that are seeded and those that are not, if a difference was drawn from one of the latter.

    A generator that ``set_seed`` seeds is in different states in the two checks before it, and in the same after it.
    """
    if pair.first.loader.seed != pair.second.loader.seed:
        return None
    set_seed = pair.between(*MOMENTS[1:3])
    drawn: set[str] = set()
    for evidence in used.values():
        if evidence.hash_order:  # seeded, with hash()
            continue
        drawn.update(name for span in evidence.spans for name in span.drawn)
        by_workers = evidence.sample.moved_at_start and "loader.generator" not in pair.first.loader.generators
        if evidence.order.drawn_by_default or by_workers:  # a loader draws the seeds of its workers from torch
            drawn.add("torch")
    unseeded = tuple(name for name in SEEDS if name in moved(*set_seed.after) and name in drawn)
    seeded = tuple(name for name in SEEDS if name in set_seed.seeded)
    return Seeding(seeded, unseeded, "\n".join(SEEDS[name][1] for name in unseeded)) if unseeded else None


# -------------------------------------------------------------------------------------------------------- report


def finding_of(verdict: PipelineVerdict, *, names: tuple[str, str], folders: tuple[Path, Path]) -> Finding:
    """Return the report: the stages, the missing seeding, then the reasons of each finding with the code to write.

    Args:
        verdict: on two checks.
        names: what to call them.
        folders: where they lie.
    """
    unseen = ", ".join(stage.name for stage in verdict.stages if stage.status == UNSEEN)
    agree = f"{' and '.join(names)} agree{f', as far as was seen (not: {unseen})' if unseen else ''}"
    command = ["hashbench", "diff", *(str(folder / TRACE_FILE) for folder in folders)]
    return Finding(
        headline=agree if verdict.repeats else f"{' and '.join(names)} differ first in: {verdict.first}",
        table=Table(
            headers=("stage", "verdict", "detail"),
            rows=tuple((stage.name, stage.status, one_line(stage.detail)) for stage in verdict.stages),
        ),
        parts=tuple(_parts(verdict)),
        next=() if verdict.divergence is None else (shlex.join(command),),
        equal=verdict.repeats,
        differs=not verdict.repeats,
        data=to_json(verdict),
    )


def _parts(verdict: PipelineVerdict) -> Iterator[Finding]:
    if verdict.seeding is not None:
        yield Finding(headline=verdict.seeding.sentence, table=_code("Add to set_seed:", verdict.seeding.advice))
    for finding in verdict.findings:
        for reason in finding.reasons:
            cause = f"{reason.cause}, {reason.confidence}"
            facts = ("stage", finding.stage), ("cause", cause), ("because", one_line(reason.because))
            yield Finding(headline="", facts=facts, table=_code("Write instead:", reason.advice))


def _code(title: str, lines: str) -> Table:
    return Table.of_lines(title, (f"    {line}" for line in lines.splitlines()))
