"""Fixtures for tests of replays."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hashbench.core.run.settings import preserved


@pytest.fixture
def eight_threads() -> Iterator[None]:
    """Races need other threads, and calls of milliseconds, else one thread does it all before the others wake. With
    eight threads, two replays differ in at least 14 of 29 cases on any machine, also a busy one or one with a single
    core; with two threads, in none of 29 for ``put_`` on two idle cores."""
    with preserved():
        torch.set_num_threads(8)
        yield
