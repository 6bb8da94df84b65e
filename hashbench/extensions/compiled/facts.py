"""The columns of a compiled model. Pure; imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hashbench.core.records import SHARE, Facts, column
from hashbench.extensions.compiled.varieties import VARIETIES


@dataclass(frozen=True, slots=True)
class FurtherCompilations:
    """What each compilation after the first one gives, by the name of its variety: ``same``, or what differs.

    As the column has it: ``fresh cache: same; max_autotune: not compared (no time)``.
    """

    outcomes: Mapping[str, str]

    def __str__(self) -> str:
        return "; ".join(f"{name}: {outcome}" for name, outcome in self.outcomes.items())

    @classmethod
    def parse(cls, text: str) -> FurtherCompilations:
        """Read what :meth:`__str__` returned; text before the first known name is dropped."""
        _, *parts = _NAMED.split(text)
        return cls(dict(zip(parts[::2], (part.removesuffix("; ") for part in parts[1::2]), strict=True)))

    @property
    def not_compared(self) -> FurtherCompilations:
        """Those that were not compared with the first one, with the reason."""
        return FurtherCompilations(
            {name: outcome for name, outcome in self.outcomes.items() if outcome.startswith(NOT_COMPARED)}
        )


NOT_COMPARED = "not compared"

NOT_SEEN = "are not seen"
"""In what a row's ``detail`` says of kernels whose calls no Python sees."""

_NAMED = re.compile(rf"(?:^|(?<=; ))({'|'.join(re.escape(variety.name) for variety in VARIETIES)}): ")


@dataclass(frozen=True, slots=True)
class CompiledFacts(Facts):
    """What a compiled model shows beside its status; ``docs/csv_columns.md`` explains every field."""

    graphs: int | None = None
    graph_breaks: int | None = None
    compile_seconds: float | None = None
    kernels: int | None = None
    checked: float | None = column(None, between=SHARE)
    stage: str = column(label="Stage of the compiler", after="origin", yields_to="cause", place=True)
    op: str = column(label="Op of the program", place=True)
    beyond_rounding: float | None = None
    eager_rounding: float | None = None
    semantic: str = column(label="A mistake, not rounding")
    reference: str = column(label="Eager reference")
    cured_by: str = column(label="Cured by")
    compilations: str = column(label="Further compilations")
