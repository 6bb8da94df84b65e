"""What the states of generators around some code say of it."""

from __future__ import annotations

import pytest

from hashbench.tools.pipeline.pairs import Span

SPANS = {
    "drawn from different states": ("ab", "cd", ("torch",), "drawn"),
    "different states, and nothing drawn": ("ab", "ab", (), ""),
    "different states, then seeded": ("ab", "cc", ("torch",), "drawn seeded"),
    "different states, and what came then was not recorded": ("ab", "  ", ("torch",), "drawn"),
    "drawn from equal states": ("aa", "bb", ("torch",), ""),
    "equal states that code moved apart": ("aa", "bc", ("torch",), "diverged"),
    "recorded in one check alone": ("a ", "bc", ("torch",), ""),
}


@pytest.mark.parametrize(("before", "after", "drew", "expected"), SPANS.values(), ids=SPANS)
def test_states_around_code(before: str, after: str, drew: tuple[str, ...], expected: str) -> None:
    states = [tuple({"torch": state} if state != " " else {} for state in pair) for pair in (before, after)]
    span = Span("make_loader", *states, drew)
    found = [name for name in ("drawn", "seeded", "diverged") if getattr(span, name) == ("torch",)]
    assert " ".join(found) == expected
