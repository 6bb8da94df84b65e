"""Which models of a suite a sweep runs: the flags ``--only``, ``-k``, ``-x``, ``--exclude-exact`` and partitions.

The rules are those of ``benchmarks/dynamo``: patterns are regular expressions that are searched for without regard to
case, and a partition is a slice of the sorted list *before* the patterns are applied.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches

from hashbench.errors import HashbenchError
from hashbench.records import MODES, ModelSpec

WHICH = ("default", "all")


def select(
    specs: Iterable[ModelSpec],
    *,
    only: Collection[str] = (),
    filters: Sequence[str] = (),
    excludes: Sequence[str] = (),
    exclude_exact: Collection[str] = (),
    which: str = "default",
    total_partitions: int = 1,
    partition_id: int = 0,
    mode: str,
) -> tuple[ModelSpec, ...]:
    """The models to run, sorted by suite and name.

    Models that cannot run in ``mode``, or on the sweep's device, stay in: their row says ``pass_due_to_skip`` and why.

    Args:
        specs: one or more suites.
        only: exact names, taken from all models; partitions and patterns then play no part, as in dynamo.
        filters: a model stays when any of these patterns is found in its name. With filters all models are searched.
        excludes: a model goes when any of these patterns is found in its name.
        exclude_exact: names that go.
        which: ``default`` takes the models that their suite marks so (all of them where it marks none), ``all`` all.
        total_partitions: into how many parts the list is cut.
        partition_id: which part to take, from 0. All parts together are the whole list, none twice.
        mode: ``training`` or ``inference``.

    Raises:
        HashbenchError: an unknown name, an invalid pattern or partition, or nothing is left.
    """
    everything = tuple(sorted(specs, key=lambda spec: (spec.suite, spec.name)))
    _check_choice("mode", mode, MODES)
    _check_choice("models", which, WHICH)
    _check_partition(total_partitions, partition_id)
    wanted, unwanted = _pattern(filters), _pattern(excludes)
    _check_names((*only, *exclude_exact), everything)
    if only:
        return tuple(spec for spec in everything if spec.name in only and spec.name not in exclude_exact)
    candidates = everything if which == "all" or filters else _defaults(everything)
    kept = tuple(
        spec
        for spec in _partition(candidates, total=total_partitions, index=partition_id)
        if (wanted is None or wanted.search(spec.name))
        and not (unwanted is not None and unwanted.search(spec.name))
        and spec.name not in exclude_exact
    )
    if not kept:
        raise HashbenchError(
            "no model is selected",
            consequence=f"none of {len(candidates)} is left after -k, -x and the partition",
            tip="See the names with: hashbench list",
        )
    return kept


def unknown_name(what: str, name: str, known: Iterable[str], *, tip: str) -> HashbenchError:
    """The error for a name that is not among ``known``: it offers the nearest ones, else ``tip``."""
    near = get_close_matches(name, sorted(set(known)), n=3, cutoff=0.5)
    return HashbenchError(
        f"unknown {what} {name!r}",
        consequence="nothing was run",
        tip=f"Did you mean {' or '.join(near)}?" if near else tip,
    )


def _check_names(names: Iterable[str], specs: Sequence[ModelSpec]) -> None:
    known = {spec.name for spec in specs}
    for name in names:
        if name not in known:
            raise unknown_name("model", name, known, tip="See the names with: hashbench list")


def _check_choice(what: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise HashbenchError(f"unknown {what} {value!r}", tip=f"Choose one of {', '.join(choices)}.")


def _check_partition(total: int, index: int) -> None:
    if total < 1:
        raise HashbenchError(
            f"cannot cut the list into {total} partitions",
            consequence="nothing was run",
            tip="Give --total-partitions 1 or more.",
        )
    if not 0 <= index < total:
        raise HashbenchError(
            f"there is no partition {index} of {total}",
            consequence="nothing was run",
            tip=f"Give --partition-id 0 to {total - 1}.",
        )


def _pattern(patterns: Sequence[str]) -> re.Pattern[str] | None:
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise HashbenchError(
                f"{pattern!r} is not a regular expression",
                consequence=str(error),
                tip="Put a backslash before special characters.",
            ) from error
    joined = "|".join(f"(?:{pattern})" for pattern in patterns)
    return re.compile(joined, re.IGNORECASE) if patterns else None


def _defaults(specs: Sequence[ModelSpec]) -> tuple[ModelSpec, ...]:
    marking = {spec.suite for spec in specs if spec.default}
    return tuple(spec for spec in specs if spec.default or spec.suite not in marking)


def _partition(specs: Sequence[ModelSpec], *, total: int, index: int) -> Sequence[ModelSpec]:
    """The slice that dynamo's ``get_benchmark_indices`` gives: equal parts, the remainder in the last one."""
    size = len(specs) // total
    return specs[index * size : (index + 1) * size if index < total - 1 else len(specs)]
