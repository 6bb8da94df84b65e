"""How a sweep looks while it runs: a bar with the current models on a terminal, a line a model elsewhere."""

from __future__ import annotations

import contextlib
import sys
import textwrap
from types import TracebackType
from typing import Any, Self, TextIO

from tqdm import tqdm

from hashbench.records import Row
from hashbench.sweep.run import Event, ModelFinished, ModelRequeued, ModelStarted, SweepOpened, SweepPlanned
from hashbench.text import a_few, one_line

_SHOWN = 6
"""Models that run, by name: a cluster runs more of them than a line can hold."""


class Progress:
    """Shows the events of :func:`hashbench.sweep.run.run_sweep` on ``stream`` (by default standard error).

    A terminal gets a bar with the models that run and the time left, and above it a line for each row that is not
    ``pass``. Anything else gets one line for each finished model. A stream that is closed is no reason to stop a sweep.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._on_terminal = self._stream.isatty()
        self._bar: tqdm[Any] | None = None
        self._running: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def __call__(self, event: Event) -> None:
        """Show ``event``."""
        with contextlib.suppress(OSError, ValueError):
            match event:
                case SweepOpened():
                    self._open(event)
                case SweepPlanned():
                    self._print(_plan(event))
                case ModelStarted():
                    self._running.append(event.name)
                    self._show_running()
                case ModelRequeued():
                    self._forget(event.row.name)
                    self._print(f"{_summary(event.row)}: runs again alone, after all others")
                case ModelFinished():
                    self._finish(event)

    def _open(self, event: SweepOpened) -> None:
        if event.done or event.damaged:
            self._print(f"{event.done} of {event.total} rows are there already{_damaged(event.damaged)}")
        if self._on_terminal:
            self._bar = tqdm(
                total=event.total,
                initial=event.done,
                file=self._stream,
                dynamic_ncols=True,
                bar_format="{percentage:3.0f}%|{bar:20}| {n_fmt}/{total_fmt} [{elapsed}{postfix}] {desc}",
            )

    def _finish(self, event: ModelFinished) -> None:
        self._forget(event.row.name)
        if self._bar is None:
            self._print(f"[{event.done}/{event.total}] {_summary(event.row)}")
            return
        if event.row.accuracy != "pass":
            self._print(_summary(event.row))
        self._bar.set_postfix_str(_time_left(event.eta_seconds), refresh=False)
        self._bar.update(event.done - self._bar.n)
        self._show_running()

    def _forget(self, name: str) -> None:
        if name in self._running:
            self._running.remove(name)

    def _show_running(self) -> None:
        if self._bar is not None:
            self._bar.set_description_str(one_line(a_few(self._running, _SHOWN)))

    def _print(self, line: str) -> None:
        if self._bar is None:
            print(line, file=self._stream, flush=True)
        else:
            self._bar.write(line, file=self._stream)


def _damaged(count: int) -> str:
    return f"; {count} damaged row files were thrown away and their models run again" if count else ""


def _plan(event: SweepPlanned) -> str:
    """``4 models at once on 2 devices, 2 threads each on cores of its own, together up to 21.2 GiB; longest first as in
    …``."""
    threads = f"{event.threads} threads" if event.threads != 1 else "1 thread"
    how = f", {threads} each" + (" on cores of its own" if event.pinned else "") if event.threads else ""
    memory = "" if event.memory_mib is None else f", together up to {event.memory_mib / 1024:.1f} GiB"
    known = f"{event.known} of {event.waiting} models"
    order = f"longest first as {known} were in {event.times_from}" if event.times_from else "no earlier times"
    devices = f" on {event.devices} devices" if event.devices > 1 else ""
    return f"{event.workers} models at once{devices}{how}{memory}; {order}"


def _summary(row: Row) -> str:
    """``resnet18  eager_two_runs_differ  aten::index_put  3.2 s``; an error in place of a kernel."""
    seconds = "" if row.seconds is None else f"{row.seconds:.1f} s"
    reason = row.kernel or textwrap.shorten(row.error, 100)
    # A line end in a name would begin a line of its own, which CI services may take for a command.
    return one_line("  ".join(filter(None, [row.name, row.accuracy, reason, seconds])))


def _time_left(seconds: float) -> str:
    """``40 s left``, ``12 min left``, ``3.5 h left``."""
    if seconds < 90:
        return f"{seconds:.0f} s left"
    return f"{seconds / 60:.0f} min left" if seconds < 5400 else f"{seconds / 3600:.1f} h left"
