"""The table of extensions: what options and models ask for, and that every target is there."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, fields
from pkgutil import resolve_name

import pytest

from hashbench.core.extensions import DiffsFiles, RowWords, check_for, own_check_of, stages_for
from hashbench.core.records import BATCH_INVARIANCE, RunOptions
from hashbench.extensions import EXTENSIONS

TARGETS = [
    (field.name, value)
    for each in EXTENSIONS
    for field in fields(each)
    if isinstance(value := getattr(each, field.name), str) and value.startswith("hashbench.")
]


MODULES = {
    "words": [name for name in vars(RowWords) if not name.startswith("_")],
    "diffs": [name for name in vars(DiffsFiles) if not name.startswith("_")],
    "commands": ["add"],
    "audit": ["row", "died", "lies_at", "reports"],
}
"""What targets that are no functions must have."""


@dataclass(frozen=True)
class Model:
    world_size: int | None


def options(**changed: object) -> RunOptions:
    return RunOptions(**{"device": "cpu", "mode": "training", **changed})  # type: ignore[arg-type]


@pytest.mark.parametrize(("field", "target"), TARGETS)
def test_every_target_is_there(field: str, target: str) -> None:
    found = resolve_name(target)
    assert all(callable(getattr(found, name)) for name in MODULES[field]) if field in MODULES else callable(found)


@pytest.mark.parametrize(
    ("asked", "check", "stages"),
    [
        ({}, None, []),
        ({"backend": "aot_eager"}, "hashbench.extensions.compiled.check", []),
        ({"mode": BATCH_INVARIANCE}, "hashbench.extensions.invariance.check", []),
        ({"stress": True}, None, ["hashbench.extensions.stress.stage"]),
    ],
    ids=["nothing", "a backend", "an invariance", "stress"],
)
def test_options_ask_for_a_check_and_for_stages(asked: dict[str, object], check: str | None, stages: list[str]) -> None:
    for module in filter(None, (check, *stages)):
        pytest.importorskip(module)
    given = options(**asked)
    assert getattr(check_for(given), "__module__", None) == check
    assert [stage.__module__ for stage in stages_for(given)] == stages  # type: ignore[attr-defined]


@pytest.mark.parametrize(("world_size", "own"), [(None, False), (1, False), (2, True)])
def test_a_model_with_ranks_has_its_own_check(world_size: int | None, own: bool) -> None:
    if own:
        pytest.importorskip("hashbench.extensions.ranks.check")
    assert (own_check_of(Model(world_size)) is not None) == own


def test_the_table_loads_no_extension() -> None:
    code = "import sys, hashbench.extensions; print(*(n for n in sys.modules if n.startswith(('hashbench.', 'torch'))))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    core = {f"hashbench.core.{name}" for name in ("catalog", "errors", "extensions", "records", "text")}
    core |= {f"hashbench.core.records.{name}" for name in ("asked", "concluded", "seen", "shown")}
    assert set(done.stdout.split()) == {*core, "hashbench.core", "hashbench.extensions"}
