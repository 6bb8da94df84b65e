"""Programs of several ranks: what two runs of each are said to differ by, where one run's replicas diverge, and that
recording them changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from hashbench.extensions.ranks.replicas import ReplicasVerdict, check_replicas
from hashbench.extensions.ranks.verdict import RanksVerdict
from tests.extensions.ranks.observed import Observed, each, observe
from tests.extensions.ranks.pool import RankPool
from tests.extensions.ranks.programs.base import Replicas, Truth
from tests.extensions.ranks.programs.table import PROGRAMS
from tests.extensions.ranks.running import Ran

pytestmark = pytest.mark.slow

ENDING = [name for name, program in PROGRAMS.items() if not program.truth.missing]
EARLY = [name for name in ENDING if PROGRAMS[name].truth.origin == ("unwaited",)]
REPLICAS = [name for name, program in PROGRAMS.items() if program.replicas is not None]
ROUNDS = 20

AGREE = "all ranks agree"

ObservedOf = Callable[[str, bool], Observed]


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


@each(PROGRAMS)
def test_two_runs_of_a_clean_twin_agree_on_all_ranks(name: str, observed: ObservedOf) -> None:
    assert said(observed(name, False).verdict()) == AGREE


@each(PROGRAMS)
def test_two_planted_runs_are_told_apart_where_the_fault_is(name: str, observed: ObservedOf) -> None:
    verdict = observed(name, True).verdict()
    assert is_right(verdict, PROGRAMS[name].truth), said(verdict)


@pytest.mark.exhaustive
@each(PROGRAMS)
def test_a_clean_twin_agrees_in_every_round(name: str, rank_pool: RankPool, tmp_path: Path) -> None:
    rounds = [observe(rank_pool, name, planted=False, folder=tmp_path / str(one)) for one in range(ROUNDS)]
    assert [said(found.verdict()) for found in rounds] == [AGREE] * ROUNDS


@pytest.mark.exhaustive
@each(["read_before_wait"])
def test_read_before_its_wait_is_told_in_every_round(name: str, rank_pool: RankPool, tmp_path: Path) -> None:
    rounds = [observe(rank_pool, name, planted=True, folder=tmp_path / str(one)) for one in range(ROUNDS)]
    verdicts = [found.verdict() for found in rounds]
    assert all(is_right(verdict, PROGRAMS[name].truth) for verdict in verdicts), list(map(said, verdicts))


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


@each(PROGRAMS)
def test_replicas_of_a_clean_twin_agree(name: str, observed: ObservedOf) -> None:
    assert parted(check_replicas(observed(name, False).traces[0])) == []


@each([name for name in ENDING if PROGRAMS[name].replicas is None])
def test_replicas_agree_in_a_planted_run_that_parts_none(name: str, observed: ObservedOf) -> None:
    assert parted(check_replicas(observed(name, True).traces[0])) == []


@each(REPLICAS)
def test_replicas_that_part_are_named(name: str, observed: ObservedOf) -> None:
    truth, verdict = PROGRAMS[name].replicas, check_replicas(observed(name, True).traces[0])
    assert truth is not None
    assert are_right(verdict, truth), parted(verdict)


# ----------------------------------------------------------- the programs themselves: nothing is changed by looking


def results(ran: Sequence[Ran]) -> list[Mapping[str, str]]:
    """The results of each rank."""
    return [on_rank.results for on_rank in ran]


@each(PROGRAMS)
def test_results_of_a_clean_twin_are_the_same_in_each_run_recorded_or_not(name: str, observed: ObservedOf) -> None:
    found = observed(name, False)
    first, second = map(results, found.recorded)
    assert any(first)
    assert results(found.plain) == first == second


@pytest.mark.parametrize("planted", [False, True], ids=["clean", "planted"])
@each(ENDING)
def test_recording_adds_no_collective_and_changes_no_order(name: str, planted: bool, observed: ObservedOf) -> None:
    found = observed(name, planted)
    assert all(on_rank.exchanged for on_rank in found.plain)
    assert [one.exchanged for one in found.recorded[0]] == [one.exchanged for one in found.plain]


@each([name for name in ENDING if name not in EARLY])
def test_planted_fault_differs_in_each_run_unless_its_truth_says_that_nothing_does(
    name: str, observed: ObservedOf
) -> None:
    first, second = map(results, observed(name, True).recorded)
    assert (first == second) is (PROGRAMS[name].truth == Truth())


@each(EARLY)
def test_early_read_sees_data_that_have_not_come(name: str, observed: ObservedOf) -> None:
    rank = PROGRAMS[name].truth.rank
    assert rank is not None
    assert observed(name, True).plain[rank].results != observed(name, False).plain[rank].results


@each(REPLICAS)
def test_replicas_part_in_the_planted_run_alone(name: str, observed: ObservedOf) -> None:
    truth = PROGRAMS[name].replicas
    assert truth is not None

    def contents(label: str, *, planted: bool) -> int:
        return len({on_rank.results[label] for on_rank in observed(name, planted).plain})

    assert all(contents(label, planted=True) > contents(label, planted=False) for label in truth.names)
