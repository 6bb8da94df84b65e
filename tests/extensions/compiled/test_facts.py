"""The column of further compilations: read back as it was written."""

from __future__ import annotations

from hashbench.extensions.compiled.facts import FurtherCompilations

OUTCOMES = {
    "fresh cache": "same",
    "max_autotune": "3 results differ, first cpp_fused_add_0",
    "one thread": "not compared (RuntimeError: a; fresh: b)",
}


def test_compilations_are_read_back_as_they_were_written() -> None:
    made = FurtherCompilations(OUTCOMES)
    assert str(made) == "; ".join(f"{name}: {outcome}" for name, outcome in OUTCOMES.items())
    assert FurtherCompilations.parse(str(made)) == made
    assert str(made.not_compared) == "one thread: not compared (RuntimeError: a; fresh: b)"
    assert FurtherCompilations.parse("") == FurtherCompilations({})
