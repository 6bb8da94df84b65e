"""One run of a program as it is, and two that are recorded, on the ranks of a pool."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from hashbench.core.records import Trace
from hashbench.core.trace import file
from hashbench.extensions.ranks.find import find_across_ranks
from hashbench.extensions.ranks.verdict import RanksVerdict
from tests.extensions.ranks.pool import Outcome, RankPool
from tests.extensions.ranks.programs.table import PROGRAMS
from tests.extensions.ranks.running import Ran

_GROUPS = {name: f"ranks {number % 2}" for number, name in enumerate(PROGRAMS)}


def each(names: Iterable[str]) -> pytest.MarkDecorator:
    """Run a test for each of these programs; two workers of xdist have half of the programs each."""
    params = [pytest.param(name, marks=pytest.mark.xdist_group(_GROUPS[name])) for name in names]
    return pytest.mark.parametrize("name", params)


@dataclass(frozen=True, slots=True)
class Observed:
    """What was observed of a variant of a program.

    Attributes:
        plain: how run 0 went on each rank where it was not recorded; empty where a rank is killed.
        recorded: how runs 0 and 1 went where they were recorded.
        traces: of these, by rank.
        ranks: number of ranks.
    """

    plain: tuple[Ran, ...]
    recorded: tuple[tuple[Ran | None, ...], tuple[Ran | None, ...]]
    traces: tuple[Mapping[int, Trace], Mapping[int, Trace]]
    ranks: int

    def verdict(self) -> RanksVerdict:
        """Compare the two recorded runs."""
        return find_across_ranks(*self.traces, world_size=self.ranks)


def observe(pool: RankPool, name: str, *, planted: bool, folder: Path) -> Observed:
    """Run a variant of a program; no rank may raise or die that is not meant to."""
    ranks, is_killed = PROGRAMS[name].ranks, planted and PROGRAMS[name].truth.missing

    def run(how: str, number: int, place: Path, *more: Path) -> tuple[Outcome, ...]:
        (place / "own").mkdir(parents=True)
        arguments = (name, planted, number, place / "own", *more)
        outcomes = pool.call(f"tests.extensions.ranks.running:{how}", *arguments, ranks=ranks, folder=place)
        assert is_killed or not any(outcome.error for outcome in outcomes), outcomes
        return tuple(outcome.value for outcome in outcomes)

    into = folder / "recorded0", folder / "recorded1"
    recorded = run("run_recorded", 0, folder / "0", into[0]), run("run_recorded", 1, folder / "1", into[1])
    plain = () if is_killed else run("run_untraced", 0, folder / "plain")
    return Observed(plain, recorded, (traces_in(into[0]), traces_in(into[1])), ranks)


def traces_in(folder: Path) -> dict[int, Trace]:
    """The traces of a recording, up to the last whole step where a rank was killed."""
    paths = {int(path.name.removeprefix("rank").partition(".")[0]): path for path in folder.glob("rank*.log.gz")}
    return {rank: file.read(path, cut=True) for rank, path in sorted(paths.items())}
