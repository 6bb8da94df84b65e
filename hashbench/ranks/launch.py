"""Start the ranks of a program on this machine, as ``torchrun --standalone --nproc-per-node N`` does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from hashbench.errors import HashbenchError
from hashbench.processes import Child, describe_end
from hashbench.text import duration

TERMINATION_SECONDS = 15.0
"""How long ranks may take to end after SIGTERM, before they are killed."""

_OURS = {"OMP_NUM_THREADS": "1"}
"""As torchrun sets it where it is not set, with a warning."""


def run_ranks(command: Sequence[str], *, ranks: int, seconds: float | None = None) -> str:
    """Run ``command``, program and arguments, once on each rank, and wait for all.

    What the ranks print goes to standard error. They meet at a port of their own, chosen by the system.

    Args:
        command: what each rank runs, with ``RANK``, ``WORLD_SIZE`` and so on in its environment.
        ranks: number of ranks.
        seconds: after which they are ended; ``None``: never.

    Returns:
        How they ended, in words; empty if all ended by themselves with exit code 0.

    Raises:
        HashbenchError: the launcher cannot be started.
    """
    launcher = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {name: value for name, value in _OURS.items() if name not in os.environ}
    output = _standard_error()
    try:
        child = Child(
            [*launcher, "--no-python", *command], stdout=output, stderr=output, environment=environment, guarded=True
        )
    except OSError as error:
        raise HashbenchError("cannot start the ranks", consequence=error.strerror or str(error)) from error
    with child:
        status = child.wait(seconds) if seconds is not None else _wait(child)
        if status is None and seconds is not None:
            child.interrupt(signal.SIGTERM)  # handed on to the ranks, which close their traces
            child.wait(TERMINATION_SECONDS)
            return f"the ranks were ended after {duration(seconds)}, the time limit"
    return "" if not status else f"the ranks {_words(status)}"


def _wait(child: Child) -> int | None:
    while (status := child.wait(3600.0)) is None:
        pass
    return status


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
