"""Replay a captured call: live copy, single replays, controlled series, plain repetition, and a tally of outcomes.

Use inside :func:`hashbench.core.diagnose.calls.live.captured_environment`.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter

from hashbench.core.diagnose.calls.call import CapturedCall, held_bytes
from hashbench.core.diagnose.calls.live import CallOutcome, LiveCall, OutcomeDigests
from hashbench.core.diagnose.calls.ops import is_custom
from hashbench.core.diagnose.causes import stats
from hashbench.core.diagnose.replay.facts import Snapshot
from hashbench.core.processes import Budget
from hashbench.core.records import NO_TIME, ExperimentResult

Context = Callable[[], AbstractContextManager[object]]
"""Makes the context around replays; if it yields a function, that is called before each replay."""

UNCHANGED: Context = nullcontext

PATIENCE = 10
"""Factor on the requested replays while only one outcome was seen, up to ``PATIENT_SHARE`` of the budget: a difference
in one of twenty replays shows almost surely in 200 replays, not in 20."""
PATIENT_SHARE = 0.05
LONGER = 4
"""Factor on the length of an experiment while the unchanged call happens to agree as well."""
BLOCKS = 5
"""Blocks of replays per experiment, with replays of the unchanged call in between."""

MOST_COPIES = 5
MOST_BYTES = 2**26
"""Limits on copied outcomes (number, total bytes), the first included; two are always copied."""


class InapplicableError(Exception):
    """The experiment does not apply to the call; the message is the reason."""


class Tally:
    """Outcomes of one experiment, compared with ``reference`` (default: the first outcome).

    Outcomes are kept as digests; contents are copied for the first and a few others.
    """

    def __init__(self, reference: OutcomeDigests | None = None) -> None:
        self.reference = reference
        self.trials = self.differing = 0
        self.seconds: list[float] = []
        self.copies: list[Snapshot] = []
        self.outcomes: list[OutcomeDigests] = []
        self._seen: Counter[int] = Counter() if reference is None else Counter({hash(reference): 1})
        self._copied_bytes = 0

    def add(self, outcome: OutcomeDigests, *, seconds: float, copy: Callable[[], Snapshot]) -> None:
        """Add an outcome; ``copy`` is called only if its content is kept."""
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
        """Number of distinct outcomes, the reference included."""
        return len(self._seen)

    def result(self, name: str, *, found: str = "", note: str = "") -> ExperimentResult:
        """Return the tally as the result of a call experiment."""
        seconds = statistics.median(self.seconds) if self.seconds else None
        counts = self.trials, self.differing, self.distinct
        return ExperimentResult(name, "call", *counts, seconds=seconds, found=found, note=note)


class Replayer:
    """One call, its live copy, and the outcomes of its repetition."""

    def __init__(self, call: CapturedCall, *, replays: int, budget: Budget) -> None:
        self.call, self.replays, self.budget = call, replays, budget
        self.trials = replays
        self.custom = is_custom(call.func)
        self.live = LiveCall(call)
        self.repeated = Tally()
        self.cost = 0.0  # seconds of the last plain replay, with resetting and hashing
        self.provoked: list[Snapshot] = []
        self.elsewhere: list[OutcomeDigests] = []  # of inputs at other addresses

    @property
    def in_place(self) -> OutcomeDigests | None:
        """The single outcome of the unchanged call, apart from rare exceptions; ``None`` if it has several."""
        return self.repeated.reference if stats.is_rare(self.repeated.result("repeat")) else None

    def against_in_place(self) -> Tally:
        """Return a tally that compares with the single outcome of the undisturbed call.

        Raises:
            InapplicableError: the undisturbed call has several outcomes.
        """
        if self.in_place is None:
            raise InapplicableError("the outcome differs in place")
        return Tally(self.in_place)

    def replay(self, tally: Tally, *, live: LiveCall | None = None, change: Context = UNCHANGED) -> None:
        """Reset, run under ``change``, and add the outcome to the tally."""
        live = live or self.live
        begin = perf_counter()
        live.reset()
        with change():
            outcome = live.run()
        digests = outcome.digests()
        live.mark_unchanged(digests.arguments)
        tally.add(digests, seconds=outcome.seconds, copy=lambda: self.snapshot(live, outcome, digests))
        if tally is self.repeated:
            self.cost = perf_counter() - begin

    def snapshot(self, live: LiveCall, outcome: CallOutcome, digests: OutcomeDigests) -> Snapshot:
        """Copy all that a run wrote, including arguments that the schema does not declare as written."""
        written = outcome.written
        known = {id(tensor) for tensor in written}
        changed = zip(outcome.tensors, digests.arguments, live.content, strict=True)
        undeclared = [tensor for tensor, after, before in changed if after != before and id(tensor) not in known]
        return tuple(tensor.detach().clone() for tensor in [*written, *undeclared])

    def compared(
        self,
        name: str,
        left: Budget,
        *,
        live: LiveCall | None = None,
        change: Context = UNCHANGED,
        each: bool = False,
        tally: Tally | None = None,
    ) -> ExperimentResult:
        """Replay ``live`` under ``change`` (entered for ``each`` replay), interleaved with unchanged replays."""
        tally = tally or Tally()

        def block(count: int) -> None:
            with UNCHANGED() if each else change() as restart:
                for _ in range(count):
                    if callable(restart):
                        restart()
                    self.replay(tally, live=live, change=change if each else UNCHANGED)

        return self.controlled(name, tally, left, block=block)

    def controlled(self, name: str, tally: Tally, left: Budget, *, block: Callable[[int], None]) -> ExperimentResult:
        """Run replays in blocks until the tally has its trials or time is up.

        If the unchanged call differs, each block is followed by unchanged replays, which count for ``repeat``. Races
        only show while cores are free, so an experiment that removes the difference proves nothing unless the unchanged
        call differed
        meanwhile: both alternate, up to a limit.
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
        """Return the number of unchanged replays after a block.

        Over all blocks they miss a differing replay in 1 of 1000 cases; one per block if nearly all replays differ.
        """
        share = min(0.99, self.repeated.differing / self.repeated.trials)
        return min(size, max(1, math.ceil(math.log(0.001) / math.log(1 - share) / BLOCKS)))

    def repeat(self, left: Budget) -> ExperimentResult:
        """Run the experiment ``repeat``: same storages, content and generators restored before each replay.

        Continues while nothing differs yet, and while outcomes differ so rarely that other experiments could prove
        nothing.
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
        """Return the number of trials for the other experiments."""
        return stats.arm_length(self.repeated.result("repeat"), asked=self.replays)

    def keep(self, tally: Tally) -> None:
        """Remember an outcome that only a disturbance caused."""
        if tally.differing and not self.provoked:
            self.provoked = tally.copies[:1] if self.in_place is not None else tally.copies[1:2]
