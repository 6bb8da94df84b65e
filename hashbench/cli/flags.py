"""What all subcommands share: parsers whose errors are one line, kinds of flags, and values made of parsed flags."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Never, TypeVar

from hashbench.errors import HashbenchError

EXIT_DIFFERENCE, EXIT_USAGE, EXIT_FAULT, EXIT_INTERRUPTED = 1, 2, 70, 130
LARGEST_SEED = 2**32 - 1  # NumPy takes no larger one
LONGEST_SECONDS = 1e6  # eleven days; the kernel counts a wait in 31 bits of milliseconds

Commands = Any
"""What ``ArgumentParser.add_subparsers`` returns; its class has no public name."""

Flags = argparse._ActionsContainer
"""A parser, or a group of its flags."""

_Value = TypeVar("_Value")


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


def whole(flags: Flags, *names: str, least: int = 1, default: int | None = None, text: str = "") -> None:
    """Add a flag for a whole number."""
    flags.add_argument(*names, type=at_least(least), default=default, metavar="N", help=text or None)


def seconds(flags: Flags, name: str, text: str, *, least: float = 0, default: float | None = None) -> None:
    """Add a flag for a time."""
    kind = at_least(least, float, most=LONGEST_SECONDS)
    flags.add_argument(name, type=kind, default=default, metavar="S", help=text)


def seed(flags: Flags) -> None:
    """Add ``--seed``."""
    flags.add_argument("--seed", type=at_least(0, most=LARGEST_SEED), default=1337, metavar="N")


def several(flags: Flags, *names: str, metavar: str, text: str, dest: str | None = None) -> None:
    """Add a flag that may be given several times; its values become a list."""
    more: dict[str, Any] = {} if dest is None else {"dest": dest}
    flags.add_argument(*names, action="append", default=[], metavar=metavar, help=text, **more)


def words(flags: Flags, name: str, *, metavar: str, text: str) -> None:
    """Add a flag with one or more values, which may be given several times."""
    flags.add_argument(name, nargs="+", default=[], action="extend", metavar=metavar, help=text)


def models(flags: Flags) -> None:
    """Add the flags that choose among the models of suites, as ``sweep`` and ``nightly`` have them."""
    text = "one of every family, or all"
    flags.add_argument("--models", dest="which", choices=("default", "all"), default="default", help=text)
    words(flags, "--only", metavar="M", text="these models")
    several(flags, "-k", "--filter", dest="filters", metavar="RE", text="models that match")
    several(flags, "-x", "--exclude", dest="excludes", metavar="RE", text="but not those that match")


def made_of(kind: type[_Value], parsed: argparse.Namespace, **more: Any) -> _Value:
    """The dataclass ``kind`` of the parsed flags that are called as its fields, and of ``more``; a list is a tuple."""
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    given = {name: value for name, value in vars(parsed).items() if name in names}
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()} | more)


def new_folder(*names: str) -> Path:
    """The results folder where nobody chose one: ``results/<date>_<time>_<names>``."""
    return Path("results") / "_".join([time.strftime("%Y-%m-%d_%H%M%S"), *names])


def refuse_resume_without_output(parsed: argparse.Namespace) -> None:
    """Raise where ``--resume`` is given and ``--output`` is not: a new folder holds nothing to complete."""
    if parsed.resume and parsed.output is None:
        raise HashbenchError(
            "--resume requires --output",
            consequence="a new results folder holds nothing to complete, so nothing was run",
            tip="Add --output DIR with the folder of the run that stopped, or leave --resume out.",
        )


def say(message: str, code: int = 0) -> int:
    """Print ``message`` as one line on standard error and return ``code``."""
    print(f"hashbench: {' '.join(message.split())}", file=sys.stderr)
    return code
