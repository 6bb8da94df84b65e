"""Trace this rank of a program step by step, into a folder that all ranks share.

No collective is added and nothing is waited for: each rank writes a file of its own.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hashbench.core.errors import HashbenchError
from hashbench.core.processes import uncollected
from hashbench.core.records import EarlyRead, Result, TracedRank
from hashbench.core.run.settings import settings
from hashbench.core.text import count, ending
from hashbench.core.trace.file import TraceText
from hashbench.core.trace.groups import rank_of
from hashbench.core.trace.rank_file import RankFile
from hashbench.core.trace.segments import TraceSegment
from hashbench.extensions.ranks.launch import refuse_missing
from hashbench.extensions.ranks.notes import REPRO, NamedCall
from hashbench.extensions.ranks.printing import keeping_prints
from hashbench.extensions.ranks.results import CURRENT
from hashbench.extensions.ranks.step_file import member, rank_path, run_id
from hashbench.extensions.ranks.stepped import SteppedTrace
from hashbench.extensions.ranks.waiting import telling_at_deadline

if TYPE_CHECKING:
    from hashbench.extensions.ranks.capture import RankCapture


class RankRecorder:
    """Recorder of one rank: trace, results and file, from :meth:`start` until :meth:`end`.

    Args:
        folder: of the recording.
        model: its parameters are named from the start.
        steps: the steps to record; ``None``: all.
        tracer: as for :class:`~hashbench.core.trace.api.HashDebugTrace`.
        source_lines: as for :class:`~hashbench.core.trace.api.HashDebugTrace`.
        capture: sees every call.
    """

    def __init__(
        self,
        folder: Path,
        model: torch.nn.Module | None,
        steps: range | None,
        *,
        tracer: str = "auto",
        source_lines: bool = False,
        capture: RankCapture | None = None,
    ) -> None:
        self._folder, self._model, self._process = folder, model, os.getpid()
        self._steps = range(sys.maxsize) if steps is None else steps
        self._trace = SteppedTrace(
            after_step=self._after_step,
            tracer=tracer,
            settings=settings,
            source_lines=source_lines,
            watcher=capture,
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
def record_ranks(
    folder: str | Path,
    model: torch.nn.Module | None = None,
    steps: range | None = None,
    *,
    tracer: str = "auto",
    source_lines: bool = False,
    capture: Sequence[str] = (),
) -> Iterator[None]:
    """Trace this rank, step by step, into ``rank{R}.log.gz`` of a folder that all ranks share.

    A step ends with each step of the most frequently stepped optimizer; a program without one is a single step. The
    parameters of every optimizer that stepped are results, and whatever :func:`~hashbench.result` adds.

    Args:
        folder: of this recording; earlier files of its ranks are replaced.
        model: names modules and parameters from the start; without it they have names from their first call on.
        steps: records these steps only, such as ``range(2, 4)``; consecutive.
        tracer: as for :class:`~hashbench.core.trace.api.HashDebugTrace`.
        source_lines: records the line of the program behind every op, too.
        capture: ids of records, ``ID@RANK`` or for every rank ``ID``, one call of each rank: the call is kept, and when
            the program has ended its repro is written into ``repro``; of a collective, name the record of each rank.

    Raises:
        HashbenchError: the folder cannot be made or has a ``repro``, another trace is active, ``steps`` are not
            consecutive, or the tracer is unavailable. What the program raises passes unchanged, as does its exit code.
    """
    if steps is not None and (steps.step != 1 or steps.start < 0 or not steps):
        raise HashbenchError(
            f"invalid steps {steps.start}:{steps.stop}",
            consequence="nothing was recorded",
            tip="Use START:STOP, 0 <= START < STOP: `--steps 2:4` records 2 and 3.",
        )
    captured = _capture_of(Path(folder), (capture,) if isinstance(capture, str) else capture)
    recorder = RankRecorder(Path(folder), model, steps, tracer=tracer, source_lines=source_lines, capture=captured)
    recorder.start()
    token = CURRENT.set(recorder.add)
    ended = ""
    try:
        with _told_of_termination(recorder):
            yield
    except BaseException as error:
        ended = ending(error)
        raise
    finally:
        CURRENT.reset(token)
        recorder.end(ended)
        if captured is not None:
            captured.write()


def _capture_of(folder: Path, words: Sequence[str]) -> RankCapture | None:
    if not words:
        return None
    from hashbench.extensions.ranks.capture import RankCapture  # which imports all experiments

    if (folder / REPRO).exists():
        raise HashbenchError(
            f"{folder / REPRO} exists",
            consequence="two repros would be mixed, so the program was not started",
            tip="Name another folder.",
        )
    return RankCapture([NamedCall.of(word) for word in words], folder, rank=lambda: (rank_of(os.environ) or (0, 1))[0])


def run_script(
    folder: str | Path,
    script: str,
    arguments: Sequence[str],
    *,
    module: bool = False,
    **options: Any,
) -> None:
    """Run an unchanged script under :func:`record_ranks`, as ``python script arguments`` does.

    Args:
        folder: of this recording.
        script: path of the script; with ``module``, the name of a module, as for ``python -m``.
        arguments: of the script.
        module: ``script`` is the name of a module.
        options: as for :func:`record_ranks`, but for ``model``.

    Raises:
        HashbenchError: as for :func:`record_ranks`; there is no such script. Whatever the script raises passes,
            ``SystemExit`` included.
    """
    refuse_missing(script, module=module)
    before = sys.argv, list(sys.path)
    sys.argv = [script, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = str(Path.cwd()) if module else str(Path(script).resolve().parent)
    try:
        with (
            telling_at_deadline(Path(folder)),
            keeping_prints(Path(folder), (rank_of(os.environ) or (0, 1))[0]),
            record_ranks(folder, **options),
        ):
            if module:
                runpy.run_module(script, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(script, run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before


@contextmanager
def _told_of_termination(recorder: RankRecorder) -> Iterator[None]:
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
