"""Fixtures of the tests of ``hashbench.core.check``."""

from __future__ import annotations

import pytest

from hashbench.core.diagnose.replay.controls.perturbations import _heap
from tests.core.check.model_helpers import RUNS


@pytest.fixture(autouse=True)
def _from_the_first_run() -> None:
    RUNS[0] = 0


@pytest.fixture
def free_memory_given_back() -> None:
    """What earlier tests left would be other content for a plain pair, too."""
    if (library := _heap()) is not None:
        library.malloc_trim(0)
