"""Trace this process step by step into a file: every step is a part of the trace, written when it ends."""

from __future__ import annotations

import os
import signal
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from hashbench.core.errors import HashbenchError
from hashbench.core.processes import uncollected
from hashbench.core.records import EarlyRead, OpRecord, Result, TracedRank
from hashbench.core.run.settings import settings
from hashbench.core.text import count
from hashbench.core.trace.callbacks import TraceCallback
from hashbench.core.trace.file import TraceText
from hashbench.core.trace.groups import rank_of
from hashbench.core.trace.rank_file import RankFile
from hashbench.core.trace.segments import TraceSegment
from hashbench.core.trace.step_file import member, rank_path, run_id
from hashbench.core.trace.stepped import SteppedTrace


class CallCapture(TraceCallback):
    """Callback that sees every call, and then the records of a step."""

    def describe(self, records: Iterable[OpRecord]) -> None:
        """Look at the records of a step."""


class StepRecorder:
    """Recorder of this process, which may be a rank: trace, results and file, from :meth:`start` until :meth:`end`.

    Args:
        folder: of the recording.
        model: its parameters are named from the start.
        steps: the steps to record; ``None``: all.
        tracer: as for :class:`~hashbench.core.trace.api.HashDebugTrace`.
        source_lines: as for :class:`~hashbench.core.trace.api.HashDebugTrace`.
        capture: sees every call.
        each: count the steps of each optimizer; see :mod:`~hashbench.core.trace.steps`.
    """

    def __init__(
        self,
        folder: Path,
        model: torch.nn.Module | None,
        steps: range | None,
        *,
        tracer: str = "auto",
        source_lines: bool = False,
        capture: CallCapture | None = None,
        each: bool = False,
    ) -> None:
        self._folder, self._model, self._process = folder, model, os.getpid()
        self._steps = range(sys.maxsize) if steps is None else steps
        self._trace = SteppedTrace(
            after_step=self._after_step,
            tracer=tracer,
            settings=settings,
            source_lines=source_lines,
            watcher=capture,
            each=each,
        )
        self._capture = capture
        self._optimizers: list[torch.optim.Optimizer] = []
        self._closed = 0  # number of whole steps recorded
        self._seen = 0  # number of steps of the program so far
        self._names: Counter[str] = Counter()
        self._names_of: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}  # by the id of the parameter
        self._file: RankFile | None = None
        self._text: TraceText | None = None
        self._writing = False

    def start(self) -> None:
        """Begin. The file of this rank in an earlier recording is removed, if a launcher has told the rank.

        Raises:
            HashbenchError: the folder cannot be made; another trace is active.
        """
        known = rank_of(os.environ)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if known is not None:
                rank_path(self._folder, known[0]).unlink(missing_ok=True)
        except OSError as error:
            raise HashbenchError(
                f"cannot record into {self._folder}",
                consequence=f"{error.strerror or error}, so the program was not started",
                tip="Name a folder that can be written.",
            ) from error
        self._trace.follow()
        try:
            if self._steps.start == 0:
                self._trace.start(self._model)
        except BaseException:
            self._trace.unfollow()
            raise

    def roots(self) -> dict[str, torch.nn.Module]:
        """Return the models that the program called while it was traced, by name."""
        return self._trace.roots()

    @property
    def records(self) -> int:
        """Number of records so far."""
        return self._trace.records

    def end_early(self) -> bool:
        """Write what is recorded, and record no more; return False if nothing is being recorded."""
        if os.getpid() != self._process or self._writing or not self._trace.is_active():
            return False
        self._trace.stop()
        self._close_step(self._seen)
        return True

    def add(self, name: str, value: Any) -> None:
        """Add a result of this step, if the step is recorded."""
        if self._trace.is_active() and os.getpid() == self._process:
            self._trace.add_results([(self._unique(name), value)])

    def end(self, ended: str) -> None:
        """Write what is left, and how the program ended; empty if by itself."""
        if os.getpid() != self._process:
            return
        self._trace.unfollow()
        was_active = self._trace.is_active()
        if was_active and not self._closed and not ended:  # a program without an optimizer
            self._close_step(self._seen)
        if self._trace.is_active():
            self._trace.stop()
        if not (was_active or self._closed or ended):
            ended = f"it ended after {count(self._seen, 'step')}, before the first recorded one"
        self._write_end(ended, tail=was_active and not self._lost)

    def end_by_signal(self, name: str) -> None:
        """Write that a signal ended the program, unless the signal came while a step was written."""
        if not self._writing and os.getpid() == self._process:
            self._write_end(name, tail=False)

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        if os.getpid() != self._process:
            return
        if all(optimizer is not known for known in self._optimizers):
            self._optimizers.append(optimizer)
        number, self._seen = self._seen, self._trace.iteration or 0
        if number == self._seen:
            return
        if self._trace.is_active():
            self._close_step(number)
            if self._lost or self._seen >= self._steps.stop:
                self._trace.stop()
        elif self._seen == self._steps.start:
            self._trace.start(self._model)

    # ----------------------------------------------------------------------------------------------------- results

    def _unique(self, name: str) -> str:
        """Return the name of the next result of this name in this step."""
        number = self._names[name]
        self._names[name] += 1
        return f"{name}#{number}" if number else name

    def _add_parameters(self) -> None:
        """Add the parameters of all optimizers that stepped, each once, by name."""
        self._trace.settle()
        places = {
            id(parameter): (f"optimizer{number}.{group}.{at}", parameter)
            for number, optimizer in reversed(list(enumerate(self._optimizers)))
            for group, each in enumerate(optimizer.param_groups)
            for at, parameter in enumerate(each["params"])
        }
        found = sorted(places.values(), key=itemgetter(0))
        new = [parameter for _, parameter in found if not self._name_of(parameter)]
        for parameter, name in zip(new, self._trace.names_of(new), strict=True):
            self._names_of[id(parameter)] = weakref.ref(parameter), name
        named = ((self._unique(self._name_of(each) or place), each) for place, each in found)
        self._trace.add_results(named, wait=False)

    def _name_of(self, parameter: torch.Tensor) -> str:
        """Return the name that a parameter had before, also after its module is gone; empty if it had none."""
        known, name = self._names_of.get(id(parameter), (None, ""))
        return name if known is not None and known() is parameter else ""

    # ----------------------------------------------------------------------------------------------------- the file

    def _close_step(self, number: int) -> None:
        """Take a step, and write it."""
        self._writing = True
        with uncollected():  # collections would be most of the cost
            self._add_parameters()
            segment = self._trace.taken()
            self._names.clear()
            text = self._opened()
            if text is not None:
                self._add_segment(text, segment)
                text.close_step(number, segment.trace.results, segment.trace.early_reads)
                self._write(text, f"steps from {number} on are not recorded")
        self._closed += not self._lost
        self._writing = False

    def _write_end(self, ended: str, *, tail: bool) -> None:
        """Write what came after the last step, and the end."""
        self._writing = True
        text = self._opened()
        if text is not None and self._file is not None:
            results: list[Result] = []
            early: list[EarlyRead] = []
            for segment in self._tail() if tail else ():
                self._add_segment(text, segment)
                results += segment.trace.results
                early += segment.trace.early_reads
            text.end(results, early, ended=self._lost or ended)
            self._write(text, "the end is not recorded")
            self._file.close()
        self._text = None

    def _tail(self) -> Iterator[TraceSegment]:
        """Yield what came after the last step, and the parameters if that is anything."""
        segment = self._trace.taken()
        yield segment
        if segment.trace.records or segment.trace.results:
            self._add_parameters()
            yield self._trace.taken()

    def _add_segment(self, text: TraceText, segment: TraceSegment) -> None:
        if self._capture is not None:
            self._capture.describe(segment.trace.records)
        text.add(segment.trace, first=segment.first, arrived=segment.arrived)

    def _opened(self) -> TraceText | None:
        """Return the text of the trace, whose first line is written; ``None`` if that cannot be, or it has its end."""
        if self._file is None:
            rank, size = rank_of(os.environ) or (0, 1)
            self._file = RankFile(rank_path(self._folder, rank), replaces=True)
            text = TraceText(replace(self._trace.head, rank=TracedRank(rank, size)))
            self._text = text if self._write(text, "no step is recorded") else None
        return self._text

    def _write(self, text: TraceText, consequence: str) -> bool:
        """Append the new text to the file."""
        assert self._file is not None
        comment = "" if self._file.size else run_id(os.environ, os.getppid())
        written = self._file.append(member(text.lines.new(), comment), consequence)
        (text.lines.keep if written else text.lines.drop)()
        return written

    @property
    def _lost(self) -> str:
        """How the trace ended because it could not be written; empty if it could."""
        lost = self._file is not None and self._file.lost
        return f"the trace could not be written: {lost}" if lost else ""


@contextmanager
def told_of_termination(recorder: StepRecorder) -> Iterator[None]:
    """Write the end of the trace when SIGTERM comes, and then die of it.

    A program with a handler of its own for SIGTERM, set before or within, keeps it, and ends as that says.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def terminate(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        recorder.end_by_signal("SIGTERM")
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is terminate:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
