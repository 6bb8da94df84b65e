"""Starts the harness, and ends it with all its child processes."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Never

from hashbench.integrations.dynamo.session import Session, chosen_model
from hashbench.processes import Child

SITE = Path(__file__).with_name("site")
"""The folder that makes a Python load our hook."""

_LOOK_SECONDS = 2.0
_GRACE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class HarnessFlags:
    """What the flags of the harness say about where its CSV goes and what is run.

    ``csv`` is absolute, empty where only the harness knows. ``begins_anew``: it will remove its old CSV. ``accuracy``:
    it checks accuracy, so that every model begun gets a row.
    """

    csv: str = ""
    mode: str = "inference"
    begins_anew: bool = False
    accuracy: bool = False


def read_flags(arguments: Sequence[str]) -> HarnessFlags:
    """The harness's own flags, as far as they concern us. What cannot be read is left to the harness to refuse."""
    parser = _Reader(add_help=False, allow_abbrev=False)
    for flag in ("--output", "--output-directory"):
        parser.add_argument(flag, default="")
    for flag in ("--accuracy", "--training", "--retain-output", "--disable-output"):
        parser.add_argument(flag, action="store_true")
    try:
        found, _ = parser.parse_known_args(list(arguments))
    except ValueError:
        return HarnessFlags()
    csv = ""
    if found.output and not found.disable_output and (found.output_directory or Path(found.output).is_absolute()):
        csv = str(Path(found.output_directory, found.output).absolute())
    mode = "training" if found.training else "inference"
    anew = not chosen_model(arguments) and not found.retain_output
    return HarnessFlags(csv, mode, begins_anew=anew, accuracy=found.accuracy)


class _Reader(argparse.ArgumentParser):
    def error(self, message: str) -> Never:
        raise ValueError(message)


def run_harness(session: Session, *, meanwhile: Callable[[], object]) -> int:
    """Run the harness to its end and return its exit code, negative for a signal. ``meanwhile`` is called every few
    seconds. Ctrl-C and SIGTERM end the harness and all that it has started.

    Raises:
        KeyboardInterrupt: after that.
    """
    path = os.pathsep.join(filter(None, (str(SITE), os.environ.get("PYTHONPATH", ""))))
    environment = {**session.environment(), "PYTHONPATH": path}
    with _stopped_by_term():
        command = [sys.executable, session.script, *session.arguments]
        with Child(command, stdin=None, stdout=None, stderr=None, environment=environment, own_session=False) as child:
            try:
                while (status := child.wait(_LOOK_SECONDS)) is None:
                    meanwhile()
            except BaseException:
                child.interrupt()  # a Ctrl-C has reached it too: it gets a moment, and then nothing of it stays
                child.wait(_GRACE_SECONDS)
                raise
        return status


@contextlib.contextmanager
def _stopped_by_term() -> Iterator[None]:
    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
