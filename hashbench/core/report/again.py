"""The command that sweeps a model of a row again. Pure; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from hashbench.core.records import DTYPES, Row, flags_of_mode

_OF_THE_RUN = (
    *(
        "--batch-size",
        "--iterations",
        "--runs",
        "--threads",
        "--seed",
        "--deterministic",
        "--cotangent",
        "--compilations",
    ),
)
"""Flags of a sweep that change what a model computes, each with one value."""


def sweep_again(
    row: Row, environments: Mapping[str, Mapping[str, Any]], *, names: Sequence[str] = (), runs: int = 0
) -> tuple[str, ...]:
    """Return the words of the ``hashbench sweep`` that runs the model of ``row`` again, into ``again/NAME``.

    Suite (a zoo file by its path), ``--tiny`` and :data:`_OF_THE_RUN` are taken from the command line in the row's
    environment, the rest from the row. The environment may come from elsewhere: no other word of it is taken.

    Args:
        row: a row of the sweep.
        environments: environments of machines by key, as in
            :attr:`~hashbench.core.results.load.Sweep.environments`.
        names: the models to run; empty: that of ``row`` alone.
        runs: runs of each; 0: as many as before.

    Returns:
        The words; none if the row has no suite or no mode.
    """
    if not row.suite or not row.mode:
        return ()
    found = environments.get(row.env, {}).get("command_line")
    known = [word for word in found if isinstance(word, str)] if isinstance(found, list) else []
    suite = next((word for word in known if word.endswith(".py") and Path(word).stem == row.suite), row.suite)
    words = ["hashbench", "sweep", "--suite", suite, *flags_of_mode(row.mode)]
    words += ["--tiny"] * ("--tiny" in known)
    words += [f"--{row.dtype}"] * (row.dtype in DTYPES and row.dtype != DTYPES[0])
    words += ["-d", row.dev] * (row.dev != "cpu")
    words += ["--backend", row.backend] * bool(row.backend)
    for flag, value in pairwise(known):
        known_flag = (
            flag in _OF_THE_RUN and (row.backend or flag != "--compilations") and not (runs and flag == "--runs")
        )
        words += [flag, value] * bool(known_flag and not value.startswith("-"))
    words += ["--runs", str(runs)] * bool(runs)
    return (*words, "--only", *(names or (row.name,)), "--output", f"again/{row.name}")
