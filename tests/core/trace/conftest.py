"""Fixtures of the tests of tracing."""

from __future__ import annotations

import pytest
import torch

from hashbench.core.native.build import Unavailable
from hashbench.core.trace import tracer


@pytest.fixture
def seeded() -> None:
    """Seed torch's generators."""
    torch.manual_seed(0)


@pytest.fixture(params=["python", "native"])
def each_tracer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test once per tracer, as the one that ``HashDebugTrace()`` chooses."""
    if request.param == "python":
        monkeypatch.setattr(tracer, "native_unavailable", lambda: Unavailable("not asked for", "ask for it"))
    elif missing := tracer.native_unavailable():
        pytest.skip(missing.reason)
