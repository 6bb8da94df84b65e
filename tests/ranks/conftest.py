"""The pool of ranks that all tests of a session share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks.pool import PRELOADED, RankPool


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Four gloo ranks that have imported the programs."""
    from tests.ranks.running import FLIGHT_RECORDER

    with RankPool(4, preload=(*PRELOADED, "tests.ranks.running"), environment=FLIGHT_RECORDER) as pool:
        yield pool
