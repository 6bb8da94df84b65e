"""``hashbench replay``: rerun the experiments on the call of a repro, in a child process.

The arguments come from a file, and not every torch kernel validates them: a crash of the child must become an error of
this process. The child prints the result and returns the exit code.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from hashbench.cli import flags
from hashbench.cli.parser import EXIT_DIFFERENCE, EXIT_FAULT, EXIT_INTERRUPTED, EXIT_USAGE, Commands
from hashbench.core.errors import HashbenchError, last_line
from hashbench.core.processes import Child, describe_end, python_calling

_EXIT_CODES = (0, EXIT_DIFFERENCE, EXIT_USAGE, EXIT_FAULT, EXIT_INTERRUPTED)


def add(commands: Commands) -> None:
    """Add the subcommand."""
    replay = commands.add_parser("replay", help="Rerun the experiments on the captured call of a repro.")
    replay.add_argument(
        "folder", type=Path, metavar="DIR", help="Replay the call in DIR, a folder with call.json and tensors.pt."
    )
    flags.whole(replay, "--replays", least=2, default=20, text="Replay each experiment N times.")
    flags.seconds(replay, "--budget", "Spend at most S seconds on all experiments.", least=0.1, default=120.0)
    text = "Import FILE, a Python file, library or module that defines the op."
    flags.several(replay, "--import", dest="imports", metavar="FILE", text=text)
    flags.report(replay)
    replay.set_defaults(command=_replay)


def _replay(parsed: argparse.Namespace) -> int:
    """Replay in a child and return its exit code.

    Raises:
        HashbenchError: the child crashed.
    """
    with flags.prints_aside(parsed):
        _refuse_folder_of_repros(parsed.folder)
    asked = {
        **{name: getattr(parsed, name) for name in ("replays", "budget", "imports", "json")},
        "folder": str(parsed.folder),
        "html": None if parsed.html is None else str(parsed.html),
        "path": sys.path,
    }
    with _terminal() as stderr, tempfile.TemporaryFile() as errors:
        command = python_calling("hashbench.cli.replaying:in_child", json.dumps(asked), str(stderr), dies_with_us=True)
        handed = (stderr,) if stderr >= 0 else ()
        with Child(command, stdout=None, stderr=errors, handed=handed) as child:
            status = child.wait(math.inf)
        said = _content(errors)
    assert status is not None
    if status not in _EXIT_CODES:
        last_words = last_line(said)
        raise HashbenchError(
            f"the process that replayed {parsed.folder} has no result",
            consequence=f"{describe_end(status)}{f' ({last_words})' if last_words else ''}",
            tip="The folder is damaged or forged, or a kernel of torch has a fault.",
        )
    if said and sys.stderr is not None:
        with contextlib.suppress(OSError):
            sys.stderr.write(said)
    return status


@contextlib.contextmanager
def _terminal() -> Iterator[int]:
    """Yield a descriptor of standard error for the child's phases if it is a terminal, else -1. Other errors of the
    child, and messages of libraries that abort, are printed once it has ended."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield -1
        return
    descriptor = os.dup(sys.stderr.fileno())
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _content(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(1 << 20).decode(errors="replace")


def in_child(asked: str, stderr: str) -> int:
    """Replay as ``asked`` (JSON), print the result, and return the exit code."""
    from hashbench import cli

    if int(stderr) >= 0:
        sys.stderr = open(int(stderr), "w", buffering=1)  # noqa: PTH123, SIM115 – a descriptor
    values = json.loads(asked)
    sys.path[:] = values.pop("path")
    parsed = argparse.Namespace(**values)

    def replay() -> int:
        with flags.errors_as_asked(parsed, command="hashbench replay"):
            return _replay_here(parsed)

    return cli.guarded(replay)


def _replay_here(parsed: argparse.Namespace) -> int:
    from hashbench.core.diagnose import repro
    from hashbench.core.diagnose.calls import ops

    folder = Path(parsed.folder)
    with flags.prints_aside(parsed), flags.phases_shown():
        for definition in parsed.imports:
            ops.load(definition)
        made = repro.rerun(folder, replays=parsed.replays, budget=parsed.budget)
    commands = [shlex.join(["python", str(folder / "repro.py")])] if made.reproduced else []
    found = repro.rerun_finding(made, commands=commands)
    return flags.show_finding(found, parsed, title="hashbench replay", of=str(folder))


def _refuse_folder_of_repros(folder: Path) -> None:
    """Raise if ``folder`` belongs to a sweep or a night; print the commands that replay its repros first."""
    from hashbench.core.commands import CALL_FILE, replay_command

    if (folder / CALL_FILE).exists():
        return
    repros = sorted(call.parent for above in range(4) for call in folder.glob(f"{'*/' * above}*/{CALL_FILE}"))
    for repro in repros:
        print(replay_command(repro))
    if repros:
        problem = f"{folder} is not a repro, but has {len(repros)} inside"
        raise HashbenchError(problem, consequence="nothing was replayed", tip="Choose one of those listed.")
    try:
        (folder / CALL_FILE).stat()
    except OSError as error:  # the child would say so after it has imported torch
        problem, reason = f"cannot use the repro in {folder}", f"nothing was run ({CALL_FILE}: {error.strerror})"
        raise HashbenchError(problem, consequence=reason, tip="Regenerate it with `hashbench sweep`.") from error
