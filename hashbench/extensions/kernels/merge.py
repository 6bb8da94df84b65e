"""One fault that several variations show is one fault. Pure. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from hashbench.extensions.kernels.verdict import Fault, FaultKind, TriedVariation, VariationOutcome

_CALLS = (
    FaultKind.RAISED,
    FaultKind.STRUCTURE,
    FaultKind.UNWRITTEN,
    FaultKind.STALE,
    FaultKind.CALLS_DIFFER,
    FaultKind.WRITES_INPUT,
)
"""Kinds that are no error of a value; those that lead come first."""

_CAUSES = (FaultKind.UNWRITTEN, FaultKind.STALE, FaultKind.CALLS_DIFFER)
"""Kinds that make values wrong: wrong values of the same result are then no fault of their own."""

_SEVERITY = (
    VariationOutcome.WRONG,
    VariationOutcome.OUT_OF_TIME,
    VariationOutcome.REFUSED,
    VariationOutcome.NOT_DEFINED,
    VariationOutcome.WITHIN_ROUNDING,
    VariationOutcome.NOT_APPLICABLE,
    VariationOutcome.OFF,
)


def merged(faults: Iterable[Fault]) -> tuple[Fault, ...]:
    """Return one fault for each result and sort of fault, the one that leads first.

    That of the given inputs stands for those of variations; among these the one whose kind is certain, and says more
    than "beyond rounding". The others' variations are told in its detail.
    """
    groups: dict[tuple[str, str], list[Fault]] = {}
    for fault in faults:
        groups.setdefault((fault.output, _sort_of(fault)), []).append(fault)
    explained = {output for output, sort in groups if sort in _CAUSES}
    kept = [_leader(group) for (output, sort), group in groups.items() if sort != "values" or output not in explained]
    return tuple(sorted(kept, key=lambda fault: (fault.variation != "given", _rank(fault))))


def _sort_of(fault: Fault) -> str:
    if _is_of_calls(fault):
        return fault.kind
    return "special" if fault.variation in ("nan", "inf") else "values"


def _rank(fault: Fault) -> int:
    """Return where a fault stands: an exception comes first where no inputs are varied, and last where some are."""
    if fault.kind is FaultKind.RAISED and fault.variation != "given":
        return len(_CALLS) + 1
    return _CALLS.index(fault.kind) if _is_of_calls(fault) else len(_CALLS)


def _is_of_calls(fault: Fault) -> bool:
    """Return whether calls have shown the kind of a fault; one with a doubt is guessed from the values."""
    return fault.kind in _CALLS and not fault.doubt


def _leader(group: Sequence[Fault]) -> Fault:
    leader = min(group, key=lambda fault: (fault.variation != "given", _vague(fault)))
    others = list(dict.fromkeys(fault.variation for fault in group if fault.variation != leader.variation))
    if not others:
        return leader
    also = f"also with {', '.join(others)}"
    return replace(leader, detail=f"{leader.detail}; {also}" if leader.detail else also)


def _vague(fault: Fault) -> tuple[bool, bool]:
    return fault.kind in (FaultKind.BEYOND_ROUNDING, FaultKind.ZEROS), bool(fault.doubt)


def together(first: TriedVariation, second: TriedVariation) -> TriedVariation:
    """Return what a variation showed for results and for gradients."""
    leader = min(first, second, key=lambda each: _SEVERITY.index(each.outcome))
    ratio = max((each.ratio for each in (first, second) if each.ratio is not None), default=None)
    return replace(leader, ratio=ratio, meaning=first.meaning or second.meaning)
