"""The suite ``compiled``: its list, its files and its truths name the same models, what it plants can be undone, and
every row of a sweep says what the truth of its model says (:mod:`tests.extensions.compiled.truths`)."""

from __future__ import annotations

import ast
import csv
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest.mark.structures import ParameterSet
from running_order import LONGEST_FIRST

import hashbench
from benchmarks import compiled_truths
from hashbench import cli
from hashbench.core.catalog import CAUSES
from hashbench.core.records import Row
from hashbench.core.results.rows import read_rows
from hashbench.core.suites import registry
from hashbench.core.suites.csv_file import data_folder
from hashbench.core.suites.python_suites import import_file
from hashbench.extensions.compiled.varieties import VARIETIES
from tests.extensions.compiled.truths import (
    DECOYS,
    PLANTED,
    TRITON_DECOYS,
    TRITON_PLANTED,
    TRITON_TRUTHS,
    TRITON_TWINS,
    TRUTHS,
    TWINS,
    Truth,
)
from tests.flat_rows import flat

SPECS = {spec.name: spec for spec in registry.catalog("compiled")}
FILES = sorted((data_folder() / "compiled").glob("[!_]*.py"))
STAGES = (
    "dynamo",
    "aot_autograd",
    "decomposition",
    "joint_graph_passes",
    "post_grad_passes",
    "lowering",
    "codegen",
    "memory_planning",
    "runtime",
)
WITHOUT_STAGE = ("lowering", "codegen", "memory_planning", "runtime")
"""Stages behind which a kernel is wrong, and not its graph."""
WORDS_OF_TORCH = ("atomic_add",)
"""Specimens that are called as something of Inductor's: a mode of stores."""
ALL_TRUTHS = {**TRUTHS, **TRITON_TRUTHS}
ALL_PLANTED = (*PLANTED, *TRITON_PLANTED)


def models_in(path: Path) -> list[str]:
    """The keys of ``MODELS`` in a zoo file, read off its text."""
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="MODELS")], value=ast.Dict(keys=keys)):
                return [ast.literal_eval(key) for key in keys if key is not None]
    return []


def test_list_files_and_truths_name_the_same_models_each_once() -> None:
    in_files = sorted(name for path in FILES for name in models_in(path))
    assert in_files == sorted(SPECS) == sorted(ALL_TRUTHS)
    assert len(TRUTHS) == len(PLANTED) + len(TWINS) + len(DECOYS)
    assert len(TRITON_TRUTHS) == len(TRITON_PLANTED) + len(TRITON_TWINS) + len(TRITON_DECOYS)


@pytest.mark.parametrize("truth", ALL_TRUTHS.values(), ids=list(ALL_TRUTHS))
def test_a_model_runs_in_the_mode_of_its_truth(truth: Truth) -> None:
    assert getattr(SPECS[truth.name], f"skip_{truth.mode}") == ""


@pytest.mark.parametrize("truth", ALL_PLANTED, ids=[truth.name for truth in ALL_PLANTED])
def test_what_is_planted_is_said_in_the_words_of_rows(truth: Truth) -> None:
    assert truth.stage in STAGES
    assert truth.phase in ("forward", "backward")
    assert (truth.kernel != "") == (truth.stage in WITHOUT_STAGE or truth.differs_by != "")
    assert (truth.compiler_pass != "") == truth.stage.endswith("_passes")
    assert re.compile(truth.kernel)
    same_modes = [SPECS[name].skip_training for name in (truth.name, f"{truth.name}_twin")]
    assert same_modes[0] == same_modes[1]


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_has_a_specimen(stage: str) -> None:
    assert any(truth.stage == stage for truth in PLANTED)


def test_neither_twins_nor_decoys_are_blamed() -> None:
    assert [truth.name for truth in ALL_TRUTHS.values() if truth.is_blamed and truth not in ALL_PLANTED] == []


def test_hashbench_knows_no_specimen_by_name() -> None:
    package = Path(hashbench.__file__).parent
    source = "\n".join(path.read_text() for path in package.rglob("*.py") if "models" not in path.parts)
    assert [name for name in SPECS if f'"{name}"' in source and name not in {*WORDS_OF_TORCH, *CAUSES}] == []


def test_the_list_has_no_column_that_a_catalog_ignores() -> None:
    with (data_folder() / "compiled.csv").open(encoding="utf-8", newline="") as file:
        assert all(line["note"] and line["task"] in ("planted", "decoy") for line in csv.DictReader(file))


@pytest.fixture
def planting() -> Any:
    """The module that plants; whatever is planted at the end is undone."""
    module = import_file(data_folder() / "compiled" / "_planted.py")
    yield module
    module.undo()


def build(name: str) -> None:
    registry.load(SPECS[name], mode=ALL_TRUTHS[name].mode)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ALL_TRUTHS if f"{name}_twin" in ALL_TRUTHS])
def test_what_is_planted_is_undone_by_the_next_model(name: str, planting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    changed: list[tuple[Any, str, Any]] = []

    def attribute(self: Any, owner: Any, field: str, value: Any, *, right: Any = planting.Patches.attribute) -> None:
        changed.append((owner, field, getattr(owner, field)))
        right(self, owner, field, value)

    def item(self: Any, mapping: Any, key: Any, value: Any, *, right: Any = planting.Patches.item) -> None:
        changed.append((mapping, key, mapping[key]))
        right(self, mapping, key, value)

    def now(owner: Any, field: Any) -> Any:
        return owner[field] if isinstance(owner, dict) else getattr(owner, field)

    monkeypatch.setattr(planting.Patches, "attribute", attribute)
    monkeypatch.setattr(planting.Patches, "item", item)
    build(name)
    planted = planting.is_planted()
    assert planted == bool(changed)
    assert all(now(owner, field) is not before for owner, field, before in changed)
    build(name)  # again: nothing more
    assert len(changed) == len({(id(owner), str(field)) for owner, field, _ in changed})
    build("gelu_lowering_twin")
    assert not planting.is_planted()
    assert all(now(owner, field) is before for owner, field, before in changed)


@pytest.mark.slow
def test_a_fault_that_cannot_be_planted_leaves_torch_as_it_was(planting: Any) -> None:
    before = torch.compiler.config.cache_key_tag

    def fault(patches: Any) -> None:
        patches.attribute(torch.compiler.config, "cache_key_tag", "half planted")
        raise RuntimeError("no such internal")

    with pytest.raises(RuntimeError, match="no such internal"):
        planting.plant(fault)
    assert (torch.compiler.config.cache_key_tag, planting.is_planted()) == (before, False)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("planting")
def test_a_twin_is_right_in_the_process_and_with_the_caches_of_its_specimen() -> None:
    apart = {}
    for name in ("gelu_lowering", "gelu_lowering_twin"):
        workload = compiled_truths.load(name, "inference")
        exact, reference = (compiled_truths.run(workload, "inference", dtype=kind) for kind in (torch.float64, None))
        compiled = compiled_truths.run(workload, "inference", dtype=torch.float64, backend="inductor")
        apart[name], _ = compiled_truths.separation(reference, exact, compiled)
    assert apart["gelu_lowering"] > compiled_truths.PLANTED
    assert apart["gelu_lowering_twin"] < compiled_truths.CLEAN


# --------------------------------------------------------------------------------------- what a sweep says of them

COMPILATIONS = 1 + len(VARIETIES)
WITHOUT_OP = ("dropout_offset",)
"""Specimens of which the stage alone is named: operators that draw other random numbers are not looked for."""


def group_of(truth: Truth) -> str:
    """The sweep that a row comes from, which is an ``xdist_group`` of its own."""
    planted = TRUTHS[truth.name.removesuffix("_twin")]
    return f"compiled {truth.mode}{' again' if planted.differs_by else ''}"


def grouped(truths: Iterable[Truth]) -> list[ParameterSet]:
    return [
        pytest.param(truth, id=f"{truth.name} in {truth.mode}", marks=pytest.mark.xdist_group(group_of(truth)))
        for truth in truths
    ]


def test_all_sweeps_are_among_what_is_begun_first() -> None:
    assert set(LONGEST_FIRST) >= set(map(group_of, TRUTHS.values()))


@pytest.fixture(scope="session")
def row_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Truth], Row]:
    """The row of a model in the mode of its truth, for which its whole group is swept."""

    @functools.cache
    def rows(group: str) -> Mapping[str, Row]:
        folder = tmp_path_factory.mktemp("compiled")
        names = [truth.name for truth in TRUTHS.values() if group_of(truth) == group]
        command = ["sweep", "--suite", "compiled", f"--{group.split()[1]}", "--output", str(folder), "--only", *names]
        flags = ["--backend", "inductor", "--threads", "2", "--diagnose-budget", "300"]
        again = ["--compilations", str(COMPILATIONS)] if group.endswith("again") else []
        assert cli.main([*command, *flags, *again]) == 0
        return {row.name: row for row in read_rows(folder / "accuracy.csv")}

    return lambda truth: rows(group_of(truth))[truth.name]


def untrue(row: Row, truth: Truth) -> dict[str, tuple[object, object]]:
    """Columns of a row that are not as the truth says, each with what was expected and what was found."""
    # Compilations are compared kernel by kernel; which stage chose another one is not looked for.
    stages = ("",) if truth.differs_by else (truth.stage,) if truth.is_blamed else ("", "rounding")
    expected: dict[str, tuple[bool, object]] = {
        "accuracy": (row.accuracy in truth.accuracy, truth.accuracy),
        "stage": (flat(row).stage in stages, stages),
        "kernel": (re.fullmatch(truth.kernel, row.kernel) is not None, truth.kernel),
        "op": (flat(row).op == ("" if truth.name in WITHOUT_OP else truth.op) or not truth.is_blamed, truth.op),
        # A pass, and an operator whose run fails, are not told with a phase.
        "phase": (row.phase in (truth.phase, "" if not truth.kernel else truth.phase), truth.phase),
        "semantic": (not truth.semantic or flat(row).semantic == "yes", "yes"),
        "confidence": (not (truth.semantic and truth.cured_by) or row.confidence == "proven", "proven"),
    }
    return {name: (truth_of, getattr(flat(row), name)) for name, (right, truth_of) in expected.items() if not right}


@pytest.mark.exhaustive
@pytest.mark.usefixtures("shared_servers")
@pytest.mark.parametrize("truth", grouped(TRUTHS.values()))
def test_row_says_the_truth(truth: Truth, row_of: Callable[[Truth], Row]) -> None:
    row = row_of(truth)
    assert untrue(row, truth) == {}, f"{row.detail} {row.evidence.text} {row.error}".strip()
