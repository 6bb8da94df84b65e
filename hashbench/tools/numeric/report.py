"""What a numeric check finds: frozen values, verdicts in words, the report. Pure: no torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hashbench.core import finding
from hashbench.core.errors import HashbenchError
from hashbench.core.finding import Finding, Table, few
from hashbench.core.text import count, in_brackets, join_limited, ulps, when

SIDES = ("before", "after")
STAGES = ("parameters", "outputs", "buffers", "gradients", "stepped")
"""What is compared in every iteration, in this order: parameters before the forward, what the forward returns, buffers
after it, gradients after the backward, parameters after the optimizer's step."""

FORMS = ("dtype", "device", "layout")
"""Differences of form that a caller may look past (``ignore=``); numbers are then compared after a conversion."""

LONE = ("only before", "only after")
"""Kinds of a difference in which one of the two values does not exist."""

OF_OPS = ("op", "replaced", *LONE)
"""Kinds of a :class:`FirstDifference` that blame an op."""

HEADERS = ("stage", "tensor", "iteration", "differ", "beyond", "max abs", "max relative", "max ULP", "of allowed", "")

Rename = Mapping[str, str] | Callable[[str], str] | None


@dataclass(frozen=True, slots=True)
class Rule:
    """What counts as equal within tolerance: ``|before - after| <= atol + rtol * |after|`` for every element, as
    ``torch.allclose(before, after)`` has it.

    ``precision`` is used for both ``rtol`` and ``atol``, as in torch's own numeric check. Without it each dtype has
    its tolerances of ``torch.testing.assert_close``; of two dtypes the larger ones. ``ignore`` names differences of
    :data:`FORMS` that count as none.
    """

    precision: float | None = None
    rtol: float | None = None
    atol: float | None = None
    ignore: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for name in ("precision", "rtol", "atol"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise HashbenchError(
                    f"{name}={value!r} is not a tolerance", tip="Give a number from 0, such as 1e-4, or None."
                )
        unknown = sorted(self.ignore - set(FORMS))
        if unknown:
            raise HashbenchError(f"{unknown[0]!r} cannot be ignored", tip=f"What can be is: {', '.join(FORMS)}.")

    def limits(self, default: tuple[float, float]) -> tuple[float, float]:
        """Return ``(rtol, atol)``; ``default`` are those of the dtypes."""
        rtol, atol = default if self.precision is None else (self.precision, self.precision)
        return (rtol if self.rtol is None else self.rtol, atol if self.atol is None else self.atol)


@dataclass(frozen=True, slots=True)
class TensorComparison:
    """Two values of one name, compared. True where they are equal within tolerance.

    ``bitwise``: also bit by bit. ``kind`` is empty where no bit differs, else the first of ``only before``,
    ``only after``, ``type``, ``shape``, ``no data``, ``not comparable``, ``dtype``, ``device``, ``layout``, ``value``,
    ``representation`` (only signs of zero or NaN payloads differ) that applies; ``detail`` says it in words.

    Numbers are absent (``None``) where none can be given: ``elements`` that differ, of ``total``; ``beyond`` tolerance;
    the largest ``|before - after|``, ``|before - after| / |before|`` (where that is not zero) and distance in units in
    the last place, over elements that are finite in both; ``excess``, the largest difference as a multiple of what is
    allowed (infinite for a NaN or infinity against anything else). ``nan_in_both``: elements that are NaN in both,
    which counts as equal within tolerance.
    """

    name: str
    within: bool
    bitwise: bool
    kind: str = ""
    detail: str = ""
    elements: int | None = None
    total: int | None = None
    beyond: int | None = None
    max_abs: float | None = None
    max_relative: float | None = None
    max_ulp: int | None = None
    excess: float | None = None
    nan_in_both: int = 0
    rtol: float | None = None
    atol: float | None = None

    def __bool__(self) -> bool:
        return self.within

    @property
    def severity(self) -> tuple[bool, float, float]:
        """What to sort by, worst last: within tolerance or not, then the excess; what has no numbers is worst."""
        excess = math.inf if self.excess is None and self.kind else self.excess or 0.0
        return not self.within, excess, self.max_abs or 0.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """All values of one stage, compared. True where all are equal within tolerance; ``bitwise``: also bit by bit."""

    stage: str
    tensors: tuple[TensorComparison, ...]
    iteration: int = 0

    def __bool__(self) -> bool:
        return all(tensor.within for tensor in self.tensors)

    @property
    def bitwise(self) -> bool:
        """Whether no bit differs."""
        return all(tensor.bitwise for tensor in self.tensors)

    @property
    def differing(self) -> tuple[TensorComparison, ...]:
        """Those that differ in any bit, worst first."""
        differing = [tensor for tensor in self.tensors if not tensor.bitwise]
        return tuple(sorted(differing, key=lambda tensor: tensor.severity, reverse=True))

    def __str__(self) -> str:
        worst = next(iter(self.differing), None)
        return f"{self.stage}: {verdict_of([self])}" + ("" if worst is None else f", worst {worst.name}")


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception: in which model (``before`` or ``after``), at which stage, in which iteration."""

    side: str
    stage: str
    iteration: int
    error: str
    exception: Exception | None = None
    nondeterministic_op: str = ""

    def __str__(self) -> str:
        return f"the model {self.side} raised at {self.stage}, iteration {self.iteration}: {self.error}"


@dataclass(frozen=True, slots=True)
class CommonRecord:
    """A record that both executions have: its op as the execution ``before`` has it, and its ids in the two traces."""

    op: str
    module: str
    phase: str
    iteration: int | None
    name: str
    other: str

    def __str__(self) -> str:
        return f"{self.op}{f' in {self.module}' if self.module else ''} ({when(self.phase, self.iteration)})"


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """Where two executions first differ: the earliest place whose own inputs agree while what it leaves differs.

    From there the difference reaches the results.

    ``level`` is ``tolerance`` (differences within tolerance count as agreement) or ``bitwise``. ``kind`` is
    ``parameter``, ``buffer``, ``input``, ``other`` (a tensor that no recorded op wrote), ``op`` (both executions have
    it), ``replaced`` (one op in place of another, in the same module), ``only before``, ``only after``,
    ``between`` (ops of which it is not known which correspond, as those of compiled code), or ``unseen`` (no recorded
    op explains it). ``op`` is the op's name (of a tensor: the first op that
    reads it), ``index`` its place in the execution ``before``; ``name`` and ``other`` are the ids of its record or leaf
    in the two traces.

    What an op left that only one execution runs cannot be compared. Where such an op is blamed, ``until`` names the
    first thing after it that both have and that differs: the difference enters between the two. Of ``between`` no op is
    blamed: ``last_before`` and ``first_after`` are the records around it that both have (``None``: there is none).
    ``unmatched_before`` and ``unmatched_after`` are the ops of either execution of which no counterpart is known.
    ``healed`` counts what differs at this level without reaching a result.
    """

    level: str
    kind: str
    op: str
    module: str
    phase: str
    iteration: int | None
    detail: str
    before: str = ""
    after: str = ""
    name: str = ""
    other: str = ""
    index: int | None = None
    numbers: TensorComparison | None = None
    until: str = ""
    last_before: CommonRecord | None = None
    first_after: CommonRecord | None = None
    unmatched_before: tuple[str, ...] = ()
    unmatched_after: tuple[str, ...] = ()
    healed: int = 0
    aligned: int = 0
    only_before: int = 0
    only_after: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """What a numeric check found. True where something was compared, nothing raised, and every value that was compared
    is equal within tolerance. ``notes`` say what else a reader must know; ``first_differences`` are those of
    ``trace=True``."""

    comparisons: tuple[Comparison, ...]
    raised: tuple[Raised, ...] = ()
    notes: tuple[str, ...] = ()
    first_differences: tuple[FirstDifference, ...] = ()
    iterations: int = 0

    def __bool__(self) -> bool:
        return not self.raised and any(item.tensors for item in self.comparisons) and all(self.comparisons)

    @property
    def bitwise(self) -> bool:
        """Whether, beside that, no bit differs."""
        return bool(self) and all(item.bitwise for item in self.comparisons)

    def of(self, stage: str) -> tuple[Comparison, ...]:
        """Return the comparisons of one stage, one for each iteration that reached it."""
        return tuple(item for item in self.comparisons if item.stage == stage)

    @property
    def _word(self) -> str:
        """The verdict in few words."""
        return "equal bit by bit" if self.bitwise else "equal within tolerance" if self else "different"

    @property
    def verdict(self) -> str:
        """The verdict in one line, stage by stage."""
        stages = [stage for stage in STAGES if self.of(stage)]
        parts = [f"{stage} {verdict_of(self.of(stage))}" for stage in stages]
        parts += [str(raised) for raised in self.raised]
        return f"{self._word}: {'; '.join(parts) or 'nothing was compared'}"

    def __str__(self) -> str:
        return self.verdict


def verdict_of(comparisons: Sequence[Comparison]) -> str:
    """Return the verdict on one stage, over all its iterations, in a few words."""
    tensors = [tensor for comparison in comparisons for tensor in comparison.tensors]
    names = dict.fromkeys(tensor.name for tensor in tensors)
    bits = dict.fromkeys(tensor.name for tensor in tensors if not tensor.bitwise)
    beyond = list(dict.fromkeys(tensor.name for tensor in tensors if not tensor.within))
    if not names:
        return "none to compare"
    if not bits:
        return f"equal bit by bit ({len(names)})"
    if not beyond:
        return f"equal within tolerance ({len(bits)} of {len(names)} not bit by bit)"
    first = min(comparison.iteration for comparison in comparisons if not comparison)
    since = f" from iteration {first} on" if first else ""
    return f"differ{since} ({len(beyond)} of {len(names)}: {join_limited(beyond, 2)})"


# ------------------------------------------------------------------------------------------------------ rendering


def as_text(report: Report, *, limit: int = 20) -> str:
    """Return what ``hashbench numeric`` prints; see :func:`finding_of`."""
    return finding.as_text(finding_of(report, limit=limit))


def as_json(report: Report) -> str:
    """Return the JSON document of ``hashbench numeric``."""
    return finding.as_json(finding_of(report))


def finding_of(report: Report, *, limit: int = 20, command: str = "") -> Finding:
    """Return a table of what differs, worst first, at most ``limit`` lines of it; what only one model has; notes; and
    where the models first differ. ``command`` finds that, if it was not looked for.

    The data has every comparison, without what is absent or empty. Numbers that JSON lacks (infinity) are their names.
    """
    worst = _worst(report)
    rows = [_cells(*row) for row in worst if row[2].kind not in LONE]
    more = f"{len(rows) - limit} more of the tensors that differ are less far apart."
    levels: dict[tuple[str, ...], list[FirstDifference]] = {}
    for found in report.first_differences:
        levels.setdefault((found.kind, found.name, found.other, found.detail), []).append(found)
    return Finding(
        headline=f"The models are {report._word}",
        facts=(
            *((stage, verdict_of(report.of(stage))) for stage in STAGES if report.of(stage)),
            *(("raised", str(raised)) for raised in report.raised),
            *_lone_facts(worst),
        ),
        table=Table("", HEADERS, tuple(rows[:limit])),
        notes=((more,) if len(rows) > limit else ()) + report.notes,
        next=(command,) if command and not report.bitwise and not report.first_differences else (),
        parts=tuple(map(_difference, levels.values())),
        equal=bool(report),
        differs=not report,
        data={
            "equal_within_tolerance": bool(report),
            "equal_bitwise": report.bitwise,
            "verdict": report.verdict,
            "iterations": report.iterations,
            "comparisons": list(map(_plain, report.comparisons)),
            "raised": [
                {"side": item.side, "stage": item.stage, "iteration": item.iteration, "error": item.error}
                for item in report.raised
            ],
            "first_differences": list(map(_plain, report.first_differences)),
        },
    )


def _lone_facts(worst: Sequence[tuple[str, int, TensorComparison]]) -> Iterator[tuple[str, str]]:
    """Yield what only one model has."""
    lone: dict[tuple[str, str], list[str]] = {}
    for stage, _, tensor in sorted(worst, key=lambda row: STAGES.index(row[0])):
        if tensor.kind in LONE:
            detail = f" ({tensor.detail})" if tensor.detail else ""
            lone.setdefault((stage, tensor.kind), []).append(tensor.name + detail)
    yield from ((kind, f"{stage}: {few(names)}") for (stage, kind), names in lone.items())


def _worst(report: Report) -> list[tuple[str, int, TensorComparison]]:
    """List for every tensor that differs the first iteration in which it is beyond tolerance, else in which it differs:
    a later one inherits what an earlier one left. Worst tensors first."""
    worst: dict[tuple[str, str], tuple[str, int, TensorComparison]] = {}
    for comparison in report.comparisons:
        for tensor in comparison.tensors:
            known = worst.get((comparison.stage, tensor.name))
            if not tensor.bitwise and (known is None or (known[2].within and not tensor.within)):
                worst[comparison.stage, tensor.name] = (comparison.stage, comparison.iteration, tensor)
    return sorted(worst.values(), key=lambda row: row[2].severity, reverse=True)


def _cells(stage: str, iteration: int, tensor: TensorComparison) -> tuple[str, ...]:
    differ = "" if tensor.elements is None else f"{tensor.elements} of {tensor.total}"
    kind = "" if tensor.kind in ("value", "") and not tensor.detail else f"{tensor.kind} {tensor.detail}".strip()
    numbers = (tensor.beyond, tensor.max_abs, tensor.max_relative, tensor.max_ulp, tensor.excess)
    return stage, tensor.name, str(iteration), differ, *map(_number, numbers), kind


def _number(value: float | None) -> str:
    return "" if value is None else str(value) if isinstance(value, int) else f"{value:.3g}"


def _difference(same: Sequence[FirstDifference]) -> Finding:
    """Return the report of a first difference, which may be that of both levels."""
    found = same[0]
    level = " and ".join("beyond tolerance" if each.level == "tolerance" else "bit by bit" for each in same)
    numbers = found.numbers
    by = ""
    if numbers is not None and numbers.max_abs is not None:
        by = in_brackets(f"by at most {numbers.max_abs:.3g}", ulps(numbers.max_ulp))
    op = f"{found.op}{f' in {found.module}' if found.module else ''}{in_brackets(when(found.phase, found.iteration))}"
    what = f"{op}: {found.detail}{by}" if found.kind in OF_OPS else f"{found.detail}{by}"
    unmatched = zip(SIDES, (found.unmatched_before, found.unmatched_after), strict=True)
    changed = found.before != found.after
    return Finding(
        headline=f"First difference {level}: {what}",
        facts=(
            ("first read by", op if found.op and found.kind not in OF_OPS else ""),
            *((f"unmatched {side}", f"{count(len(ops), 'op')}: {few(list(dict.fromkeys(ops)))}" if ops else "")
              for side, ops in unmatched),
            ("until", f"{found.until}: differs in both, and the difference enters before it" if found.until else ""),
            ("before", (found.before or "absent") if changed else ""),
            ("after", (found.after or "absent") if changed else ""),
            ("ops", f"{found.aligned} correspond, {found.only_before} only before, {found.only_after} only after"),
            ("healed", f"{found.healed} of those that correspond differ and agree again before a result"),
        ),
    )  # fmt: skip


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
        return {name: _plain(item) for name, item in fields if item is not None and item != ""}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
