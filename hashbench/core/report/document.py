"""A sweep as a finding, for ``hashbench sweep --json``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from hashbench.core.catalog import Kind, kind_of
from hashbench.core.extensions import shown
from hashbench.core.finding import Finding, few
from hashbench.core.records import Row
from hashbench.core.report.table import what_passing_means
from hashbench.core.report.text import filled
from hashbench.core.text import count

COMMANDS = 3
"""Maximum commands to run next."""

_VERBS = {
    Kind.DIFFER: ("differs", "differ"),
    Kind.LATENT: ("is flaky", "are flaky"),
    Kind.FAIL: ("fails", "fail"),
    Kind.SKIP: ("is skipped", "are skipped"),
}


def sweep_finding(rows: Sequence[Row], *, folders: Iterable[Path], command: Callable[[Row], str]) -> Finding:
    """Return the verdict on all models of a sweep.

    Args:
        rows: in the order of the sweep, as a CSV has them.
        folders: with the results.
        command: returns the command that reruns a row.
    """
    seen = [shown(row) for row in rows]
    by_kind = {kind: [row for row in seen if kind_of(row.accuracy) is kind] for kind in _VERBS}
    passing = len(seen) - sum(map(len, by_kind.values()))
    parts = [
        f"{few([row.name for row in some])} {_VERBS[kind][len(some) > 1]}" for kind, some in by_kind.items() if some
    ]
    verdict = f"{passing} of {count(len(seen), 'row')} {'pass' if passing != 1 else 'passes'}"
    troubled = [row for row in seen if kind_of(row.accuracy).is_trouble]
    meaning = what_passing_means(rows)
    return Finding(
        headline="; ".join([verdict, *parts]) if seen else "No model was run",
        notes=tuple(" ".join(paragraph.split()) for paragraph in meaning.split("\n\n") if paragraph),
        next=tuple(filter(None, map(command, troubled[:COMMANDS]))),
        equal=bool(seen) and passing == len(seen),
        differs=bool(by_kind[Kind.DIFFER] or by_kind[Kind.LATENT]),
        data={
            "folders": [str(folder) for folder in folders],
            "counts": dict(Counter(row.accuracy for row in seen)),
            "rows": [filled(row) for row in seen],
        },
    )
