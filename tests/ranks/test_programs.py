"""The programs themselves, untraced: clean twins repeat, and each planted fault does what its truth says."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from tests.ranks.pool import Outcome, RankPool
from tests.ranks.programs.base import Truth
from tests.ranks.programs.table import PROGRAMS

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ranks")]

Results = list[dict[str, str]]
DIFFER = [name for name, program in PROGRAMS.items() if program.truth.rank is not None and not program.truth.missing]
EARLY = [name for name in DIFFER if PROGRAMS[name].truth.origin == ("unwaited",)]


@pytest.fixture(scope="module")
def results_of(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool, int], Results]:
    """Digests of the results of a run, by rank, each run made once."""

    @cache
    def run(name: str, planted: bool, number: int) -> Results:
        folder = tmp_path_factory.mktemp("program")
        (folder / "own").mkdir()
        arguments = (name, planted, number, folder / "own")
        outcomes: tuple[Outcome, ...] = rank_pool.call(
            "tests.ranks.running:run_untraced", *arguments, ranks=PROGRAMS[name].ranks, folder=folder
        )
        assert not [outcome.error for outcome in outcomes if outcome.error]
        return [dict(outcome.value.results) for outcome in outcomes]

    return run


@pytest.mark.parametrize("name", PROGRAMS)
def test_clean_twin_repeats(name: str, results_of: Callable[[str, bool, int], Results]) -> None:
    assert results_of(name, False, 0) == results_of(name, False, 1)
    assert any(results_of(name, False, 0))


@pytest.mark.parametrize("name", [name for name in DIFFER if name not in EARLY])
def test_planted_fault_comes_out_otherwise_in_each_run(
    name: str, results_of: Callable[[str, bool, int], Results]
) -> None:
    assert results_of(name, True, 0) != results_of(name, True, 1)


@pytest.mark.parametrize("name", EARLY)
def test_early_read_sees_data_that_have_not_come(name: str, results_of: Callable[[str, bool, int], Results]) -> None:
    rank = PROGRAMS[name].truth.rank
    assert rank is not None
    assert results_of(name, True, 0)[rank] != results_of(name, False, 0)[rank]


@pytest.mark.parametrize("name", [name for name, program in PROGRAMS.items() if program.truth == Truth()])
def test_fault_that_is_the_same_in_each_run_repeats(name: str, results_of: Callable[[str, bool, int], Results]) -> None:
    assert results_of(name, True, 0) == results_of(name, True, 1)


@pytest.mark.parametrize("name", [name for name, program in PROGRAMS.items() if program.replicas is not None])
def test_replicas_part_in_the_planted_run_alone(name: str, results_of: Callable[[str, bool, int], Results]) -> None:
    truth = PROGRAMS[name].replicas
    assert truth is not None

    def contents(label: str, planted: bool) -> int:
        return len({results[label] for results in results_of(name, planted, 0)})

    assert all(contents(label, planted=True) > contents(label, planted=False) for label in truth.names)
