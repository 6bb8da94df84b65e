"""What a resumed training did not restore: its first step and the state before it, against the uninterrupted run.

Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hashbench.errors import HashbenchError
from hashbench.io import to_json
from hashbench.text import a_few, count
from hashbench.training import file
from hashbench.training.compare import (
    OUTSIDE,
    OUTSIDE_TORCH,
    STATE,
    PartDifference,
    differences_of,
    pairs_of_steps,
    range_words,
)
from hashbench.training.file import Recording

_SHOWN = 4


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
    unread: bool = False
    ranks: tuple[int, ...] = ()

    @property
    def equal(self) -> bool:
        """True if the resumed run is the uninterrupted one, as far as both go."""
        return not self.lost and not self.then and self.later is None


def judge_folders(first: Path, second: Path, *, at: int | None = None) -> ResumeVerdict:
    """Judge the recordings of an uninterrupted run and of one that went on from a checkpoint.

    Args:
        first, second: folders of the two.
        at: first step of the second; default: as its program told (``start=``).

    Raises:
        HashbenchError: it is not known where the second begins, or nothing can be compared.
    """
    paths = [file.ranks(folder) for folder in (first, second)]
    both = sorted(paths[0].keys() & paths[1].keys())
    if not both:
        raise HashbenchError(f"{first} and {second} have no rank in common", consequence="nothing was compared")
    found = [(rank, judge(file.read(paths[0][rank]), file.read(paths[1][rank]), at=at)) for rank in both]
    worst = max((verdict for _, verdict in found), key=lambda verdict: (bool(verdict.lost), not verdict.equal))
    alike = [rank for rank, verdict in found if verdict.equal == worst.equal]
    return replace(worst, folders=(first, second), ranks=tuple(alike) if len(both) > 1 else ())


def judge(first: Recording, second: Recording, *, at: int | None = None) -> ResumeVerdict:
    """Judge two recordings of one rank; see :func:`judge_folders`."""
    shift = _shift(second, at)
    pairs, steps = pairs_of_steps(first, second, shift=shift)
    began = steps[0]
    lost: dict[tuple[str, str], PartDifference] = {}
    then: list[PartDifference] = []
    unread, later = True, None
    idle = _idle_generators(first)
    for number, old, new in pairs:
        differing = [kept for one in differences_of(first, second, old, new) if (kept := _without(one, idle)).names]
        if number < began:
            as_begun = old is first.before or bool(first.steps[number + 1].begin)
            unread = not old.complete or (not as_begun and any(one.part in STATE for one in differing))
            lost |= {_key(one): one for one in differing}
        elif number == began:
            lost |= {_key(one): one for one in differing if one.part in OUTSIDE}
            then = [one for one in differing if one.part not in OUTSIDE]
        elif differing and later is None and not (lost or then):
            later = number
    folders = first.path.parent, second.path.parent
    return ResumeVerdict(folders, began, tuple(lost.values()), tuple(then), steps, later, unread)


def _idle_generators(recording: Recording) -> frozenset[str]:
    """Return the generators outside torch that a run never draws from: their states need not be restored."""
    states = [step.parts.get("generator", {}) for step in recording.steps.values()]
    return frozenset(name for name in OUTSIDE_TORCH if len({state.get(name) for state in states}) == 1)


def _without(difference: PartDifference, idle: frozenset[str]) -> PartDifference:
    """Return a difference without generators that are not drawn from."""
    if difference.part != "generator":
        return difference
    return replace(difference, names=tuple(name for name in difference.names if name not in idle))


def _key(difference: PartDifference) -> tuple[str, str]:
    return difference.part, difference.names[0]


def _shift(second: Recording, at: int | None) -> int:
    """Return what to add to the step numbers of the resumed run."""
    told = second.header.start
    if told and at is not None and told != at:
        raise HashbenchError(
            f"{second.path.parent} begins with step {told}, not {at}",
            consequence="nothing was compared",
            tip="Leave out --at, or give that step.",
        )
    if told:
        return 0
    if at is None:
        raise HashbenchError(
            f"{second.path.parent} does not tell with which step it begins",
            consequence="its steps cannot be compared with those of the uninterrupted run",
            tip="Give --at N, or hashbench.watch(…, start=N) in the program.",
        )
    return at


def began_anew(first: Recording, second: Recording) -> bool:
    """Return True if a run that should have gone on began with the state that the other one began with."""
    if first.before is None or second.before is None:
        return False
    return not [one for one in differences_of(first, second, first.before, second.before) if one.part != "state"]


def restored_at(first: Recording, second: Recording) -> int | None:
    """Return the step before which the first run had the parameters that the second one began with; ``None``: it never
    had, or it is not recorded."""
    begun = {} if second.before is None else second.before.parts.get("parameter", {})
    for number, step in reversed(list(first.steps.items())):
        if begun and (step.parts.get("parameter") == begun or step.begin.get("parameter") == begun):
            return number + (step.begin.get("parameter") != begun)
    return None


# ------------------------------------------------------------------------------------------------------ in words


def as_text(verdict: ResumeVerdict) -> str:
    """Return what ``hashbench watch resume`` prints."""
    return "\n".join(_lines(verdict))


def _lines(verdict: ResumeVerdict) -> Iterator[str]:
    on = f" on ranks {', '.join(map(str, verdict.ranks))}" if verdict.ranks else ""
    if verdict.equal:
        yield f"The resumed run is the uninterrupted one in {range_words(verdict.steps)}{on}."
    elif verdict.later is not None:
        yield (
            f"All that is recorded was restored at step {verdict.at}{on}: the runs differ from step {verdict.later} on."
        )
        yield f"`hashbench watch diff {verdict.folders[0]} {verdict.folders[1]}` says in what."
    elif verdict.lost:
        yield f"Resumed at step {verdict.at}{on}, not restored:"
        yield from (f"  {lost_words(one)}" for one in verdict.lost)
    else:
        yield (
            f"All that is recorded was restored at step {verdict.at}{on}, and its {verdict.then[0].part} differs: a "
            "state that is not recorded, or a kernel that does not repeat."
        )
    if verdict.unread and not verdict.equal:
        yield (
            f"How the uninterrupted run began step {verdict.at} was not read in full (what a program changes between "
            "steps is no loss): record it with HASHBENCH_WATCH_EVERY=1 for all names."
        )


def lost_words(difference: PartDifference) -> str:
    """Return what was not restored, as ``optimizer state exp_avg of 4 parameters (fc.weight, …)``."""
    names = difference.names
    match difference.part:
        case "generator":
            return f"generator {a_few(names, _SHOWN)}: its state"
        case "batch":
            return "position in the data: the batch is another one (sampler, its generator, or workers)"
        case "lr":
            return f"scheduler: the learning rate is {difference.second or 'absent'} instead of {difference.first}"
        case "scaler":
            return f"gradient scaler: {names[0]} is {difference.second or 'absent'} instead of {difference.first}"
        case "options":
            return f"option {names[0]} is {difference.second or 'absent'} instead of {difference.first}"
        case "state":
            keys = a_few(list(dict.fromkeys(name.rpartition(": ")[2] for name in names)))
            tensors = list(dict.fromkeys(name.rpartition(": ")[0] for name in names))
            gone = ", which is absent" if not difference.second else ""
            return f"optimizer state {keys}{gone}, of {_tensors(tensors)}"
    return _tensors(names, difference.part)


def _tensors(names: Sequence[str], noun: str = "parameter") -> str:
    return f"{count(len(names), noun)} ({a_few(names, _SHOWN)})"


def as_json(verdict: ResumeVerdict) -> str:
    """Return the verdict as a JSON document."""
    words = [lost_words(one) for one in verdict.lost]
    folders = list(map(str, verdict.folders))
    fields = {**to_json(verdict), "folders": folders, "equal": verdict.equal, "not_restored": words}
    return json.dumps(fields, indent=1)
