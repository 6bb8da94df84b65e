"""Compare the weights of two sides without names: match by digests, then say what differs in the rest. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from hashbench.extensions.implementations import names
from hashbench.extensions.implementations.digest import TensorSource, is_through
from hashbench.extensions.implementations.pool import Level, Pool, levels
from hashbench.extensions.implementations.rest import Rest
from hashbench.extensions.implementations.settled import Settled, settle_groups
from hashbench.extensions.implementations.vectors import settle_vectors
from hashbench.extensions.implementations.verdict import WeightsDifference, WeightsMatch, WeightsVerdict
from hashbench.extensions.implementations.whole import match_constants, match_whole


def compare_weights(a: TensorSource, b: TensorSource) -> WeightsVerdict:
    """Return what two sides hold.

    Args:
        a, b: tensors by name, read part by part: of a checkpoint, or in memory. A few parts of tensors, and the digests
            of rows and columns, are in memory at once.
    """
    ours, theirs = Pool(a), Pool(b)
    constants = match_constants(ours, theirs)
    matches: list[WeightsMatch] = []
    found: list[Settled] = []
    differences: list[WeightsDifference] = []
    every = levels(map(ours.dtype, ours.left), map(theirs.dtype, theirs.left))
    for rounded in (False, True):
        some = [level for level in every if level.rounded == rounded]
        for level in some:
            whole = match_whole(ours, theirs, level)
            matches += [] if rounded else whole
            differences += _through(a, b, level, whole) if rounded else []
        for settle in (settle_groups, settle_vectors):
            for level in some:
                for settled in settle(ours, theirs, level):
                    found.append(settled)
                    matches += [] if rounded else settled.matches
                    differences += _through(a, b, level, settled.matches) if rounded else []
                    differences += settled.differences
    rest = Rest(ours, theirs, [*_pairs(matches, found)], matches)
    differences += rest.differences
    misplaced = [*_misplaced(matches)]
    out_of_order = [*_disordered(found)]
    wrong = {name for each in misplaced for name in each.a}
    wholes = {name for each in out_of_order for name in (*each.a, *each.b)}
    matches = [match for match in matches if wrong.isdisjoint(match.a) and wholes.isdisjoint((*match.a, *match.b))]
    return WeightsVerdict(
        a=len(a.headers),
        b=len(b.headers),
        matches=tuple(matches),
        differences=(*misplaced, *out_of_order, *differences),
        constants_a=constants[0],
        constants_b=constants[1],
        unknown=tuple(rest.unknown),
    )


def _through(
    a: TensorSource, b: TensorSource, level: Level, matches: Iterable[WeightsMatch]
) -> Iterator[WeightsDifference]:
    """Yield the matches that are ones only because one side was rounded."""
    for match in matches:
        side, other = ("b", "a") if all(is_through(b, name, level.common) for name in match.b) else ("a", "b")
        text = f"{side} holds the values of {other} rounded through {level.common}"
        total = sum(a.headers[name].count for name in match.a)
        yield WeightsDifference(kind="narrowed", a=match.a, b=match.b, text=text, total=total)


def _pairs(matches: Iterable[WeightsMatch], found: Iterable[Settled]) -> Iterator[tuple[str, str]]:
    """Yield names of which one is expected to hold the other, or to be in it."""
    for match in matches:
        if match.kind == "same":
            yield match.a[0], match.b[0]
    for settled in found:
        yield from ((part, whole) for whole, parts in settled.orders_b.items() for part in parts)
        yield from ((whole, part) for whole, parts in settled.orders_a.items() for part in parts)


def _misplaced(matches: Iterable[WeightsMatch]) -> Iterator[WeightsDifference]:
    """Yield tensors that stand in each other's places, and those laid out unlike others of their kind."""
    same = {match.a[0]: match for match in matches if match.kind == "same" and len(match.a) == len(match.b) == 1}
    pairs = [(match.a[0], match.b[0]) for match in same.values()]
    places = {match.b[0] for match in same.values()}
    circles = names.exchanged(pairs, places)
    for circle in circles:
        ours, theirs = zip(*circle, strict=True)
        yield WeightsDifference(kind="exchanged", a=ours, b=theirs, text="each is in the place of the other")
    moved = {one for circle in circles for one, _ in circle}
    described = ((one, match.b[0], match.how or "unchanged") for one, match in same.items() if one not in moved)
    for one, other, how, usual in names.outliers(described):
        yield WeightsDifference(
            kind="layout", a=(one,), b=(other,), text=f"{how}, where others of its kind are {usual}"
        )


def _disordered(found: Iterable[Settled]) -> Iterator[WeightsDifference]:
    """Yield fused and cut tensors whose parts stand in another order than in others of their kind."""
    every = [*found]
    for side in ("b", "a"):
        orders: dict[str, tuple[str, ...]] = {}
        for settled in every:
            orders |= settled.orders_b if side == "b" else settled.orders_a
        strayed = names.strays([(part, whole) for whole, parts in orders.items() for part in parts])
        if strayed:
            parts, wholes = (tuple(dict.fromkeys(each)) for each in zip(*strayed, strict=True))
            ours, theirs = (parts, wholes) if side == "b" else (wholes, parts)
            yield WeightsDifference(kind="exchanged", a=ours, b=theirs, text="each is in the place of another")
            orders = {whole: parts for whole, parts in orders.items() if whole not in wholes}
        for whole, moved, unlike in names.disordered(orders):
            text = f"the order is {names.braced(orders[whole])}, unlike {unlike}"
            made = WeightsDifference(kind="order", a=moved, b=(whole,), text=text)
            yield made if side == "b" else replace(made, a=(whole,), b=moved)
