"""The verdict on the weights of two sides, as a finding. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from hashbench.core.finding import Finding, Table
from hashbench.core.text import count
from hashbench.extensions.implementations.names import braced, split
from hashbench.extensions.implementations.verdict import WeightsDifference, WeightsMatch, WeightsVerdict

WORDS = {
    "changed": "different values",
    "narrowed": "rounded through a narrower dtype",
    "missing": "without counterpart",
    "lines": "rows or columns missing",
    "exchanged": "exchanged",
    "order": "parts in another order",
    "layout": "laid out unlike others",
    "copy": "another tensor in its place",
}
"""Kind of a difference -> it in words."""

EXPLAINED = 5
"""Differences with all that is known of them; the table and ``--json`` have all."""

LINES = 20
"""Lines of a table, where none are asked for."""


def finding_of(verdict: WeightsVerdict, *, names: tuple[str, str] = ("", ""), limit: int = LINES) -> Finding:
    """Return the report of a verdict.

    Args:
        verdict: what both sides hold.
        names: what ``a`` and ``b`` are, such as two paths; empty: not said.
        limit: lines of the table, at most.
    """
    differs = bool(verdict.differences)
    return Finding(
        headline=_headline(verdict),
        facts=(*_facts(verdict), *zip(("a", "b"), names, strict=True)),
        table=_table(verdict, limit),
        notes=tuple(_notes(verdict, limit)),
        equal=verdict.equal,
        differs=differs,
        data={
            "differences": [_difference_data(each) for each in verdict.differences],
            "matches": [_match_data(each) for each in verdict.matches],
            "constants": {"a": verdict.constants_a, "b": verdict.constants_b},
            "tensors": {"a": verdict.a, "b": verdict.b},
            "unknown": list(verdict.unknown),
        },
    )


def _headline(verdict: WeightsVerdict) -> str:
    if verdict.differences:
        first = verdict.differences[0]
        others = len(verdict.differences) - 1
        more = f", and {others} more" if others else ""
        return f"The weights differ: {_named(first)}: {WORDS[first.kind]}{more}"
    if verdict.equal:
        return "Both hold the same weights"
    if not verdict.matches:
        return "Whether both hold the same weights is not known: nothing but repeated values could be compared"
    return "Whether both hold the same weights is not known: not all could be compared"


def _named(difference: WeightsDifference) -> str:
    """Return the tensors concerned; the same name on both sides once."""
    ours, theirs = braced(difference.a), braced(difference.b)
    if ours == theirs or not theirs:
        return f"{ours}{'' if theirs else ' of a'}"
    return f"{ours} / {theirs}" if ours else f"{theirs} of b"


def _facts(verdict: WeightsVerdict) -> Iterator[tuple[str, str]]:
    for number, each in enumerate(verdict.differences[:EXPLAINED], start=1):
        yield f"difference {number}", f"{_named(each)}: {_explained(each)}"
    matched_a, matched_b = (
        sum(len(names) for names in sides)
        for sides in ((each.a for each in verdict.matches), (each.b for each in verdict.matches))
    )
    yield "equal", f"{matched_a} of {count(verdict.a, 'tensor')} of a, {matched_b} of {verdict.b} of b"
    if verdict.constants_a or verdict.constants_b:
        yield "repeated values", f"{verdict.constants_a} of a, {verdict.constants_b} of b: equal, but no proof"
    kinds: dict[str, int] = {}
    for match in verdict.matches:
        word = _how(match)
        kinds[word] = kinds.get(word, 0) + 1
    yield "of these", ", ".join(f"{number} {word}" for word, number in kinds.items())


def _explained(difference: WeightsDifference) -> str:
    parts = [difference.text] if difference.text else []
    if difference.differing is not None:
        parts.append(f"{difference.differing} of {difference.total} elements differ")
        parts.append(f"first {_at(difference.first_a)} of a, {difference.value_a}, and {_at(difference.first_b)} of b, "
                     f"{difference.value_b}")  # fmt: skip
    return f"{WORDS[difference.kind]}: {'; '.join(parts)}" if parts else WORDS[difference.kind]


def _at(index: Sequence[int]) -> str:
    return f"[{', '.join(map(str, index))}]"


def _how(match: WeightsMatch) -> str:
    """Return how tensors correspond, in words."""
    return ", ".join(filter(None, ("as it is" if match.kind == "same" and not (match.how or match.cast) else "",
                                   match.kind if match.kind != "same" else "", match.how, match.cast)))  # fmt: skip


def _table(verdict: WeightsVerdict, limit: int) -> Table:
    """Return what differs, then what is equal, layers and experts with the same answer in one row."""
    rows = [(braced(each.a) or "-", braced(each.b) or "-", _short(each), "") for each in verdict.differences]
    merged: dict[tuple[str, str, str], int] = {}
    for match in verdict.matches:
        key = (_templates(match.a), _templates(match.b), _how(match))
        merged[key] = merged.get(key, 0) + 1
    usual = Counter(_how(match) for match in verdict.matches).most_common(1)
    unusual_first = sorted(merged.items(), key=lambda row: usual[0][0] == row[0][2])
    rows += [(ours, theirs, how, str(number)) for (ours, theirs, how), number in unusual_first]
    return Table(headers=("a", "b", "how", "times"), rows=tuple(rows[:limit]))


def _short(each: WeightsDifference) -> str:
    counted = f": {each.differing} of {each.total}" if each.differing is not None else ""
    return f"{WORDS[each.kind]}{counted}"


def _templates(names: Sequence[str]) -> str:
    return braced([split(name)[0] for name in names])


def _notes(verdict: WeightsVerdict, limit: int) -> Iterator[str]:
    yield from verdict.unknown
    lines = len(verdict.differences) + len({(_templates(m.a), _templates(m.b), _how(m)) for m in verdict.matches})
    if lines > limit:
        yield f"The table has {limit} of {lines} lines: --lines {lines} shows all, --json has every name."
    if verdict.equal and any(match.kind in ("fused", "cut", "regrouped") for match in verdict.matches):
        yield (
            "The parts of fused and cut tensors stand in the same order in all of a kind. Whether the code that reads "
            "them wants this order is not known."
        )


def _difference_data(each: WeightsDifference) -> dict[str, Any]:
    return {
        "kind": each.kind,
        "a": list(each.a),
        "b": list(each.b),
        "text": each.text,
        "differing": each.differing,
        "total": each.total,
        "first_a": list(each.first_a),
        "first_b": list(each.first_b),
        "value_a": each.value_a,
        "value_b": each.value_b,
    }


def _match_data(each: WeightsMatch) -> dict[str, Any]:
    return {"kind": each.kind, "a": list(each.a), "b": list(each.b), "how": each.how, "cast": each.cast}
