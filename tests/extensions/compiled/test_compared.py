"""What became of compiled models between two sweeps."""

from __future__ import annotations

import dataclasses

import pytest

from hashbench.core.report.compare import Became, compare
from tests.core.report.rows import PLAIN, sweep
from tests.extensions.compiled.compiled_rows import INACCURATE, ROUNDED
from tests.flat_rows import changed


@pytest.mark.parametrize(
    ("base", "new", "outcome", "note"),
    [
        pytest.param(
            *(PLAIN, dataclasses.replace(PLAIN, backend="inductor")),
            *(Became.NOT_COMPARABLE, "backend (none) → inductor"),
            id="an eager row says nothing of a compiled one",
        ),
        pytest.param(
            *(dataclasses.replace(PLAIN, backend="aot_eager"), dataclasses.replace(PLAIN, backend="inductor")),
            *(Became.NOT_COMPARABLE, "backend aot_eager → inductor"),
            id="another backend",
        ),
        pytest.param(
            *(dataclasses.replace(PLAIN, backend="inductor"), INACCURATE),
            *(Became.REGRESSED, "codegen: cpp_fused_relu_0 (aten.relu.default) in Net.act"),
            id="a new inaccuracy",
        ),
        pytest.param(
            *(dataclasses.replace(PLAIN, backend="inductor"), ROUNDED),
            *(Became.REGRESSED, "rounding, no kernel is to blame"),
            id="a new inaccuracy by rounding",
        ),
        pytest.param(
            *(INACCURATE, changed(INACCURATE, stage="lowering")),
            *(Became.MOVED, "stage codegen → lowering"),
            id="another stage",
        ),
        pytest.param(
            *(INACCURATE, changed(INACCURATE, stage="lowering", confidence="open")),
            *(Became.STILL_DIFFERS, "lowering: cpp_fused_relu_0 (aten.relu.default) in Net.act"),
            id="another stage that is not established",
        ),
        pytest.param(
            *(INACCURATE, changed(INACCURATE, accuracy="compiled_two_runs_differ", stage="")),
            *(Became.MOVED, "accuracy fail_accuracy → compiled_two_runs_differ"),
            id="another status of the same kind",
        ),
    ],
)
def test_what_became_of_a_compiled_model(base, new, outcome, note):
    (change,) = compare(sweep(base), sweep(new)).changes
    assert (change.outcome, change.note) == (outcome, note)
