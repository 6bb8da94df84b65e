"""Where a captured call is repeated: its live copy, one replay, a controlled series of them, and the plain repetition.

For use inside ``calls.in_force``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from time import perf_counter

from hashbench.causes import stats
from hashbench.processes import Budget
from hashbench.records import NO_TIME, ExperimentResult
from hashbench.replay.call import CallOutcome, CapturedCall, Materialised, outcome_of, wait_for, written_tensors
from hashbench.replay.experiments.table import UNCHANGED, Change
from hashbench.replay.facts import Snapshot
from hashbench.replay.op_owner import is_custom
from hashbench.replay.tally import Tally

PATIENCE = 10
"""A call that gave one outcome so far is repeated so many times as often as was asked for, while that takes no more
than ``PATIENT_SHARE`` of the budget: a difference of one in twenty shows in 200 replays (all but surely), not in 20."""
PATIENT_SHARE = 0.05
LONGER = 4
"""An arm is made up to so many times as long where the unchanged call happens to agree all the while, too."""
BLOCKS = 5
"""An arm's replays come in so many blocks, with replays of the unchanged call in between."""
DIFFERS_IN_PLACE = "the outcome differs in place"


class Laboratory:
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
        return self.repeated.reference if stats.is_rare(self.repeated.arm("repeat")) else None

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
            seconds = perf_counter() - start
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
        """The outcomes of ``live`` under ``change``, against those of the call as it was in between."""
        tally = tally or Tally()

        def block(count: int) -> None:
            with UNCHANGED() if each else change() as restart:
                for _ in range(count):
                    if restart is not None:
                        restart()
                    self.replay(tally, live=live, change=change if each else UNCHANGED)

        return self.controlled(name, tally, left, block=block)

    def controlled(self, name: str, tally: Tally, left: Budget, *, block: Callable[[int], None]) -> ExperimentResult:
        """Replays in blocks, until the tally has its trials or the time is up.

        Where the call differs as it is, each block of the arm is followed by one of the call as it was, which counts
        for ``repeat``. Races show only while cores are free, so an arm that removes the difference proves nothing if
        the unchanged call did not differ meanwhile either.
        """
        controls = self.repeated.differing if name != "repeat" and tally.reference is None else 0
        before = self.repeated.differing

        def undecided() -> bool:
            """Whether neither the arm nor the unchanged call differed so far: they take turns, up to a limit."""
            seen = tally.differing or self.repeated.differing > before
            return bool(controls) and not seen and tally.trials < LONGER * self.trials

        while tally.trials < self.trials or undecided():
            size = self._block_size(left)
            missing = self.trials - tally.trials + (tally.reference is None)
            block(min(size, missing) if missing > 0 else size)
            for _ in range(self._controls(size) if controls else 0):
                self.replay(self.repeated)
            if tally.trials and left.left() <= 0:
                break
        note = "" if tally.trials >= self.trials else f"{tally.trials} of {self.trials} trials: {NO_TIME}"
        if controls and not tally.differing and self.repeated.differing == before:
            note = f"{tally.trials} replays agree, but so did those of the unchanged call meanwhile"
            return ExperimentResult(name, "call", note=note)
        return tally.arm(name, note=note)

    def _controls(self, size: int) -> int:
        """Unchanged replays after a block: so many that, over all blocks, one that differs is missed in 1 of 1000 cases
        only; one a block where nearly all differ."""
        share = min(0.99, self.repeated.differing / self.repeated.trials)
        return min(size, max(1, math.ceil(math.log(0.001) / math.log(1 - share) / BLOCKS)))

    def _block_size(self, left: Budget) -> int:
        affordable = int(left.left() / (BLOCKS * self.cost)) if self.cost else self.trials
        return max(1, min(affordable, -(-self.trials // BLOCKS)))

    def repeat(self, left: Budget) -> ExperimentResult:
        """The arm ``repeat``: same storages, content and generators put back before each replay.

        Goes on where nothing differed yet, and where outcomes differ so rarely that other arms could prove nothing.
        """
        tally = self.repeated
        arm = self.compared("repeat", left, tally=tally)
        patient = Budget(self.budget.left() * PATIENT_SHARE)
        while not tally.differing and tally.trials < PATIENCE * self.replays and patient.left() > 0:
            self.replay(tally)
        while left.left() > 0 and self.replays <= tally.trials < self._length():
            for _ in range(10):
                self.replay(tally)
        self.trials = self._length()
        return tally.arm("repeat", note=arm.note)

    def _length(self) -> int:
        """Trials that the other arms are to make."""
        return stats.arm_length(self.repeated.arm("repeat"), asked=self.replays)

    def keep(self, tally: Tally) -> None:
        """Remember an outcome that only a disturbance brought about."""
        if tally.differing and not self.provoked:
            self.provoked = tally.copies[:1] if self.in_place is not None else tally.copies[1:2]
