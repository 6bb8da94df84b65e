"""The first step and part in which two recordings differ. Pure.

A part is compared where both runs read it. Parts of :data:`~hashbench.extensions.watch.file.WHOLE` are read in every
step; a tensor of the model is read by rotation, so that a difference seen in step 300 may have come about since the
step after that in which every tensor had last been seen equal: :attr:`RankVerdict.since`.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from hashbench.core.errors import HashbenchError
from hashbench.extensions.watch.batches import BatchDifference, difference_of
from hashbench.extensions.watch.file import BY_TENSOR, PARTS, Recording, Step
from hashbench.extensions.watch.lacking import lacks_of, tensor_of

OUTSIDE = frozenset({"batch", "generator", "scaler", "lr", "scheduler", "options", "order"})
"""Parts that no kernel of the step computes: what differs first in one of them was made between the steps."""

OUTSIDE_TORCH = frozenset({"python", "numpy"})
"""Generators that few programs seed. One that differs from the first step on is a difference only beside another first
batch of a step, and after the first step only if it is drawn from: it may serve the names of temporary files alone."""

BEGIN = "begin"
"""Column of the state that a step begins with, where both runs read it."""

STATE = frozenset({"buffer", "parameter", "state"})
"""Parts that a step begins with."""

_REPEATED = ("batch", "loss")
"""Parts with one value for each micro-batch, in turn."""


@dataclass(frozen=True, slots=True)
class PartDifference:
    """A part that differs in a step.

    Attributes:
        part: one of :data:`~hashbench.extensions.watch.file.PARTS`, or ``order``: that of an optimizer's parameters.
        names: what differs within it.
        compared: number of names compared.
        first, second: the value of the first of these names in each run; empty: absent.
        equal_at: last step in which the first name was seen equal; ``None``: in none.
        begun: it differs as the step began: the program changed it after the step before.
    """

    part: str
    names: tuple[str, ...]
    compared: int
    first: str
    second: str
    equal_at: int | None = None
    begun: bool = False


@dataclass(frozen=True, slots=True)
class SettingDifference:
    """A setting, a fact of the machine or an environment variable that is another one in the two runs.

    Attributes:
        name: of it.
        first, second: its value in each run; empty: it is not set there.
        at: the first step in which it differs.
    """

    name: str
    first: str
    second: str
    at: int


@dataclass(frozen=True, slots=True)
class RankVerdict:
    """Two recordings of one rank.

    Attributes:
        rank: of both.
        steps: numbers of the steps that both have, ascending.
        step: the first that differs; the one before the first where the initial state does; the one after the last
            where what was read at the end does; ``None``: none.
        since: the first step in which that difference can have come about.
        differing: what differs in it, in the order in which a step meets it.
        agreed: part -> last step in which it was seen equal before.
        seen: step -> part -> whether it is equal; only the parts that were compared.
        notes: other things to know, each a sentence.
        gaps: what was not compared, each a sentence: where there is one, equal steps are no equal runs.
        lengths_differ: one run has steps after the last one of the other, which were compared with nothing.
        idle: a difference that reaches nothing: states of generators, beside which all else is equal to the end.
        idle_at: the first step that has it.
        batches: how the batches of the first step that differs differ; ``None``: they do not, or it is not known.
        settings: what was set differently, up to the first step that differs: a kernel may follow it.
    """

    rank: int
    steps: tuple[int, ...]
    step: int | None
    since: int | None
    differing: tuple[PartDifference, ...]
    agreed: Mapping[str, int]
    seen: Mapping[int, Mapping[str, bool]]
    notes: tuple[str, ...] = ()
    gaps: tuple[str, ...] = ()
    lengths_differ: bool = False
    idle: PartDifference | None = None
    idle_at: int | None = None
    batches: BatchDifference | None = None
    settings: tuple[SettingDifference, ...] = ()

    @property
    def equal(self) -> bool:
        """True if nothing differs that reaches a result, and all of both runs was compared."""
        return self.step is None and not self.gaps

    @property
    def initial(self) -> bool:
        """True if the state before the first step differs."""
        return self.step is not None and self.step < self.steps[0]

    @property
    def at_end(self) -> bool:
        """True if only the state differs that was read at the end."""
        return self.step is not None and self.step > self.steps[-1]


def compare(first: Recording, second: Recording, *, shift: int = 0) -> RankVerdict:
    """Compare two recordings of one rank.

    Args:
        first, second: the recordings.
        shift: added to the step numbers of the second.

    Raises:
        HashbenchError: nothing can be compared: no step or no tensor is in both, or digests are of other devices.
    """
    states, steps = pairs_of_steps(first, second, shift=shift)
    states = [*states, *last_pair(first, second, shift=shift)]
    unseeded = _unseeded(first, second, steps, shift)
    known = _Known(shared_tensors(first, second), unseeded)
    seen: dict[int, dict[str, bool]] = {}
    found: tuple[int, int, tuple[PartDifference, ...]] | None = None
    agreed: dict[str, int] = {}
    reached = False
    for number, old, new in states:
        compared, begun = list(_parts(old, new, known)), _begun(old, new, known)
        seen[number] = {part: not names for part, names, _ in compared} | ({} if begun is None else {BEGIN: not begun})
        reached |= any(names for part, names, _ in compared if part != "generator") or bool(begun)
        if found is None:
            differing = [_difference(known, part, names, total, old, new) for part, names, total in compared if names]
            differing += [*_order(first, second, number, states), *(begun or ())]
            if differing:
                differing.sort(key=functools.partial(_moment, unseeded=unseeded))
                made_here = differing[0].begun or differing[0].part in OUTSIDE or number == states[0][0]
                found = number, number if made_here else min(known.since(), number), tuple(differing)
            else:
                agreed |= {part: number for part, _, _ in compared}
                known.saw(number, old, new)
    idle = found if not reached and found is not None and found[2][0].part == "generator" else None
    step, since, parts = (None, None, ()) if found is None or idle is not None else found
    return RankVerdict(
        first.header.rank,
        steps,
        step,
        since,
        parts,
        agreed,
        seen,
        notes=(*_notes(first, second), *_unseeded_notes(unseeded)),
        gaps=(
            *gaps_of(first, second),
            *unread_gaps(first, second, states, agree=step is None and shift == 0),
            *_lengths(first, second, steps, shift),
        ),
        lengths_differ=_last(first, 0) != _last(second, shift),
        idle=None if idle is None else idle[2][0],
        idle_at=None if idle is None else idle[0],
        batches=batches_of(step, parts, first, second, shift),
        settings=tuple(
            difference
            for difference in settings_of(first, second, steps, shift)
            if step is None or difference.at <= step
        ),
    )


def settings_of(first: Recording, second: Recording, steps: Sequence[int], shift: int) -> Iterator[SettingDifference]:
    """Yield what differs between two runs of torch's settings, the machine and the environment, and since when."""
    reported: set[str] = set()
    headers = [(recording.header.machine, recording.header.environment) for recording in (first, second)]
    states = [(first.steps[number].settings, second.steps[number - shift].settings, number) for number in steps]
    for old, new, number in (*states, *((*pair, steps[0]) for pair in zip(*headers, strict=True))):
        if old is not new:
            for name in dict.fromkeys([*old, *new]):
                if name not in reported and old.get(name) != new.get(name):
                    reported.add(name)
                    yield SettingDifference(name, old.get(name, ""), new.get(name, ""), number)


def batches_of(
    step: int | None, differing: Iterable[PartDifference], first: Recording, second: Recording, shift: int
) -> BatchDifference | None:
    """Return how the batches of a step differ, if they do."""
    if step is None or all(difference.part != "batch" for difference in differing):
        return None
    return difference_of(step, first.steps, {number + shift: step for number, step in second.steps.items()})


def pairs_of_steps(
    first: Recording, second: Recording, *, shift: int = 0
) -> tuple[list[tuple[int, Step, Step]], tuple[int, ...]]:
    """Return number and content of the steps of both runs, the state before the first one included, and the numbers
    without it. Raises as :func:`compare` does."""
    _refuse_other(first, second)
    others = {number + shift: step for number, step in second.steps.items()}
    steps = tuple(number for number in first.steps if number in others)
    for recording in (first, second):
        if not recording.steps:
            raise HashbenchError(
                f"{recording.path} has no step: its run {_end_words(recording)} before its first one",
                consequence="nothing was compared",
                tip="A step is one of an optimizer of torch that holds parameters of the model.",
            )
    if not steps:
        raise HashbenchError(
            f"{first.path} and {second.path} have no step in common",
            consequence=f"they hold {range_words(list(first.steps))} and {range_words(list(others))}; nothing was "
            "compared",
        )
    before = _before(first, second, shift)
    return [*before, *((number, first.steps[number], others[number]) for number in steps)], steps


def last_pair(first: Recording, second: Recording, *, shift: int = 0) -> list[tuple[int, Step, Step]]:
    """Return the states that were read when the recordings ended, numbered after the last step, where both read them
    after the same step."""
    if first.final is None or second.final is None or first.final.number != second.final.number + shift:
        return []
    return [(first.final.number + 1, first.final, second.final)]


def differences_of(first: Recording, second: Recording, old: Step, new: Step) -> list[PartDifference]:
    """Return what differs in one step, in the order in which a step meets it."""
    known = _Known(shared_tensors(first, second), {})
    compared = _parts(old, new, known)
    found = [_difference(known, part, names, total, old, new) for part, names, total in compared if names]
    return sorted(found, key=_moment)


def changed_between(first: Recording, second: Recording, old: Step, new: Step) -> list[PartDifference]:
    """Return what of the state differs as a step began; nothing where that was not read."""
    return _begun(old, new, _Known(shared_tensors(first, second), {})) or []


def _end_words(recording: Recording) -> str:
    if recording.ended == "cut":
        return "was killed, or goes on,"
    return f"ended with {recording.ended}" if recording.ended else "ended"


def _refuse_other(first: Recording, second: Recording) -> None:
    devices = first.header.device, second.header.device
    if devices[0] != devices[1]:
        raise HashbenchError(
            f"{first.path} is of a run on {devices[0]}, {second.path} of one on {devices[1]}",
            consequence="their digests are different functions; nothing was compared",
        )
    if not shared_tensors(first, second):
        raise HashbenchError(
            f"{first.path} is of {first.header.model}, {second.path} of {second.header.model}",
            consequence="they have no parameter in common; nothing was compared",
        )


def shared_tensors(first: Recording, second: Recording) -> frozenset[str]:
    """Return the names of the parameters and buffers that both models have."""
    names = [{*recording.header.parameter, *recording.header.buffer} for recording in (first, second)]
    return frozenset(names[0] & names[1])


def _before(first: Recording, second: Recording, shift: int) -> list[tuple[int, Step, Step]]:
    """Return the state before the second run's first step, where the first run has it: before its own first step; as
    its step of that number began; or else as the step before it ended, but for what the program changed since."""
    if second.before is None:
        return []
    number = second.before.number + shift
    if first.before is not None and first.before.number == number:
        return [(number, first.before, second.before)]
    left, later = first.steps.get(number), first.steps.get(number + 1)
    if later is not None and later.begin:
        return [(number, Step(number, later.begin, complete=True), second.before)]
    if left is None:
        return []
    others = {at + shift: step for at, step in second.steps.items()}
    following = [(step, others[at]) for at, step in first.steps.items() if at > number and at in others]
    changed = _differing(left, second.before)
    changed -= set(_still_differing(changed, following))
    return [(number, _without(left, changed), _without(second.before, changed))]


def _differing(first: Step, second: Step) -> set[tuple[str, str]]:
    """Return what of the state differs, as part and name."""
    values = [
        {(part, name): step.parts[part][name] for part in STATE for name in step.parts.get(part, {})}
        for step in (first, second)
    ]
    return {key for key in values[0].keys() | values[1].keys() if values[0].get(key) != values[1].get(key)}


def _still_differing(
    names: Iterable[tuple[str, str]], following: Sequence[tuple[Step, Step]]
) -> Iterator[tuple[str, str]]:
    """Yield what differs when both runs read it next, or was not read again. What agrees then was not lost: the program
    changed it in between."""
    for part, name in names:
        read = ((old.parts.get(part, {}).get(name), new.parts.get(part, {}).get(name)) for old, new in following)
        old, new = next((pair for pair in read if None not in pair), ("", None))
        if old != new:
            yield part, name


def _without(step: Step, same: set[tuple[str, str]]) -> Step:
    parts = {
        part: {name: value for name, value in values.items() if (part, name) not in same}
        for part, values in step.parts.items()
    }
    return replace(step, parts=parts)


def _last(recording: Recording, shift: int) -> int:
    return max(recording.steps, default=-1) + shift


# ----------------------------------------------------------------------------------------------------- one step


class _Known:
    """What was seen equal so far: tensor by tensor, the last step.

    Attributes:
        tensors: parameters and buffers of both models.
        unseeded: generators that differ from the first step on -> whether they are drawn from.
    """

    def __init__(self, tensors: frozenset[str], unseeded: Mapping[str, bool]) -> None:
        self.tensors, self.unseeded = tensors, unseeded
        self.equal_at: dict[tuple[str, str], int] = {}

    def saw(self, number: int, old: Step, new: Step) -> None:
        """Note that all that both steps read was equal."""
        for part in PARTS:
            for name in old.parts.get(part, {}).keys() & new.parts.get(part, {}).keys():
                self.equal_at[part, name] = number

    def since(self) -> int:
        """Return the step after that in which the tensor seen longest ago was seen equal."""
        held = [number for (part, _), number in self.equal_at.items() if part in BY_TENSOR and part != "gradient"]
        return min(held, default=-1) + 1


def _parts(old: Step, new: Step, known: _Known) -> Iterator[tuple[str, tuple[str, ...], int]]:
    """Yield each part that both steps read, with the names that differ in it and the number of names compared."""
    read = [{**step.parts.get("parameter", {}), **step.parts.get("buffer", {})}.keys() for step in (old, new)]
    tensors = known.tensors & read[0] & read[1]
    for part in PARTS:
        values = old.parts.get(part), new.parts.get(part)
        if values[0] is None or values[1] is None:
            continue
        names = dict.fromkeys([*values[0], *values[1]])
        if part == "generator":
            left_out = _left_out(known, old, new)
            names = {name: None for name in names if name not in left_out}
        if part in BY_TENSOR:
            names = {name: None for name in names if _is_compared(part, name, values, tensors, known.tensors)}
        if names:
            yield part, tuple(name for name in names if values[0].get(name) != values[1].get(name)), len(names)


def _begun(old: Step, new: Step, known: _Known) -> list[PartDifference] | None:
    """Return what of the state differs as a step began; ``None`` where that was not read."""
    if not (old.begin and new.begin):
        return None
    states = Step(old.number, old.begin, complete=True), Step(new.number, new.begin, complete=True)
    return [
        replace(_difference(known, part, names, total, *states), begun=True)
        for part, names, total in _parts(*states, known)
        if names
    ]


def _left_out(known: _Known, old: Step, new: Step) -> set[str]:
    """Return the unseeded generators that did not make this step another one."""
    batches = [step.parts.get("batch", {}).get("0") for step in (old, new)]
    if batches[0] == batches[1]:
        return set(known.unseeded)
    return {name for name, drawn in known.unseeded.items() if not drawn and ("batch", "0") in known.equal_at}


def _is_compared(
    part: str, name: str, values: Sequence[Mapping[str, str] | None], read: Collection[str], shared: Collection[str]
) -> bool:
    """Return True if both steps have this reading of a tensor, or both read the tensor itself: then one is absent."""
    tensor = tensor_of(part, name)
    return tensor in read or (tensor in shared and all(value is not None and name in value for value in values))


def _difference(
    known: _Known, part: str, names: tuple[str, ...], compared: int, old: Step, new: Step
) -> PartDifference:
    first, second = (step.parts[part].get(names[0], "") for step in (old, new))
    if part == "loss" and _loss(old, names[0]) != _loss(new, names[0]):
        first, second = _loss(old, names[0]), _loss(new, names[0])
    return PartDifference(part, names, compared, first, second, known.equal_at.get((part, names[0])))


def _loss(step: Step, name: str) -> str:
    """Return the value of a loss as text; empty where there is none."""
    if int(name) >= len(step.losses):
        return ""
    value = step.losses[int(name)]
    return "not finite" if value is None else repr(value)


def _unseeded(first: Recording, second: Recording, steps: Sequence[int], shift: int) -> dict[str, bool]:
    """Return the generators outside torch that differ in the first step, and whether a run draws from them."""
    runs = [[first.steps[number] for number in steps], [second.steps[number - shift] for number in steps]]
    states = [[step.parts["generator"] for step in run if "generator" in step.parts] for run in runs]
    if not all(states):
        return {}
    return {
        name: any(len({state.get(name) for state in run}) > 1 for run in states)
        for name in sorted(OUTSIDE_TORCH)
        if states[0][0].get(name) != states[1][0].get(name)
    }


def _order(
    first: Recording, second: Recording, number: int, states: Sequence[tuple[int, Step, Step]]
) -> list[PartDifference]:
    """Return the order of the optimizers' parameters, where it differs, as a part of the first step."""
    if number != states[0][0] or first.optimizers == second.optimizers or not (first.optimizers and second.optimizers):
        return []
    flat = [
        [name for optimizer in recording.optimizers for group in optimizer for name in group]
        for recording in (first, second)
    ]
    if sorted(flat[0]) != sorted(flat[1]):
        return []
    at = next((index for index, pair in enumerate(zip(*flat, strict=True)) if pair[0] != pair[1]), 0)
    return [PartDifference("order", tuple(flat[0]), len(flat[0]), flat[0][at], flat[1][at])]


TIMES: Mapping[str, int] = {part: number for number, part in enumerate(("order", *PARTS))}
"""Part -> its place in a step."""


def _moment(difference: PartDifference, unseeded: Mapping[str, bool] = MappingProxyType({})) -> tuple[int, int, int]:
    """Return when a step meets a part: options, the state that it begins with, batches and losses in turn, the rest.

    A generator is read after the first batch, and precedes it: numbers of it made the batch, for it was drawn from no
    differently before. It may also be that a batch made by something else drew more of them, as by rejection.
    """
    if difference.part == "options":  # set by the program, which may change the state between the steps by them
        return (-2, 0, 0)
    if difference.begun:
        return (-1, TIMES[difference.part], 0)
    if difference.part == "generator" and not unseeded.keys() >= set(difference.names):
        return (0, TIMES["batch"], 0)
    turn = int(difference.names[0]) if difference.part in _REPEATED else 0
    late = TIMES[difference.part] > TIMES["loss"]
    return (2**31 if late else turn, TIMES[difference.part], 1)


# -------------------------------------------------------------------------------------------------------- notes


def _lengths(first: Recording, second: Recording, steps: Sequence[int], shift: int) -> Iterator[str]:
    """Say which steps were compared with nothing."""
    if _last(first, 0) != _last(second, shift) or len(first.steps) != len(second.steps):
        yield f"{first.path.parent} has {range_words(list(first.steps))}, {second.path.parent} " + (
            f"{range_words(list(second.steps))}; compared: {range_words(steps)}."
        )


def gaps_of(first: Recording, second: Recording) -> Iterator[str]:
    """Say what was not compared in the steps of both: what has not ended, was not recorded or not read, or is in one
    run alone."""
    for recording in (first, second):
        name = recording.path.parent
        after = f"after step {_last(recording, 0)}"
        if recording.ended == "cut":
            yield f"{name} has no end: its run was killed {after}, or goes on, or its disk was full."
        elif recording.ended:
            yield f"{name} ended {after} with {recording.ended}."
        for what in recording.missed:
            yield f"{name} did not record {what}."
    if not any(step.parts.get("batch") for recording in (first, second) for step in recording.steps.values()):
        yield (
            "The watched model was not called: batches and generators are not compared, and no step can be traced. "
            "Watch the module that the loop calls, or pass the batches to batch(…) of what hashbench.watch returns."
        )
    for each, other in ((first, second), (second, first)):
        for kind in ("parameter", "buffer"):
            alone = sorted(set(getattr(each.header, kind)) - set(getattr(other.header, kind)))
            if alone:
                more = f" and {len(alone) - 1} more" if len(alone) > 1 else ""
                yield f"Only {each.path.parent} has the {kind} {alone[0]}{more}."
        read = [
            {part for step in run.steps.values() for part, values in step.parts.items() if values}
            for run in (each, other)
        ]
        for part in PARTS:
            if part in read[0] - read[1] and part != "state":
                yield f"Only {each.path.parent} recorded the part {part} of a step."


def unread_gaps(
    first: Recording, second: Recording, states: Sequence[tuple[int, Step, Step]], *, agree: bool
) -> Iterator[str]:
    """Say what a run lacks in these states, though it should have it; ``agree``: nothing differs in states that have
    the same number in both runs."""
    return lacks_of(first, second, states, shared=shared_tensors(first, second), aligned=agree)


def _notes(first: Recording, second: Recording) -> Iterator[str]:
    for package, version in first.header.versions.items():
        changed = second.header.versions.get(package)
        if changed != version:
            yield f"{package} is {version} in {first.path.parent} and {changed} in {second.path.parent}."


def _unseeded_notes(unseeded: Mapping[str, bool]) -> Iterator[str]:
    for name, drawn in unseeded.items():
        if drawn:
            yield f"The generator of {name} differs from the first step on (not seeded alike), and is drawn from."


def range_words(steps: Sequence[int]) -> str:
    """Return ``steps 3 to 9``."""
    if not steps:
        return "no steps"
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
