"""Trace chosen steps of a training loop with the tracer of a sweep, into the folder of the recording."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from hashbench.core.errors import HashbenchError
from hashbench.core.io import tell_unwritten
from hashbench.core.trace.api import HashDebugTrace
from hashbench.extensions.watch.file import trace_name

TRACE_VARIABLE = "HASHBENCH_TRACE_STEP"
"""Environment variable with the steps to trace: ``300`` or ``289:301`` (from the first to the one before the last)."""

_STEPS = re.compile(r"(?P<first>\d{1,12})(:(?P<stop>\d{1,12}))?")


def steps_to_trace(given: range | Sequence[int] | int | None) -> range:
    """Return the steps that the environment or the program asks to trace; the environment precedes.

    Raises:
        HashbenchError: they are no steps, or not consecutive.
    """
    text = os.environ.get(TRACE_VARIABLE, "")
    if text:
        part = _STEPS.fullmatch(text)
        if part is None:
            raise _refusal(f"{TRACE_VARIABLE}={text!r}")
        first = int(part["first"])
        stop = int(part["stop"]) if part["stop"] else first + 1
        if stop <= first:
            raise _refusal(f"{TRACE_VARIABLE}={text}")
        return range(first, stop)
    if given is None:
        return range(0)
    steps = [given] if isinstance(given, int) else list(given)
    if not steps or steps != list(range(steps[0], steps[0] + len(steps))) or steps[0] < 0:
        raise _refusal(f"trace={given!r}")
    return range(steps[0], steps[-1] + 1)


def _refusal(what: str) -> HashbenchError:
    return HashbenchError(
        f"{what} names no steps to trace", consequence="nothing is traced", tip="Give 300, or 289:301 for 289 to 300."
    )


class StepTracer:
    """A trace of consecutive steps: it begins with the first call of the model in the first of them, and ends with the
    first call after the last, or with the recording. Where it cannot go on, as on a full disk, it ends.

    It cannot end in a hook of an optimizer, whose table of hooks is being iterated over there.

    Attributes:
        model: whose parameters and buffers are named.
    """

    def __init__(self, steps: range, folder: Path, rank: int, failed: Callable[[str, BaseException], None]) -> None:
        self._steps, self._folder, self._rank, self._failed = steps, folder, rank, failed
        self.model: torch.nn.Module | None = None
        self._trace: HashDebugTrace | None = None
        self._first = self._last = -1

    def begin(self, step: int, inputs: Any) -> None:
        """Begin with ``step`` if it is to be traced, or end after the last one; ``inputs`` are named ``input/…``."""
        self.leave(step)
        if self._trace is None and step in self._steps:
            with self._surviving():
                self._trace = trace = HashDebugTrace(source_lines=True, model=self.model, inputs=inputs)
                self._first = step
                trace.__enter__()
                trace.iteration = step

    def add_all(self, step: int, named: Callable[[], Iterable[tuple[str, torch.Tensor | None]]]) -> None:
        """Add results of ``step`` to the trace, if there is one."""
        if self._trace is not None and step in self._steps:
            with self._surviving():
                for name, value in named():
                    if value is not None:
                        self._trace.add_result(f"step {step}: {name}", value)

    def stepped(self, step: int) -> None:
        """Count the end of ``step``."""
        if self._trace is not None:
            self._last = step
            with self._surviving():
                self._trace.iteration = step + 1

    def leave(self, step: int) -> None:
        """End if ``step`` is not to be traced."""
        if step not in self._steps:
            self.end()

    def end(self) -> None:
        """End and write the trace, if there is one with a whole step."""
        trace = self._trace
        if trace is None:
            return
        with self._surviving():
            trace.__exit__(None, None, None)
            self._trace = None
            if self._last >= self._first:
                trace.save(self._folder / trace_name(self._rank, self._first, self._last))

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        """End the trace, and not the program, where an error comes out of it."""
        try:
            yield
        except Exception as error:
            trace, self._trace, self._steps = self._trace, None, range(0)
            self._failed("trace", error)
            if isinstance(error, OSError):
                tell_unwritten(self._folder, error, "no step is traced any more")
            if trace is not None and trace.is_active():
                with suppress(Exception):
                    trace.__exit__(None, None, None)
