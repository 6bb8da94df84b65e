"""The command line. The only place that prints and the only place with exit codes.

Exit codes: 0 it did its job · 1 a difference (``compare``, ``diff``, ``replay``, ``sweep --strict``) · 2 what was asked
is wrong (one line: what, consequence, what to do) · 70 a fault of hashbench, with a trace · 130 stopped by Ctrl-C or by
a closed pipe.

Each file here adds some subcommands to the parser; what a subcommand needs is imported when it runs, so that ``--help``
and ``compare`` do not wait for torch.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence

from hashbench import __version__
from hashbench.cli import reading, report, sweep, tools
from hashbench.cli.flags import EXIT_FAULT, EXIT_INTERRUPTED, EXIT_USAGE, OneLineParser, say
from hashbench.errors import HashbenchError

__all__ = ["main"]

FILES = (sweep, report, reading, tools)
"""In the order in which ``hashbench --help`` lists their subcommands."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit code."""
    try:
        parsed = _parser().parse_args(arguments)
        command: Callable[[argparse.Namespace], int] = parsed.command
        return command(parsed)
    except HashbenchError as error:
        return say(str(error), EXIT_USAGE)
    except KeyboardInterrupt:
        return say("stopped", EXIT_INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python fails once more when it flushes
        return EXIT_INTERRUPTED
    except Exception:
        traceback.print_exc()
        return say("this is a fault of hashbench: please report it with the trace above", EXIT_FAULT)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="hashbench", description="Run every model of a zoo twice and name the kernel that differs."
    )
    parser.add_argument("--version", action="version", version=f"hashbench {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=OneLineParser)
    for file in FILES:
        file.add(commands)
    return parser
