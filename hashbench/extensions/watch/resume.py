"""What a resumed training did not restore: its first step and the state before it, against the uninterrupted run.

Pure."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hashbench.core.errors import HashbenchError
from hashbench.core.finding import Finding, few
from hashbench.core.io import to_json
from hashbench.core.text import count, format_ranks, listed
from hashbench.extensions.watch import file
from hashbench.extensions.watch.batches import BatchDifference, SampleMatch
from hashbench.extensions.watch.compare import (
    OUTSIDE,
    OUTSIDE_TORCH,
    STATE,
    PartDifference,
    batches_of,
    changed_between,
    differences_of,
    gaps_of,
    last_pair,
    pairs_of_steps,
    range_words,
    unread_gaps,
)
from hashbench.extensions.watch.file import PARTS, Recording, Step
from hashbench.extensions.watch.text import part_words

_WORDS = {
    "batch": "batches",
    "generator": "generators",
    "scaler": "scaler",
    "loss": "losses",
    "buffer": "buffers",
    "gradient": "gradients",
    "lr": "learning rates",
    "scheduler": "schedulers",
    "options": "options",
    "parameter": "parameters",
    "state": "optimizer state",
}


@dataclass(frozen=True, slots=True)
class ResumeVerdict:
    """A resumed run against the uninterrupted one.

    Attributes:
        folders: of the uninterrupted run and of the resumed one.
        at: first step of the resumed run.
        lost: what was not restored: in the state before that step, and of what it began with.
        then: what else differs in that step.
        steps: numbers of the steps of both.
        later: the first later step that differs, where nothing does in the first; ``None``: none.
        in_later: what differs in it.
        recorded: parts that both recordings have.
        gaps: what was not compared in these steps, each a sentence.
        batches: how the batches of the first step differ; ``None``: they do not.
        idle: generators whose state was another one in the first step, was equal again later, and reached nothing.
        unread: of tensors, what the uninterrupted run began this step with was not read: a share of them after the step
            before, or what is lost may have been changed since.
        ranks: ranks that show the same, when there are several.
    """

    folders: tuple[Path, Path]
    at: int
    lost: tuple[PartDifference, ...]
    then: tuple[PartDifference, ...]
    steps: tuple[int, ...]
    later: int | None = None
    in_later: tuple[PartDifference, ...] = ()
    recorded: tuple[str, ...] = ()
    gaps: tuple[str, ...] = ()
    batches: BatchDifference | None = None
    idle: tuple[str, ...] = ()
    unread: bool = False
    ranks: tuple[int, ...] = ()

    @property
    def equal(self) -> bool:
        """True if the resumed run is the uninterrupted one in all that was recorded, in the steps of both."""
        return not self.differs and not self.gaps

    @property
    def differs(self) -> bool:
        """True if something was lost or differs. Neither this nor ``equal``: not all was compared."""
        return bool(self.lost or self.then) or self.later is not None


def judge_folders(first: Path, second: Path, *, at: int | None = None) -> ResumeVerdict:
    """Judge the recordings of an uninterrupted run and of one that went on from a checkpoint.

    Args:
        first, second: folders of the two.
        at: first step of the second; default: the ``start=`` of its program.

    Raises:
        HashbenchError: it is not known where the second begins, or nothing can be compared.
    """
    paths = [file.ranks(folder) for folder in (first, second)]
    both = sorted(paths[0].keys() & paths[1].keys())
    if not both:
        raise HashbenchError(f"{first} and {second} have no rank in common", consequence="nothing was compared")
    found = [(rank, judge(file.read(paths[0][rank]), file.read(paths[1][rank]), at=at)) for rank in both]
    worst = max(
        (verdict for _, verdict in found), key=lambda verdict: (bool(verdict.lost), verdict.differs, not verdict.equal)
    )
    alike = [rank for rank, verdict in found if (verdict.differs, verdict.equal) == (worst.differs, worst.equal)]
    return replace(worst, folders=(first, second), ranks=tuple(alike) if len(both) > 1 else ())


def judge(first: Recording, second: Recording, *, at: int | None = None) -> ResumeVerdict:
    """Judge two recordings of one rank; see :func:`judge_folders`."""
    shift = _shift(second, at)
    pairs, steps = pairs_of_steps(first, second, shift=shift)
    began = steps[0]
    lost: dict[tuple[str, str], PartDifference] = {}
    then: list[PartDifference] = []
    unread, later, in_later, elsewhere = True, None, [], False
    idle = _idle_generators(first)
    for number, old, new in pairs:
        between = changed_between(first, second, old, new) if number > began else []
        found = [*differences_of(first, second, old, new), *between]
        differing = [kept for difference in found if (kept := _without(difference, idle)).names]
        if number < began:
            as_begun = old is first.before or bool(first.steps[number + 1].begin)
            unread = not old.complete or (not as_begun and any(result.part in STATE for result in differing))
            lost |= {_key(result): result for result in differing}
        elif number == began:
            lost |= {_key(result): result for result in differing if result.part in OUTSIDE}
            then = [result for result in differing if result.part not in OUTSIDE]
        elsewhere |= number > began and bool(differing)
        if number > began and differing and later is None and not (lost or then):
            later, in_later = number, sorted(differing, key=lambda result: not result.begun)
    set_again = _set_again(pairs, lost, idle, is_all=not then and not elsewhere)
    lost = {} if set_again else lost
    if later is None and not (lost or then):
        ends = [
            difference
            for _, *end in last_pair(first, second, shift=shift)
            for difference in differences_of(first, second, *end)
        ]
        in_later = [difference for difference in ends if difference.part != "generator"]
        later = steps[-1] + 1 if in_later else None
    agree = shift == 0 and later is None and not (lost or then)
    return ResumeVerdict(
        (first.path.parent, second.path.parent),
        began,
        tuple(sorted(lost.values(), key=lambda difference: difference.part != "generator")),
        tuple(then),
        steps,
        later,
        tuple(in_later),
        tuple(part for part in PARTS if any(part in old.parts and part in new.parts for _, old, new in pairs)),
        (*gaps_of(first, second), *unread_gaps(first, second, pairs, agree=agree)),
        batches_of(began, lost.values(), first, second, shift),
        set_again,
        unread,
    )


def _idle_generators(recording: Recording) -> frozenset[str]:
    """Return the generators outside torch that a run never draws from: their states need not be restored."""
    states = [step.parts.get("generator", {}) for step in recording.steps.values()]
    return frozenset(name for name in OUTSIDE_TORCH if len({state.get(name) for state in states}) == 1)


def _set_again(
    pairs: Sequence[tuple[int, Step, Step]],
    lost: Mapping[tuple[str, str], PartDifference],
    idle: Collection[str],
    *,
    is_all: bool,
) -> tuple[str, ...]:
    """Return the generators that differ in the first step alone, where nothing else does in any: the program seeds them
    before it draws from them."""
    read = [
        (old.parts["generator"], new.parts["generator"])
        for _, old, new in pairs
        if "generator" in old.parts and "generator" in new.parts
    ]
    if not is_all or any(difference.part != "generator" for difference in lost.values()) or len(read) < 2:
        return ()
    names = [name for difference in lost.values() for name in difference.names if name not in idle]
    return tuple(names) if all(read[-1][0].get(name) == read[-1][1].get(name) for name in names) else ()


def _without(difference: PartDifference, idle: frozenset[str]) -> PartDifference:
    """Return a difference without generators that are not drawn from."""
    if difference.part != "generator":
        return difference
    return replace(difference, names=tuple(name for name in difference.names if name not in idle))


def _key(difference: PartDifference) -> tuple[str, str]:
    return difference.part, difference.names[0]


def _shift(second: Recording, at: int | None) -> int:
    """Return what to add to the step numbers of the resumed run."""
    start = second.header.start
    if start and at is not None and start != at:
        raise HashbenchError(
            f"{second.path.parent} begins with step {start}, not {at}",
            consequence="nothing was compared",
            tip="Leave out --at, or give that step.",
        )
    if start:
        return 0
    if at is None:
        raise HashbenchError(
            f"{second.path.parent} has no start step",
            consequence="its steps cannot be compared with those of the uninterrupted run",
            tip="Give --at N, or hashbench.watch(…, start=N) in the program.",
        )
    return at


def began_anew(first: Recording, second: Recording) -> bool:
    """Return True if a run that should have gone on began with the state that the other one began with."""
    if first.before is None or second.before is None:
        return False
    return not [
        difference
        for difference in differences_of(first, second, first.before, second.before)
        if difference.part != "state"
    ]


def restored_at(first: Recording, second: Recording) -> int | None:
    """Return the step before which the first run had the parameters that the second one began with; ``None``: it never
    had, or it is not recorded."""
    begun = {} if second.before is None else second.before.parts.get("parameter", {})
    for number, step in reversed(list(first.steps.items())):
        if begun and (step.parts.get("parameter") == begun or step.begin.get("parameter") == begun):
            return number + (step.begin.get("parameter") != begun)
    return None


# ------------------------------------------------------------------------------------------------------ in words


def finding_of(verdict: ResumeVerdict) -> Finding:
    """Return the report of a resumed run."""
    return Finding(
        headline=_headline(verdict),
        facts=tuple(_facts(verdict)),
        notes=tuple(_notes(verdict)),
        next=(shlex.join(["hashbench", "watch", "diff", *map(str, verdict.folders)]),) if verdict.differs else (),
        equal=verdict.equal,
        differs=verdict.differs,
        data={**to_json(verdict), "folders": list(map(str, verdict.folders)), "not_restored": lost_of(verdict)},
    )


def _headline(verdict: ResumeVerdict) -> str:
    ranks = f" on {format_ranks(verdict.ranks)}" if verdict.ranks else ""
    if verdict.lost:
        return f"Not everything was restored at step {verdict.at}{ranks}"
    if not verdict.differs:
        whole = "; not all was compared" if verdict.gaps else ""
        return f"The resumed run matches the uninterrupted run in {range_words(verdict.steps)}{ranks}{whole}"
    if verdict.later is None:
        return f"Everything recorded was restored at step {verdict.at}{ranks}, and its {verdict.then[0].part} differs"
    where = "after the last step" if verdict.later > verdict.steps[-1] else f"from step {verdict.later} on"
    return f"Everything recorded was restored at step {verdict.at}{ranks}; the runs differ {where}"


def _facts(verdict: ResumeVerdict) -> Iterator[tuple[str, str]]:
    for number, words in enumerate(lost_of(verdict)):
        yield "also not restored" if number else "not restored", words
    if verdict.later is not None:
        yield "what differs", part_words(verdict.in_later[0])
    yield "compared", f"{count(len(verdict.steps), 'step')}: {listed([_WORDS[part] for part in verdict.recorded])}"


def _notes(verdict: ResumeVerdict) -> Iterator[str]:
    yield from () if verdict.differs else verdict.gaps
    if not verdict.differs:
        if verdict.idle:
            names = few(verdict.idle)
            yield f"The state of generator {names} differed at step {verdict.at}, was set again, and reached nothing."
        yield (
            "Averages and other modules are not recorded. Later steps were not compared: `--steps N` runs a script for "
            "N steps."
        )
    elif verdict.later is None and not verdict.lost:
        yield "The cause is a state that is not recorded, or a kernel that is not deterministic."
    if verdict.unread and not verdict.equal:
        yield (
            f"Not all tensors with which the uninterrupted run began step {verdict.at} were read (a change between "
            "steps is no loss): record it with HASHBENCH_WATCH_EVERY=1 for all names."
        )


def lost_of(verdict: ResumeVerdict) -> list[str]:
    """Return what was not restored, in words; a generator, as the likely source of other batches, first."""
    other_batch = any(difference.part == "batch" for difference in verdict.lost)
    return [
        _batch_words(verdict.batches)
        if difference.part == "batch"
        else lost_words(difference)
        + (", the likely source of the different batch" if other_batch and difference.part == "generator" else "")
        for difference in verdict.lost
    ]


def _batch_words(batches: BatchDifference | None) -> str:
    """Return what another batch says of a resumption, as far as its samples tell."""
    if batches is not None and batches.in_shape and batches.samples is not SampleMatch.OTHER:
        first, second = batches.words()
        return f"data position, or its batches: {second} instead of {first}"
    match SampleMatch.UNKNOWN if batches is None else batches.samples:
        case SampleMatch.SAME:
            return "data order: the batch has the same samples in a different order, or different labels"
        case SampleMatch.MOVED:
            return "data position: the batch has samples of different steps (sampler, its generator, or workers)"
        case SampleMatch.OTHER:
            return (
                "data content: no sample of the batch is in the uninterrupted run (random transforms, augmentation, "
                "noise, or different data)"
            )
    return "data position, or random transforms: the first batch differs"


def lost_words(difference: PartDifference) -> str:
    """Return what was not restored, as ``optimizer state exp_avg of 4 parameters (fc.weight, …)``."""
    names = difference.names
    match difference.part:
        case "generator":
            return f"generator {few(names)}: its state"
        case "scheduler":
            more = f" (and {few(names[1:])})" if len(names) > 1 else ""
            return f"scheduler: {names[0]} is {difference.second or 'absent'} instead of {difference.first}{more}"
        case "lr":
            return f"scheduler: the learning rate is {difference.second or 'absent'} instead of {difference.first}"
        case "scaler":
            return f"gradient scaler: {names[0]} is {difference.second or 'absent'} instead of {difference.first}"
        case "options":
            return f"option {names[0]} is {difference.second or 'absent'} instead of {difference.first}"
        case "state":
            keys = few(list(dict.fromkeys(name.rpartition(": ")[2] for name in names)))
            tensors = list(dict.fromkeys(name.rpartition(": ")[0] for name in names))
            gone = ", which is absent" if not difference.second else ""
            return f"optimizer state {keys}{gone}, of {_tensors(tensors)}"
    return _tensors(names, difference.part)


def _tensors(names: Sequence[str], noun: str = "parameter") -> str:
    return f"{count(len(names), noun)} ({few(names)})"
