"""What a fresh process is asked to do, and what it leaves: JSON files in the folder of a run. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

TASK, END, NOTE = "task.json", "end.json", "capture.json"
"""Files in the folder of a run: what was asked, how it ended, and what the replays of a captured call show."""

STDOUT, STDERR = "stdout.txt", "stderr.txt"
"""What the program printed."""

REPRO = "repro"
"""Folder of the repro of a captured call, in that of its run."""

FIXED_PROCESS = 4_040_404
"""Number of the process that a program sees in a run with fixed clocks."""

FIXED_NAME = "hbfixed"
"""Begin of the names of temporary files there."""


@dataclass(frozen=True, slots=True)
class Program:
    """The program, as ``python`` gets it.

    Attributes:
        script: path; with ``module`` the name of a module.
        arguments: of it.
        module: run as ``python -m``.
        seed: seeds the generators of Python, NumPy and torch before it begins; ``None``: nothing is seeded.
    """

    script: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    seed: int | None = None

    @property
    def name(self) -> str:
        """What to call it: the name of its file."""
        return self.script if self.module else Path(self.script).name


@dataclass(frozen=True, slots=True)
class ProgramTask:
    """One run.

    Attributes:
        program: what to run.
        folder: where its recording goes.
        first, stop: first step that is traced, and the one after the last; equal: none.
        most: maximum number of records of the trace.
        watched: digests of each step are recorded.
        clocks: nanoseconds at which clocks start, by name, in a run in which they, the number of the process and the
            names of temporary files are fixed; empty: they are real.
        capture: id of a record whose call is captured and replayed; empty: none.
    """

    program: Program
    folder: str
    first: int = 0
    stop: int = 0
    most: int = 0
    watched: bool = True
    clocks: Mapping[str, int] = field(default_factory=dict)
    capture: str = ""


@dataclass(frozen=True, slots=True)
class ProgramEnd:
    """What a run leaves beside its recording.

    Attributes:
        ended: how it ended; empty: by itself.
        torch: it imported torch.
        steps: steps of its optimizers.
        bounded: the trace reached its maximum number of records.
        unseen: what was not recorded, each a phrase.
        prints: step and number of bytes printed before it began, where that number changed.
    """

    ended: str = ""
    torch: bool = False
    steps: int = 0
    bounded: bool = False
    unseen: tuple[str, ...] = ()
    prints: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class CallNote:
    """What the replays of a captured call show.

    Attributes:
        words: in one phrase, or why there is none.
        written: there is a repro.
        cause, confidence, because, advice: of its diagnosis.
        definition: file or module that defines a custom op.
    """

    words: str
    written: bool = False
    cause: str = ""
    confidence: str = ""
    because: str = ""
    advice: str = ""
    definition: str = ""
