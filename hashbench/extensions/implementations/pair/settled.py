"""Both sides in float64, until nothing parts that may differ between two right sides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hashbench.core.divergence.content import ContentAlignment, ContentGraph, Parting
from hashbench.core.divergence.content_align import align_contents
from hashbench.core.divergence.content_walk import find_partings
from hashbench.core.errors import HashbenchError, named_line
from hashbench.extensions.implementations.pair.order import other_order, with_order
from hashbench.extensions.implementations.pair.partial import with_sums
from hashbench.extensions.implementations.pair.parts import narrowed
from hashbench.extensions.implementations.pair.record import RecordedRun, SideRunError
from hashbench.extensions.implementations.pair.running import recorded
from hashbench.extensions.implementations.pair.sides import GRADIENT, Side, common_names
from hashbench.extensions.implementations.pair.stand_ins import (
    StandIn,
    StandInReason,
    choices,
    draws,
    near_constants,
    outputs_to_keep,
    rounded_constants,
    unlike_draw,
)

Progress = Callable[[str], None]

MOST_PARTED = 8
"""Independent places that are looked at."""

MOST_INSIDE = 16
"""Ops of (a) that are looked into where it is not known which of them corresponds."""

ROUNDS = 4
"""Runs of (b) with contents of (a), at most."""


@dataclass(frozen=True, slots=True)
class ComparedSides:
    """Both sides in float64.

    Attributes:
        a, b: the runs.
        names: name in (a) of each compared output of (b).
        left: names of outputs that one side lacks.
        alignment: which contents correspond.
    """

    a: RecordedRun
    b: RecordedRun
    names: Mapping[str, str]
    left: tuple[str, ...]
    alignment: ContentAlignment


@dataclass(frozen=True, slots=True)
class SettledSides:
    """Both sides in float64, with contents of (a) in (b) where two right sides may differ.

    Attributes:
        compared: the runs; that of (b) with these contents.
        partings: where they part otherwise.
        stand_ins: these contents.
        values: of both sides, at the first ops of the first partings.
    """

    compared: ComparedSides
    partings: tuple[Parting, ...]
    stand_ins: tuple[StandIn, ...]
    values: tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]

    @property
    def mistakes(self) -> tuple[Parting, ...]:
        """Partings, without those at which both sides draw with ops that cannot be compared."""
        graphs = self.compared.a.graph, self.compared.b.graph
        return tuple(parting for parting in self.partings if not unlike_draw(parting, *graphs))

    @property
    def undecided(self) -> tuple[tuple[StandIn, str], ...]:
        """What keeps both sides from being the same function, each with a sentence."""
        return tuple((each, self._sentence(each)) for each in self.stand_ins if each.why is not StandInReason.ROUNDED)

    @property
    def reason(self) -> str:
        """Why it is not known; empty if nothing is undecided."""
        return _limited([sentence for _, sentence in self.undecided])

    @property
    def notes(self) -> tuple[str, ...]:
        """What was taken for equal, a sentence for each reason."""
        rounded = [self._sentence(each) for each in self.stand_ins if each.why is StandInReason.ROUNDED]
        notes = [f"{_limited(rounded)}."] if rounded else []
        if self.undecided and self.partings:
            notes.append(f"{self.reason}. (b) was given what (a) has there.")
        elif self.undecided:
            notes.append("With what (a) has there, all results of (b) agree in float64.")
        return tuple(notes)

    def _sentence(self, each: StandIn) -> str:
        a, b = self.compared.a, self.compared.b
        if each.why is StandInReason.DRAWN:
            return drawn(b, each.b)
        if each.why is StandInReason.CHOSEN:
            return f"{b.place(each.b)} chooses between values that are equal to {each.digits} digits"
        return f"{each.kept} ({b.place(each.b)} of (b), {a.place(each.a)} of (a)): taken for equal"


def drawn(run: RecordedRun, node: str) -> str:
    """Say that a node holds draws that the other side has not."""
    return f"{run.place(node)} draws random numbers that differ: use eval(), or equal draws in the same order"


def _limited(sentences: Sequence[str]) -> str:
    found = tuple(dict.fromkeys(sentences))
    return f"{found[0]}{f'; and {len(found) - 1} more' if len(found) > 1 else ''}" if found else ""


class SideFailedError(Exception):
    """A side raised in float64."""

    def __init__(self, name: str, said: str) -> None:
        super().__init__(f"{name}: {said}")
        self.name, self.said = name, said


def _wide(name: str, side: Side, seed: int, **options: Any) -> RecordedRun:
    try:
        return recorded(side, seed, wide=True, **options)
    except HashbenchError:
        raise
    except SideRunError as error:
        raise SideFailedError(name, str(error)) from error
    except Exception as error:
        raise SideFailedError(name, named_line(error)) from error


def settle(a: Side, b: Side, seed: int, say: Progress) -> SettledSides:
    """Run both sides in float64, and (b) again with contents of (a) where these may differ.

    What constructors compute is computed in float64 as well. Where both sides then part, it is tried as well with what
    they hold in their own dtype: of these two the one counts in which more of both corresponds.

    Args:
        a, b: the sides.
        seed: of the generators.
        say: called with what is done now.

    Raises:
        SideFailedError: a side raised.
        HashbenchError: there is nothing to compare.
    """
    found = _settled(a, b, seed, say)
    if not found.partings or max(a.ranks, b.ranks) > 1:
        return found
    if not (found.compared.a.rebuilt or found.compared.b.rebuilt):
        return _with_parts(found, a, seed, say)
    say("run both with constants of their own dtype")
    sides = replace(a, rebuilt=False), replace(b, rebuilt=False)
    cast = _settled(*sides, seed, say)
    better = not cast.partings or len(cast.compared.alignment.partners) > len(found.compared.alignment.partners)
    return _with_parts(cast, sides[0], seed, say) if better else _with_parts(found, a, seed, say)


def _with_parts(found: SettledSides, a: Side, seed: int, say: Progress) -> SettledSides:
    """Narrow the leading region of (b) by what a fused op of (a) computes inside."""
    if not found.partings or len(found.partings[0].b) < 2:
        return found
    say("look inside the ops of (a)")
    lead, *others = found.partings
    graph, covered = found.compared.a.graph, found.compared.alignment.covered
    left = [node.id for node in graph if node.op and node.id not in covered and not node.copies]
    names = lead.a or tuple(left[:MOST_INSIDE])
    calls = _wide("(a)", a, seed, keep=frozenset(names)).calls
    narrow = narrowed(lead, names, graph, found.compared.b.graph, calls)
    return replace(found, partings=(narrow, *others))


def _settled(a: Side, b: Side, seed: int, say: Progress) -> SettledSides:
    compared, stand_ins = _in_float64(a, b, seed, say), list[StandIn]()
    for left in reversed(range(ROUNDS + 1)):
        say("walk back")
        graphs = compared.a.graph, compared.b.graph, compared.alignment
        partings = tuple(with_order(*graphs, parting) for parting in find_partings(*graphs)) or other_order(*graphs)
        if not partings:
            return SettledSides(compared, (), tuple(stand_ins), ({}, {}))
        if left == ROUNDS and max(a.ranks, b.ranks) > 1:
            say("add up partial sums of ranks")
            compared = _with_partial_sums(a, b, seed, compared)
            partings = find_partings(compared.a.graph, compared.b.graph, compared.alignment) or partings
        given = {each.b: each.value for each in stand_ins}
        say("read the values where they part")
        found, values = _stand_ins(a, b, seed, compared, partings, given)
        if not found or not left:
            return SettledSides(compared, partings, tuple(stand_ins), values)
        stand_ins += found
        say("run (b) in float64 with what (a) has there")
        given |= {each.b: each.value for each in found}
        compared = _compared(compared.a, _wide("(b)", b, seed, given=given), compared.names, compared.left, say)
    raise AssertionError


def _with_partial_sums(a: Side, b: Side, seed: int, compared: ComparedSides) -> ComparedSides:
    """Align partial sums of ranks as well: what is right in them explains nothing."""
    first, second, alignment = compared.a, compared.b, compared.alignment
    if a.ranks > 1:
        first = with_sums(first, a, seed, alignment.covered, second.graph)
    if b.ranks > 1:
        second = with_sums(second, b, seed, alignment.partners, first.graph)
    return replace(compared, a=first, b=second, alignment=align_contents(first.graph, second.graph))


def _stand_ins(
    a: Side,
    b: Side,
    seed: int,
    compared: ComparedSides,
    partings: Sequence[Parting],
    given: Mapping[str, torch.Tensor],
) -> tuple[list[StandIn], tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]]:
    """Return contents of (a) for (b), with values of both at the first ops of the partings."""
    one, other = compared.a.graph, compared.b.graph
    parameters = compared.a.parameters, compared.b.parameters
    drawn = [pair for pair in draws(one, other) if pair[1] not in given]
    constants = list(near_constants(one, other, parameters))
    keep_a, keep_b = {ours for ours, _ in (*drawn, *constants)}, {theirs for _, theirs in (*drawn, *constants)}
    for parting in partings[:MOST_PARTED]:
        keep_a |= {*parting.a[:1], *outputs_to_keep(one, parting.a)}
        keep_b |= {*parting.b[:1], *outputs_to_keep(other, parting.b)}
    first = _wide("(a)", a, seed, keep=frozenset(keep_a))
    second = _wide("(b)", b, seed, keep=frozenset(keep_b), given=given)
    values = first.values, second.values
    if max(a.ranks, b.ranks) > 1:
        return [], values  # the ranks of a program cannot be given contents
    found = [StandIn(*pair, first.values[pair[0]], StandInReason.DRAWN) for pair in drawn if pair[0] in first.values]
    found += rounded_constants(constants, first, second, given)
    if not found:
        found = [each for parting in partings[:MOST_PARTED] for each in choices(parting, first, second)]
    return [each for each in found if each.b not in given], values


def _in_float64(a: Side, b: Side, seed: int, say: Progress) -> ComparedSides:
    say("run (a) in float64")
    first = _wide("(a)", a, seed)
    say("run (b) in float64")
    second = _wide("(b)", b, seed)
    names, left = common_names(first.graph.results, second.graph.results)
    if not names:
        raise HashbenchError(
            "cannot compare these implementations",
            consequence=f"(a) returns {_listed(first)} and (b) returns {_listed(second)}: no output is in both",
            tip="Say what is compared, by outputs or outputs_a and outputs_b.",
        )
    return _compared(first, second, names, left, say)


def _compared(
    first: RecordedRun, second: RecordedRun, names: Mapping[str, str], left: tuple[str, ...], say: Progress
) -> ComparedSides:
    say("align")
    one, other = _renamed(first.graph, second.graph, names)
    alignment = align_contents(one, other)
    return ComparedSides(replace(first, graph=one), replace(second, graph=other), names, left, alignment)


def _renamed(a: ContentGraph, b: ContentGraph, names: Mapping[str, str]) -> tuple[ContentGraph, ContentGraph]:
    """Return both graphs with the same name for each compared output, and with all gradients.

    No gradient has the name of one on the other side: which parameters correspond is not known.
    """
    theirs = {name: b.results[name] for name in names} | _gradients(b, "(b)")
    ours = {name: a.results[wanted] for name, wanted in names.items()} | _gradients(a, "(a)")
    return ContentGraph(a.nodes, ours), ContentGraph(b.nodes, theirs)


def _gradients(graph: ContentGraph, side: str) -> dict[str, str]:
    return {f"{name} {side}": node for name, node in graph.results.items() if name.startswith(GRADIENT)}


def _listed(run: RecordedRun) -> str:
    return ", ".join(run.graph.results) or "no tensor"
