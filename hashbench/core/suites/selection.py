"""Which models of a suite a sweep runs: the flags ``--only``, ``-k``, ``-x``, ``--exclude-exact`` and partitions.

The rules are those of ``benchmarks/dynamo``: patterns are regular expressions that are searched for without regard to
case, and a partition is a slice of the sorted list *before* the patterns are applied.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

from hashbench.core.errors import HashbenchError
from hashbench.core.records import ModelSpec
from hashbench.core.results.folder import Partition

WHICH = ("default", "all")
_SEE_NAMES = "See the names with: hashbench list"


@dataclass(frozen=True, slots=True)
class Selection:
    """Which models of ``suites`` are run.

    Attributes:
        suites: names of suites or paths of zoo files.
        only: exact names, taken from all models. Patterns and partitions, which dynamo then ignores, are refused beside
            them.
        filters: a model stays when any of these patterns is found in its name. With filters all models are searched.
        excludes: a model goes when any of these patterns is found in its name.
        exclude_exact: names that go.
        which: ``default`` takes the models that their suite marks so (all of them where it marks none), ``all`` all.
        total_partitions: into how many parts the list is cut.
        partition_id: which part to take, from 0. All parts together are the whole list, none twice.
    """

    suites: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    filters: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()
    exclude_exact: tuple[str, ...] = ()
    which: str = "default"
    total_partitions: int = 1
    partition_id: int = 0

    def of(self, specs: Iterable[ModelSpec]) -> tuple[ModelSpec, ...]:
        """Filter ``specs``, sorted by suite and name. Models that cannot run in the sweep's mode or on its device are
        kept: their row says ``pass_due_to_skip`` and why.

        Raises:
            HashbenchError: an unknown name, an invalid pattern or partition, or nothing is left.
        """
        everything = tuple(sorted(specs, key=lambda spec: (spec.suite, spec.name)))
        self._check({spec.name for spec in everything})
        wanted, unwanted = pattern_of(self.filters), pattern_of(self.excludes)
        candidates = everything
        if self.only:
            candidates = tuple(spec for spec in everything if spec.name in self.only)
        elif self.which != "all" and not self.filters:
            marking = {spec.suite for spec in everything if spec.default}
            candidates = tuple(spec for spec in everything if spec.default or spec.suite not in marking)
        kept = tuple(
            spec
            for spec in self._part_of(candidates)
            if (wanted is None or wanted.search(spec.name))
            and not (unwanted is not None and unwanted.search(spec.name))
            and spec.name not in self.exclude_exact
        )
        if not kept:
            consequence = f"none of {len(candidates)} is left after -k, -x, --exclude-exact and the partition"
            raise HashbenchError("no model is selected", consequence=consequence, tip=_SEE_NAMES)
        return kept

    def partition(self, specs: Iterable[ModelSpec]) -> Partition:
        """Return which part of the whole selection this is."""
        if self.total_partitions == 1:
            return Partition()
        whole = replace(self, total_partitions=1, partition_id=0).of(specs)
        models = tuple((spec.suite, spec.name) for spec in whole)
        return Partition(self.partition_id, self.total_partitions, models)

    def _check(self, known: set[str]) -> None:
        problem, tip = "", ""
        if self.which not in WHICH:
            problem, tip = f"unknown models {self.which!r}", f"Choose one of {', '.join(WHICH)}."
        elif self.total_partitions < 1:
            problem = f"cannot cut the list into {self.total_partitions} partitions"
            tip = "Give --total-partitions 1 or more."
        elif not 0 <= self.partition_id < self.total_partitions:
            problem = f"partition {self.partition_id} of {self.total_partitions} does not exist"
            tip = f"Give --partition-id 0 to {self.total_partitions - 1}."
        if problem:
            raise HashbenchError(problem, consequence="nothing was run", tip=tip)
        self.refuse_contradictions()
        for name in (*self.only, *self.exclude_exact):
            if name not in known:
                raise unknown_name("model", name, known, tip=_SEE_NAMES)

    def refuse_contradictions(self) -> None:
        """Raise :class:`HashbenchError` where a pattern or a partition is asked for beside exact names."""
        given = {"-k": self.filters, "-x": self.excludes, "--total-partitions": self.total_partitions > 1}
        beside = [flag for flag, value in given.items() if value]
        if self.only and beside:
            raise HashbenchError(
                f"--only cannot be combined with {' or '.join(beside)}",
                consequence="it names each model that is wanted, so nothing was run",
                tip="Leave one of them out; to take names away from --only or -k, use --exclude-exact.",
            )

    def _part_of(self, specs: Sequence[ModelSpec]) -> Sequence[ModelSpec]:
        """Slice as dynamo's ``get_benchmark_indices`` does: equal parts, the remainder in the last one."""
        size, index = len(specs) // self.total_partitions, self.partition_id
        return specs[index * size : (index + 1) * size if index < self.total_partitions - 1 else len(specs)]


def unknown_name(what: str, name: str, known: Iterable[str], *, tip: str) -> HashbenchError:
    """Build the error for a name that is not among ``known``: it suggests the nearest ones, else ``tip``."""
    near = get_close_matches(name, sorted(set(known)), n=3, cutoff=0.5)
    return HashbenchError(
        f"unknown {what} {name!r}",
        consequence="nothing was run",
        tip=f"Did you mean {' or '.join(near)}?" if near else tip,
    )


def pattern_of(patterns: Sequence[str], *, flags: re.RegexFlag = re.IGNORECASE) -> re.Pattern[str] | None:
    """Compile ``patterns`` into one expression that matches any of them; ``None`` if there are none.

    Raises:
        HashbenchError: one is not a regular expression.
    """
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            tip = "Put a backslash before special characters."
            raise HashbenchError(f"{pattern!r} is not a regular expression", consequence=str(error), tip=tip) from error
    joined = "|".join(f"(?:{pattern})" for pattern in patterns)
    return re.compile(joined, flags) if patterns else None
