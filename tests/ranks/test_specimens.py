"""Programs of several ranks: what two runs of each are said to differ by, where one run's replicas part, and that
recording them changes nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from hashbench.divergence.rank_verdict import RanksVerdict
from hashbench.divergence.ranks import find_across_ranks
from hashbench.divergence.replicas import ReplicasVerdict, check_replicas
from hashbench.records import Trace
from hashbench.trace import file
from tests.ranks.pool import Outcome, RankPool
from tests.ranks.programs.base import Replicas, Truth
from tests.ranks.programs.table import PROGRAMS

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ranks")]

VARIANTS = {"clean": False, "planted": True}
ENDING = [name for name, program in PROGRAMS.items() if not program.truth.missing]
REPLICAS = [name for name, program in PROGRAMS.items() if program.replicas is not None]
EARLY_ROUNDS = CLEAN_ROUNDS = 20

AGREE = "all ranks agree"


class Specimens:
    """Runs of programs on the ranks of a pool, and what was recorded of them."""

    def __init__(self, pool: RankPool, folder: Path) -> None:
        self._pool, self._folder, self._calls = pool, folder, 0

    def untraced(self, name: str, *, planted: bool, number: int = 0) -> tuple[Outcome, ...]:
        """Run a program untraced."""
        return self._run("run_untraced", name, planted, number)[1]

    def recorded(self, name: str, *, planted: bool, number: int) -> tuple[Path, tuple[Outcome, ...]]:
        """Run a program and record it; return the recording's folder."""
        return self._run("run_recorded", name, planted, number, recorded=True)

    def _run(
        self, how: str, name: str, planted: bool, number: int, *, recorded: bool = False
    ) -> tuple[Path, tuple[Outcome, ...]]:
        self._calls += 1
        folder = self._folder / f"{self._calls}"
        own, into = folder / "own", folder / "recording"
        own.mkdir(parents=True)
        more = (into,) if recorded else ()
        outcomes = self._pool.call(
            f"tests.ranks.running:{how}", name, planted, number, own, *more, ranks=PROGRAMS[name].ranks, folder=folder
        )
        return into, outcomes


@dataclass(frozen=True, slots=True)
class Pair:
    """Two recorded runs of a program."""

    outcomes: tuple[tuple[Outcome, ...], tuple[Outcome, ...]]
    traces: tuple[Mapping[int, Trace], Mapping[int, Trace]]

    def verdict(self, ranks: int) -> RanksVerdict:
        return find_across_ranks(*self.traces, world_size=ranks)


def traces_in(folder: Path) -> dict[int, Trace]:
    """The traces of a recording, up to the last whole step where a rank was killed."""
    paths = {int(path.name.removeprefix("rank").partition(".")[0]): path for path in folder.glob("rank*.log.gz")}
    return {rank: file.read(path, cut=True) for rank, path in sorted(paths.items())}


def recorded_twice(specimens: Specimens, name: str, *, planted: bool) -> Pair:
    runs = [specimens.recorded(name, planted=planted, number=number) for number in (0, 1)]
    if not (planted and PROGRAMS[name].truth.missing):
        assert not any(outcome.error for _, outcomes in runs for outcome in outcomes), runs
    return Pair((runs[0][1], runs[1][1]), (traces_in(runs[0][0]), traces_in(runs[1][0])))


@pytest.fixture(scope="module")
def specimens(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Specimens:
    return Specimens(rank_pool, tmp_path_factory.mktemp("specimens"))


@pytest.fixture(scope="module")
def pair_of(specimens: Specimens) -> Callable[[str, bool], Pair]:
    """Two recorded runs of a variant, made once for all tests of this file."""
    return functools.cache(lambda name, planted: recorded_twice(specimens, name, planted=planted))


def said(verdict: RanksVerdict) -> str:
    """The verdict in words for the message of a failed test."""
    if verdict.equal:
        return AGREE
    firsts = [
        f"rank {one.rank}: {one.origin} {one.kernel} at {one.node}, missing {one.missing}" for one in verdict.first
    ]
    return "; ".join([*firsts, *(f"later rank {one.rank}: {one.kernel}" for one in verdict.later), *verdict.unknown])


def is_right(verdict: RanksVerdict, truth: Truth) -> bool:
    """Whether a verdict on two planted runs says what is true."""
    told = all(any(f"ank {rank} " in sentence for sentence in verdict.unknown) for rank in truth.missing)
    if truth.rank is None:
        return not verdict.first and (bool(truth.missing) or verdict.equal) and told
    found, *beside = sorted(verdict.first, key=lambda one: one.rank != truth.rank) or [None]
    if found is None:
        return False
    others = {one.rank for one in verdict.differing} - {one.rank for one in verdict.first}
    kernel = truth.kernel if found.origin in ("kernel", "collective", "unwaited") else found.kernel
    return (
        told
        and found.rank == truth.rank
        and found.origin in truth.origin
        and found.kernel == kernel
        and f".{found.module}".endswith(f".{truth.module or ''}".rstrip("."))
        and truth.iteration in (None, found.iteration)
        and {(one.rank, one.kernel) for one in beside} == {*truth.beside}
        and {(one.rank, one.kernel) for one in verdict.later} == {*truth.later}
        and (bool(found.through) or not others)
    )


# ------------------------------------------------------------------------------------------------------- two runs


@pytest.mark.parametrize("name", PROGRAMS)
def test_two_runs_of_a_clean_twin_agree_on_all_ranks(name: str, pair_of: Callable[[str, bool], Pair]) -> None:
    assert said(pair_of(name, False).verdict(PROGRAMS[name].ranks)) == AGREE


@pytest.mark.parametrize("name", PROGRAMS)
def test_two_planted_runs_are_told_apart_where_the_fault_is(name: str, pair_of: Callable[[str, bool], Pair]) -> None:
    verdict = pair_of(name, True).verdict(PROGRAMS[name].ranks)
    assert is_right(verdict, PROGRAMS[name].truth), said(verdict)


@pytest.mark.exhaustive
@pytest.mark.parametrize("round_of", range(CLEAN_ROUNDS))
def test_clean_twins_agree_in_every_round(round_of: int, specimens: Specimens) -> None:
    verdicts = {
        name: said(recorded_twice(specimens, name, planted=False).verdict(program.ranks))
        for name, program in PROGRAMS.items()
    }
    assert {name: verdict for name, verdict in verdicts.items() if verdict != AGREE} == {}, f"round {round_of}"


@pytest.mark.exhaustive
@pytest.mark.parametrize("round_of", range(EARLY_ROUNDS))
def test_read_before_its_wait_is_told_in_every_round(round_of: int, specimens: Specimens) -> None:
    verdict = recorded_twice(specimens, "read_before_wait", planted=True).verdict(2)
    assert is_right(verdict, PROGRAMS["read_before_wait"].truth), f"round {round_of}: {said(verdict)}"


# ------------------------------------------------------------------------------------------------------- replicas


def parted(verdict: ReplicasVerdict) -> list[str]:
    """The replicas that part, and how."""
    return [
        f"{one.name} after step {one.step}, minority {one.minority}: {one.origin} {one.kernel}"
        for one in verdict.differing
    ]


def are_right(verdict: ReplicasVerdict, truth: Replicas) -> bool:
    """Whether a verdict on a planted run says what is true."""
    first = [one for one in verdict.differing if one.step == truth.step]
    return (
        len(first) == len(truth.names)
        and all(any(one.name.endswith(f".{name}") for one in first) for name in truth.names)
        and {one.minority for one in first} == {truth.minority}
        and (not truth.origin or truth.origin in {one.origin for one in first})
        and (not truth.kernel or truth.kernel in {one.kernel for one in first})
        and min(one.step for one in verdict.differing if one.step is not None) == truth.step
    )


@pytest.mark.parametrize("name", PROGRAMS)
def test_replicas_of_a_clean_twin_agree(name: str, pair_of: Callable[[str, bool], Pair]) -> None:
    assert parted(check_replicas(pair_of(name, False).traces[0])) == []


@pytest.mark.parametrize("name", [name for name in ENDING if PROGRAMS[name].replicas is None])
def test_replicas_agree_in_a_planted_run_that_parts_none(name: str, pair_of: Callable[[str, bool], Pair]) -> None:
    assert parted(check_replicas(pair_of(name, True).traces[0])) == []


@pytest.mark.parametrize("name", REPLICAS)
def test_replicas_that_part_are_named(name: str, pair_of: Callable[[str, bool], Pair]) -> None:
    truth, verdict = PROGRAMS[name].replicas, check_replicas(pair_of(name, True).traces[0])
    assert truth is not None
    assert are_right(verdict, truth), parted(verdict)


# -------------------------------------------------------------------------- nothing is changed by looking


def exchanged(outcomes: tuple[Outcome, ...]) -> list[tuple[str, ...]]:
    """What each rank exchanged with others, as torch's flight recorder has it."""
    return [outcome.value.exchanged for outcome in outcomes]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ENDING)
def test_recording_adds_no_collective_and_changes_no_order(
    name: str, variant: str, pair_of: Callable[[str, bool], Pair], specimens: Specimens
) -> None:
    planted = VARIANTS[variant]
    plain = exchanged(specimens.untraced(name, planted=planted))
    assert all(plain)
    assert exchanged(pair_of(name, planted).outcomes[0]) == plain
