"""Settle what tensors of the other side lie in as one stretch: fused biases, flattened layers. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from hashbench.extensions.implementations.digest import Words, chunks, hashes
from hashbench.extensions.implementations.dtypes import common_dtypes, rounded, unsigned
from hashbench.extensions.implementations.located import compare_spans
from hashbench.extensions.implementations.names import split
from hashbench.extensions.implementations.pool import Level, Pool
from hashbench.extensions.implementations.settled import Settled, difference_of
from hashbench.extensions.implementations.verdict import Kind, Names, WeightsDifference, WeightsMatch
from hashbench.extensions.implementations.windows import LONGEST, Guest, Inside, find, mixed_from


@dataclass(frozen=True, slots=True)
class _Sides:
    """The side of the tensor that is searched, and that of the tensors in it; ``host_is_a``: the former is ``a``."""

    host: Pool
    guest: Pool
    level: Level
    host_is_a: bool

    @property
    def host_dtype(self) -> str:
        return self.level.a if self.host_is_a else self.level.b

    @property
    def guest_dtype(self) -> str:
        return self.level.b if self.host_is_a else self.level.a

    def ordered(self, host: Names, guests: Names) -> tuple[Names, Names]:
        """Return the names of ``a``, then those of ``b``."""
        return (host, guests) if self.host_is_a else (guests, host)


def settle_vectors(a: Pool, b: Pool, level: Level) -> Iterator[Settled]:
    """Take the tensors of both sides that tensors of the other side lie in as a stretch, with these tensors."""
    for sides in (_Sides(b, a, level, host_is_a=False), _Sides(a, b, level, host_is_a=True)):
        for host in _hosts(sides.host, sides.host_dtype):
            found = _settled(sides, host)
            if found is not None:
                yield found


def _hosts(pool: Pool, dtype: str) -> list[str]:
    """Return the tensors that are searched, element after element; of equal ones the first alone."""
    twins = {twin for names in pool.twins.values() for twin in names}
    return [name for name in pool.candidates(dtype) if pool.count(name) <= LONGEST and name not in twins]


def _settled(sides: _Sides, host: str) -> Settled | None:
    common = sides.level.common
    guests = {}
    for name in sides.guest.candidates(sides.guest_dtype):
        if sides.guest.count(name) < sides.host.count(host) and _may_lie(sides, host, name):
            digest = sides.guest.digest(name, common)
            guests[name] = Guest(digest.count, digest.additive)
    if not guests:
        return None
    elements = _hashes(sides.host, host, common)
    inside = find(elements, guests)
    if inside.parts:
        return _laid_out(sides, host, elements, inside)
    whole = sides.host.digest(host, common)
    parts = mixed_from(Guest(whole.count, whole.additive), guests)
    return _matched(sides, host, parts, "interleaved") if parts else None


def _may_lie(sides: _Sides, host: str, guest: str) -> bool:
    if not sides.level.rounded:
        return True
    common = sides.level.common
    return sides.host.went_through(host, common) != sides.guest.went_through(guest, common)


def _hashes(pool: Pool, name: str, common: str) -> Words:
    own = pool.dtype(name)
    return np.concatenate([hashes(rounded(chunk, own, common)) for chunk in chunks(pool.tensors, name)])


def _matched(sides: _Sides, host: str, parts: tuple[str, ...], how: str) -> Settled:
    ours, theirs = sides.ordered(sides.host.take([host]), sides.guest.take(parts))
    kind: Kind = "same" if len(parts) == 1 else "cut" if sides.host_is_a else "fused"
    return Settled((WeightsMatch(kind=kind, a=ours, b=theirs, how=how, cast=sides.level.cast),))


def _laid_out(sides: _Sides, host: str, elements: Words, inside: Inside) -> Settled:
    """Return what a tensor holds in which some were found."""
    parts, zeros = dict(inside.parts), 0
    differences: list[WeightsDifference] = []
    zero = hashes(np.zeros(1, np.uint8))[0]
    numbers = split(next(iter(parts)))[1][:1]
    for start, stop in inside.gaps:
        if bool(np.all(elements[start:stop] == zero)):
            zeros += stop - start
            continue
        if _is_repeated(sides, elements[start:stop]):
            continue
        fillers = _fillers(sides, stop - start, parts, numbers)
        if not fillers:
            differences.append(_gap(sides, host, tuple(inside.parts), start, stop))
        for name in fillers:
            parts[name] = start
            found = _difference(sides, host, name, start)
            differences += [found] if found is not None else []
            start += sides.guest.count(name)
    ordered = tuple(sorted(parts, key=parts.__getitem__))
    how = f"{'a' if sides.host_is_a else 'b'} has {zeros} zeros more" if zeros else ""
    settled = _matched(sides, host, ordered, how)
    orders = {host: ordered} if len(ordered) > 1 else {}
    return replace(
        settled,
        matches=() if differences else settled.matches,
        differences=tuple(differences),
        orders_a=orders if sides.host_is_a else {},
        orders_b={} if sides.host_is_a else orders,
    )


def _is_repeated(sides: _Sides, elements: Words) -> bool:
    """Return whether a stretch is one repeated value that a constant of the other side has."""
    pool, common = sides.guest, sides.level.common
    if not bool(np.all(elements == elements[0])):
        return False
    values = (
        rounded(np.array([value], unsigned(pool.dtype(name))), pool.dtype(name), common)
        for name, value in pool.constants.items()
        if common in common_dtypes(pool.dtype(name), common)
    )
    return any(hashes(value)[0] == elements[0] for value in values)


def _fillers(sides: _Sides, wanted: int, parts: dict[str, int], numbers: tuple[int, ...]) -> tuple[str, ...]:
    """Return the tensors without partner that a gap is for: those with the numbers of the parts found come first."""
    fitting = [
        name
        for name in sides.guest.left
        if name not in parts and sides.guest.dtype(name) == sides.guest_dtype and sides.guest.count(name) <= wanted
    ]
    near = [name for name in fitting if split(name)[1][:1] == numbers]
    exact = [name for name in near if sides.guest.count(name) == wanted]
    if exact:
        return tuple(exact[:1])
    if sum(map(sides.guest.count, near)) == wanted:
        return tuple(near)
    return tuple(fitting) if len(fitting) == 1 and sides.guest.count(fitting[0]) == wanted else ()


def _difference(sides: _Sides, host: str, name: str, start: int) -> WeightsDifference | None:
    count = sides.guest.count(name)
    if sides.host_is_a:
        compared = compare_spans(sides.host.tensors, sides.guest.tensors, host, name, start, 0, count)
    else:
        compared = compare_spans(sides.guest.tensors, sides.host.tensors, name, host, 0, start, count)
    names = (host, name) if sides.host_is_a else (name, host)
    return difference_of(*names, compared) if compared.differing else None


def _gap(sides: _Sides, host: str, parts: tuple[str, ...], start: int, stop: int) -> WeightsDifference:
    lacking = "b" if sides.host_is_a else "a"
    text = f"{lacking} lacks {stop - start} elements of it: {start} to {stop - 1}"
    ours, theirs = sides.ordered((host,), parts)
    return WeightsDifference(kind="lines", a=ours, b=theirs, text=text)
