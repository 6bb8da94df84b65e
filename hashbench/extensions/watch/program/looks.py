"""From a program to a verdict: which runs are made, and what each is for."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

from hashbench.core.catalog import Origin
from hashbench.core.io import from_json, read_file, read_json
from hashbench.core.processes import tell_phase
from hashbench.core.records import Divergence
from hashbench.extensions.watch.program.compare import (
    MOST_PRINTED,
    RunsVerdict,
    TextDifference,
    compare_runs,
    differ_beside_addresses,
    first_divergence,
    kind_of_end,
    without_addresses,
)
from hashbench.extensions.watch.program.launch import ProgramRun, StandardInput, run_once
from hashbench.extensions.watch.program.task import (
    FIXED_NAME,
    FIXED_PROCESS,
    NOTE,
    STDOUT,
    CallNote,
    Program,
    ProgramTask,
)

PAIRS = 2
"""Pairs of traced runs of the second look, at most."""

_CLOCKS = ("time", "monotonic", "perf_counter", "process_time", "thread_time")

_EARLIER = 16
"""Steps by which a second look begins earlier, where the difference was there when its trace began."""


@dataclass(frozen=True, slots=True)
class RunRequest:
    """What is asked for.

    Attributes:
        program: the program.
        runs: number of runs of the first look.
        first_steps: steps that are traced in the first look.
        most: maximum number of records of a trace.
        seconds: after which a run is ended; ``None``: never.
        files: whose content is compared.
        why: the call of the kernel is captured and replayed.
    """

    program: Program
    runs: int = 2
    first_steps: int = 3
    most: int = 100_000
    seconds: float | None = None
    files: tuple[str, ...] = ()
    why: bool = False


@dataclass(frozen=True, slots=True)
class NamedKernel:
    """Where the difference entered.

    Attributes:
        divergence: as the traces show it.
        first, stop: first traced step, and the one after the last.
        traces: folders of the two runs.
        made: False where the difference was there when the trace began.
    """

    divergence: Divergence
    first: int
    stop: int
    traces: tuple[Path, Path]
    made: bool = True


@dataclass(frozen=True, slots=True)
class SecondLook:
    """Traced runs of the steps that differ.

    Attributes:
        first, stop: the steps.
        pairs: verdicts on the pairs of runs.
    """

    first: int
    stop: int
    pairs: tuple[RunsVerdict, ...]

    @property
    def differing(self) -> int:
        """Number of pairs that differ."""
        return sum(pair.differs for pair in self.pairs)


@dataclass(frozen=True, slots=True)
class ExplainedText:
    """A text that differs because of a clock, a process number, a temporary name or an address.

    Attributes:
        text: it.
        shows: what it shows, in words.
    """

    text: TextDifference
    shows: str


@dataclass(frozen=True, slots=True)
class ProgramVerdict:
    """The verdict on the runs of a program.

    Attributes:
        request: what was asked for.
        pairs: each run but the first, compared with the first.
        named: where the difference entered; ``None``: not known, or there is none.
        look: the second look; ``None``: none was needed.
        explained: texts that agree in runs with fixed clocks.
        note: what the replays of the kernel's call show.
    """

    request: RunRequest
    pairs: tuple[RunsVerdict, ...]
    named: NamedKernel | None = None
    look: SecondLook | None = None
    explained: tuple[ExplainedText, ...] = ()
    note: CallNote | None = None

    @property
    def lead(self) -> RunsVerdict:
        """The first pair that differs, or else the first."""
        return next((pair for pair in self.pairs if pair.differs), self.pairs[0])

    @property
    def texts(self) -> tuple[TextDifference, ...]:
        """Texts that differ, and not because of a clock."""
        explained = {each.text.name for each in self.explained}
        return tuple(text for text in self.lead.texts if text.name not in explained)

    @property
    def differs(self) -> bool:
        """Whether the runs differ."""
        return bool(self.lead.ends_differ or self.lead.differs_inside or self.texts)


class ProgramLooks:
    """The runs of a program, in folders of their own.

    Args:
        request: what is asked for.
        folder: of all runs.
    """

    def __init__(self, request: RunRequest, folder: Path) -> None:
        self._request, self._folder = request, folder
        self._input = StandardInput()
        self._number = 0

    def verdict(self) -> ProgramVerdict:
        """Make the runs that are needed, and judge them."""
        request = self._request
        first = ProgramTask(request.program, "", 0, request.first_steps, request.most)
        runs = [self._run(first, f"run {number + 1} of {request.runs}") for number in range(request.runs)]
        tell_phase("comparing the runs")
        pairs = tuple(compare_runs(runs[0], run, most=request.most) for run in runs[1:])
        found = ProgramVerdict(request, pairs)
        if not found.differs:
            return found
        if not (found.lead.ends_differ or found.lead.differs_inside):
            found = replace(found, explained=self._explained(found.lead))
        if found.differs:
            found = self._named(found)
        if request.why and found.named is not None and found.named.divergence.origin == Origin.KERNEL:
            found = replace(found, note=self._replayed(found.named))
        return found

    def _run(self, task: ProgramTask, words: str) -> ProgramRun:
        self._number += 1
        task = replace(task, folder=str(self._folder / f"run{self._number}"))
        request = self._request
        words = f"{request.program.name}: {words}"
        tell_phase(words)
        return run_once(task, words, source=self._input, seconds=request.seconds, files=request.files)

    # ---------------------------------------------------------------------------------------------- fixed clocks

    def _explained(self, lead: RunsVerdict) -> tuple[ExplainedText, ...]:
        """Run the program twice with fixed clocks; return the texts that agree then, but for addresses of objects."""
        clocks = {name: getattr(time, f"{name}_ns")() for name in _CLOCKS}
        task = ProgramTask(self._request.program, "", watched=False, clocks=clocks)
        runs = []
        for number in (1, 2):
            runs.append(self._run(task, f"run {number} of 2 with a fixed clock"))
            shutil.rmtree(self._folder / "tmp", ignore_errors=True)
        if kind_of_end(runs[0]) != kind_of_end(runs[1]) or runs[0].status != lead.first.status:
            return ()
        left = differ_beside_addresses(*runs)
        return tuple(ExplainedText(text, _shown(text, runs[0])) for text in lead.texts if text.name not in left)

    # --------------------------------------------------------------------------------------------------- kernels

    def _named(self, found: ProgramVerdict) -> ProgramVerdict:
        """Name the kernel, from the traces of the first steps or from a second look."""
        lead, request = found.lead, self._request
        named = _kernel_of(lead, 0, request.first_steps)
        if named is not None and named.made:
            return replace(found, named=named)
        steps = steps_of(lead, found.texts)
        if steps is None or steps[1] <= request.first_steps:
            return replace(found, named=named)
        look, named = self._second_look(*steps, otherwise=named)
        return replace(found, look=look, named=named)

    def _second_look(
        self, first: int, stop: int, *, otherwise: NamedKernel | None
    ) -> tuple[SecondLook, NamedKernel | None]:
        request, runs, pairs = self._request, list[ProgramRun](), list[RunsVerdict]()
        named = otherwise
        for number in range(PAIRS):
            task = ProgramTask(request.program, "", first, stop, request.most)
            words = f"second look at {_steps_words(first, stop)}"
            new = [self._run(task, f"{words}, run {2 * number + at} of at most {2 * PAIRS}") for at in (1, 2)]
            tell_phase("comparing the runs")
            pair = compare_runs(*new, most=request.most)
            pairs.append(pair)
            runs += new
            known = [pair, *(compare_runs(*two, most=request.most) for two in combinations(runs, 2) if number)]
            found = [kernel for each in known if (kernel := _kernel_of(each, first, stop)) is not None]
            named = next((kernel for kernel in found if kernel.made), next(iter(found), named))
            if named is not None and named.made:
                break
            moved = steps_of(pair, pair.texts) if pair.differs else None
            if named is not None:  # it was there when the trace began
                first, runs = max(0, first - _EARLIER), []
            elif moved is not None and moved != (first, stop):
                (first, stop), runs = moved, []
        return SecondLook(first, stop, tuple(pairs)), named

    def _replayed(self, named: NamedKernel) -> CallNote:
        """Run the program once more, capture the call, and replay it."""
        task = ProgramTask(
            self._request.program, "", named.first, named.stop, self._request.most, capture=named.divergence.node
        )
        run = self._run(task, f"once more, to replay {named.divergence.kernel}")
        if not (run.folder / NOTE).exists():
            return CallNote(f"not captured: the program {run.ended() or 'ended by os._exit'}")
        return from_json(CallNote, read_json(run.folder / NOTE))


def _shown(text: TextDifference, control: ProgramRun) -> str:
    """Return what a text shows that agrees in runs with fixed clocks, from what such a run shows there."""
    contents = dict(control.files)
    content = contents[text.name] if text.name else read_file(control.folder / STDOUT, most=MOST_PRINTED)
    lines = (content or b"").split(b"\n")
    shown = [lines[line.number - 1] for line in text.lines if line.number <= len(lines)] or lines
    words = b"\n".join(shown)
    first = text.lines[0] if text.lines else None
    if first is not None and _without_addresses(first.first) == _without_addresses(first.second):
        return "the address of an object"
    if FIXED_NAME.encode() in words:
        return "the name of a temporary file"
    return "the number of the process" if str(FIXED_PROCESS).encode() in words else "the clock"


def _without_addresses(line: str | None) -> bytes | None:
    return without_addresses(None if line is None else line.encode())


def _kernel_of(pair: RunsVerdict, first: int, stop: int) -> NamedKernel | None:
    """Return what the traces of two runs name."""
    if pair.traced is None or not pair.differs:
        return None
    divergence = first_divergence(pair.traced)
    if divergence is None:
        return None
    leaves = {leaf.id for leaf in pair.traced.first.leaves}
    made = first == 0 or divergence.opaque_producer or divergence.node not in leaves
    return NamedKernel(divergence, first, stop, (pair.first.folder, pair.second.folder), made)


def steps_of(pair: RunsVerdict, texts: Sequence[TextDifference]) -> tuple[int, int] | None:
    """Return the first step to trace and the one after the last, by what differs; ``None``: there is no such step."""
    first = None if pair.loop is None else pair.loop.first
    if first is not None and first.step is not None and pair.loop is not None:
        since = first.step if first.since is None else first.since
        return max(0, since - 1), first.step + 1
    end = pair.first.end
    lines = [text.lines[0] for text in texts if not text.name and text.lines]
    if end is None or not end.steps or not lines:
        return None
    before = next((step - 1 for step, printed in end.prints if printed > lines[0].at), end.steps)
    return before, before + 1


def _steps_words(first: int, stop: int) -> str:
    return f"step {first}" if stop == first + 1 else f"steps {first} to {stop - 1}"
