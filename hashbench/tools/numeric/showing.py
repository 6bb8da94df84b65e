"""A report as text and as JSON. Pure: no torch."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from tabulate import tabulate

from hashbench.text import a_few
from hashbench.tools.numeric.findings import LONE, STAGES, Parting, Report, TensorComparison

HEADERS = ("stage", "tensor", "iteration", "differ", "beyond", "max abs", "max relative", "max ULP", "of allowed", "")


def as_text(report: Report, *, limit: int = 20) -> str:
    """A table of what differs, worst first, at most ``limit`` lines of it; what only one model has; notes; where the
    models part; the verdict."""
    return "\n".join(_lines(report, limit))


def _lines(report: Report, limit: int) -> Iterator[str]:
    rows = [row for row in _worst(report) if row[2].kind not in LONE]
    if rows:
        cells = [_cells(*row) for row in rows[:limit]]
        yield tabulate(cells, headers=HEADERS, tablefmt="simple", disable_numparse=True)
        if len(rows) > limit:
            yield f"and {len(rows) - limit} more, less far apart"
        yield ""
    yield from _lone_lines(report)
    yield from (f"note: {note}" for note in report.notes)
    for found, levels in _by_place(report.partings):
        yield from _parting_lines(found, " and ".join(levels))
    yield report.verdict


def _worst(report: Report) -> list[tuple[str, int, TensorComparison]]:
    """Of every tensor that differs, the first iteration in which it is beyond tolerance, else in which it differs: a
    later one inherits what an earlier one left. Worst tensors first."""
    found: dict[tuple[str, str], tuple[str, int, TensorComparison]] = {}
    for comparison in report.comparisons:
        for tensor in comparison.tensors:
            known = found.get((comparison.stage, tensor.name))
            if not tensor.bitwise and (known is None or (known[2].within and not tensor.within)):
                found[comparison.stage, tensor.name] = (comparison.stage, comparison.iteration, tensor)
    return sorted(found.values(), key=lambda row: row[2].severity, reverse=True)


def _lone_lines(report: Report) -> Iterator[str]:
    """What only one of the models has, a line for each stage and model."""
    found: dict[tuple[str, str], list[str]] = {}
    for stage, _, tensor in sorted(_worst(report), key=lambda row: STAGES.index(row[0])):
        if tensor.kind in LONE:
            found.setdefault((stage, tensor.kind), []).append(
                tensor.name + (f" ({tensor.detail})" if tensor.detail else "")
            )
    for (stage, kind), names in found.items():
        yield f"{stage} {kind}: {a_few(names, 6)}"


def _cells(stage: str, iteration: int, tensor: TensorComparison) -> list[str]:
    differ = "" if tensor.elements is None else f"{tensor.elements} of {tensor.total}"
    said = "" if tensor.kind in ("value", "") and not tensor.detail else f"{tensor.kind} {tensor.detail}".strip()
    numbers = (tensor.max_abs, tensor.max_relative, tensor.max_ulp, tensor.excess)
    return [stage, tensor.name, str(iteration), differ, _number(tensor.beyond), *map(_number, numbers), said]


def _number(value: float | None) -> str:
    return "" if value is None else str(value) if isinstance(value, int) else f"{value:.3g}"


def _by_place(partings: Sequence[Parting]) -> list[tuple[Parting, list[str]]]:
    """The places, each with the levels at which the executions part there."""
    found: dict[tuple[str, str, str], tuple[Parting, list[str]]] = {}
    for parting in partings:
        _, levels = found.setdefault((parting.kind, parting.name, parting.other), (parting, []))
        levels.append("beyond tolerance" if parting.level == "tolerance" else "bit by bit")
    return list(found.values())


def _parting_lines(found: Parting, level: str) -> Iterator[str]:
    where = f" in {found.module}" if found.module else ""
    phase = f" ({found.phase}, iteration {found.iteration})" if found.phase else ""
    if found.kind in ("op", "replaced", "only before", "only after"):
        yield f"first apart {level}: {found.op}{where}{phase}: {found.detail}{_by(found.numbers)}"
    elif found.op:
        yield f"first apart {level}: {found.detail}{_by(found.numbers)}, first read by {found.op}{where}{phase}"
    else:
        yield f"first apart {level}: {found.detail}"
    if found.until:
        yield f"  the first place of both executions that differs: {found.until}; they part between the two"
    if found.before != found.after:
        yield f"  before: {found.before or 'absent'}"
        yield f"  after:  {found.after or 'absent'}"
    yield (
        f"  ops: {found.aligned} correspond, {found.only_before} only before, {found.only_after} only after; "
        f"{found.healed} of those that correspond differ and agree again before a result"
    )


def _by(numbers: TensorComparison | None) -> str:
    if numbers is None or numbers.max_abs is None:
        return ""
    ulp = "" if numbers.max_ulp is None else f", {numbers.max_ulp} ULP"
    return f" (by at most {numbers.max_abs:.3g}{ulp})"


def as_json(report: Report) -> str:
    """One JSON object: ``equal_within_tolerance``, ``equal_bitwise``, ``verdict``, every comparison, exceptions, notes
    and partings. Numbers that JSON lacks (infinity) are their names."""
    content = {
        "equal_within_tolerance": bool(report),
        "equal_bitwise": report.bitwise,
        "verdict": report.verdict,
        "iterations": report.iterations,
        "comparisons": [
            {"stage": found.stage, "iteration": found.iteration, "tensors": [_plain(item) for item in found.tensors]}
            for found in report.comparisons
        ],
        "raised": [
            {"side": item.side, "stage": item.stage, "iteration": item.iteration, "error": item.error}
            for item in report.raised
        ],
        "notes": list(report.notes),
        "partings": [_plain(found) for found in report.partings],
    }
    return json.dumps(content, indent=2) + "\n"


def _plain(value: Any) -> dict[str, Any]:
    """A dataclass without what is absent or empty."""
    fields = dataclasses.asdict(value).items()
    return {name: _jsonable(item) for name, item in fields if item is not None and item != ""}


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _jsonable(item) for name, item in value.items() if item is not None and item != ""}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
