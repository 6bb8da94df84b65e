"""The callbacks for trainers, and a loop around accelerate, with the real libraries on a tiny model."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from extensions.watch.loops import Plan
from extensions.watch.trainers import TRAINERS

from hashbench.extensions.watch import file
from hashbench.extensions.watch.compare import RankVerdict
from hashbench.extensions.watch.resume import ResumeVerdict, judge_folders
from hashbench.extensions.watch.traced import LoopVerdict, compare_folders

pytestmark = pytest.mark.slow

PLANS = {
    "plain": Plan(at=7, steps=16),
    "accumulation, clipping": Plan(at=7, steps=16, accumulate=2, clip=True),
    "bfloat16": Plan(at=7, steps=16, amp=True),
}

FAULTS = {
    "generator": "generator",
    "data order": "batch",
    "kernel": "loss",
    "optimizer state": "parameter",
}
"""Fault -> the part that differs first, in the step in which it is planted."""

Base = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    """Return the recording of a trainer without a fault, made once."""
    made: dict[tuple[str, str], Path] = {}

    def recorded(trainer: str, plan: str) -> Path:
        if (trainer, plan) not in made:
            folder = tmp_path_factory.mktemp("base") / "run"
            run(trainer, folder, PLANS[plan])
            made[trainer, plan] = folder
        return made[trainer, plan]

    return recorded


def run(trainer: str, folder: Path, plan: Plan, **more: object) -> None:
    pytest.importorskip(trainer)
    pytest.importorskip("accelerate")
    TRAINERS[trainer](folder, plan, **more)


def first(verdict: LoopVerdict) -> RankVerdict:
    found = verdict.first
    assert found is not None
    return found


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_equal_runs_agree_in_every_part(trainer: str, plan: str, base: Base, tmp_path: Path) -> None:
    run(trainer, tmp_path / "again", PLANS[plan])
    verdict = compare_folders(base(trainer, plan), tmp_path / "again")
    assert verdict.equal
    assert verdict.ranks[0].steps == tuple(range(16))
    absent = {"scaler"} if trainer == "transformers" else {"scaler", "scheduler"}  # its Trainer always has one
    assert {part for parts in verdict.ranks[0].seen.values() for part in parts} == {*file.PARTS} - absent
    step = file.read(tmp_path / "again" / "rank0.jsonl").steps[3]
    assert len(step.parts["loss"]) == len(step.parts["batch"]) == PLANS[plan].accumulate
    assert "none" not in step.parts["gradient"].values()


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_planted_difference_is_found(trainer: str, plan: str, fault: str, base: Base, tmp_path: Path) -> None:
    run(trainer, tmp_path / "b", replace(PLANS[plan], fault=fault))
    verdict = first(compare_folders(base(trainer, plan), tmp_path / "b"))
    assert (verdict.step, verdict.differing[0].part, verdict.since) == (7, FAULTS[fault], 7)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_another_order_of_parameters_is_found(trainer: str, base: Base, tmp_path: Path) -> None:
    run(trainer, tmp_path / "b", replace(PLANS["plain"], fault="order"))
    verdict = first(compare_folders(base(trainer, "plain"), tmp_path / "b"))
    assert (verdict.initial, verdict.differing[0].part) == (True, "order")


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("workers", [2])
def test_workers_of_the_loader_change_no_digest(trainer: str, workers: int, base: Base, tmp_path: Path) -> None:
    run(trainer, tmp_path / "b", replace(PLANS["plain"], workers=workers))
    verdict = compare_folders(base(trainer, "plain"), tmp_path / "b")
    assert verdict.equal


@pytest.mark.parametrize("plan", ["plain", "accumulation, clipping"])
@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_kernel_is_named_where_its_step_is_traced(
    trainer: str, plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HASHBENCH_TRACE_STEP", "6:8")
    run(trainer, tmp_path / "a", PLANS[plan])
    run(trainer, tmp_path / "b", replace(PLANS[plan], fault="kernel"))
    run(trainer, tmp_path / "c", PLANS[plan])
    (traced,) = compare_folders(tmp_path / "a", tmp_path / "b").traced
    assert (traced.first, traced.last) == (6, 7)
    assert traced.verdict is not None
    divergence = traced.verdict.divergence
    assert divergence is not None
    assert divergence.kernel == "planted_loops.racy.default"
    assert divergence.module.endswith("net")
    assert divergence.phase == "forward"
    assert divergence.iteration == 7
    assert divergence.source.startswith("loops.py:")
    assert compare_folders(tmp_path / "a", tmp_path / "c").equal


@pytest.mark.exhaustive
@pytest.mark.parametrize("trainer", TRAINERS)
def test_twenty_places_of_each_fault(trainer: str, tmp_path: Path) -> None:
    drawn = random.Random(trainer)
    for number in range(20):
        plan = replace(PLANS[drawn.choice(list(PLANS))], at=drawn.randrange(1, 11))
        run(trainer, tmp_path / f"{number}.clean", plan)
        for fault, part in FAULTS.items():
            run(trainer, tmp_path / f"{number}.{fault}", replace(plan, fault=fault))
            verdict = first(compare_folders(tmp_path / f"{number}.clean", tmp_path / f"{number}.{fault}"))
            assert (verdict.step, verdict.differing[0].part) == (plan.at, part), fault
        run(trainer, tmp_path / f"{number}.twin", plan)
        assert compare_folders(tmp_path / f"{number}.clean", tmp_path / f"{number}.twin").equal


# ------------------------------------------------------------------------------------------------------- resumption

CHECKPOINT = {"transformers": "checkpoint-10", "lightning": "epoch=0-step=10.ckpt"}


def resumed(trainer: str, folder: Path) -> ResumeVerdict:
    """Judge a run that goes on from step 10, whose checkpoint lies in ``folder``."""
    plan = PLANS["plain"]
    run(trainer, folder / "b", plan, resume=str(folder / "out" / CHECKPOINT[trainer]), output=folder / "again")
    return judge_folders(folder / "a", folder / "b")


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    monkeypatch.setenv("HASHBENCH_WATCH_EVERY", "1")

    def train(trainer: str) -> Path:
        run(trainer, tmp_path / "a", PLANS["plain"], output=tmp_path / "out")
        return tmp_path

    return train


def test_what_the_trainer_of_transformers_restores(saved: Callable[[str], Path]) -> None:
    folder = saved("transformers")
    verdict = resumed("transformers", folder)
    assert (verdict.equal, verdict.at) == (True, 10)


@pytest.mark.parametrize(
    ("file_name", "parts"),
    [("optimizer.pt", {"state"}), ("rng_state.pth", {"generator"})],
)
def test_a_file_that_a_checkpoint_of_transformers_lacks(
    saved: Callable[[str], Path], file_name: str, parts: set[str]
) -> None:
    folder = saved("transformers")
    (folder / "out" / CHECKPOINT["transformers"] / file_name).unlink()
    assert {one.part for one in resumed("transformers", folder).lost} >= parts


def test_what_the_trainer_of_lightning_restores(saved: Callable[[str], Path]) -> None:
    """Its checkpoints have no states of generators, and Dropout draws from one."""
    folder = saved("lightning")
    verdict = resumed("lightning", folder)
    assert verdict.at == 10
    assert "generator" in {one.part for one in verdict.lost}
    assert "state" not in {one.part for one in verdict.lost}


def test_optimizer_state_that_a_checkpoint_of_lightning_lacks(saved: Callable[[str], Path]) -> None:
    folder = saved("lightning")
    path = folder / "out" / CHECKPOINT["lightning"]
    content = torch.load(path, weights_only=False)
    content["optimizer_states"][0]["state"] = {}
    torch.save(content, path)
    lost = {one.part: one for one in resumed("lightning", folder).lost}
    assert {name.rpartition(": ")[2] for name in lost["state"].names} == {"momentum_buffer"}
    assert lost["state"].second == ""
