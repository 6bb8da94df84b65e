"""Which elements of a result are wrong, in the simplest words that are true. Pure: tensors in, words out.

A description is a set of elements. It is true both ways: nearly all wrong elements are in it, and the share of wrong
ones in it is told where it is not nearly all. Among those that are true the shortest message wins (minimum description
length: Rissanen, "Modeling by shortest data description", 1978): the bits that state the description, and those that
say which elements inside and outside of it are wrong. A description that fits by chance costs more than it saves.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from hashbench.core.run.rounding_judge import JudgedResult
from hashbench.core.text import listed, spaced
from hashbench.extensions.kernels.conditions import conditions_on
from hashbench.extensions.kernels.slices import Words, axis_of, entropy, words_for

LEAST_COVERED = 0.95
"""Share of the wrong elements that a description must cover."""

_NEARLY_ALL = 0.9
"""Share of wrong elements in a description from which on it stands without a number."""

_ALL = 0.98
"""Share of all elements from which on all are said to be wrong."""

_CHOICES = 2.0
"""Bits of data that one bit of a condition must save: many are tried, and of few elements one fits by chance."""

_PART = 0.004
"""Share of the information in all of the mask that each part of a description must save."""

_MOST_LISTED = 3


@dataclass(frozen=True, slots=True)
class _PlaceCandidate:
    """A description.

    Attributes:
        words: its text and bits.
        parts: the number of clauses in it.
        inside: the number of elements in it.
        hits: the number of wrong elements in it.
        mask: makes the mask of its elements, which broadcasts to the result.
        condition: it is a clause that begins with ``where``.
    """

    words: Words
    parts: int
    inside: float
    hits: float
    mask: Callable[[], torch.Tensor]
    condition: bool = False

    def length(self, mask: _Mask) -> float:
        """Return the bits of the message that uses it; infinite if it misses wrong elements."""
        if self.hits < LEAST_COVERED * mask.number:
            return math.inf
        outside = entropy(mask.number - self.hits, mask.total - self.inside)
        price = self.words.bits + self.parts * _PART * mask.information
        return price + entropy(self.hits, self.inside) + outside


class _Mask:
    """The wrong elements, and what is asked of them more than once."""

    def __init__(self, wrong: torch.Tensor, known: torch.Tensor | None = None) -> None:
        self.wrong, self.known = wrong, known
        self.shape = tuple(wrong.shape)
        self.total = wrong.numel() if known is None else int(torch.count_nonzero(known))
        self.number = int(torch.count_nonzero(self.wrong))
        self.information = entropy(self.number, self.total)

    def right(self) -> _Mask:
        """Return what is right in place of what is wrong."""
        return _Mask(~self.wrong if self.known is None else self.known & ~self.wrong, self.known)

    def part(self, dim: int, indices: torch.Tensor) -> _Mask:
        """Return the part at some indices of a dimension."""
        known = None if self.known is None else self.known.index_select(dim, indices)
        return _Mask(self.wrong.index_select(dim, indices), known)

    def along(self, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return for each index of a dimension the number of wrong elements and of all."""
        others = [other for other in range(len(self.shape)) if other != dim]

        def count(mask: torch.Tensor) -> torch.Tensor:
            return mask.sum(others, dtype=torch.int32) if others else mask.to(torch.int32)

        size = self.shape[dim]
        every = torch.full((size,), self.total // size) if self.known is None else count(self.known)
        return count(self.wrong), every

    def candidate(
        self, words: Words, mask: Callable[[], torch.Tensor], *, parts: int = 1, condition: bool = False
    ) -> _PlaceCandidate:
        """Count how many elements a description has, and how many of them are wrong."""
        inside = mask().broadcast_to(self.wrong.shape)
        hits = torch.count_nonzero(inside & self.wrong)
        inside = inside if self.known is None else inside & self.known
        return _PlaceCandidate(words, parts, float(torch.count_nonzero(inside)), float(hits), mask, condition)


def places_of(wrong: torch.Tensor, inputs: Mapping[str, torch.Tensor], *, unsure: torch.Tensor | None = None) -> str:
    """Return the simplest true description of the elements that are wrong.

    Args:
        wrong: bools, shape of the result.
        inputs: tensors by their names in the text, of any shape. Those that broadcast to the result, or have the shape
            of some of its dimensions, are compared with it; integers also as indices into it.
        unsure: bools, elements that may be either: errors that rounding may or may not explain. What is said holds for
            the others. In a place that is wrong some errors are small by chance.

    Returns:
        ``rows 96 to 127``, ``the last 5 of dimension 1``, ``where input 0 < 0``, ``1 element in 1 024, the first
        [0, 3]``; empty: all elements.

    Raises:
        ValueError: no element is wrong.
    """
    wrong = wrong.detach().to("cpu", torch.bool).contiguous()
    if unsure is not None and bool(unsure.any()):
        mask = _Mask(wrong, wrong | ~unsure.detach().to("cpu", torch.bool))
    else:
        mask = _Mask(wrong)
    if not mask.number:
        raise ValueError("no element is wrong: there is no place to describe")
    if mask.number == mask.total:
        return ""
    whole = _PlaceCandidate(Words("", 0.0), 0, mask.total, mask.number, lambda: mask.wrong.new_ones(()))
    places = [*_products(mask), *_unions(mask), *_crossed(mask), *_in_memory(mask), *_diagonals(mask)]
    conditions = [
        mask.candidate(Words(found.words.text, _CHOICES * found.words.bits), found.mask, condition=True)
        for found in conditions_on(mask.wrong, inputs, mask.known)
    ]
    best = min([whole, *places, *conditions], key=lambda candidate: candidate.length(mask))
    helpful = [place for place in places if place.length(mask) < whole.length(mask)]
    helpful = sorted(helpful, key=lambda candidate: candidate.length(mask))[:1]
    both = [_both(mask, place, condition) for place in helpful for condition in conditions]
    best = min([best, *both], key=lambda candidate: candidate.length(mask))
    return _told(mask, best, few=unsure is not None)


def _both(mask: _Mask, place: _PlaceCandidate, condition: _PlaceCandidate) -> _PlaceCandidate:
    words = Words(f"{place.words.text} {condition.words.text}", place.words.bits + condition.words.bits)
    parts = place.parts + condition.parts
    return mask.candidate(words, lambda: place.mask() & condition.mask(), parts=parts)


def wrong_places(judged: JudgedResult, inputs: Mapping[str, torch.Tensor]) -> str:
    """Return where a judged result is wrong, as :func:`places_of`; empty also if no single element is.

    Args:
        judged: the result beside its reference.
        inputs: by their names in the text.
    """
    if not bool(judged.beyond.any()):
        return ""
    return places_of(judged.beyond, inputs, unsure=(judged.units > 1) & ~judged.beyond)


# ------------------------------------------------------------------------------------------------------------ words


def _told(mask: _Mask, found: _PlaceCandidate, *, few: bool) -> str:
    if not found.parts or (mask.number == 1 and found.parts > 1 and not found.condition):
        return _listed(mask, few=few)
    if few and found.condition and mask.number >= _ALL * mask.total:  # it tells where errors are small by chance
        return ""
    share = found.hits / found.inside
    if share >= _NEARLY_ALL:
        return found.words.text
    return f"{_share(share)} {'' if found.condition else 'in '}{found.words.text}"


def _listed(mask: _Mask, *, few: bool) -> str:
    """Return what is said of elements that nothing describes: all or most of them, those that are few, or a share.

    With ``few``, a few right ones among all that are wrong are chance.
    """
    right = mask.total - mask.number
    total = spaced(mask.wrong.numel())
    if mask.number == 1:
        return f"one element of {total}, {_first(mask.wrong)[0]}"
    if mask.number <= _MOST_LISTED:
        return f"{mask.number} elements of {total}: {', '.join(_first(mask.wrong))}"
    share = mask.number / mask.total
    if few and share >= _ALL:
        return ""
    if right <= _MOST_LISTED:
        return f"all of {total} elements but {listed(_first(mask.right().wrong))}"
    if share >= _ALL:
        return ""
    if mask.wrong.numel() < 100:
        return f"{mask.number} of {total} elements, the first {_first(mask.wrong)[0]}"
    if share >= 0.5:
        return _share(share)
    return f"{_share(share)}, the first {_first(mask.wrong)[0]}"


def _share(share: float) -> str:
    """Return ``most elements``, ``1 element in 40`` or ``1 element in 10^6``."""
    if share >= _NEARLY_ALL:
        return "nearly all elements"
    if share >= 0.5:
        return "most elements"
    number = round(1 / share)
    exponent = round(math.log10(number))
    if exponent >= 5 and abs(number / 10**exponent - 1) < 0.1:
        return f"1 element in 10^{exponent}"
    digits = max(len(str(number)) - 2, 0)
    return f"1 element in {spaced(round(number, -digits))}"


def _first(mask: torch.Tensor) -> list[str]:
    """Return the indices of the first elements of a mask."""
    flat = mask.flatten()
    few = int(torch.count_nonzero(flat)) <= _MOST_LISTED
    places = flat.nonzero()[:, 0] if few else flat.to(torch.uint8).argmax().reshape(1)
    indices = torch.stack(torch.unravel_index(places, mask.shape), 1)
    return [str(index) for index in indices.tolist()]


# ----------------------------------------------------------------------------------------------------------- slices


@dataclass(frozen=True, slots=True)
class _IndexRange:
    """Indices of one dimension."""

    dim: int
    inside: torch.Tensor
    words: Words

    def mask(self, rank: int) -> torch.Tensor:
        """Return its bools, of a shape that broadcasts to the result."""
        return self.inside.view([-1 if dim == self.dim else 1 for dim in range(rank)])


def _products(mask: _Mask) -> Iterator[_PlaceCandidate]:
    """Yield slices of one or several dimensions, those that fit best."""
    cuts = _cuts(mask)
    chosen = [tuple(cuts), *(tuple(cut for cut in cuts if cut is not left) for left in cuts), *((cut,) for cut in cuts)]
    yield from (_product(mask, cuts) for cuts in dict.fromkeys(chosen) if cuts)


def _cuts(part: _Mask) -> list[_IndexRange]:
    """Cut the dimension that tells most, then the next one in what that leaves, until no cut saves more than it
    costs."""
    cuts: list[_IndexRange] = []
    while True:
        tried = [dim for dim, size in enumerate(part.shape) if size > 1 and all(cut.dim != dim for cut in cuts)]
        found = [cut for dim in tried for cut in _cuts_of(part, dim)]
        length, cut = min(found, key=lambda pair: pair[0], default=(math.inf, None))
        if cut is None or length >= part.information:
            return sorted(cuts, key=lambda cut: cut.dim)
        cuts.append(cut)
        part = part.part(cut.dim, cut.inside.nonzero()[:, 0])


def _cuts_of(part: _Mask, dim: int) -> Iterator[tuple[float, _IndexRange]]:
    """Yield cuts of a dimension, with the bits of the message that uses it."""
    counts, sizes = part.along(dim)
    for inside in _levels(counts, sizes):
        if int(torch.count_nonzero(inside)) < part.shape[dim]:
            words = words_for(inside.nonzero()[:, 0].numpy(), axis_of(part.shape, dim))
            cut = _IndexRange(dim, inside, words)
            hits, number = float(counts[inside].sum()), float(sizes[inside].sum())
            yield (
                _PlaceCandidate(words, 1, number, hits, functools.partial(cut.mask, len(part.shape))).length(part),
                cut,
            )


def _levels(counts: torch.Tensor, sizes: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the indices whose shares stand out, those between the first and the last of them, and the same of all that
    are not zero. An index of which nothing is known goes with its neighbours."""
    shares = counts / sizes.clamp_min(1)
    for level in (float(shares.max()) / 4, 0.0):
        inside = shares > level
        yield inside
        places = inside.nonzero()[:, 0]
        hull = torch.zeros_like(inside)
        hull[int(places[0]) : int(places[-1]) + 1] = True
        yield hull
        empty = sizes == 0
        if bool(empty.any()):
            yield inside | (empty & hull)


def _product(mask: _Mask, cuts: Sequence[_IndexRange]) -> _PlaceCandidate:
    part = mask
    for cut in cuts:
        part = part.part(cut.dim, cut.inside.nonzero()[:, 0])
    text = (" in " if len(mask.shape) == 2 else ", ").join(cut.words.text for cut in cuts)
    words = Words(text, sum(cut.words.bits for cut in cuts))
    rank = len(mask.shape)

    def inside() -> torch.Tensor:
        found = cuts[0].mask(rank)
        for cut in cuts[1:]:
            found = found & cut.mask(rank)
        return found

    return _PlaceCandidate(words, len(cuts), part.total, part.number, inside)


def _unions(mask: _Mask) -> Iterator[_PlaceCandidate]:
    """Yield what is left out by slices of several dimensions: ``row 5, and column 7``, or ``all but`` a block."""
    if len(mask.shape) < 2:
        return
    right = mask.right()
    cuts = _cuts(right) if right.number else []
    if len(cuts) < 2:
        return
    block = _product(right, cuts)
    rest = [words_for((~cut.inside).nonzero()[:, 0].numpy(), axis_of(mask.shape, cut.dim)) for cut in cuts]
    union = Words(", and ".join(words.text for words in rest), sum(words.bits for words in rest))
    words = min(union, Words(f"all but {block.words.text}", block.words.bits + 1), key=lambda words: words.bits)
    inside, hits = mask.total - block.inside, mask.number - (block.inside - block.hits)
    yield _PlaceCandidate(words, len(cuts), inside, hits, lambda: ~block.mask())


def _crossed(mask: _Mask) -> Iterator[_PlaceCandidate]:
    """Yield what lies in slices of one of two dimensions and not of both: tiles beside the diagonal."""
    for first, second in itertools.combinations([dim for dim, size in enumerate(mask.shape) if size > 1], 2):
        cuts = [_fuller(mask, first), _fuller(mask, second)]
        text = f"{cuts[0].words.text} or {cuts[1].words.text}, not both"
        words = Words(text, sum(cut.words.bits for cut in cuts) + 3)
        rank = len(mask.shape)
        inside = functools.partial(torch.logical_xor, cuts[0].mask(rank), cuts[1].mask(rank))
        yield mask.candidate(words, inside, parts=2)


def _fuller(mask: _Mask, dim: int) -> _IndexRange:
    """Return the indices of a dimension with larger shares of wrong elements: those above the widest gap."""
    counts, sizes = mask.along(dim)
    shares = counts / sizes.clamp_min(1)
    ordered = shares.sort().values
    inside = shares > ordered[int(ordered.diff().argmax())]
    if not bool(inside.any()):
        inside[0] = True
    return _IndexRange(dim, inside, words_for(inside.nonzero()[:, 0].numpy(), axis_of(mask.shape, dim)))


def _in_memory(mask: _Mask) -> Iterator[_PlaceCandidate]:
    """Yield a range of the elements as they follow each other, whatever the shape: the tail of a flat loop."""
    if len([size for size in mask.shape if size > 1]) < 2:
        return
    flat = mask.wrong.flatten()
    first, last = int(flat.to(torch.uint8).argmax()), len(flat) - 1 - int(flat.flip(0).to(torch.uint8).argmax())
    if last + 1 - first == len(flat):
        return
    inside = torch.zeros_like(flat)
    inside[first : last + 1] = True
    words = words_for(torch.arange(first, last + 1).numpy(), axis_of((len(flat),), 0))
    words = Words(f"{words.text} in memory order", words.bits + 3)
    yield mask.candidate(words, lambda: inside.view(mask.shape))


def _diagonals(mask: _Mask) -> Iterator[_PlaceCandidate]:
    """Yield sets of diagonals of the last two dimensions, numbered as by ``torch.diagonal``: column minus row."""
    if len(mask.shape) < 2 or min(mask.shape[-2:]) < 3:
        return
    rows, columns = mask.shape[-2:]
    counts = _along_diagonals(mask.wrong.view(-1, rows, columns).sum(0, dtype=torch.float32))
    number = torch.arange(1 - rows, columns)
    if mask.known is None:
        length = torch.minimum(rows + number.clamp_max(0), columns - number.clamp_min(0)).clamp_max(min(rows, columns))
        sizes = length * (mask.total / (rows * columns))
    else:
        sizes = _along_diagonals(mask.known.view(-1, rows, columns).sum(0, dtype=torch.float32))
    dense = number[counts > 0.25 * (counts / sizes.clamp_min(1)).max() * sizes]
    low, high = int(dense[0]), int(dense[-1])
    named = {
        "the diagonal": number == 0,
        "all but the diagonal": number != 0,
        "above the diagonal": number > 0,
        "below the diagonal": number < 0,
        "the diagonal and above": number >= 0,
        "the diagonal and below": number <= 0,
    }
    sets = [(Words(name, 5.0), inside) for name, inside in named.items()]
    bits = 2 * math.log2(rows + columns)
    if low == high:
        sets.append((Words(f"diagonal {low} (column minus row)", bits / 2 + 4), number == low))
    sets.append((Words(f"diagonals {low} to {high} (column minus row)", bits + 4), (number >= low) & (number <= high)))
    apart = torch.arange(columns) - torch.arange(rows)[:, None] + rows - 1
    for words, inside in sets:
        mask_of = functools.partial(torch.Tensor.__getitem__, inside, apart)
        yield _PlaceCandidate(words, 1, float(sizes[inside].sum()), float(counts[inside].sum()), mask_of)


def _along_diagonals(matrix: torch.Tensor) -> torch.Tensor:
    """Return the sum of each diagonal, the lowest one first."""
    rows, columns = matrix.shape
    wide = torch.nn.functional.pad(matrix.flip(0), (0, rows)).flatten()[:-rows]
    return wide.view(rows, rows + columns - 1).sum(0)
