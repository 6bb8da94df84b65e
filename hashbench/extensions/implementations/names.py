"""What names of tensors say once most are matched by content: where a tensor is expected, and what stands elsewhere.

A number between dots is that of a layer or an expert; with ``#`` in its place the rest is the name's template. Names
never match tensors: they only tell which of the tensors that are left belong together.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hashbench.core.text import one_line

Pairs = Sequence[tuple[str, str]]
"""Names of equal tensors on both sides."""


def split(name: str) -> tuple[str, tuple[int, ...]]:
    """Return the template of a name, and its numbers.

    >>> split("layers.3.w1.weight")
    ('layers.#.w1.weight', (3,))
    """
    parts = name.split(".")
    numbers = tuple(int(part) for part in parts if part.isdecimal())
    return ".".join("#" if part.isdecimal() else part for part in parts), numbers


def joined(template: str, numbers: Sequence[int]) -> str:
    """Return the name with a template and numbers."""
    left = iter(numbers)
    return ".".join(str(next(left)) if part == "#" else part for part in template.split("."))


def braced(names: Sequence[str], *, most: int = 4) -> str:
    """Return names as one text: what they share once, what differs in braces, of which at most ``most`` are shown.

    >>> braced(["layers.0.q_proj.weight", "layers.0.k_proj.weight"])
    'layers.0.{q,k}_proj.weight'
    """
    names = list(dict.fromkeys(names))
    if len(names) < 2:
        return one_line("".join(names))
    start = os.path.commonprefix(names)  # noqa: RUF071 – of characters, as meant
    end = os.path.commonprefix([name[len(start) :][::-1] for name in names])[::-1]  # noqa: RUF071
    middles = [name[len(start) : len(name) - len(end)] for name in names]
    shown = ",".join([*middles[:most], *(["…"] if len(middles) > most else [])])
    return one_line(f"{start}{{{shown}}}{end}")


@dataclass(frozen=True, slots=True)
class ExpectedNames:
    """Where tensors of one side are expected on the other.

    Attributes:
        votes: template here -> template there and how far its numbers are shifted -> pairs that say so.
        shifts: how far numbers are shifted -> pairs of whatever template that say so.
        names: all names on the other side.
    """

    votes: Mapping[str, Counter[tuple[str, tuple[int, ...]]]]
    shifts: Counter[tuple[int, ...]]
    names: Container[str]

    @classmethod
    def of(cls, pairs: Pairs, names: Container[str]) -> ExpectedNames:
        """Return what these pairs of equal tensors let expect of others."""
        votes: defaultdict[str, Counter[tuple[str, tuple[int, ...]]]] = defaultdict(Counter)
        for one, other in pairs:
            (here, numbers), (there, theirs) = split(one), split(other)
            votes[here][there, _shift(numbers, theirs)] += 1
        shifts = Counter(shift for each in votes.values() for (_, shift), times in each.items() for _ in range(times))
        return cls(dict(votes), shifts, names)

    def name(self, name: str) -> str:
        """Return the name that a tensor is expected to have there; empty if none is."""
        if name in self.names:
            return name
        template, numbers = split(name)
        votes = self.votes.get(template, Counter())
        for there, shift in sorted(votes, key=lambda vote: (votes[vote], self.shifts[vote[1]]), reverse=True):
            if there.count("#") > len(numbers):
                continue
            made = joined(there, [*(number + by for number, by in zip(numbers, shift, strict=False))])
            if made in self.names:
                return made
        return ""

    def is_sure(self, name: str) -> bool:
        """Return whether one template there, and one shift of numbers, is more frequent than every other."""
        if name in self.names:
            return True
        votes = self.votes.get(split(name)[0], Counter())
        there: Counter[str] = Counter()
        for (template, _), times in votes.items():
            there[template] += times
        lengths = {len(shift) for _, shift in votes}
        alike = Counter({shift: times for shift, times in self.shifts.items() if len(shift) in lengths})
        return all(_has_first(each) for each in (there, alike))


def _has_first(counted: Counter[Any]) -> bool:
    """Return whether one is counted more often than every other."""
    (_, most), *others = counted.most_common() or [("", 0)]
    return most > max((times for _, times in others), default=0)


def _shift(numbers: Sequence[int], theirs: Sequence[int]) -> tuple[int, ...]:
    return tuple(other - own for own, other in zip(numbers, theirs, strict=False))


def exchanged(pairs: Pairs, names: Container[str]) -> list[tuple[tuple[str, str], ...]]:
    """Return the pairs whose tensors stand in each other's places, circle by circle.

    A pair counts if the tensor is expected under another name, that of a tensor of another such pair, and those that
    stand where they are expected outnumber them.
    """
    expected = ExpectedNames.of(pairs, names)
    place = dict(pairs)
    moved = {one: expected.name(one) for one, other in pairs if expected.is_sure(one)}
    moved = {one: name for one, name in moved.items() if name and name != place[one]}
    circles = []
    holder = {other: one for one, other in pairs}
    while moved:
        first = next(iter(moved))
        circle, one = [first], first
        while (one := holder.get(moved[one], "")) in moved and one != first:
            circle.append(one)
        if one == first and len(circle) > 1:
            circles.append(tuple((name, place[name]) for name in circle))
        for name in circle:
            moved.pop(name, None)
    return circles


def strays(pairs: Pairs) -> list[tuple[str, str]]:
    """Return the parts that are in another fused tensor than they are expected in, each with the one that has it.

    Args:
        pairs: part and whole. As many must be in a whole that should be in others as the other way round.
    """
    expected = ExpectedNames.of(pairs, {whole for _, whole in pairs})
    moved = [(part, whole, expected.name(part)) for part, whole in pairs if expected.is_sure(part)]
    moved = [each for each in moved if each[1] != each[2] != ""]
    held, wanted = Counter(whole for _, whole, _ in moved), Counter(name for *_, name in moved)
    return [(part, whole) for part, whole, name in moved if held[whole] == wanted[whole] and held[name] == wanted[name]]


def outliers(described: Iterable[tuple[str, str, str]]) -> Iterator[tuple[str, str, str, str]]:
    """Yield what is unlike most of its kind: two names, what it is, and what most are.

    Args:
        described: two names, and a word on how the tensors correspond.
    """
    kinds: defaultdict[tuple[str, str], list[tuple[str, str, str]]] = defaultdict(list)
    for one, other, word in described:
        kinds[split(one)[0], split(other)[0]].append((one, other, word))
    for members in kinds.values():
        ((usual, often), *_) = Counter(word for *_, word in members).most_common()
        if 2 * often > len(members):
            yield from ((one, other, word, usual) for one, other, word in members if word != usual)


Signature = tuple[tuple[str, tuple[int, ...]], ...]


def signature(parts: Sequence[str]) -> Signature:
    """Return the order of the parts of a fused tensor; numbers are counted from the lowest among the parts."""
    found = [split(part) for part in parts]
    lowest = [min(each) for each in zip(*(numbers for _, numbers in found), strict=False)]
    return tuple(
        (template, tuple(number - low for number, low in zip(numbers, (*lowest, *numbers[len(lowest) :]), strict=True)))
        for template, numbers in found
    )


def disordered(fused: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """Yield each fused tensor whose parts stand in another order than in others of its kind.

    With it come the parts that stand elsewhere, and what they are unlike. The only one of its kind is expected to have
    its parts in the order of their numbers.

    Args:
        fused: name of the whole -> its parts in order.
    """
    kinds: defaultdict[tuple[str, tuple[str, ...]], list[tuple[str, Signature]]] = defaultdict(list)
    for whole, parts in fused.items():
        order = signature(parts)
        kinds[split(whole)[0], tuple(sorted(template for template, _ in order))].append((whole, order))
    for members in kinds.values():
        ((usual, often), *_) = Counter(order for _, order in members).most_common()
        unlike = "another one of its kind, and nothing says which is right"
        if 2 * often > len(members):
            unlike = "most of its kind"
        if len(members) == 1:
            usual, unlike = _numbered(usual), "the numbers in their names"
        for whole, order in members:
            moved = (part for part, here, there in zip(fused[whole], order, usual, strict=True) if here != there)
            if order != usual:
                yield whole, tuple(moved), unlike


def _numbered(order: Signature) -> Signature:
    """Return an order in which the parts of each template are sorted by their numbers."""
    waiting = {template: iter(sorted(each for each in order if each[0] == template)) for template, _ in order}
    return tuple(next(waiting[template]) for template, _ in order)
