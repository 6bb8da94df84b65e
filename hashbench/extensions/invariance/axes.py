"""Item axes of the tensors of a call, by how their rows compare in two runs: what it takes to repeat the call on other
items. Pure: no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hashbench.extensions.invariance.judged import JudgedCall
from hashbench.extensions.invariance.layout import Cut, ItemAxis, ItemSubset, NotItemwiseError, Shape
from hashbench.extensions.invariance.match import CallRows, Match

_Held = tuple[Match | None, Cut | None]
"""How the rows of a tensor compare, and how they were cut; ``None``: it has no rows to compare."""


@dataclass(frozen=True, slots=True)
class CallAxes:
    """Where the items lie in the tensors of a call.

    Attributes:
        items: of the call. Where items depend on each other, all that the smaller run has are one.
        read: the axis of each tensor that it was given.
        left: the axis of each tensor that it left.
        watched: the item that both runs have, where items depend on each other.
    """

    items: int
    read: tuple[ItemAxis | None, ...]
    left: tuple[ItemAxis | None, ...]
    watched: int | None


def axes_of(
    judged: JudgedCall,
    reference: CallRows,
    subset: ItemSubset,
    *,
    targets: Sequence[int | None],
    written: Sequence[int | None],
) -> CallAxes:
    """Return the item axes of a call of the reference.

    Args:
        judged: how the call compares with that of the other run.
        reference: what the call read and wrote.
        subset: the items of both runs.
        targets: which of the tensors noted as written each tensor is that the call was given.
        written: the same of each tensor that it left.

    Raises:
        NotItemwiseError: the call cannot be repeated on other items; the message says why, or nothing.
    """
    read = [(judged.read.get(path), rows.cut) for path, rows in reference.read]
    left = [_as_written(judged, reference, at) for at in written]
    moves = all(match is None or match.equal for match, _ in left)
    whole = moves and not subset.together
    _require_whole_items(judged, subset, read)
    _require_itemwise([match for match, _ in read], subset)
    _require_itemwise([match for match, _ in left if not (moves and _counts_items(match, subset))], subset)
    inherited = [match for match, _ in read if match is not None]
    filled = [_as_written(judged, reference, target) for target in targets]
    shapes = [tensor.shape for _, tensor in reference.read]
    given = [held if held[0] is not None else target for held, target in zip(read, filled, strict=True)]
    rows = subset.size if subset.together else 1
    return CallAxes(
        subset.batch // rows,
        tuple(_axis(*held, subset, inherited, shape) for held, shape in zip(given, shapes, strict=True)),
        tuple(_axis(match, _whole(cut) if whole else cut, subset, inherited) for match, cut in left),
        subset.first // rows if subset.together else None,
    )


def _whole(cut: Cut | None) -> Cut | None:
    """Return the cut of a tensor of which all is an item's: it holds other items' rows, or one for each item."""
    return cut and cut._replace(narrowed=())


def _as_written(judged: JudgedCall, reference: CallRows, at: int | None) -> _Held:
    return (None, None) if at is None else (judged.written[at], reference.written[at].cut)


def _counts_items(match: Match | None, subset: ItemSubset) -> bool:
    """Return True for a tensor with as many rows as there are items, or a multiple."""
    return match is not None and match.sizes is not None and subset.multiple(*match.sizes) > 0


def _require_whole_items(judged: JudgedCall, subset: ItemSubset, read: Sequence[_Held]) -> None:
    """Raise unless tokens are a whole number of parts as long as the smaller run, and their places do not matter."""
    if subset.together and (not read or subset.batch % subset.size or subset.first % subset.size):
        raise NotItemwiseError("")
    if subset.first and judged.coupled:  # which tokens are first and last may be among its other arguments
        raise NotItemwiseError("the call cannot be repeated alone: its other arguments differ")


def _require_itemwise(matches: Iterable[Match | None], subset: ItemSubset) -> None:
    """Raise unless each item's rows are at a place that follows from the item."""
    if not all(match is None or match.itemwise(subset) for match in matches):
        why = "the call cannot be repeated on other items: which rows belong to which is not the same for all"
        raise NotItemwiseError(why)


def _axis(
    match: Match | None, cut: Cut | None, subset: ItemSubset, inherited: Sequence[Match], shape: Shape = ()
) -> ItemAxis | None:
    """Return the item axis of a tensor; a dimension whose rows differ is laid out as an input of its size. For tokens
    that the other run lacks it follows from the ``shape``."""
    if match is None and subset.together:
        return _axis_of_size(shape, subset)
    if match is None or match.sizes is None or cut is None or cut.dim is None:
        return None
    outer = match.outer(inherited)
    also = tuple(dim for dim, _, length in cut.narrowed if length == subset.size)
    inner = subset.multiple(*match.sizes) // outer * (subset.size if subset.together else 1)
    return ItemAxis(cut.dim, outer, inner, also)


def _axis_of_size(shape: Shape, subset: ItemSubset) -> ItemAxis | None:
    """Return the token axis of a tensor that the other run lacks, as a mask: the dimensions as long as the batch."""
    dims = [dim for dim, size in enumerate(shape) if size == subset.batch]
    return ItemAxis(dims[0], 1, subset.size, tuple(dims[1:])) if dims else None


def counting_places(
    reference: Iterable[int | None], other: Iterable[int | None], subset: ItemSubset
) -> tuple[int, ...]:
    """Return the places of whole numbers among the arguments that count items: multiples of them in both runs."""
    return tuple(
        at
        for at, (there, here) in enumerate(zip(reference, other, strict=False))
        if there is not None and here is not None and there != here and subset.multiple(there, here)
    )
