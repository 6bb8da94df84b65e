"""Start the ranks of a program on this machine, as ``torchrun --standalone --nproc-per-node N`` does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

from hashbench.core.errors import HashbenchError
from hashbench.core.processes import Child, describe_end
from hashbench.core.text import duration
from hashbench.extensions.ranks.waiting import DEADLINE, all_reported, waiting_words

TERMINATION_SECONDS = 15.0
"""How long ranks may take to end after SIGTERM, before they are killed."""

NOTE_SECONDS = 3.0
"""How long ranks may take to say where they are."""

_OURS = {"OMP_NUM_THREADS": "1"}
"""As torchrun sets it where it is not set, with a warning."""


@dataclass(frozen=True, slots=True)
class RanksEnd:
    """How the ranks of a run ended.

    Attributes:
        problem: in words; empty if all ended by themselves with exit code 0.
        waiting: where each rank was, in a sentence, if they were ended because their time was over.
    """

    problem: str = ""
    waiting: tuple[str, ...] = ()


def run_ranks(
    command: Sequence[str], *, ranks: int, seconds: float | None = None, folder: Path | None = None
) -> RanksEnd:
    """Run ``command``, program and arguments, once on each rank, and wait for all.

    What the ranks print goes to standard error. They meet at a port of their own, chosen by the system. They end with
    this process, and with the launcher.

    Args:
        command: what each rank runs, with ``RANK``, ``WORLD_SIZE`` and so on in its environment.
        ranks: number of ranks.
        seconds: after which they are ended; ``None``: never.
        folder: of the recording, where ranks say what they wait for when their time is over.

    Raises:
        HashbenchError: the launcher cannot be started.
    """
    launcher = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {name: value for name, value in _OURS.items() if name not in os.environ}
    if seconds is not None:
        environment[DEADLINE] = str(monotonic() + seconds)
    output = _standard_error()
    try:
        child = Child(
            [*launcher, "--no-python", *command], stdout=output, stderr=output, environment=environment, guarded=True
        )
    except OSError as error:
        raise HashbenchError("cannot start the ranks", consequence=error.strerror or str(error)) from error
    with child:
        status = child.wait(seconds)
        if status is None and seconds is not None:
            waiting = () if folder is None else _waiting(folder, ranks)
            child.interrupt(signal.SIGTERM)  # handed on to the ranks, which close their traces
            child.wait(TERMINATION_SECONDS)
            return RanksEnd(f"the ranks were ended after {duration(seconds)}, the time limit", waiting)
    return RanksEnd(f"the ranks {_words(status)}" if status else "")


def _waiting(folder: Path, ranks: int) -> tuple[str, ...]:
    """Return where each rank is; wait for their notes, at most :data:`NOTE_SECONDS`."""
    until = monotonic() + NOTE_SECONDS
    while not all_reported(folder, ranks) and monotonic() < until:
        sleep(0.05)
    return tuple(waiting_words(folder, ranks))


def _standard_error() -> int:
    """Return the descriptor of standard error; where it is closed, that of the null device."""
    try:
        return sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):
        return subprocess.DEVNULL


def _words(status: int) -> str:
    if status < 0:
        return f"were {describe_end(status)}"
    return f"failed (exit code {status} of torchrun, whose messages are above)"
