"""A row of an invariance, as a failed test shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hashbench.core.extensions import failure
from hashbench.core.records import BATCH_INVARIANCE
from tests.flat_rows import made

FOUND = {"mode": BATCH_INVARIANCE, "differing_results": "output.0", "kernel": "aten.mm.default", "shapes": "(4)"}


@pytest.mark.parametrize(
    ("compared", "sizes"),
    [
        ({"batch_sizes": "8 4"}, "a batch of 4 and one of 16"),
        ({"compared_with": "8 items, and the same in reverse order"}, "8 items, and the same in reverse order"),
    ],
)
def test_what_was_compared_and_the_kernel_are_named(compared: dict[str, str], sizes: str) -> None:
    row = made(
        "cpu", "net", 16, "fail_batch_invariance_at_4", **FOUND, **compared, reference_shapes="(16)", smallest_batch=5
    )
    found = failure(row, folder=Path("kept"))
    assert found.headline == f"net: the same items differ between {sizes} in output.0"
    assert dict(found.facts) == {
        "first kernel": "aten.mm.default",
        "shapes": "(4) and (16); from 5 items on",
        "cause": "not looked for",
        "to do": "let the diagnosis run (diagnose=True).",
    }
