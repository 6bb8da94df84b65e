"""Judgements written by hand, for the tests of groups and of the page."""

from __future__ import annotations

from itertools import product
from typing import Any

from hashbench.core.catalog import Status
from hashbench.core.records import Row
from hashbench.core.report.compare import Became, decide
from hashbench.extensions.report.expectations import ExpectationStatus, JudgedNight, Judgement
from hashbench.extensions.report.page import render_html
from tests.core.report.rows import row
from tests.extensions.report.histories import diagnosed, history

FLAGS = ("selected", "comparable", "same_place", "always", "stressed")
OF_MODELS = {
    decide(base, new, **dict(zip(FLAGS, values, strict=True)))
    for base, new in product(("", *Status), repeat=2)
    if base or new
    for values in product((True, False), repeat=len(FLAGS))
}
"""Outcomes of models; the others are of audits."""

DIFFERS, PASSES = diagnosed("a"), row("a")


def judgement(
    status: ExpectationStatus, outcome: Became, base: Row | None, new: Row | None, **values: Any
) -> Judgement:
    name = (new or base or PASSES).name
    return Judgement(("specimens", "training", "float32", "cpu", name), outcome, base, new, status=status, **values)


NEW_DIFFERENCE = judgement(ExpectationStatus.NEW_DIFFERENCE, Became.REGRESSED, PASSES, DIFFERS)
MOVED = judgement(ExpectationStatus.MOVED, Became.MOVED, DIFFERS, DIFFERS, note="kernel x → y")
STALE = judgement(ExpectationStatus.STALE, Became.FIXED, DIFFERS, PASSES, expected=True, since="2026-01-01", unseen=40)
MET_PASS = judgement(ExpectationStatus.MET, Became.UNCHANGED, PASSES, PASSES)


def changes_of(*judgements: Judgement) -> str:
    """What the page shows of them as changes."""
    text = render_html(JudgedNight(history([DIFFERS]), judgements))
    return text[text.index('id="changes"') :].partition("</section>")[0]
