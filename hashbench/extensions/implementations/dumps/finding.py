"""The verdict on two dumps, as a finding. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from hashbench.core.finding import Finding, Table
from hashbench.core.text import count, join_limited
from hashbench.extensions.implementations.dumps.align import First, Partner
from hashbench.extensions.implementations.dumps.verdict import FACTORS, ROUNDING, ComparedDump, DumpsVerdict
from hashbench.extensions.implementations.names import braced

CLOSE = 4
"""Times of the largest distance before it within which the nearest candidate may be rounding."""

HOW = {
    "bit by bit": "bit by bit",
    "rows": "same rows",
    "sums": "same sums",
    "fused": "of these parts",
    "part": "part of it",
}
"""Way of a partner -> it in words."""


def finding_of(verdict: DumpsVerdict, *, limit: int = 20) -> Finding:
    """Return the report of a verdict. ``limit``: lines of the table, at most."""
    a, b = verdict.a, verdict.b
    complete = verdict.is_complete
    return Finding(
        headline=_headline(verdict),
        facts=tuple(_facts(verdict)),
        table=_table(verdict, limit),
        notes=tuple(_notes(verdict, limit)),
        equal=complete,
        differs=verdict.differs,
        data={
            "first": {"a": _first_data(a, b), "b": _first_data(b, a)},
            "pairs": [_pair_data(b, a, place, partner) for place, partner in sorted(b.partners.items())],
            "alone": {"a": _alone(a), "b": _alone(b)},
            "tensors": {"a": len(a.sketches), "b": len(b.sketches)},
            "tolerance": verdict.tolerance,
            "dtype": verdict.dtype,
            "order": {"a": a.dump.order, "b": b.dump.order},
            "unknown": [*a.left_out, *b.left_out],
        },
    )


def _leading(verdict: DumpsVerdict) -> tuple[ComparedDump, str, str] | None:
    """Return the side whose first tensor leads, its letter and that of the other: B, if its order is as good as A's."""
    sides = [(verdict.b, "B", "A"), (verdict.a, "A", "B")]
    if verdict.a.dump.of_calls and not verdict.b.dump.of_calls:
        sides.reverse()
    return next((each for each in sides if each[0].first is not None), None)


def _headline(verdict: DumpsVerdict) -> str:
    leading, b = _leading(verdict), verdict.b
    if leading is not None and leading[0].first is not None:
        side, own, other = leading
        name = side.sketches[leading[0].first.place].name
        if verdict.differs:
            return f"{name} of {own} is the first without a partner in {other}"
        return f"{name} of {own} has no partner in {other}, but the last that was computed agrees"
    if verdict.is_complete:
        exact = all(each.how == "bit by bit" for each in b.partners.values())
        return f"Every tensor of A and of B has a partner{', equal bit by bit' if exact else ''}"
    if not b.partners:
        return "No tensor of B has a partner in A: whether they differ is not known"
    return f"What both dumped agrees: {len(b.partners)} of {count(len(b.sketches), 'tensor')} of B have a partner in A"


def _facts(verdict: DumpsVerdict) -> Iterator[tuple[str, str]]:
    leading = _leading(verdict)
    sides = [(verdict.b, verdict.a, "B", "A"), (verdict.a, verdict.b, "A", "B")]
    if leading is not None and leading[1] == "A":
        sides.reverse()
    if leading is not None:
        yield from _first_facts(*sides[0], verdict.tolerance)
        if sides[1][0].first is not None:
            yield f"first of {sides[1][2]}", _described(sides[1][0], sides[1][0].first)
    for side, _, own, others in sides:
        ways = Counter(HOW[each.how] for each in side.partners.values())
        said = f": {', '.join(f'{number} {way}' for way, number in ways.items())}" if ways else ""
        yield f"of {own} in {others}", f"{len(side.partners)} of {count(len(side.sketches), 'tensor')}{said}"
    roundoff = f"the unit roundoff of {verdict.dtype} ({ROUNDING[verdict.dtype]:.2g}), the lowest dtype here"
    units = f"{FACTORS[verdict.dtype]} times {roundoff}"
    yield "tolerance", f"{verdict.tolerance:.2g} of the sums: {'as asked for' if verdict.chosen else units}"
    for side, own in ((verdict.a, "A"), (verdict.b, "B")):
        yield own, f"{side.path}, {side.dump.kind}; order {side.dump.order}"


def _first_facts(
    side: ComparedDump, other: ComparedDump, own: str, others: str, tolerance: float
) -> Iterator[tuple[str, str]]:
    if (first := side.first) is None:
        return
    yield f"first of {own}", _described(side, first)
    if first.before is not None:
        partner = side.partners[first.before]
        names = braced([other.sketches[place].name for place in _places(partner)])
        yield "agrees before it", f"{side.sketches[first.before].name} / {names}"
    if first.nearest is not None:
        distance, place = first.nearest
        apart, usual = _tolerances(distance, tolerance), _tolerances(first.usual, tolerance)
        yield (
            f"nearest in {others}",
            f"{other.sketches[place].name}, {apart} tolerances apart; largest before it {usual}",
        )
    if first.again:
        yield "behind it", f"{count(first.again, 'tensor')} of {own} with something new have a partner again"


def _tolerances(distance: float, tolerance: float) -> str:
    number = distance / max(tolerance, float.fromhex("0x1p-1022"))
    return f"{number:.3g}" if number >= 0.01 or not distance else "< 0.01"  # the rounding of sums


def _described(side: ComparedDump, first: First) -> str:
    sketch = side.sketches[first.place]
    return f"{sketch.name}, {sketch.header}"


def _places(partner: Partner) -> tuple[int, ...]:
    return partner.places if partner.how == "fused" else partner.places[:1]


def _table(verdict: DumpsVerdict, limit: int) -> Table:
    """Return the tensors around the first one that leads."""
    leading = _leading(verdict)
    a, b, headers = verdict.a, verdict.b, ("B", "A")
    if leading is not None and leading[1] == "A":
        a, b, headers = b, a, ("A", "B")
    at = b.first.place if b.first is not None else 0
    start = max(0, min(at - limit // 2, len(b.sketches) - limit))
    rows = []
    for place in range(start, min(len(b.sketches), start + limit)):
        partner = b.partners.get(place)
        names = braced([a.sketches[each].name for each in _places(partner)]) if partner else "-"
        apart = _tolerances(partner.distance, verdict.tolerance) if partner and partner.how != "bit by bit" else ""
        rows.append((b.sketches[place].name, names, HOW[partner.how] if partner else "", apart))
    return Table(headers=(*headers, "how", "tolerances apart"), rows=tuple(rows))


def _notes(verdict: DumpsVerdict, limit: int) -> Iterator[str]:
    leading = _leading(verdict)
    first = leading[0].first if leading else None
    if first is not None and first.nearest is not None and first.nearest[0] < CLOSE * first.usual:
        yield "Rounding grew to this in the tensors before it, so that it may be rounding. --rtol X sets the tolerance."
    if not verdict.b.partners:
        yield "Nothing agrees: did both have the same inputs, and the same weights (hashbench numeric --weights)?"
    if leading is not None and not leading[0].dump.of_calls:
        yield f"The order of {leading[1]} is not that of calls, so that another one may be the first: see --json."
    for side, own in ((verdict.a, "A"), (verdict.b, "B")):
        if side.left_out:
            yield f"{own}: {join_limited(side.left_out, 2)}: of a dtype whose values are not compared."
        alone = _alone(side)
        if alone and not verdict.differs:
            yield f"Of {own} alone: {join_limited(alone, 3)}."
        yield from side.dump.notes
    if len(verdict.b.sketches) > limit:
        yield f"The table has {limit} lines: --lines N shows more, --json has all pairs."


def _alone(side: ComparedDump) -> list[str]:
    return [each.name for place, each in enumerate(side.sketches) if place not in side.partners]


def _first_data(side: ComparedDump, other: ComparedDump) -> dict[str, Any] | None:
    if side.first is None:
        return None
    nearest, before = side.first.nearest, side.first.before
    return {
        "name": side.sketches[side.first.place].name,
        "before": None if before is None else side.sketches[before].name,
        "again": side.first.again,
        "nearest": None if nearest is None else other.sketches[nearest[1]].name,
        "distance": None if nearest is None else _finite(nearest[0]),
    }


def _pair_data(side: ComparedDump, other: ComparedDump, place: int, partner: Partner) -> dict[str, Any]:
    names = [other.sketches[each].name for each in _places(partner)]
    return {"b": side.sketches[place].name, "a": names, "how": partner.how, "distance": partner.distance}


def _finite(distance: float) -> float | None:
    return distance if distance < float("inf") else None
