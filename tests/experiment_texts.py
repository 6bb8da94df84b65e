"""Results of experiments written as texts, for tests that need many."""

from __future__ import annotations

import re

from hashbench.core.catalog import EXPERIMENTS
from hashbench.core.records import ExperimentResult, RowEvidence

_WRITTEN = re.compile(r"(\w+)/(\w+) (?:(\d+)/(\d+)(?:~(\d+))?|\((.*)\))(?: \[(.*)\])?", re.DOTALL)


def result(text: str) -> ExperimentResult:
    """``call/repeat 20/20~2 [found]``; every outcome is another one where ``~distinct`` is left out. Words in
    parentheses in place of the count say why an experiment was not run."""
    match = _WRITTEN.fullmatch(text)
    assert match, text
    on, name, differing, trials, distinct, note, found = match.groups()
    assert on in EXPERIMENTS[name].on, f"{text} is no experiment"
    if note is not None:
        return ExperimentResult(name, on, note=note, raised=note.startswith("raises"))
    outcomes = int(distinct or int(differing) + 1)
    return ExperimentResult(
        name, on, trials=int(trials), differing=int(differing), distinct=outcomes, found=found or ""
    )


def evidence(*texts: str) -> RowEvidence:
    """The column of a row."""
    return RowEvidence.of(map(result, texts))
