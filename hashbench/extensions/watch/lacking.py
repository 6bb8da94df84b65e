"""What a recording lacks of what it should hold: such readings were compared with nothing. Pure.

Which tensors a step reads follows from ``every`` and from the names and sizes of the tensors, and a file has no sizes.
So a tensor should be in a step that says it is complete; that has another digest of it, as its gradient's; or in which
the other run read it, where both runs read by one rotation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from hashbench.extensions.watch.file import PARTS, Recording, Step

_ALWAYS = frozenset({"batch", "loss", "buffer", "gradient", "lr", "parameter", "state"})
"""Parts that each line of a step has, if only as an empty list."""

_KINDS = {"parameter": frozenset({"parameter", "gradient", "state"}), "buffer": frozenset({"buffer"})}
"""Kind of tensor -> parts that show that it was its turn."""

_OF_STATE = frozenset({"parameter", "buffer", "state"})

Pair = tuple[int, Step, Step]
"""Number and content of one step of both runs."""


@dataclass(frozen=True, slots=True)
class _Lack:
    number: int
    what: str


def tensor_of(part: str, name: str) -> str:
    """Return the tensor that a name within a part is of: in the state of an optimizer, a key follows it."""
    return name.rpartition(": ")[0] if part == "state" else name


def lacks_of(
    first: Recording, second: Recording, pairs: Sequence[Pair], *, shared: frozenset[str], aligned: bool
) -> Iterator[str]:
    """Say what each run lacks, one sentence for a run.

    Args:
        first, second: the recordings.
        pairs: their steps, the states before the first one and at the end included. A state that is made of others is
            left out: what the program changed is not in it.
        shared: tensors of both models.
        aligned: nothing differs, and the steps have the same numbers in both runs. Tensors of one name have one size
            then, for their digests agree.
    """
    runs = first, second
    pairs = [(at, old, new) for at, old, new in pairs if _is_any(old, first.before, first.steps.get(at), first.final)]
    found: tuple[list[_Lack], list[_Lack]] = [], []
    steps = {number for number, old, _ in pairs if first.steps.get(number) is old}
    begins = min(steps)
    recorded = [_recorded(run) for run in runs]
    known = [{kind: _names(run.before, kind) for kind in _KINDS} for run in runs]
    rotates = {kind: _is_one_rotation(first, second, pairs, kind, shared, aligned=aligned) for kind in _KINDS}
    for number, *states in pairs:
        for index, (own, other) in enumerate((states, states[::-1])):
            parts = [
                part
                for part in PARTS
                if part not in own.parts and part in recorded[index]
                if _should_have(part, own, other, is_step=number in steps)
            ]
            found[index].extend(_Lack(number, f"the part {part}") for part in parts)
            for kind in _KINDS.keys() & recorded[index] - set(parts):
                names = _lacking(own, other, kind, known[index][kind], rotates=rotates[kind] and number in steps)
                found[index].extend(_Lack(number, f"the {kind} {name}") for name in sorted(names & shared))
                known[index][kind] |= _names(own, kind)
            found[index].extend(_lacks_at_begin(number, own, other, runs, shared, is_first=number <= begins))
    for run, lacks in zip(runs, found, strict=True):
        if lacks:
            yield _sentence(run, lacks, steps)


def _is_any(step: Step, *read: Step | None) -> bool:
    return any(step is each for each in read)


def _sentence(run: Recording, lacks: Sequence[_Lack], steps: Iterable[int]) -> str:
    lead = lacks[0]
    where = f"in step {lead.number}" if lead.number in steps else _beside(lead.number, steps)
    more = f", and {len(lacks) - 1} more that it should have" if len(lacks) > 1 else ", which it should have"
    return f"{run.path.parent} lacks {lead.what} {where}{more}."


def _beside(number: int, steps: Iterable[int]) -> str:
    return f"before step {number + 1}" if number < min(steps) else "at the end"


def _recorded(run: Recording) -> frozenset[str]:
    """Return the parts that any step has: of a part that none has, nothing is known to be missing."""
    return frozenset(part for step in run.steps.values() for part, values in step.parts.items() if values)


def _names(step: Step | None, kind: str) -> set[str]:
    return set() if step is None else set(step.parts.get(kind, ()))


def _turns(step: Step, kind: str) -> set[str]:
    """Return the tensors whose turn it was."""
    return {tensor_of(part, name) for part in _KINDS[kind] for name in step.parts.get(part, ())}


def _should_have(part: str, own: Step, other: Step, *, is_step: bool) -> bool:
    """Return True if a state of one run should have a part: by its kind, by what the other run has, or by a batch,
    beside which generators are read."""
    if not is_step:
        return part in _OF_STATE and bool(other.parts.get(part))
    beside_a_batch = part == "generator" and bool(own.parts.get("batch"))
    return part in _ALWAYS or beside_a_batch or bool(other.parts.get(part))


def _lacking(own: Step, other: Step, kind: str, known: set[str], *, rotates: bool) -> set[str]:
    """Return the tensors that a run should have read."""
    expected = _turns(own, kind)
    if own.complete:
        expected |= known | _turns(other, kind)
    elif rotates:
        expected |= _turns(other, kind)
    return expected - _names(own, kind)


def _is_one_rotation(
    first: Recording, second: Recording, pairs: Sequence[Pair], kind: str, shared: frozenset[str], *, aligned: bool
) -> bool:
    """Return True if both runs read the tensors of a kind by one rotation, but for what is missing.

    Where steps have other numbers, or sizes may be others, that is seen by most steps. It may be wrong: of two runs
    whose rotations differ in few steps, as by the size of one tensor of many, those steps are said to lack it.
    """
    if first.header.every != second.header.every:
        return False
    if set(getattr(first.header, kind)) != set(getattr(second.header, kind)):
        return False
    steps = [(old, new) for number, old, new in pairs if first.steps.get(number) is old]
    turns = [(_turns(old, kind) & shared, _turns(new, kind) & shared) for old, new in steps]
    turns = [pair for pair in turns if pair[0] or pair[1]]
    return aligned or 2 * sum(old == new for old, new in turns) > len(turns)


def _lacks_at_begin(
    number: int,
    own: Step,
    other: Step,
    runs: tuple[Recording, Recording],
    shared: frozenset[str],
    *,
    is_first: bool,
) -> Iterator[_Lack]:
    """Yield what is missing of the state that a step began with, which each but a run's first has if ``every`` is 1."""
    if not other.begin:
        return
    if not own.begin:
        if all(run.header.every == 1 for run in runs) and not is_first:
            yield _Lack(number, "the state that it began with")
        return
    for part in _OF_STATE - {"state"}:
        for name in sorted(set(other.begin.get(part, ())) - set(own.begin.get(part, ()))):
            if name in shared:
                yield _Lack(number, f"the {part} {name} of the beginning")
