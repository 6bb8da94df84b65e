"""What a numeric check finds, as frozen values, and the words and the order in which it is told. Pure: no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hashbench.errors import HashbenchError
from hashbench.text import a_few

SIDES = ("before", "after")
STAGES = ("parameters", "outputs", "buffers", "gradients", "stepped")
"""What is compared in every iteration, in this order: parameters before the forward, what the forward returns, buffers
after it, gradients after the backward, parameters after the optimizer's step."""

FORMS = ("dtype", "device", "layout")
"""Differences of form that a caller may look past (``ignore=``); numbers are then compared after a conversion."""

LONE = ("only before", "only after")
"""Kinds of a difference in which one of the two values does not exist."""

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
                    f"{name}={value!r} is no tolerance", tip="Give a number from 0, such as 1e-4, or None."
                )
        unknown = sorted(self.ignore - set(FORMS))
        if unknown:
            raise HashbenchError(f"{unknown[0]!r} cannot be ignored", tip=f"What can be is: {', '.join(FORMS)}.")

    def limits(self, default: tuple[float, float]) -> tuple[float, float]:
        """``(rtol, atol)``; ``default`` are those of the dtypes."""
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
        found = [tensor for tensor in self.tensors if not tensor.bitwise]
        return tuple(sorted(found, key=lambda tensor: tensor.severity, reverse=True))

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
class Parting:
    """Where two executions part: the earliest place whose own inputs agree while what it leaves differs, and from
    which the difference reaches the results.

    ``level`` is ``tolerance`` (differences within tolerance count as agreement) or ``bitwise``. ``kind`` is
    ``parameter``, ``buffer``, ``input``, ``other`` (a tensor that no recorded op wrote), ``op`` (both executions have
    it), ``replaced`` (one op in place of another, in the same module), ``only before``, ``only after``, or ``unseen``
    (no recorded op explains it). ``op`` is the op's name (of a tensor: the first op that reads it), ``index`` its place
    in the execution ``before``; ``name`` and ``other`` are the ids of its record or leaf in the two traces.

    What an op left that only one execution runs cannot be compared. Where such an op is blamed, ``until`` names the
    first thing after it that both have and that differs: they part between the two. ``healed`` counts what differs at
    this level without reaching a result.
    """

    level: str
    kind: str
    op: str
    module: str
    phase: str
    iteration: int
    detail: str
    before: str = ""
    after: str = ""
    name: str = ""
    other: str = ""
    index: int | None = None
    numbers: TensorComparison | None = None
    until: str = ""
    healed: int = 0
    aligned: int = 0
    only_before: int = 0
    only_after: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """What a numeric check found. True where something was compared, nothing raised, and every value that was compared
    is equal within tolerance. ``notes`` say what else a reader must know; ``partings`` are those of ``trace=True``."""

    comparisons: tuple[Comparison, ...]
    raised: tuple[Raised, ...] = ()
    notes: tuple[str, ...] = ()
    partings: tuple[Parting, ...] = ()
    iterations: int = 0

    def __bool__(self) -> bool:
        return not self.raised and any(found.tensors for found in self.comparisons) and all(self.comparisons)

    @property
    def bitwise(self) -> bool:
        """Whether, beside that, no bit differs."""
        return bool(self) and all(found.bitwise for found in self.comparisons)

    def of(self, stage: str) -> tuple[Comparison, ...]:
        """The comparisons of one stage, one for each iteration that reached it."""
        return tuple(found for found in self.comparisons if found.stage == stage)

    @property
    def verdict(self) -> str:
        """The verdict in one line, stage by stage."""
        stages = [stage for stage in STAGES if self.of(stage)]
        parts = [f"{stage} {verdict_of(self.of(stage))}" for stage in stages]
        parts += [str(raised) for raised in self.raised]
        word = "equal bit by bit" if self.bitwise else "equal within tolerance" if self else "different"
        return f"{word}: {'; '.join(parts) or 'nothing was compared'}"

    def __str__(self) -> str:
        return self.verdict


def verdict_of(comparisons: Sequence[Comparison]) -> str:
    """The verdict on one stage, over all its iterations, in a few words."""
    everything = [tensor for found in comparisons for tensor in found.tensors]
    names = dict.fromkeys(tensor.name for tensor in everything)
    if not everything:
        return "none to compare"
    if all(tensor.bitwise for tensor in everything):
        return f"equal bit by bit ({len(names)})"
    beyond = dict.fromkeys(tensor.name for tensor in everything if not tensor.within)
    if beyond:
        first = min(found.iteration for found in comparisons if not found)
        since = f" from iteration {first} on" if first else ""
        return f"differ{since} ({len(beyond)} of {len(names)}: {a_few(list(beyond), 2)})"
    bits = dict.fromkeys(tensor.name for tensor in everything if not tensor.bitwise)
    return f"equal within tolerance ({len(bits)} of {len(names)} not bit by bit)"


def renamed(names: Iterable[str], rename: Rename) -> dict[str, str]:
    """The name in the model after of every name in the model before.

    Args:
        names: those in the model before, such as ``conv1.weight``.
        rename: a function from one to the other; or a mapping, of whole names or of what they begin with up to a dot
            (``{"conv1": "stem.0"}`` takes ``conv1.weight`` to ``stem.0.weight``). The longest that fits counts.

    Raises:
        HashbenchError: two names become one, or an entry of the mapping fits no name.
    """
    found = {name: rename(name) if callable(rename) else _by_prefix(name, rename or {}) for name in names}
    taken: dict[str, str] = {}
    for name, target in found.items():
        if target in taken:
            raise HashbenchError(
                f"rename takes both {taken[target]!r} and {name!r} to {target!r}",
                consequence="one of them would not be compared",
                tip="Give each name one of its own.",
            )
        taken[target] = name
    return found


def unused(names: Sequence[str], rename: Rename) -> list[str]:
    """The entries of a mapping that fit no name: most likely misspelt."""
    if rename is None or callable(rename):
        return []
    return [old for old in rename if not any(name == old or name.startswith(f"{old}.") for name in names)]


def _by_prefix(name: str, rename: Mapping[str, str]) -> str:
    fitting = [old for old in rename if name == old or name.startswith(f"{old}.")]
    longest = max(fitting, key=len, default="")
    return f"{rename[longest]}{name[len(longest) :]}" if fitting else name


def without_wrapper(name: str) -> str:
    """A parameter's or module's name without the part that ``torch.compile`` puts into it, which keeps the module that
    it wraps as ``_orig_mod``."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")
