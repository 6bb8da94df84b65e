"""What all tests of a session share: the pool of ranks, and what was observed of each program on them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from tests.extensions.ranks.pool import PRELOADED, RankPool

if TYPE_CHECKING:
    from tests.extensions.ranks.observed import Observed


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Four gloo ranks that have imported the programs."""
    from tests.extensions.ranks.running import FLIGHT_RECORDER

    with RankPool(4, preload=(*PRELOADED, "tests.extensions.ranks.running"), environment=FLIGHT_RECORDER) as pool:
        yield pool


@pytest.fixture(scope="session")
def observed(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Observed]:
    """Return what was observed of a variant of a program, which runs once for all tests."""
    from tests.extensions.ranks.observed import observe

    return functools.cache(
        lambda name, planted: observe(rank_pool, name, planted=planted, folder=tmp_path_factory.mktemp("observed"))
    )
