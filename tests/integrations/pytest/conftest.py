"""Sessions of ``pytester``, which have a home of their own."""

from __future__ import annotations

import pytest

from hashbench.core.native import cache


@pytest.fixture(autouse=True)
def _cache_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let them load the native tracer that is there: compiling it takes half a minute."""
    monkeypatch.setenv(cache.VARIABLE, str(cache.folders()[0].parent))
