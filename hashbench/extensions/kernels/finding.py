"""The verdict on a kernel and its reference, as a finding. No torch."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hashbench.core.finding import Facts, Finding, Table, plain
from hashbench.core.text import count, cut, in_brackets, listed, one_line, percent, spaced
from hashbench.extensions.kernels.verdict import (
    Example,
    Fault,
    FaultKind,
    JudgedOutput,
    KernelOutcome,
    RoundingVerdict,
    TriedVariation,
    VariationOutcome,
)

GIVEN = "given"
"""The variation that varies nothing."""

FAULTS = 3
"""Faults that have lines; ``--json`` has all."""

LONGEST_CELL = 68
"""Maximum characters of a cell that says what was varied; ``--json`` has all."""

AS_NEAR = 1.05
"""Errors whose sizes are within this factor are said to be as large as each other."""

WORDS: Mapping[FaultKind, str] = {
    FaultKind.BEYOND_ROUNDING: "an error beyond rounding",
    FaultKind.STALE: "stale values",
    FaultKind.NON_FINITE: "a non-finite value, or none where one belongs",
    FaultKind.SIGN_OF_ZERO: "the sign of zero",
    FaultKind.APPROXIMATION: "an approximation",
    FaultKind.WRITES_INPUT: "it writes its inputs",
    FaultKind.CALLS_DIFFER: "it differs from call to call",
    FaultKind.RAISED: "it raised",
}
"""Kinds that a headline calls otherwise than by their names."""

_MEASURED = (FaultKind.SCALED, FaultKind.SHIFTED)
"""Kinds that a headline tells with their number."""

_TOLD = (VariationOutcome.REFUSED, VariationOutcome.NOT_DEFINED, VariationOutcome.NOT_APPLICABLE)


def finding_of(verdict: RoundingVerdict, *, commands: Sequence[str] = ()) -> Finding:
    """Return the report of a verdict.

    Args:
        verdict: what was found.
        commands: to run next.
    """
    return Finding(
        headline=headline_of(verdict),
        facts=(
            *_fault_facts(verdict),
            *((each.name, _output(each)) for each in verdict.outputs),
            ("claimed", "" if verdict.approximate is None else f"good to {_claim(verdict.approximate)}"),
            ("dtype and device", " on ".join(filter(None, (verdict.dtype, verdict.device)))),
            ("variations", _counts(verdict)),
        ),
        table=_variations(verdict.variations),
        notes=tuple(_notes(verdict)),
        next=tuple(commands),
        equal=verdict.right,
        differs=verdict.outcome is KernelOutcome.WRONG,
        data=_data(verdict),
    )


def finding_by_dtype(verdicts: Mapping[str, RoundingVerdict], *, commands: Sequence[str] = ()) -> Finding:
    """Return the report of a kernel in several dtypes: a table with a row of each, and those that are not right whole.

    Args:
        verdicts: dtype -> what was found.
        commands: to run next.
    """
    names = {kind: [name for name, each in verdicts.items() if each.outcome is kind] for kind in KernelOutcome}
    wrong, unknown = names[KernelOutcome.WRONG], names[KernelOutcome.NOT_KNOWN]
    rows = tuple((name, *(cut(one_line(cell), LONGEST_CELL) for cell in _row(each))) for name, each in verdicts.items())
    return Finding(
        headline=_headline_by_dtype(names),
        table=Table("", ("dtype", "verdict", "units", "at", "explained by", "against the reference"), rows),
        parts=tuple(finding_of(each) for each in verdicts.values() if not each.right),
        next=tuple(commands),
        equal=not wrong and not unknown,
        differs=bool(wrong),
        data={"dtypes": {name: _data(each) for name, each in verdicts.items()}},
    )


# ------------------------------------------------------------------------------------------------------- headline


def headline_of(verdict: RoundingVerdict) -> str:
    """Return the verdict in one line."""
    if verdict.outcome is KernelOutcome.NOT_KNOWN:
        return f"Not known whether the kernel is right: {verdict.reason or 'no reason is known'}"
    if verdict.outcome is KernelOutcome.WRONG:
        return _wrong(verdict)
    worst = worst_of(verdict.outputs)
    if worst is None:
        return "Within rounding"
    if not worst.ratio:
        return f"Within rounding: equal to the reference bit by bit{in_brackets(verdict.dtype)}"
    at = f" at {list(worst.worst)}" if worst.worst else ""
    of = f" of {worst.name}" if len(verdict.outputs) > 1 else ""
    parts = (f"{number(worst.ratio)} {_unit(worst.ratio)}{at}{of}", _nearer(worst))
    return f"Within rounding: {', '.join(filter(None, parts))}{in_brackets(_beside(verdict))}"


def _wrong(verdict: RoundingVerdict) -> str:
    first = verdict.faults[0] if verdict.faults else Fault(FaultKind.BEYOND_ROUNDING)
    of = f" {first.output}" if first.output != "output" else ""
    beside = in_brackets(verdict.dtype, f"variation {first.variation}" if first.variation != GIVEN else "")
    more = f"; and {count(len(verdict.faults) - 1, 'other fault')}" if len(verdict.faults) > 1 else ""
    return f"Wrong{of}: {_what(first)}{_where(first)}{beside}{more}"


def _headline_by_dtype(names: Mapping[KernelOutcome, Sequence[str]]) -> str:
    said = [
        f"{words} in {listed(names[kind])}"
        for kind, words in (
            (KernelOutcome.WRONG, "wrong"),
            (KernelOutcome.NOT_KNOWN, "not known"),
            (KernelOutcome.WITHIN_ROUNDING, "within rounding"),
        )
        if names[kind]
    ]
    text = "; ".join(said)
    return f"{text[:1].upper()}{text[1:]}"


def _beside(verdict: RoundingVerdict) -> str:
    """Return what explains the errors, where that is more than the order of sums."""
    wide = [each.explained_by for each in verdict.outputs if each.explained_by not in ("", "equal")]
    return ", ".join(filter(None, (verdict.dtype, *dict.fromkeys(wide))))


def _what(fault: Fault) -> str:
    """Return the kind of a fault: ``scaled by 1.01``, ``it raised: ValueError: …``."""
    words = WORDS.get(fault.kind, fault.kind.value)
    if fault.kind is FaultKind.RAISED and fault.detail:
        return f"{words}: {fault.detail}"
    measured = fault.detail.partition(" (")[0] if fault.kind in _MEASURED else ""
    return f"{words} {measured}" if measured.startswith("by ") else words


def _where(fault: Fault) -> str:
    return f" {'' if fault.where.startswith('where ') else 'in '}{fault.where}" if fault.where else ""


# ---------------------------------------------------------------------------------------------------------- facts


def _fault_facts(verdict: RoundingVerdict) -> Facts:
    meanings = {each.name: each.meaning for each in verdict.variations}
    found: list[tuple[str, str]] = []
    for place, fault in enumerate(verdict.faults[:FAULTS], start=1):
        named = f" {place}" if place > 1 else ""
        found += [
            (f"fault{named}", _fault(fault, meanings.get(fault.variation, ""))),
            (f"where{named}", _extent(fault)),
            (f"shown by{named}", example_words(fault.example) if fault.example else ""),
            (f"not certain{named}", fault.doubt),
        ]
    return tuple(found)


def _fault(fault: Fault, meaning: str) -> str:
    of = f"{fault.output}: " if fault.output != "output" else ""
    measured = ": ".join(filter(None, (WORDS.get(fault.kind, fault.kind.value), fault.detail)))
    units = "" if fault.ratio is None else f", up to {number(fault.ratio)} {_unit(fault.ratio)}"
    varied = "" if fault.variation == GIVEN else f", with the variation {fault.variation}{in_brackets(meaning)}"
    return f"{of}{measured}{units}{varied}"


def _extent(fault: Fault) -> str:
    share = "" if fault.share is None else f"{percent(fault.share)} of the elements"
    return ", ".join(filter(None, (fault.where, share)))


def example_words(example: Example) -> str:
    """Return an input and what it leads to: ``float32[1, 7], zeros but 1.0 at [0, 6]: [0] is 0, not 1``."""
    inputs = "; ".join(example.inputs)
    at = f"{list(example.index)} " if example.index else ""
    if example.got is None and example.wanted is None:
        return inputs
    led = f"{at}is {_instead(example)}"
    return ": ".join(filter(None, (inputs, led)))


def _output(output: JudgedOutput) -> str:
    shape = f"{output.dtype}{list(output.shape)}"
    if not output.ratio:
        return f"{shape}, equal to the reference bit by bit"
    at = f" at {list(output.worst)}" if output.worst else ""
    values = ""
    if output.got is not None or output.wanted is not None:
        values = f", {_instead(output)}"
    explained = f"explained by {output.explained_by}" if output.explained_by else "which nothing explains"
    own = "" if output.own_ratio is None else f"the reference itself is off by {number(output.own_ratio)}"
    units = f"{number(output.ratio)} {_unit(output.ratio)}"
    parts = (f"{shape}, {units}{at}{values}", explained, own, _nearer(output))
    return "; ".join(filter(None, parts))


def _instead(element: Example | JudgedOutput) -> str:
    """Return what the kernel has there, and what the reference in float64 has."""
    return f"{value(element.got)} instead of {value(element.wanted)}"


def _nearer(output: JudgedOutput) -> str:
    """Return how much nearer to float64 the kernel is than its reference."""
    if output.better is None or not math.isfinite(output.better) or output.better <= 0:
        return ""
    if 1 / AS_NEAR <= output.better <= AS_NEAR:
        return "as near to float64 as the reference"
    nearer, times = ("nearer to", output.better) if output.better > 1 else ("farther from", 1 / output.better)
    return f"{number(times)} times {nearer} float64 than the reference"


def _claim(approximate: float) -> str:
    return f"{approximate:.3g} of the largest value"


def _counts(verdict: RoundingVerdict) -> str:
    """Return how many variations there were of each outcome, and their seed."""
    counted = Counter(each.outcome for each in verdict.variations)
    said = [f"{counted[outcome]} {outcome.value}" for outcome in VariationOutcome if counted[outcome]]
    return f"{', '.join(said)}; seed {verdict.seed}" if said else ""


# ------------------------------------------------------------------------------------------------ table and notes


def _variations(variations: Sequence[TriedVariation]) -> Table:
    rows = tuple(
        (
            each.name,
            each.outcome.value,
            "" if each.ratio is None else number(each.ratio),
            cut(one_line(each.reason if each.outcome in _TOLD and each.reason else each.meaning), LONGEST_CELL),
        )
        for each in variations
    )
    return Table("Variations of the inputs", ("variation", "verdict", "units", "what was varied"), rows)


def _row(verdict: RoundingVerdict) -> tuple[str, ...]:
    """Return the cells of a dtype: verdict, largest units, place, what explains them, and against the reference."""
    worst = worst_of(verdict.outputs)
    if verdict.faults:
        first = verdict.faults[0]
        known = (first.ratio, None if worst is None else worst.ratio)
        ratio = max((each for each in known if each is not None), default=None)
        at = ", ".join(filter(None, (first.where, first.variation if first.variation != GIVEN else "")))
        return (
            f"{verdict.outcome.value}: {_what(first)}",
            "" if ratio is None else number(ratio),
            at,
            "nothing",
            _nearer(worst) if worst else "",
        )
    words = ": ".join(filter(None, (verdict.outcome.value, verdict.reason)))
    if worst is None:
        return words, "", "", "", ""
    at = str(list(worst.worst)) if worst.worst and worst.ratio else ""
    of = f"{worst.name} " if len(verdict.outputs) > 1 else ""
    explained = worst.explained_by or "nothing"
    return words, number(worst.ratio), f"{of}{at}".strip(), explained, _nearer(worst)


def _notes(verdict: RoundingVerdict) -> Iterator[str]:
    yield from verdict.remarks
    if len(verdict.faults) > FAULTS:
        yield f"It is wrong in {len(verdict.faults)} ways, of which {FAULTS} are shown: --json has all."
    late = [each.name for each in verdict.variations if each.outcome is VariationOutcome.OUT_OF_TIME]
    if late:
        yield f"There was no time for {listed(late)}: more seconds than {verdict.seconds:.0f} try them as well."


# ---------------------------------------------------------------------------------------------------------- words


def worst_of(outputs: Sequence[JudgedOutput]) -> JudgedOutput | None:
    """Return the result with the largest error in units; NaN counts as the largest."""
    return max(outputs, key=lambda each: math.inf if math.isnan(each.ratio) else each.ratio, default=None)


def number(units: float) -> str:
    """Return a number of units: ``1.3``, ``16 384``, ``3.1e+12``, ``inf``."""
    if not math.isfinite(units) or units >= 1e9:
        return f"{units:.2g}"
    return spaced(round(units)) if units >= 100 else f"{units:.2g}"


def value(element: complex | None) -> str:
    """Return an element; ``none`` where there is none."""
    if element is None:
        return "none"
    return f"{element:.9g}"


def _unit(units: float) -> str:
    return "unit" if units == 1 else "units"


def _data(verdict: RoundingVerdict) -> dict[str, Any]:
    """Return a verdict as plain values; the pictures are for the page alone."""
    told = dataclasses.replace(verdict, outputs=tuple(dataclasses.replace(one, picture=()) for one in verdict.outputs))
    data: dict[str, Any] = plain(told)
    for output in data["outputs"]:
        del output["picture"]
    return data
