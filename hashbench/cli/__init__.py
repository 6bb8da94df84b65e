"""The command line. The only place that prints and the only place with exit codes.

Exit codes: 0 it did its job · 1 a difference (``compare``, ``diff``, ``replay``, ``sweep --strict``) · 2 what was asked
is wrong, or the output cannot be written (one line: what, consequence, what to do) · 70 a fault of hashbench, with a
trace · 130 stopped by Ctrl-C or by a closed pipe.

Each file here adds some subcommands to the parser; what a subcommand needs is imported when it runs, so that ``--help``
and ``compare`` do not wait for torch.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import sys
import traceback
from collections.abc import Callable, Sequence

from hashbench import __version__
from hashbench.cli import fingerprint, reading, report, sweep, tools
from hashbench.cli.flags import EXIT_FAULT, EXIT_INTERRUPTED, EXIT_USAGE, OneLineParser, say, subcommands
from hashbench.errors import HashbenchError

__all__ = ["main"]

FILES = (sweep, report, reading, tools, fingerprint)
"""In the order in which ``hashbench --help`` lists their subcommands."""

_TAKES_NO_MORE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""A file or device that is full or broken, as ``> /dev/full``."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit code."""
    return guarded(lambda: _command(arguments))


def guarded(run: Callable[[], int]) -> int:
    """Return the exit code of ``run``, also where it raises, which is said in one line."""
    try:
        try:
            code = run()
        except SystemExit as ended:  # of argparse, which has said why
            code = int(ended.code or 0)
        if sys.stdout is not None:
            sys.stdout.flush()  # what cannot be written is told here, not by the interpreter as it ends
    except HashbenchError as error:
        return say(str(error), EXIT_USAGE)
    except KeyboardInterrupt:
        return say("stopped", EXIT_INTERRUPTED)
    except BrokenPipeError:
        _drop_output()
        return EXIT_INTERRUPTED
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _TAKES_NO_MORE:
            _drop_output()
            what = f"cannot write: {error.strerror}"
            return say(f"{what}, so the output is not whole. Free space, or send it elsewhere.", EXIT_USAGE)
        traceback.print_exc()
        return say("this is a fault of hashbench: please report it with the trace above", EXIT_FAULT)
    return code


def _command(arguments: Sequence[str] | None) -> int:
    parsed = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = parsed.command
    return command(parsed)


def _drop_output() -> None:
    """Send what is still to be printed nowhere: Python would fail once more when it flushes."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> OneLineParser:
    parser = OneLineParser(
        prog="hashbench", description="Run every model of a zoo twice and name the kernel that differs."
    )
    parser.add_argument("--version", action="version", version=f"hashbench {__version__}")
    commands = subcommands(parser, "COMMAND")
    for file in FILES:
        file.add(commands)
    return parser
