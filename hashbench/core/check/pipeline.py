"""The pipeline of every check, whatever it runs: a model, one on several ranks, or a compiled program.

    repeat ── runs that are compared ── confirm ── further pairs, every input hashed ── diagnose ── experiments
                                           |                                               |
                                         draft                                           draft

A kind of runs is a :class:`Runs`. What is decided here imports no torch: runs are made, compared and examined there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from hashbench.core.catalog import Confidence, Origin, Status
from hashbench.core.errors import bounded, log_error
from hashbench.core.processes import tell_phase
from hashbench.core.records import Decision, Diagnosis, Divergence, Evidence, Trace, Verdict

if TYPE_CHECKING:
    from hashbench.core.run.outcome import Outcome

CONFIRMING_PAIRS = 3
"""How often a difference is looked for again before it is called rare."""

FURTHER_RUN_FAILED = "no: a further run failed"
"""The column ``confirmed`` where a further pair could not be made."""

Search = Callable[[], "Outcome"]
"""Looks for the cause of a difference, and returns the outcome with it."""


class Runs(Protocol):
    """Makes and compares runs of one thing."""

    def repeat(self) -> Outcome:
        """Make the runs that are compared; count those that differ from the first, and find where one does."""
        ...

    def keep_draft(self, outcome: Outcome) -> None:
        """Write down an outcome before what may end the process."""
        ...

    def further_pair(self, outcome: Outcome, *, number: int) -> Outcome | None:
        """Make two further runs, with every input hashed around every op; ``number`` is that of the pair, from 1.

        Return what they make of an outcome (:func:`confirmed_by` decides which verdict stands); ``None``: they agree.
        """
        ...

    def search(self, outcome: Outcome) -> Search | None:
        """Return what looks for the cause; ``None`` if there is no difference or no budget."""
        ...


def checked(runs: Runs) -> Outcome:
    """Repeat, confirm and diagnose."""
    return explained(runs, runs.repeat())


def explained(runs: Runs, outcome: Outcome) -> Outcome:
    """Confirm the difference that an outcome has, if any, and diagnose it."""
    return diagnose(runs, confirm(runs, outcome))


def confirm(runs: Runs, outcome: Outcome) -> Outcome:
    """Add the verdict of pairs with every input hashed around every op, which shows what bypassed the dispatcher."""
    if outcome.accuracy != Status.TWO_RUNS_DIFFER:
        return outcome
    runs.keep_draft(outcome)

    def further_pair(number: int) -> Outcome | None:
        tell_phase(f"confirming pair {number}")
        return runs.further_pair(outcome, number=number)

    return in_further_pairs(outcome, further_pair)


def in_further_pairs(outcome: Outcome, further_pair: Callable[[int], Outcome | None]) -> Outcome:
    """Return the outcome of the first further pair that is not ``None``, of a few."""
    for number in range(1, CONFIRMING_PAIRS + 1):
        if (found := further_pair(number)) is not None:
            return found
    return replace(outcome, confirmed=f"no: {CONFIRMING_PAIRS} further pairs agreed")


def diagnose(runs: Runs, outcome: Outcome) -> Outcome:
    """Add the cause of the difference, if there is one and a budget to look for it."""
    search = runs.search(outcome)
    return outcome if search is None else searched(outcome, search, keep_draft=runs.keep_draft)


def unknown_cause(outcome: Outcome, because: str) -> Outcome:
    """Add that the cause is unknown, and why."""
    return replace(outcome, diagnosis=Diagnosis(Decision("unknown", Confidence.OPEN, because, ""), Evidence(origin="")))


def searched(
    outcome: Outcome,
    search: Search,
    *,
    keep_draft: Callable[[Outcome], None],
    failed: Callable[[Outcome, str], Outcome] = unknown_cause,
) -> Outcome:
    """Keep a draft of an outcome, and search; a search that raises is part of the outcome: ``failed`` adds why."""
    keep_draft(outcome)
    try:
        return search()
    except Exception as error:
        what = "the diagnosis failed"
        log_error(what)
        return failed(outcome, f"{what}: {type(error).__name__}: {bounded(str(error))}")


# ------------------------------------------------------------------------------------------------ which verdict stands


def confirmed_by(hashed: Outcome, plain: Outcome, traces: Sequence[Trace], *, number: int) -> Outcome:
    """Return the outcome with the verdict that stands, of a plain pair and of a further one with every input hashed.

    The latter replaces one that blames a kernel, since it can tell a kernel from memory that was changed under it. It
    also replaces one that blames a view or a tensor if what was read through it turns out equal. Any other plain
    verdict rests on what both runs show directly, and on the first run of the process, which is special if a state
    survives: it stays.

    Args:
        hashed: the outcome with the verdict of the further pair.
        plain: the outcome with that of the plain pair.
        traces: of the further pair.
        number: of the further pair, from 1.
    """
    assert hashed.verdict is not None
    confirmed = confirmation(plain.verdict, hashed.verdict, pairs=number)
    return replace(hashed if replaces(hashed.verdict, plain.verdict, traces) else plain, confirmed=confirmed)


def confirmation(plain: Verdict | None, hashed: Verdict, *, pairs: int) -> str:
    """Return the text of the column ``confirmed`` for a further differing pair, the ``pairs``-th one tried."""
    old = plain.divergence if plain is not None else None
    new = hashed.divergence
    times = "" if pairs == 1 else f" (in pair {pairs})"
    if old is None or new is None or same_place(old, new):
        return f"yes{times}"
    if old.origin == Origin.KERNEL:
        return f"yes{times}: with inputs hashed; without, {old.origin} at {old.node}"
    return f"differs again{times}, there by {new.origin} at {new.node}"


def same_place(first: Divergence, second: Divergence | None) -> bool:
    """Return whether two pairs of runs diverge at the same record or leaf, with the same origin."""
    return second is not None and (first.origin, first.node) == (second.origin, second.node)


def replaces(hashed: Verdict, plain: Verdict | None, traces: Sequence[Trace]) -> bool:
    """Return whether the verdict on a pair with hashed inputs supersedes an earlier plain verdict.

    It does if it looked past what the plain one blamed, which differs in this pair too: a view, a write to another part
    of a memory, or a tensor whose differing part was never read.
    """
    old, new = plain.divergence if plain is not None else None, hashed.divergence
    if old is None or old.origin == Origin.KERNEL or same_place(old, new):
        return True
    beyond = new is not None and (new.origin == Origin.KERNEL or new.opaque_producer)
    looked_past = new is not None and beyond and (new.op_index or 0) >= (old.op_index or 0)
    return looked_past and _differs_at(old.node, traces)


def _differs_at(node: str, traces: Sequence[Trace]) -> bool:
    """Return whether the traces differ at this record or leaf: what lies beyond differs in spite of it."""
    contents: list[object] = []
    for trace in traces:
        contents += [(leaf.digest, leaf.initial) for leaf in trace.leaves if leaf.id == node]
        records = [record for record in trace.records if record.id == node]
        contents += [(record.arguments, record.outputs, [ref.offset for ref in record.inputs]) for record in records]
    return len(contents) == len(traces) and contents[0] != contents[-1]
