"""What all subcommands' parsers share: errors on one line, and numbers within bounds."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from typing import Any, Never

EXIT_DIFFERENCE, EXIT_USAGE, EXIT_FAULT, EXIT_INTERRUPTED = 1, 2, 70, 130
LARGEST_SEED = 2**32 - 1  # NumPy takes no larger one
LONGEST_SECONDS = 1e6  # eleven days; the kernel counts a wait in 31 bits of milliseconds

Commands = Any
"""What ``ArgumentParser.add_subparsers`` returns; its class has no public name."""


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong on one line, without the usage text."""

    def error(self, message: str) -> Never:
        self.exit(EXIT_USAGE, f"{self.prog}: {message}. See `{self.prog} --help`.\n")


def at_least(lowest: float, kind: type = int, *, most: float = math.inf) -> Callable[[str], Any]:
    """A parser for a number of ``kind`` from ``lowest`` to ``most``."""

    def check(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not value >= lowest:
            raise argparse.ArgumentTypeError(f"{text} is too small, it must be at least {lowest:g}")
        if value > most:
            raise argparse.ArgumentTypeError(f"{text} is too large, it must be at most {most:.0f}")
        return value

    return check


def say(message: str, code: int) -> int:
    """Print ``message`` as one line on standard error and return ``code``."""
    print(f"hashbench: {' '.join(message.split())}", file=sys.stderr)
    return code
