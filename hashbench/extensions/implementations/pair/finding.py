"""The verdict on two implementations, as a finding. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hashbench.core.divergence.content import COARSE, FALLBACK
from hashbench.core.finding import Facts, Finding, Table, plain
from hashbench.core.text import count, in_brackets, join_limited, percent, spaced
from hashbench.extensions.implementations.finding import LINES
from hashbench.extensions.implementations.finding import finding_of as of_weights
from hashbench.extensions.implementations.pair.verdict import (
    ComparedResult,
    ImplementationsVerdict,
    OpPlace,
    PairOutcome,
    PartedPlace,
)
from hashbench.extensions.implementations.verdict import WeightsVerdict

NAMES = ("a", "b")
"""Words for the two sides, where the caller has none."""

FURTHER = 5
"""Further partings, and results, that have a line; ``--json`` has all."""

_LINE = re.compile(r".*?:\d+(?= |$)")


def finding_of(
    verdict: ImplementationsVerdict, names: tuple[str, str] = NAMES, *, limit: int = LINES, commands: Sequence[str] = ()
) -> Finding:
    """Return the report of a verdict.

    Args:
        verdict: what was found.
        names: words for the two sides, such as ``before`` and ``after``.
        limit: lines of the table, at most.
        commands: to run next.
    """
    first = verdict.parted[0] if verdict.parted else None
    further = enumerate(verdict.parted[1 : 1 + FURTHER], start=2)
    return Finding(
        headline=_headline(verdict, first, names),
        facts=(
            *(_facts_of(first, names, verdict.dtype) if first is not None else ()),
            *((f"place {number}", _pair_words(each, names)) for number, each in further),
            ("reaches" if first is not None else "results", _results(verdict)),
            ("weights", _weights(verdict.weights) if verdict.weights is not None else verdict.weights_reason),
            ("aligned", _aligned(verdict, names[1])),
            ("not compared", f"{join_limited(verdict.left)}, which one side alone returns" if verdict.left else ""),
            ("in lower dtypes", _fallbacks(verdict.fallbacks or {})),
        ),
        table=_values(first, names, limit) if first is not None else None,
        notes=tuple(_notes(verdict, limit)),
        next=tuple(commands),
        equal=verdict.outcome in (PairOutcome.EQUAL, PairOutcome.ROUNDING),
        differs=verdict.outcome is PairOutcome.MISTAKE,
        data=_data(verdict),
    )


def _headline(verdict: ImplementationsVerdict, first: PartedPlace | None, names: tuple[str, str]) -> str:
    if verdict.outcome is PairOutcome.EQUAL:
        return "Both implementations are equal bit by bit"
    if verdict.outcome is PairOutcome.NOT_KNOWN:
        return f"Not known whether both compute the same function: {verdict.reason or 'no reason is known'}"
    if verdict.outcome is PairOutcome.MISTAKE:
        if first is None:
            return "A mistake: the results differ by more than rounding, and no op is known to be its origin"
        where = _pair_words(first, names, line=True)
        if first.a is None or first.b is None:
            return f"A mistake: {where} has no counterpart in ({names[first.a is not None]})"
        return f"A mistake: {where} compute something else from equal data"
    if first is None:
        return "The same function: results differ by rounding, and no op is known at which it begins"
    by = f", by {_units(first.units)}" if first.units is not None else ""
    reach = max((each.units for each in verdict.results if each.units is not None), default=None)
    ends = "" if reach is None else f", {_number(reach)} reach the result" if reach else ", and no output differs"
    return f"The same function: rounding parts first at {_pair_words(first, names)}{by}{ends}"


def _pair_words(parted: PartedPlace, names: tuple[str, str], *, line: bool = False) -> str:
    """Return the ops of both sides: ``aten.mm.default in layers.0 (a) / aten.addmm.default in blocks.0 (b)``."""
    sides = [_place_words(each, name, line=line) for each, name in zip((parted.a, parted.b), names, strict=True)
             if each is not None]  # fmt: skip
    return " / ".join(sides) or "an op of neither side"


def _place_words(place: OpPlace, name: str, *, line: bool) -> str:
    at = _LINE.match(place.source) if line else None
    phase = f"{place.phase}, " if place.phase not in ("", "forward") else ""
    within = f" in {place.module}" if place.module else ""
    return f"{place.op}{within} ({phase}{name}{f', {at[0]}' if at else ''})"


def _facts_of(parted: PartedPlace, names: tuple[str, str], dtype: str) -> Facts:
    """Return what is known of one parting."""
    first, second = names
    found = []
    for place, name in zip((parted.a, parted.b), names, strict=True):
        if place is None:
            found.append((f"op of {name}", "none"))
            continue
        leaves = f"leaves {place.output}" if place.output else ""
        at = f" at {place.source}" if place.source else ""
        found.append((f"op of {name}", f"{place.op}{in_brackets(place.phase, leaves)}{at}"))
        if len(place.ops) > 1:
            found.append((f"region of {name}", f"{count(len(place.ops), 'op')}: {join_limited(place.ops)}"))
    inputs = [_paired(one, other, names) for one, other in parted.inputs]
    constants = [
        f"{name}: {one or 'none'} ({first}), {other or 'none'} ({second})" for name, one, other in parted.constants
    ]
    share = f"{percent(parted.share)} of the elements" if parted.share is not None else ""
    by = f"by at most {_units(parted.units)}{f' of {dtype}' if dtype else ''}" if parted.units is not None else ""
    return (
        *found,
        ("inputs that agree", "; ".join(inputs)),
        ("what differs", "; ".join(constants)),
        ("outputs differ", ", ".join(filter(None, (share, by)))),
        ("known of it", parted.note),
    )


def _paired(one: str, other: str, names: tuple[str, str]) -> str:
    return one if one == other else f"{one} ({names[0]}) = {other} ({names[1]})"


def _results(verdict: ImplementationsVerdict) -> str:
    shown = [f"{each.name}: {_result(each)}" for each in _worst_first(verdict.results)]
    return "; ".join([*shown[:FURTHER], *([f"{len(shown) - FURTHER} more"] if len(shown) > FURTHER else [])])


def _worst_first(results: Sequence[ComparedResult]) -> list[ComparedResult]:
    return sorted(results, key=lambda each: -math.inf if each.units is None else -each.units)


def _result(result: ComparedResult) -> str:
    if result.units is None:
        return "not comparable"
    if not result.units:
        return "equal bit by bit"
    relative = f", {result.relative:.2g} of the largest value" if result.relative is not None else ""
    return f"{_units(result.units)}{relative}"


def _weights(verdict: WeightsVerdict) -> str:
    """Return what the comparison of weights says, with the first difference."""
    found = of_weights(verdict)
    facts = dict(found.facts)
    if not verdict.differences:
        known = "; ".join(facts[name] for name in ("equal", "repeated values") if name in facts)
        return f"{found.headline}: {known}" if verdict.matches else found.headline
    others = len(verdict.differences) - 1
    return f"they differ: {facts['difference 1']}{f', and {others} more' if others else ''}"


def _aligned(verdict: ImplementationsVerdict, name: str) -> str:
    held, ops = verdict.aligned
    return f"the other side has what {held} of {count(ops, 'op')} of {name} left" if ops else ""


def _fallbacks(ops: Mapping[str, int]) -> str:
    said = []
    for coarse, tolerance in ((False, FALLBACK), (True, COARSE)):
        named = [f"{name} ({count(number, 'op')})" for name, number in ops.items() if (" in " in name) is coarse]
        if named:
            said.append(f"{join_limited(named)}: differences below {tolerance:g} there are not seen")
    return "; ".join(said)


def _values(parted: PartedPlace, names: tuple[str, str], limit: int) -> Table:
    rows = tuple((place, f"{one:.9g}", f"{other:.9g}") for place, one, other in parted.values[:limit])
    return Table("Values of the first outputs that differ", ("element", *names), rows)


def _notes(verdict: ImplementationsVerdict, limit: int) -> Iterator[str]:
    yield from verdict.notes
    if len(verdict.parted) > 1 + FURTHER:
        yield f"They part in {len(verdict.parted)} places, of which {1 + FURTHER} are shown: --json has all."
    if verdict.parted and len(verdict.parted[0].values) > limit:
        yield f"The table has {limit} of {len(verdict.parted[0].values)} values: --lines shows more, --json has all."
    if verdict.outcome is PairOutcome.ROUNDING:
        yield "In float64, where rounding vanishes, the results of both agree."
    differ = verdict.weights is not None and bool(verdict.weights.differences)
    if differ and verdict.outcome in (PairOutcome.EQUAL, PairOutcome.ROUNDING):
        yield "Weights differ, and the results of these inputs do not show it."


def _units(units: float | None) -> str:
    return "" if units is None else f"{_number(units)} {'unit' if units == 1 else 'units'}"


def _number(units: float) -> str:
    """Return a number of units: ``2``, ``0.5``, ``16 384``, ``3.1e+12``."""
    if not math.isfinite(units) or units >= 1e9:
        return f"{units:.2g}"
    return spaced(round(units)) if units >= 100 else f"{units:.3g}"


def _data(verdict: ImplementationsVerdict) -> dict[str, Any]:
    held = None if verdict.weights is None else of_weights(verdict.weights)
    weights = None if held is None else {"equal": held.equal, "differs": held.differs, **held.data}
    names = ("reason", "parted", "results", "weights_reason", "dtype", "left", "fallbacks", "seconds")
    return {
        "outcome": verdict.outcome.value,
        **{name: plain(getattr(verdict, name)) for name in names},
        "aligned": dict(zip(("ops", "of"), verdict.aligned, strict=True)),
        "weights": weights,
    }
