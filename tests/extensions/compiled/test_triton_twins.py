"""The Triton twins of the suite ``compiled``, whose faults lie in Inductor's Triton code."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from hashbench import cli
from hashbench.core.records import Row
from hashbench.core.results.rows import read_rows
from hashbench.core.suites import registry
from tests.extensions.compiled.truths import (
    TRITON_DECOYS,
    TRITON_PLANTED,
    TRITON_TRUTHS,
)

SPECS = {spec.name: spec for spec in registry.catalog("compiled")}


def swept(folder: Path, names: Iterable[str], mode: str, *flags: str) -> dict[str, Row]:
    command = ["sweep", "--suite", "compiled", f"--{mode}", "--output", str(folder), "--backend", "inductor"]
    assert cli.main([*command, "--threads", "2", *flags, "--only", *names]) == 0
    return {row.name: row for row in read_rows(folder / "accuracy.csv")}


def test_all_of_them_and_no_others_need_cuda() -> None:
    assert {name for name, spec in SPECS.items() if spec.devices == ("cuda",)} == set(TRITON_TRUTHS)
    assert (len(TRITON_PLANTED), len(TRITON_DECOYS)) == (20, 10)


@pytest.mark.usefixtures("shared_servers")
def test_without_a_device_a_row_says_what_is_needed_and_compiles_nothing(tmp_path: Path) -> None:
    row = swept(tmp_path, ["triton_tanh"], "inference")["triton_tanh"]
    assert (row.accuracy, row.error) == ("pass_due_to_skip", "needs cuda")
