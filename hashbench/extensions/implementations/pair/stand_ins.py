"""What may differ between two right sides, so that contents of (a) stand in for those of (b): draws from a generator,
constants that one side keeps in a lower dtype, and choices between values that are equal but for rounding."""

from __future__ import annotations

import enum
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from hashbench.core.divergence.content import EXACT, ContentGraph, ContentNode, Kind, Parting
from hashbench.extensions.implementations.pair.moments import LARGEST
from hashbench.extensions.implementations.pair.order import is_reordered
from hashbench.extensions.implementations.pair.places import arranged
from hashbench.extensions.implementations.pair.record import KeptCall, RecordedRun

NEAR = 2.0**-22
"""Relative difference of a constant in float32 and the same in float64, at most."""

LARGEST_CONSTANT = 2**24
"""Elements of a constant that is looked at."""

_LOOSE = 1e-5
_EQUAL = 1e-11
_SEEDS = 32
_FIRST = 4
"""Replays after which a choice must have changed anywhere."""

_LEVELS = (12, 9)
"""Digits to which the values that are chosen between are equal."""

_JUMP = 100.0
"""Change of an output, in changes of the inputs, from which on it is no continuous function of them."""


class StandInReason(enum.Enum):
    """Why contents of (a) stand in for those of (b)."""

    DRAWN = "drawn"
    ROUNDED = "kept in float32"
    CHOSEN = "chosen"


@dataclass(frozen=True, slots=True)
class StandIn:
    """Contents of a node of (a) that replace those of a node of (b).

    Attributes:
        a, b: the nodes.
        value: what (b) is given, of the shape of its node.
        why: the reason.
        digits: to which the values are equal that are chosen between; 0 otherwise.
        kept: which side keeps a constant in float32; empty otherwise.
    """

    a: str
    b: str
    value: torch.Tensor
    why: StandInReason
    digits: int = 0
    kept: str = ""


# --------------------------------------------------------------------------------------------------------- draws


def draws(a: ContentGraph, b: ContentGraph) -> Iterator[tuple[str, str]]:
    """Yield draws of both runs that correspond and differ: the first of a kind, the second, … A kind is op, arguments
    and shape."""
    kinds: defaultdict[tuple[object, ...], list[ContentNode]] = defaultdict(list)
    for node in a:
        if node.kind is Kind.RANDOM:
            kinds[node.op, node.scalars, node.shape].append(node)
    for node in b:
        if node.kind is Kind.RANDOM and (left := kinds[node.op, node.scalars, node.shape]):
            other = left.pop(0)
            if not _same(other, node):
                yield other.id, node.id


def _same(one: ContentNode, other: ContentNode) -> bool:
    both = one.moments is not None and other.moments is not None and one.moments.agree(other.moments, EXACT)
    return both and not is_reordered(one, other)


def unlike_draw(parting: Parting, a: ContentGraph, b: ContentGraph) -> bool:
    """Return whether (b) draws at a parting, and (a) draws as many numbers with another op."""
    drawn = [b.nodes[node] for node in (*parting.b[:1], *parting.constants[1]) if b.nodes[node].kind is Kind.RANDOM]
    return any(
        other.kind is Kind.RANDOM and other.numel == node.numel and other.op != node.op for node in drawn for other in a
    )


# ----------------------------------------------------------------------------------------------------- constants


def near_constants(
    a: ContentGraph, b: ContentGraph, parameters: tuple[frozenset[str], frozenset[str]]
) -> Iterator[tuple[str, str]]:
    """Yield constants of both runs that agree nearly, in the order of (b).

    Args:
        a, b: the runs.
        parameters: names of the parameters of both; these are compared as weights.
    """
    sizes: defaultdict[int, list[ContentNode]] = defaultdict(list)
    for node in _constants(a, parameters[0]):
        sizes[node.numel].append(node)
    for node in _constants(b, parameters[1]):
        for other in sizes[node.numel]:
            if node.moments and other.moments and node.moments.agree(other.moments, _LOOSE):
                yield other.id, node.id
                break


def _constants(graph: ContentGraph, parameters: frozenset[str]) -> Iterator[ContentNode]:
    for node in graph:
        constant = node.kind in (Kind.CONSTANT, Kind.WEIGHT) and node.id not in parameters and not node.copies
        if constant and 1 < node.numel <= LARGEST_CONSTANT and node.tolerance == EXACT:
            yield node


def rounded_constants(
    pairs: Iterable[tuple[str, str]], a: RecordedRun, b: RecordedRun, given: Iterable[str]
) -> Iterator[StandIn]:
    """Yield constants that one side keeps in a lower dtype, of pairs whose values were kept.

    What is made of such constants follows from them, and is left out.
    """
    behind = set(given)
    for ours, theirs in pairs:
        if theirs in behind or ours not in a.values or theirs not in b.values:
            continue
        value, kept = _ranked_alike(a.values[ours], b.values[theirs])
        if kept:
            yield StandIn(ours, theirs, value, StandInReason.ROUNDED, kept=kept)
            behind |= b.graph.following(theirs)


def _ranked_alike(ours: torch.Tensor, theirs: torch.Tensor) -> tuple[torch.Tensor, str]:
    """Return values of (a) in the places of those of (b) that have the same rank, and which side holds them in float32;
    nothing of both if none does, or if they are equal, or differ by more than its rounding."""
    nothing = ours, ""
    if ours.dtype is not torch.float64 or theirs.dtype is not torch.float64:
        return nothing
    one, (other, places) = ours.reshape(-1).sort().values, theirs.reshape(-1).sort()
    apart = torch.where(one == other, 0.0, (one - other).abs() / torch.maximum(one.abs(), other.abs()))
    if not _EQUAL < float(apart.max()) <= NEAR:
        return nothing
    low = _is_float32(one), _is_float32(other)
    words = {(True, False): "(a) keeps it in float32", (False, True): "(b) keeps it in float32"}
    kept = words.get(low, "Both keep it in float32" if all(low) else "")
    return torch.empty_like(one).scatter_(0, places, one).reshape(theirs.shape), kept


# -------------------------------------------------------------------------------------------------------- choices


def _is_float32(value: torch.Tensor) -> bool:
    return bool((value.float().double() == value).all())


def outputs_to_keep(graph: ContentGraph, nodes: Sequence[str]) -> frozenset[str]:
    """Return all outputs of the ops that wrote the first of these nodes."""
    records = {node.rpartition(":")[0] for node in nodes[:1] if graph.nodes[node].op}
    return frozenset(node.id for node in graph if node.op and node.id.rpartition(":")[0] in records)


def choices(parting: Parting, a: RecordedRun, b: RecordedRun) -> tuple[StandIn, ...]:
    """Return the outputs of the first ops of a parting that differ, if both only choose differently between values that
    are equal but for rounding; nothing otherwise.

    The ops are called again with their inputs moved by a relative 1e-12 or 1e-9.
    """
    if not parting.a or not parting.b:
        return ()
    ours, theirs = parting.a[0], parting.b[0]
    call = b.calls.get(theirs.rpartition(":")[0])
    if call is None:
        return ()
    pairs = [(ours, theirs)]
    if a.graph.nodes[ours].op == b.graph.nodes[theirs].op:
        known = outputs_to_keep(b.graph, [theirs])
        one, other = ours.rpartition(":")[0], theirs.rpartition(":")[0]
        pairs = [(f"{one}:{index}", f"{other}:{index}") for index in range(len(known))]
    found = []
    for one, other in pairs:
        if one not in a.values or other not in b.values:
            return ()
        value = b.values[other]
        like = arranged(a.values[one], value)
        if like is None or like.is_complex() or value.is_complex():
            return ()
        noise = b.graph.nodes[other].tolerance
        if bool(_apart(like, value, noise).any()):
            same_shape = a.values[one].shape == value.shape
            mine = _KeptOutput(a.calls.get(ours.rpartition(":")[0]) if same_shape else None, _index(one), like)
            digits = _equal_digits(mine, _KeptOutput(call, _index(other), value), noise)
            if not digits:
                return ()
            found.append(StandIn(one, other, like.to(value.dtype), StandInReason.CHOSEN, digits))
    return tuple(found)


def _index(node: str) -> int:
    return int(node.rpartition(":")[2])


def _apart(one: torch.Tensor, other: torch.Tensor, noise: float) -> torch.Tensor:
    """Return where two tensors differ by more than a continuous function of inputs moved by ``noise`` does."""
    if not (one.is_floating_point() and other.is_floating_point()):
        return one != other
    filled = [~(each.abs() < LARGEST) for each in (one, other)]  # of a mask, infinite or no number
    usual = torch.where(filled[1], 0.0, other)
    limit = _JUMP * noise * (usual.abs() + usual.double().square().mean().sqrt())
    apart = torch.where(filled[0] & filled[1], one.sign() != other.sign(), (one - other).abs() > limit)
    return apart | (filled[0] != filled[1]) | (one.isnan() != other.isnan())


@dataclass(frozen=True, slots=True)
class _KeptOutput:
    """An output of a call, and what it becomes if the call is repeated with its inputs moved; ``call`` may lack."""

    call: KeptCall | None
    index: int
    value: torch.Tensor

    def moved(self, seed: int, size: float) -> torch.Tensor | None:
        if self.call is None:
            return None
        value = self.call.outputs(_Moved(seed, size))[self.index].cpu()
        return value if value.shape == self.value.shape else None


def _equal_digits(ours: _KeptOutput, theirs: _KeptOutput, noise: float) -> int:
    """Return the digits to which the values are equal that ops choose between; 0 if not every difference is explained:
    an element must become the same on both sides in some of the repeated calls."""
    levels = _LEVELS if noise == EXACT else (round(-math.log10(noise)),)
    for digits in levels:
        left = first = _apart(ours.value, theirs.value, noise)
        seen: tuple[list[torch.Tensor], list[torch.Tensor]] = ([ours.value], [theirs.value])
        for seed in range(_SEEDS):
            for side, output in enumerate((ours, theirs)):
                value = output.moved(seed, 10.0**-digits)
                if value is not None:
                    seen[side].append(value)
                    for other in seen[1 - side]:
                        left = left & _apart(value, other, noise)
            if not bool(left.any()):
                return digits
            if seed == _FIRST and torch.equal(left, first):
                break
    return 0


class _Moved:
    """Moves each tensor of floating point numbers: all elements up, all down, then each by a normal draw."""

    def __init__(self, seed: int, size: float) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._sign, self._size = {0: 1.0, 1: -1.0}.get(seed), size

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            return tensor.clone()
        if self._sign is not None:
            draw = torch.full_like(tensor, self._sign)
        else:
            draw = torch.randn(tensor.shape, generator=self._generator).to(tensor)
        return tensor + self._size * draw * tensor.abs()
