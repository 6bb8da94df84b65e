"""The columns of a model that was stressed. Pure; imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hashbench.core.catalog import Perturbation
from hashbench.core.records import SHARE, ExperimentResult, Facts, column
from hashbench.core.text import one_line

_PAIRS = re.compile(r"(?P<differing>[0-9]{1,9})/(?P<pairs>[0-9]{1,9})")
_NOT_RUN = re.compile(r"not run \(.*\)")


@dataclass(frozen=True, slots=True)
class StressedPairs:
    """Perturbation → ``differing/pairs``, or ``not run (why)``: the column ``stressed``.

    >>> str(StressedPairs.parse("threads 0/4; process not run (no time)"))
    'threads 0/4; process not run (no time)'
    """

    outcomes: Mapping[str, str]

    @classmethod
    def of(cls, results: Iterable[ExperimentResult]) -> StressedPairs:
        """Build the column from results."""
        words = (one_line(result.word().partition("/")[2]).replace("; ", ", ").partition(" ") for result in results)
        return cls({name: outcome for name, _, outcome in words})

    def __str__(self) -> str:
        return "; ".join(f"{name} {outcome}" for name, outcome in self.outcomes.items())

    @classmethod
    def parse(cls, text: str) -> StressedPairs:
        """Read what :meth:`__str__` returned.

        Raises:
            ValueError: a perturbation is unknown or named twice, or has neither counts that can be nor a reason.
        """
        outcomes: dict[str, str] = {}
        for name, _, outcome in (part.partition(" ") for part in filter(None, _NEXT.split(text))):
            counts = _PAIRS.fullmatch(outcome)
            can_be = int(counts["differing"]) <= int(counts["pairs"]) > 0 if counts else _NOT_RUN.fullmatch(outcome)
            if name not in _NAMES or name in outcomes or not can_be:
                raise ValueError(f"{name} {outcome}")
            outcomes[name] = outcome
        return cls(outcomes)

    @property
    def counts(self) -> Mapping[str, tuple[int, int]]:
        """Perturbation → pairs that differ, and all; without those that were not run."""
        found = {name: _PAIRS.fullmatch(outcome) for name, outcome in self.outcomes.items()}
        return {name: (int(counts["differing"]), int(counts["pairs"])) for name, counts in found.items() if counts}


_NAMES = frozenset(Perturbation)
_NEXT = re.compile(rf"; (?=(?:{'|'.join(Perturbation)}) )")


def is_stressed(text: str) -> bool:
    """Return True for a valid value of the column ``stressed``, also for an empty one."""
    try:
        StressedPairs.parse(text)
    except ValueError:
        return False
    return True


_STRESSED = (is_stressed, "how many pairs differ of how many there were", "Such a cell reads: threads 0/5; load 0/6.")


@dataclass(frozen=True, slots=True)
class StressFacts(Facts):
    """The pairs under perturbations of a model that passes, and the place and cause of a difference between them."""

    stressed: str = column(label="Stressed pairs that differ", check=_STRESSED)
    latent: str = column(noun="perturbation", words=("", *Perturbation), after="accuracy")
    latent_kernel: str = ""
    latent_module: str = ""
    latent_phase: str = ""
    latent_cause: str = ""
    latent_confidence: str = ""
    latent_rate: float | None = column(None, between=SHARE)

    @property
    def counts(self) -> Mapping[str, tuple[int, int]]:
        """Perturbation → pairs that differ, and all; empty if the model was not stressed."""
        return StressedPairs.parse(self.stressed).counts
