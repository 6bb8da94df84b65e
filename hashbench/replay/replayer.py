"""Where a captured call is repeated: its live copy, one replay, a controlled series of them, and the plain repetition;
and the count of how often outcomes differ. For use inside ``call.in_force``.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter

from hashbench.causes import stats
from hashbench.processes import Budget
from hashbench.records import NO_TIME, ExperimentResult
from hashbench.replay.call import (
    CallOutcome,
    CapturedCall,
    Materialised,
    held_bytes,
    outcome_of,
    wait_for,
    written_tensors,
)
from hashbench.replay.facts import Snapshot
from hashbench.replay.ops import is_custom

Change = Callable[[], AbstractContextManager[object]]
"""A change around replays; one that gives a function wants that called before each of them."""

UNCHANGED: Change = nullcontext

PATIENCE = 10
"""A call that gave one outcome so far is repeated so many times as often as was asked for, while that takes no more
than ``PATIENT_SHARE`` of the budget: a difference of one in twenty shows in 200 replays (all but surely), not in 20."""
PATIENT_SHARE = 0.05
LONGER = 4
"""An experiment goes on up to so many times as long where the unchanged call happens to agree all the while, too."""
BLOCKS = 5
"""An experiment's replays come in so many blocks, with replays of the unchanged call in between."""

MOST_COPIES = 5
MOST_BYTES = 2**26
"""Together with the first, so many outcomes are copied, and while they take no more than this; two in any case."""


class InapplicableError(Exception):
    """Why an experiment makes no sense on a call."""


class Tally:
    """Outcomes of one experiment, compared with ``reference`` (default: with the first of its own).

    Outcomes are kept as digests, of which a thousand cost nothing; contents are copied for the first and a few others.
    """

    def __init__(self, reference: CallOutcome | None = None) -> None:
        self.reference = reference
        self.trials = self.differing = 0
        self.seconds: list[float] = []
        self.copies: list[Snapshot] = []
        self.outcomes: list[CallOutcome] = []
        self._seen: Counter[int] = Counter() if reference is None else Counter({hash(reference): 1})
        self._copied_bytes = 0

    def add(self, outcome: CallOutcome, *, seconds: float, copy: Callable[[], Snapshot]) -> None:
        """One more outcome; ``copy`` copies its content, and is called where that is kept."""
        self.seconds.append(seconds)
        if self.reference is None:
            self.reference = outcome
        else:
            self.trials += 1
            self.differing += outcome != self.reference
        new = not self._seen[hash(outcome)]
        self._seen[hash(outcome)] += 1
        has_room = len(self.copies) < MOST_COPIES and self._copied_bytes < MOST_BYTES
        if new and (has_room or len(self.copies) < 2):
            self.outcomes.append(outcome)
            self.copies.append(copy())
            self._copied_bytes += sum(map(held_bytes, self.copies[-1]))

    @property
    def distinct(self) -> int:
        """Outcomes, the reference among them."""
        return len(self._seen)

    def result(self, name: str, *, found: str = "", note: str = "") -> ExperimentResult:
        """The tally as the result of an experiment on the call."""
        seconds = statistics.median(self.seconds) if self.seconds else None
        counts = self.trials, self.differing, self.distinct
        return ExperimentResult(name, "call", *counts, seconds=seconds, found=found, note=note)


class Replayer:
    """One call, its live copy, and what its repetition showed so far."""

    def __init__(self, call: CapturedCall, *, replays: int, budget: Budget) -> None:
        self.call, self.replays, self.budget = call, replays, budget
        self.trials = replays
        self.custom = is_custom(call.func)
        self.devices = call.accelerators
        self.live = call.materialise()
        self.repeated = Tally()
        self.cost = 0.0  # seconds of the last plain replay, with resetting and hashing
        self.provoked: list[Snapshot] = []
        self.elsewhere: list[CallOutcome] = []  # of inputs at other addresses

    @property
    def in_place(self) -> CallOutcome | None:
        """The outcome of the call as it was, but for rare exceptions; ``None`` where it has several."""
        return self.repeated.reference if stats.is_rare(self.repeated.result("repeat")) else None

    def against_in_place(self) -> Tally:
        """A tally that compares with the one outcome that the undisturbed call has.

        Raises:
            InapplicableError: it has several.
        """
        if self.in_place is None:
            raise InapplicableError("the outcome differs in place")
        return Tally(self.in_place)

    def replay(self, tally: Tally, *, live: Materialised | None = None, change: Change = UNCHANGED) -> None:
        """Reset, run under ``change``, and add the outcome to the tally."""
        live = live or self.live
        begin = perf_counter()
        live.reset()
        wait_for(self.devices)  # for the reset, which is not to be timed
        with change():
            start = perf_counter()
            output = live.run()
            wait_for(self.devices)
            seconds = max(0.0, perf_counter() - start)  # a model may have stopped the clock or set it back
        outcome = outcome_of(output, live)
        live.found(outcome.arguments)
        tally.add(outcome, seconds=seconds, copy=lambda: self.snapshot(output, live, outcome))
        if tally is self.repeated:
            self.cost = perf_counter() - begin

    def snapshot(self, output: object, live: Materialised, outcome: CallOutcome) -> Snapshot:
        """Copies of all that a run wrote, also of what the schema does not call written."""
        written = written_tensors(output, live)
        known = {id(tensor) for tensor in written}
        changed = zip(live.tensors, outcome.arguments, live.content, strict=True)
        undeclared = [tensor for tensor, after, before in changed if after != before and id(tensor) not in known]
        return tuple(tensor.detach().clone() for tensor in [*written, *undeclared])

    def compared(
        self,
        name: str,
        left: Budget,
        *,
        live: Materialised | None = None,
        change: Change = UNCHANGED,
        each: bool = False,
        tally: Tally | None = None,
    ) -> ExperimentResult:
        """The outcomes of ``live`` under ``change`` (entered anew for ``each``), against those of the call as it was in
        between."""
        tally = tally or Tally()

        def block(count: int) -> None:
            with UNCHANGED() if each else change() as restart:
                for _ in range(count):
                    if callable(restart):
                        restart()
                    self.replay(tally, live=live, change=change if each else UNCHANGED)

        return self.controlled(name, tally, left, block=block)

    def controlled(self, name: str, tally: Tally, left: Budget, *, block: Callable[[int], None]) -> ExperimentResult:
        """Replays in blocks, until the tally has its trials or the time is up.

        Where the call differs as it is, each block is followed by one of the call as it was, which counts for
        ``repeat``. Races show only while cores are free, so an experiment that removes the difference proves nothing if
        the unchanged call did not differ meanwhile either: they take turns, up to a limit.
        """
        controls = name != "repeat" and tally.reference is None and self.repeated.differing > 0
        before = self.repeated.differing

        def undecided() -> bool:
            return controls and not tally.differing and self.repeated.differing == before

        while tally.trials < self.trials or (undecided() and tally.trials < LONGER * self.trials):
            affordable = int(left.left() / (BLOCKS * self.cost)) if self.cost else self.trials
            size = max(1, min(affordable, -(-self.trials // BLOCKS)))
            missing = self.trials - tally.trials + (tally.reference is None)
            block(min(size, missing) if missing > 0 else size)
            for _ in range(self._controls(size) if controls else 0):
                self.replay(self.repeated)
            if tally.trials and left.left() <= 0:
                break
        if undecided():
            note = f"{tally.trials} replays agree, but so did those of the unchanged call meanwhile"
            return ExperimentResult(name, "call", note=note)
        short = tally.trials < self.trials
        return tally.result(name, note=NO_TIME if short else "")

    def _controls(self, size: int) -> int:
        """Unchanged replays after a block: so many that, over all blocks, one that differs is missed in 1 of 1000 cases
        only; one a block where nearly all differ."""
        share = min(0.99, self.repeated.differing / self.repeated.trials)
        return min(size, max(1, math.ceil(math.log(0.001) / math.log(1 - share) / BLOCKS)))

    def repeat(self, left: Budget) -> ExperimentResult:
        """The experiment ``repeat``: same storages, content and generators put back before each replay.

        Goes on where nothing differed yet, and where outcomes differ so rarely that others could prove nothing.
        """
        tally = self.repeated
        note = self.compared("repeat", left, tally=tally).note
        patient = Budget(self.budget.left() * PATIENT_SHARE)
        while not tally.differing and tally.trials < PATIENCE * self.replays and patient.left() > 0:
            self.replay(tally)
        while left.left() > 0 and self.replays <= tally.trials < self._length():
            for _ in range(10):
                self.replay(tally)
        self.trials = self._length()
        return tally.result("repeat", note=note)

    def _length(self) -> int:
        """Trials that the other experiments are to make."""
        return stats.arm_length(self.repeated.result("repeat"), asked=self.replays)

    def keep(self, tally: Tally) -> None:
        """Remember an outcome that only a disturbance brought about."""
        if tally.differing and not self.provoked:
            self.provoked = tally.copies[:1] if self.in_place is not None else tally.copies[1:2]
