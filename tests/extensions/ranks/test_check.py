"""Models with ranks in real processes: the status, the rank, the kernel and the cause of each planted fault."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
from sweep_helpers import alive, wait_until

from hashbench.core.catalog import EXPERIMENTS, Role
from hashbench.core.check.model import run_model
from hashbench.core.diagnose.fresh_process import SERVER_VARIABLE
from hashbench.core.diagnose.rank_processes import RankEnd
from hashbench.core.divergence.collective_calls import nodes_of_call
from hashbench.core.records import Decision, Diagnosis, Evidence, Failure, ModelSpec, Row, RunOptions
from hashbench.core.trace import file
from hashbench.core.workers import Fork, request_for
from hashbench.extensions.ranks import check as ranks
from hashbench.extensions.ranks.check import RankPair
from hashbench.extensions.ranks.runs import RankAnswer, RankRuns
from tests.flat_rows import flat

pytestmark = pytest.mark.usefixtures("shared_servers")

ZOO = Path(__file__).with_name("ranked_zoo.py")


def row_of(name: str, folder: Path, *, world_size: int | None = 2, **options: object) -> Row:
    asked = RunOptions(mode="training", output=str(folder), replays=8, diagnose_budget=0.0)
    spec = ModelSpec("ranked_zoo", name, source=str(ZOO), world_size=world_size)
    return run_model(spec, dataclasses.replace(asked, **options))


@pytest.mark.slow
def test_a_clean_model_passes_on_both_ranks(tmp_path: Path) -> None:
    row = row_of("clean", tmp_path)

    assert (row.accuracy, row.error, flat(row).world_size, flat(row).rank, row.runs) == ("pass", "", 2, None, 2)
    assert (flat(row).group, flat(row).through, row.traces) == ("", "", "")
    assert row.ops is not None
    assert row.ops > 50


@pytest.mark.slow
def test_a_kernel_of_one_rank_is_named_with_its_rank_and_its_way_to_the_other(tmp_path: Path) -> None:
    row = row_of("counts", tmp_path)

    assert (row.accuracy, row.origin, row.kernel) == ("eager_two_runs_differ", "kernel", "ranked_zoo.counted.default")
    assert (flat(row).rank, flat(row).world_size, flat(row).group, row.module) == (
        1,
        2,
        "0-1",
        "DistributedDataParallel.module.1",
    )
    assert flat(row).through.startswith("rank 1: ranked_zoo.counted -> all_reduce #1 of group 0-1 -> rank 0")
    assert row.confirmed.startswith("yes")
    assert "rank 0: parameter.module.2.weight" in row.differing_results
    assert row.traces == "traces/ranked_zoo.training.counts.run1 traces/ranked_zoo.training.counts.run2"
    read = file.read(tmp_path / row.traces.split()[0] / "rank1.log.gz")
    assert read.rank is not None
    assert (read.rank.rank, read.rank.world_size) == (1, 2)


@pytest.mark.slow
def test_the_call_is_captured_on_its_rank_and_replayed_without_the_other(tmp_path: Path) -> None:
    row = row_of("counts", tmp_path, diagnose_budget=60.0)

    assert (flat(row).rank, row.kernel, row.cause) == (1, "ranked_zoo.counted.default", "opaque_kernel")
    assert row.evidence.result("repeat", "call").differing == row.evidence.result("repeat", "call").trials > 0
    assert row.evidence.result("pair", "pair").differing == 8
    assert row.evidence.result("fresh_process", "process").note == "needs all ranks"
    assert (tmp_path / row.repro / "repro.py").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "accuracy", "error"),
    [
        ("raises", "eager_1st_run_fail", "rank 1: ValueError: no data"),
        ("dies", "crashed", "rank 1 killed by SIGKILL"),
        ("cannot_be_built", "model_fail_to_load", "rank 1: IndexError: list index out of range"),
    ],
)
def test_a_rank_that_fails_is_named(name: str, accuracy: str, error: str, tmp_path: Path) -> None:
    row = row_of(name, tmp_path)

    assert (row.accuracy, flat(row).world_size) == (accuracy, 2)
    assert row.error.startswith(error)


@pytest.mark.slow
def test_ranks_that_hang_are_killed_with_the_worker(tmp_path: Path) -> None:
    request = request_for("rank_targets:check_a_model_that_hangs", str(ZOO), str(tmp_path))
    told = tmp_path / "hangs"
    with Fork(os.environ[SERVER_VARIABLE], request, seconds=60.0) as worker:
        worker.start(60.0)
        wait_until(lambda: told.exists() and told.read_text())
        pid = int(told.read_text())
        assert alive(pid)
        assert worker.wait(0.0) is None  # it waits for its ranks

    wait_until(lambda: not alive(pid))


@pytest.mark.slow
def test_the_number_of_ranks_may_be_that_of_the_workload(tmp_path: Path) -> None:
    row = row_of("undeclared", tmp_path, world_size=None)

    assert (row.accuracy, flat(row).world_size) == ("pass", 2)


@pytest.mark.parametrize(
    ("option", "flag"), [({"backend": "inductor"}, "--backend"), ({"mode": "batch-invariance"}, "--batch-invariant")]
)
def test_what_runs_in_one_process_is_skipped(tmp_path: Path, option: dict[str, str], flag: str) -> None:
    row = row_of("clean", tmp_path, **option)

    assert row.accuracy == "pass_due_to_skip"
    assert row.error == f"{flag} runs a model in one process, and this one has 2 ranks"


@pytest.mark.slow
def test_a_collective_is_repeated_alone_with_what_each_rank_gave(tmp_path: Path) -> None:
    spec = ModelSpec("ranked_zoo", "clean", source=str(ZOO), world_size=2)
    options = RunOptions(mode="training", output=str(tmp_path))
    check = ranks.RanksCheck(spec, options, "on", target="hashbench.core.check.model:BenchmarkRunner")
    with check._made(2) as made:
        traces = made.traces(1)
    at = next(record.id for record in traces[1].records if record.op == "c10d.allreduce_.default")
    nodes = nodes_of_call(traces, 1, at)
    unknown = Diagnosis(Decision("unknown", "open", "", ""), Evidence("collective"))

    told = check.repeated_alone(unknown, RankRuns(check.target, spec, options, "on", 1), nodes)

    assert nodes == {0: at, 1: at}
    assert [(arm.name, arm.differing, arm.trials) for arm in told.evidence.arms if arm.ran] == [
        ("contributions", 0, 20)
    ]
    assert {arm.note for arm in told.evidence.arms if not arm.ran} == {
        "its backend is gloo",
        "its backend is gloo, not NCCL",
    }
    assert (told.decision.cause, told.decision.confidence) == ("arrival_order", "likely")
    assert told.reproduced == "in fresh processes 0 of 20 repetitions differ"
    assert sorted(path.name for path in (tmp_path / told.repro).iterdir()) == ["rank0.pt", "rank1.pt", "repro.py"]


def test_every_setting_of_a_collective_is_an_experiment_on_it() -> None:
    known = {name for name, one in EXPERIMENTS.items() if "collective" in one.on and one.role is Role.LIBRARY}

    assert set(ranks.COLLECTIVE_SETTINGS) == known


def pair(*answers: RankAnswer | None, ends: dict[int, tuple[int | None, float]] | None = None) -> RankPair:
    known = {rank: answer for rank, answer in enumerate(answers) if answer is not None}
    told = ends or {}
    each = tuple(RankEnd(rank, *told.get(rank, (0, 1.0)), Path("none")) for rank in range(len(answers)))
    return RankPair(Path("none"), each, known)


def test_the_first_rank_that_raised_is_the_one_that_failed() -> None:
    late, early = (RankAnswer(Failure(word), at=at) for word, at in (("connection closed", 2.0), ("no data", 1.0)))

    assert pair(late, early).failed == (1, early)


def test_the_rank_that_died_first_is_to_blame_not_the_one_that_waits_for_it() -> None:
    dead = pair(None, None, ends={0: (None, 9.0), 1: (-9, 3.0)}).death

    assert dead is not None
    assert dead.rank == 1


def test_a_run_differs_if_it_does_on_any_rank() -> None:
    both = pair(RankAnswer(labels=(0, 0, 0)), RankAnswer(labels=(0, 0, 2)))

    assert both.differing_run == 3
    assert (both.run_counts.compared, both.run_counts.differing, both.run_counts.distinct) == (2, 1, 2)
