"""The Triton twins of the suite ``compiled``: faults planted in Inductor's Triton code are named at kernel and op by
``--as cuda:90``, which needs no GPU; right code that looks suspicious is not blamed."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest

from hashbench import cli
from hashbench.core.records import Row
from hashbench.core.results.rows import read_rows
from hashbench.core.suites import registry
from tests.extensions.compiled.truths import (
    ROUNDING,
    TRITON_DECOYS,
    TRITON_PLANTED,
    TRITON_TRUTHS,
    TRITON_TWINS,
    Truth,
)
from tests.flat_rows import flat

NAMED_AT_LEAST = 18
SAMPLE = ("triton_floor_division", "triton_masked_maximum", "triton_masked_maximum_twin", "triton_integers")
SPECS = {spec.name: spec for spec in registry.catalog("compiled")}


def swept(folder: Path, names: Iterable[str], mode: str, *flags: str) -> dict[str, Row]:
    command = ["sweep", "--suite", "compiled", f"--{mode}", "--output", str(folder), "--backend", "inductor"]
    assert cli.main([*command, "--threads", "2", *flags, "--only", *names]) == 0
    return {row.name: row for row in read_rows(folder / "accuracy.csv")}


def as_hopper(folder: Path, names: Iterable[str], mode: str, *, budget: int) -> dict[str, Row]:
    return swept(folder, names, mode, "--as", "cuda:90", "--diagnose-budget", str(budget))


def is_named(row: Row, truth: Truth) -> bool:
    return re.fullmatch(truth.kernel, row.kernel) is not None and flat(row).op == truth.op


def is_blamed(row: Row) -> bool:
    return row.kernel != "" or flat(row).stage not in ("", "rounding")


def told(rows: Iterable[Row]) -> str:
    return "\n".join(f"{row.name}: {row.accuracy} {flat(row).stage} {row.kernel} {flat(row).op}" for row in rows)


def test_all_of_them_and_no_others_need_cuda() -> None:
    assert {name for name, spec in SPECS.items() if spec.devices == ("cuda",)} == set(TRITON_TRUTHS)
    assert (len(TRITON_PLANTED), len(TRITON_DECOYS)) == (20, 10)


def test_the_page_lists_every_fault() -> None:
    page = (Path(__file__).parents[3] / "docs" / "compiled.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\w+)` \|", page.partition("| `triton_…` |")[2].partition("\n\n")[0], re.MULTILINE)
    assert sorted(f"triton_{name}" for name in listed) == sorted(truth.name for truth in TRITON_PLANTED)


@pytest.mark.usefixtures("shared_servers")
def test_without_a_device_a_row_says_what_is_needed_and_compiles_nothing(tmp_path: Path) -> None:
    row = swept(tmp_path, ["triton_tanh"], "inference")["triton_tanh"]
    assert (row.accuracy, row.error) == ("pass_due_to_skip", "needs cuda")


@pytest.mark.slow
@pytest.mark.usefixtures("shared_servers")
def test_a_sample_is_named_or_passes(tmp_path: Path) -> None:
    rows = as_hopper(tmp_path, SAMPLE, "inference", budget=60)
    named = {name: is_named(row, TRITON_TRUTHS[name]) for name, row in rows.items() if TRITON_TRUTHS[name].is_blamed}
    assert named == {"triton_floor_division": True, "triton_masked_maximum": True}, told(rows.values())
    assert [name for name, row in rows.items() if name not in named and is_blamed(row)] == [], told(rows.values())
    assert all(flat(row).checked for row in rows.values())


@pytest.fixture(scope="session")
def row_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Truth], Row]:
    """The row of a model in the mode of its truth, for which all are swept."""

    @functools.cache
    def rows(mode: str) -> Mapping[str, Row]:
        names = [truth.name for truth in TRITON_TRUTHS.values() if truth.mode == mode]
        return as_hopper(tmp_path_factory.mktemp("triton"), names, mode, budget=300)

    return lambda truth: rows(truth.mode)[truth.name]


@pytest.mark.exhaustive
@pytest.mark.usefixtures("shared_servers")
@pytest.mark.xdist_group("compiled triton")
def test_faults_are_named_at_kernel_and_op(row_of: Callable[[Truth], Row]) -> None:
    missed = [row_of(truth) for truth in TRITON_PLANTED if not is_named(row_of(truth), truth)]
    assert len(TRITON_PLANTED) - len(missed) >= NAMED_AT_LEAST, told(missed)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("shared_servers")
@pytest.mark.xdist_group("compiled triton")
@pytest.mark.parametrize("truths", [TRITON_TWINS, TRITON_DECOYS], ids=["twins", "decoys"])
def test_right_code_is_not_blamed(truths: tuple[Truth, ...], row_of: Callable[[Truth], Row]) -> None:
    blamed = [row_of(truth) for truth in truths if is_blamed(row_of(truth))]
    assert blamed == [], told(blamed)
    failed = [row_of(truth) for truth in truths if row_of(truth).accuracy not in ROUNDING]
    assert failed == [], told(failed)
