"""Report on two recordings of a training loop: the first step that differs, what differs in it, and what to run next.
Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hashbench.core.divergence.text import candidate_facts, divergence_facts, place
from hashbench.core.finding import Finding, Table, few
from hashbench.core.io import to_json
from hashbench.core.text import count, percent
from hashbench.extensions.watch.batches import SampleMatch
from hashbench.extensions.watch.compare import BEGIN, OUTSIDE, PartDifference, RankVerdict, range_words
from hashbench.extensions.watch.file import BY_TENSOR, PARTS, Recording
from hashbench.extensions.watch.traced import FurtherRun, LoopVerdict, TracedSteps

NAMES = {
    "order": "order of the optimizer's parameters",
    "batch": "batch",
    "generator": "generator",
    "scaler": "scaler",
    "loss": "loss",
    "buffer": "buffer",
    "gradient": "gradient",
    "lr": "learning rate",
    "scheduler": "scheduler",
    "options": "options of the optimizer",
    "parameter": "parameter",
    "state": "optimizer state",
    BEGIN: "state that the step began with",
}
"""Part -> words."""

MEANING = {
    "order": "The program passed the parameters to the optimizer in a different order (a set?): sums over them round "
    "differently.",
    "batch": "The batches differ: check the sampler, its seed, the workers, the order of files, and random transforms.",
    "generator": "Between the step before and this one, one run drew more or fewer random numbers, or was seeded "
    "differently.",
    "scaler": "GradScaler state differs: different overflows, or not restored.",
    "lr": "The scheduler is at a different position, was not restored, or sets the rate by a measured value.",
    "scheduler": "The scheduler is at a different position, was not restored, or has different settings: its rates may "
    "differ later.",
    "options": "The optimizer's options differ.",
    "parameter": "The gradients read in this step agree: the update differs, by the optimizer's state or its kernels.",
    "state": "The gradients read in this step agree: the update differs, by the optimizer's state or its kernels.",
}
"""First part that differs -> what that means."""

ONE_MORE = (
    "One run ran an extra micro-batch where the other stepped its optimizer: it accumulates differently, or a step was "
    "skipped (by a GradScaler, or for a number that is not finite)."
)
"""Meaning of a batch or a loss that only one of the runs has."""

BETWEEN = (
    "It differs between steps, outside of forward and optimizer: the program changed it there (averaged, clamped, "
    "tied, pruned or initialised weights), or it was modified outside the dispatcher."
)
"""Meaning of a state that differs as a step began, where it was equal after the step before."""

WITH_ITS_BATCH = "They are the likely source of the different batch as well."
"""Note on a generator where the batch differs, too."""

SIZES = {
    SampleMatch.SAME: "Batch sizes differ, samples do not: sums over them round differently.",
    SampleMatch.MOVED: "Batch sizes differ (batch size, accumulation, drop_last): samples come in different steps.",
    SampleMatch.OTHER: "Batch sizes differ (batch size, accumulation, drop_last), and no sample is in both runs.",
    SampleMatch.UNKNOWN: "Batch sizes differ: batch size, accumulation, drop_last, or the length of padded samples.",
}
"""Meaning of batches that differ in number or shape, by their samples."""

SAMPLES = {
    SampleMatch.SAME: "The step has the same samples in a different order, or with different labels: check the "
    "sampler, the workers and the order of files.",
    SampleMatch.MOVED: "Its samples come in different steps of the other run: their order differs (the sampler, its "
    "seed, the workers, the order of files).",
    SampleMatch.OTHER: "None of its samples is in the other run: their content differs (augmentation, noise, random "
    "transforms), or different data were read.",
}
"""Meaning of different batches of equal shapes, by their samples."""

SETTINGS = "Make the settings equal first: kernels depend on them, so no kernel is blamed while they differ."
"""Note on settings that differ, where the first part that differs is computed by kernels."""

_READABLE = frozenset({"order", "scaler", "loss", "lr", "scheduler", "options"})
"""Parts whose values say more than digests."""

_MAYBE_BEFORE_THE_CALL = frozenset({"generator", "loss", "buffer"})
"""First parts that differ which code before the model's call may have changed."""

_AROUND = (3, 2)
"""Steps shown before and after the first that differs."""


def finding_of(verdict: LoopVerdict) -> Finding:
    """Return the report of two recordings."""
    first = verdict.first
    several = len(verdict.ranks) > 1
    meaning = [] if first is None else [meaning_of(first), SETTINGS if _depends_on_settings(first) else ""]
    return Finding(
        headline=headline(verdict),
        facts=() if first is None else tuple(first_facts(verdict, first)),
        table=None if first is None else table(first),
        notes=tuple(filter(None, [*meaning, *gaps_of(verdict), *notes_of(verdict), *_rate_notes(verdict)])),
        parts=tuple(_traced_finding(traced, several=several) for traced in verdict.traced),
        next=tuple(next_look(verdict) or [*_data_checked(verdict), *_plot_of(verdict)]),
        equal=verdict.equal,
        differs=verdict.differs,
        data=document(verdict),
    )


def _data_checked(verdict: LoopVerdict) -> list[str]:
    """Return the command that looks into what made a batch, where one differs first."""
    first = verdict.first
    if first is None or first.differing[0].part != "batch" or _alone(first.differing[0]):
        return []
    words = ["hashbench", "pipeline", "check", "--config", "pipeline.py", "--output-dir", "check"]
    return [f"{shlex.join(words)}  # hashbench docs pipeline"]


def _plot_of(verdict: LoopVerdict) -> list[str]:
    """Return the command that plots all steps, where no kernel is to be traced."""
    folders = [*verdict.folders, *(run.folder for run in verdict.further)]
    command = ["hashbench", "watch", "diff", *map(str, folders), "--html", "watch.html"]
    return [] if verdict.equal else [shlex.join(command)]


def _depends_on_settings(first: RankVerdict) -> bool:
    return bool(first.settings) and first.differing[0].part not in OUTSIDE


def headline(verdict: LoopVerdict) -> str:
    """Return the verdict in one line."""
    first = verdict.first
    if first is None:
        return f"{_agreed_words(verdict)}{'; not all was compared' if gaps_of(verdict) else ''}"
    rank = f", first on rank {first.rank}" if len(verdict.ranks) > 1 else ""
    lead = first.differing[0]
    alone = " that one run lacks" if _alone(lead) and not _sizes(first) else ""
    between = ", changed between steps" if lead.begun else ""
    sizes = "number of batches in a step" if first.batches and first.batches.in_number else "shape of a batch"
    settings = f"; settings differ: {few([setting.name for setting in first.settings])}" if first.settings else ""
    part = sizes if _sizes(first) else NAMES[lead.part]
    return f"The runs differ {_where(first)}{rank}: {part}{alone}{between}{settings}"


def _where(first: RankVerdict) -> str:
    if first.initial:
        return f"before step {first.steps[0]}"
    return f"at the end, after step {first.steps[-1]}" if first.at_end else f"from step {first.step} on"


def _sizes(first: RankVerdict) -> bool:
    """Return True where the first difference is the number or the shape of the batches."""
    batches = first.batches
    return first.differing[0].part == "batch" and batches is not None and batches.in_shape and not batches.one_more


def gaps_of(verdict: LoopVerdict) -> list[str]:
    """Return what was not compared, each a sentence."""
    several = len(verdict.ranks) > 1
    return list(
        dict.fromkeys(
            [
                *verdict.notes,
                *(f"Rank {rank.rank}: {gap}" if several else gap for rank in verdict.ranks for gap in rank.gaps),
            ]
        )
    )


def notes_of(verdict: LoopVerdict) -> list[str]:
    """Return what else to know of the recordings, each a sentence."""
    without = [
        f"Settings differ, and nothing that was compared follows them: {settings_words(rank)}."
        for rank in verdict.ranks
        if rank.settings and rank.step is None
    ]
    return list(dict.fromkeys([*(note for rank in verdict.ranks for note in rank.notes), *without]))


def _agreed_words(verdict: LoopVerdict) -> str:
    where = f" on {count(len(verdict.ranks), 'rank')}" if len(verdict.ranks) > 1 else ""
    idle = next((rank for rank in verdict.ranks if rank.idle is not None), None)
    agreed = f"The runs agree in {range_words(verdict.ranks[0].steps)}{where}"
    if idle is None or idle.idle is None:
        return agreed
    at = "at the end" if idle.idle_at not in idle.steps else f"from step {idle.idle_at} on"
    return f"{agreed}; the state of {part_words(idle.idle)} differs {at}, and reaches nothing else that was compared"


def meaning_of(first: RankVerdict) -> str:
    """Return what the first part that differs means; empty where nothing is to be said."""
    lead, batches = first.differing[0], first.batches
    if lead.begun:
        return BETWEEN
    if (first.initial or first.at_end) and lead.part in BY_TENSOR:
        return ""
    if lead.part == "generator" and any(difference.part == "batch" for difference in first.differing):
        return f"{MEANING['generator']} {WITH_ITS_BATCH}"
    if lead.part == "batch" and batches is not None:
        if _sizes(first):
            return SIZES[batches.samples]
        if not _alone(lead):
            return SAMPLES.get(batches.samples, MEANING["batch"])
    return ONE_MORE if _alone(lead) else MEANING.get(lead.part, "")


def _alone(difference: PartDifference) -> str:
    """Return the run that alone has a batch or a loss; empty where both do."""
    if difference.part not in ("batch", "loss") or (difference.first and difference.second):
        return ""
    return "first" if difference.first else "second"


def first_facts(verdict: LoopVerdict, first: RankVerdict) -> list[tuple[str, str]]:
    """Return what is known of the first difference, as names and texts."""
    lead = first.differing[0]
    facts = (
        ("first difference", f"{first_step_words(first)}{_before_words(first)}"),
        ("rank", str(first.rank) if len(verdict.ranks) > 1 else ""),
        ("settings differ", settings_words(first)),
        ("what differs", part_words(lead)),
        ("first run", lead.first if lead.part in _READABLE else ""),
        ("second run", lead.second if lead.part in _READABLE else ""),
        *_batch_facts(first),
        ("introduced in", _since_words(first)),
        ("also differs", few([part_words(part) for part in first.differing[1:]])),
        ("last equal", agreed_words(first)),
        ("on other ranks", _others(verdict, first)),
    )
    return [(name, value) for name, value in facts if value]


def settings_words(first: RankVerdict) -> str:
    """Return which settings differ, and their values in both runs: ``num_threads (1, 2)``."""
    words = [
        f"{setting.name} ({setting.first or 'not set'}, {setting.second or 'not set'}"
        + (f", from step {setting.at} on)" if setting.at > first.steps[0] else ")")
        for setting in first.settings
    ]
    return few(words)


def _batch_facts(first: RankVerdict) -> Iterator[tuple[str, str]]:
    """Yield the batches of each run, where their number or shape differs."""
    if first.batches is not None and first.batches.in_shape:
        yield from zip(("first run", "second run"), first.batches.words(), strict=True)


def first_step_words(first: RankVerdict) -> str:
    """Return ``step 7``, ``before step 0``, or ``at the end``."""
    if first.at_end:
        return f"at the end, after step {first.steps[-1]}"
    return f"before step {first.steps[0]}" if first.initial else f"step {first.step}"


def _before_words(first: RankVerdict) -> str:
    if first.initial or first.at_end:
        return ""
    before = first.steps[0] < (first.step or 0)
    return f" (equal until step {(first.step or 0) - 1})" if before else " (the first that was compared)"


def _since_words(first: RankVerdict) -> str:
    lead, at = first.differing[0], first.step or 0
    if lead.begun:
        return (
            f"after the optimizer's step {at - 1}, and before step {at}"
            if at - 1 in first.steps
            else f"before step {at}"
        )
    if first.initial or lead.part in OUTSIDE:
        return ""
    if first.since == first.step:
        if first.at_end:
            return f"after the optimizer's step {first.steps[-1]}"
        unknown = lead.part in _MAYBE_BEFORE_THE_CALL and BEGIN not in first.seen[at] and at - 1 in first.steps
        return f"step {at}, or between it and the step before" if unknown else f"step {at}"
    if first.at_end:
        return f"one of steps {first.since} to {first.steps[-1]}, or after them: not all tensors are read in each"
    return f"one of steps {first.since} to {first.step}: not all tensors are read in each"


def part_words(difference: PartDifference) -> str:
    """Return ``gradient of fc.weight`` or ``parameter of 3 of 12 tensors: a, b, c``."""
    name = NAMES[difference.part]
    if difference.part == "order":
        return name
    if difference.part in ("batch", "loss"):
        number = "" if difference.compared == 1 else f" {int(difference.names[0]) + 1} of {difference.compared}"
        alone = _alone(difference)
        return f"{name}{number}, which only the {alone} run has" if alone else f"{name}{number}"
    if difference.part == "lr":
        return name if difference.compared == 1 else f"{name} of group {difference.names[0]}"
    names = few(difference.names)
    if difference.part not in BY_TENSOR:
        return f"{name} {names}"
    begun = ", as the step began" if difference.begun else ""
    if len(difference.names) == 1:
        return f"{name} of {names}{begun}"
    return f"{name} of {len(difference.names)} tensors ({names}){begun}"


def agreed_words(first: RankVerdict) -> str:
    """Return which parts had been seen equal until when."""
    by_step: dict[int, list[str]] = {}
    for part, step in first.agreed.items():
        by_step.setdefault(step, []).append(NAMES[part])
    return "; ".join(
        f"{few(names)} (step {step})" if step >= first.steps[0] else f"{few(names)} (at the start)"
        for step, names in sorted(by_step.items(), reverse=True)
    )


def _others(verdict: LoopVerdict, first: RankVerdict) -> str:
    return "; ".join(
        f"rank {rank.rank}: "
        + ("nothing" if rank.step is None else f"step {rank.step}, {part_words(rank.differing[0])}")
        for rank in verdict.ranks
        if rank is not first
    )


def table(rank: RankVerdict) -> Table:
    """Return the steps around the first that differs, one column a part: ``=``, ``≠``, or empty where it was not
    read."""
    assert rank.step is not None
    numbers = list(rank.seen)
    at = numbers.index(rank.step)
    shown = numbers[max(0, at - _AROUND[0]) : at + _AROUND[1] + 1]
    parts = [part for part in (BEGIN, *PARTS) if any(part in rank.seen[number] for number in shown)]
    signs = {True: "=", False: "≠", None: ""}
    rows = tuple(
        (_step_words(number, rank), *(signs[rank.seen[number].get(part)] for part in parts)) for number in shown
    )
    return Table(headers=("step", *parts), rows=rows)


def _step_words(number: int, rank: RankVerdict) -> str:
    return "start" if number < rank.steps[0] else "end" if number > rank.steps[-1] else str(number)


# ---------------------------------------------------------------------------------------------- traces and the rate


def trace_words(traced: TracedSteps, *, several: bool) -> str:
    """Return ``trace of step 300``, with the rank where there are several."""
    rank = f", rank {traced.rank}" if several else ""
    return f"trace of {range_words(range(traced.first, traced.last + 1))}{rank}"


def _traced_finding(traced: TracedSteps, *, several: bool) -> Finding:
    """Return the report of a pair of traces of these steps."""
    where = trace_words(traced, several=several)
    if traced.verdict is None:
        return Finding(headline=f"{where}: {traced.problem}", differs=False)
    divergence, equal = traced.verdict.divergence, traced.verdict.equal
    if divergence is not None:
        facts = (*divergence_facts(divergence), *candidate_facts(divergence))
        return Finding(headline=f"{where}: {place(divergence)}", facts=facts)
    words = "equal" if equal else "no divergence reaches a result"
    benign = (("benign", few(traced.verdict.benign)),)
    return Finding(headline=f"{where}: {words}", facts=benign, equal=equal, differs=not equal)


def _rate_notes(verdict: LoopVerdict) -> Iterator[str]:
    """Yield how often runs differ, and what that leaves to suspect where the traced runs agree."""
    differ = [verdict.differs, *(run.differs for run in verdict.further)]
    if verdict.further:
        yield from (f"{run.folder}: {_further_words(run)}" for run in verdict.further)
        rate = f"{sum(differ)} of {len(differ)} runs"
        yield f"{rate} differ from {verdict.folders[0]} ({percent(sum(differ) / len(differ))})."
    if not differ[0] and verdict.traced:
        runs = "" if any(differ) else f" in {len(differ)} of {count(len(differ), 'comparison')}"
        yield (
            f"The difference did not reproduce in the traced steps{runs}: no kernel is named. Run them more often; it "
            "may also be a fault of memory or hardware."
        )


def _further_words(run: FurtherRun) -> str:
    if run.step is not None:
        return f"differs from step {run.step} on"
    if run.differs:
        return "agrees with the first, but for traces"
    return "agrees with the first" if run.equal else "agrees with the first in what both have"


def next_look(verdict: LoopVerdict) -> list[str]:
    """Return the commands that trace the steps in which the difference came about; none where kernels do not make it,
    or where they are traced already."""
    first = verdict.first
    if first is None or first.initial or first.step is None or (first.at_end and first.since == first.step):
        return []
    lead = first.differing[0].part
    if lead in OUTSIDE and lead != "generator" and not _alone(first.differing[0]):
        return []
    low, stop = _from_step(first, verdict.traced), min(first.step, first.steps[-1]) + 1
    if low is None:
        return []
    steps = str(low) if stop == low + 1 else f"{low}:{stop}"
    folders = [_traced_folder(folder, low, stop) for folder in verdict.folders]
    runs = [
        f"{_environment(recording, first)}HASHBENCH_WATCH={shlex.quote(str(folder))} HASHBENCH_TRACE_STEP={steps} "
        f"{_program(recording)}"
        for folder, recording in zip(folders, verdict.recordings, strict=True)
    ]
    return [*runs, shlex.join(["hashbench", "watch", "diff", *map(str, folders)])]


def _from_step(first: RankVerdict, traced: Sequence[TracedSteps]) -> int | None:
    """Return the first step to trace; ``None`` where no further one helps.

    A trace begins with the model's first call in a step. What comes before that call, as a change of the parameters or
    the targets of the loss, is in a trace that begins a step earlier.
    """
    assert first.step is not None
    assert first.since is not None
    step = min(first.step, first.steps[-1])
    own = [steps for steps in traced if steps.rank == first.rank and steps.first <= step <= steps.last]
    if any(steps.names_a_kernel for steps in own):
        return None
    before = own or first.differing[0].begun or first.differing[0].part in _MAYBE_BEFORE_THE_CALL
    low = max(first.since - 1, first.steps[0]) if before else first.since
    called = [number for number in first.steps if number <= low and "batch" in first.seen[number]]
    return None if not called or any(steps.first <= called[-1] for steps in own) else called[-1]


def _traced_folder(folder: Path, low: int, stop: int) -> Path:
    return folder.with_name(f"{folder.name}.step{low}" if stop == low + 1 else f"{folder.name}.steps{low}-{stop - 1}")


def _environment(recording: Recording, verdict: RankVerdict) -> str:
    """Return the variables that a run had, and those by which it gets the threads and instructions that differ."""
    header = recording.header
    found = dict(header.environment)
    differ = {setting.name for setting in verdict.settings}
    if "num_threads" in differ:
        found.setdefault("OMP_NUM_THREADS", header.settings.get("num_threads", ""))
    if "cpu_capability" in differ:
        found.setdefault("ATEN_CPU_CAPABILITY", header.machine.get("cpu_capability", "").lower())
    return "".join(f"{name}={shlex.quote(value)} " for name, value in found.items())


def _program(recording: Recording) -> str:
    header = recording.header
    if header.world_size > 1 or not header.command:
        return "<the same command>"
    return shlex.join(header.command)


# ------------------------------------------------------------------------------------------------ as plain values


def document(verdict: LoopVerdict) -> dict[str, Any]:
    """Return the verdict as plain values; :class:`~hashbench.core.finding.Finding` has the rest."""
    first = verdict.first
    return {
        "folders": list(map(str, verdict.folders)),
        "step": None if first is None else first.step,
        "since": None if first is None else first.since,
        "rank": None if first is None else first.rank,
        "differing": [] if first is None else to_json(first.differing),
        "settings": [] if first is None else to_json(first.settings),
        "agreed": {} if first is None else dict(first.agreed),
        "steps": [verdict.ranks[0].steps[0], verdict.ranks[0].steps[-1]],
        "traced": [_traced_document(traced) for traced in verdict.traced],
        "further": [{**to_json(run), "folder": str(run.folder)} for run in verdict.further],
        "batches": None if first is None or first.batches is None else to_json(first.batches),
        "idle": to_json([rank.idle for rank in verdict.ranks if rank.idle is not None]),
        "not_compared": gaps_of(verdict),
    }


def _traced_document(traced: TracedSteps) -> dict[str, Any]:
    divergence = None if traced.verdict is None else traced.verdict.divergence
    return {
        "rank": traced.rank,
        "steps": [traced.first, traced.last],
        "equal": traced.verdict is not None and traced.verdict.equal,
        "divergence": None if divergence is None else to_json(divergence),
        "problem": traced.problem,
    }
