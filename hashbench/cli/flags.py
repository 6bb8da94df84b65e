"""What all subcommands share: parsers whose errors are one line, kinds of flags, and values made of parsed flags."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Never, TextIO, TypeVar

from hashbench import records
from hashbench.errors import HashbenchError
from hashbench.records import COMPANIES, DETERMINISTIC, DTYPES, TRACERS
from hashbench.text import printable

EXIT_DIFFERENCE, EXIT_USAGE, EXIT_FAULT, EXIT_INTERRUPTED = 1, 2, 70, 130
LARGEST_SEED = 2**32 - 1  # NumPy takes no larger one
LONGEST_SECONDS = 1e6  # eleven days; the kernel counts a wait in 31 bits of milliseconds

Commands = Any
"""What ``ArgumentParser.add_subparsers`` returns; its class has no public name."""

Flags = argparse._ActionsContainer
"""A parser, or a group of its flags."""

_Value = TypeVar("_Value")

_FLAG = re.compile(r"--[\w-]+")


class _Help(argparse.HelpFormatter):
    """Shows the default of every flag that has one, unless its text says what stands in for it."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", default_words(action)
        return text if not default or "default" in text else f"{text} (default: {default})".replace("%", "%%")


def default_words(action: argparse.Action) -> str:
    """The default of a flag as it is given on a command line; empty where it has none."""
    default = action.default
    if default in (None, False, argparse.SUPPRESS):
        return ""
    if isinstance(default, (list, tuple)):
        return " ".join(map(str, default))
    return f"{default:g}" if isinstance(default, float) else str(default)


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong on one line, with the names that may have been meant and the command whose help to read. Flags
    are not abbreviated: one that is mistyped would run something else, for hours.

    ``tip_for`` may say more of a flag that this command does not have.
    """

    tip_for: Callable[[str], str] = staticmethod(lambda _: "")

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **{"formatter_class": _Help, "allow_abbrev": False, **more})

    def error(self, message: str) -> Never:
        sentence = message if message.endswith("?") else f"{message}."
        self.exit(EXIT_USAGE, f"{self.prog}: {sentence} See `{self.prog} --help`.\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        """As argparse does, but an output that is full or closed is no secret."""
        if file is not None:  # Python has none where its file descriptor is closed
            file.write(message)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does, but what is not known is an error of this command, not of the one that it belongs to."""
        words = sys.argv[1:] if args is None else list(args)
        if misspelt := self._misspelt(words):  # before argparse asks for something else that is missing
            self.error(self._about(misspelt))
        parsed, unknown = super().parse_known_args(words, namespace)
        if unknown:
            self.error(self._about(unknown[0]))
        return parsed, unknown

    def _misspelt(self, words: Sequence[str]) -> str:
        """The first flag that this command does not have, among those that are its own."""
        hands_on = any(action.nargs in (argparse.PARSER, argparse.REMAINDER) for action in self._actions)
        for word in itertools.takewhile(lambda word: word != "--", words):
            if hands_on and not word.startswith("-"):
                break
            name = word.partition("=")[0]
            if _FLAG.fullmatch(name) and name not in self._option_string_actions:
                return name
        return ""

    def _about(self, unknown: str) -> str:
        what = "flag" if unknown.startswith("-") else "argument"
        tip = self.tip_for(unknown) or _did_you_mean(unknown, self._option_string_actions)
        return f"unknown {what} {unknown}{tip}"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        near = _did_you_mean(str(value), action.choices)
        if action.nargs == argparse.PARSER:
            commands = f"it is none of {', '.join(action.choices)}"
            raise argparse.ArgumentError(None, f"unknown command {value!r}{near or f': {commands}'}")
        choices = ", ".join(map(str, action.choices))
        raise argparse.ArgumentError(action, f"invalid choice: {value!r} (choose from {choices}){near}")


def _did_you_mean(word: str, known: Iterable[object]) -> str:
    from difflib import get_close_matches  # a hundredth of a second, which --help need not take

    names = sorted(map(str, known))
    near = [name for name in names if word.startswith("--") and name.startswith(word)] or get_close_matches(word, names)
    return f". Did you mean {near[0]}?" if near else ""


def subcommands(parser: OneLineParser, metavar: str) -> Commands:
    """The subcommands of a command, which shows its help where none is given; that did nothing, so it is no success."""

    def show_help(_: argparse.Namespace) -> int:
        parser.print_help(sys.stderr)
        return EXIT_USAGE

    parser.set_defaults(command=show_help)
    return parser.add_subparsers(metavar=metavar, parser_class=OneLineParser)


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


def whole(flags: Flags, *names: str, text: str, least: int = 1, default: int | None = None) -> None:
    """Add a flag for a whole number."""
    flags.add_argument(*names, type=at_least(least), default=default, metavar="N", help=text)


def seconds(flags: Flags, name: str, text: str, *, least: float = 0, default: float | None = None) -> None:
    """Add a flag for a time."""
    kind = at_least(least, float, most=LONGEST_SECONDS)
    flags.add_argument(name, type=kind, default=default, metavar="S", help=text)


def seed(flags: Flags) -> None:
    """Add ``--seed``."""
    text = "of all random generators"
    flags.add_argument("--seed", type=at_least(0, most=LARGEST_SEED), default=1337, metavar="N", help=text)


def dtype(flags: Flags) -> None:
    """Add ``--bfloat16`` and the like."""
    group = flags.add_mutually_exclusive_group()
    for name in DTYPES:
        text = "torch.autocast" if name == "amp" else f"cast the model and its inputs to {name}"
        group.add_argument(f"--{name}", dest="dtype", action="store_const", const=name, default="", help=text)


def deterministic(flags: Flags) -> None:
    """Add ``--deterministic``."""
    text = "use_deterministic_algorithms (default on)"
    flags.add_argument("--deterministic", choices=DETERMINISTIC, default="", help=text)


def tracer(flags: Flags) -> None:
    """Add ``--tracer``."""
    text = "what records the ops: the native tracer or the Python dispatch mode; auto: the former where it can be used"
    flags.add_argument("--tracer", choices=TRACERS, default="auto", help=text)


def output_format(flags: Flags, *forms: str) -> None:
    """Add ``--format``; the first form is the default."""
    flags.add_argument("--format", choices=forms, default=forms[0], help="of what is printed")


def several(flags: Flags, *names: str, metavar: str, text: str, dest: str | None = None) -> None:
    """Add a flag that may be given several times; its values become a list."""
    more: dict[str, Any] = {} if dest is None else {"dest": dest}
    flags.add_argument(*names, action="append", default=[], metavar=metavar, help=text, **more)


def fingerprints(flags: Flags) -> None:
    """Add ``--fingerprints``."""
    text = "also record kernel fingerprints, which compare and nightly read (docs/fingerprint.md)"
    flags.add_argument("--fingerprints", action="store_true", help=text)


def stress(flags: Flags) -> None:
    """Add ``--stress``."""
    text = "run what passes again under perturbations that must not matter, and name what then differs"
    flags.add_argument("--stress", action="store_true", help=text)


def batch_invariant(flags: Flags) -> None:
    """Add ``--batch-invariant``."""
    text = "in the forward pass: which items of smaller and smaller batches differ from those of the full batch"
    flags.add_argument("--batch-invariant", action="store_true", help=text)
    text = f"with --batch-invariant: {', '.join(COMPANIES)}, one or several (default batch), for one mode of rows each"
    flags.add_argument("--company", type=_companies, default="batch", metavar="C,…", help=text)


def _companies(text: str) -> str:
    companies_of(text)
    return text


def companies_of(text: str) -> tuple[str, ...]:
    """The companies that a value of ``--company`` asks for, each once.

    Raises:
        argparse.ArgumentTypeError: a word of it is none.
    """
    try:
        return records.companies_of([word.strip() for word in text.split(",")])
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def words(flags: Flags, name: str, *, metavar: str, text: str) -> None:
    """Add a flag with one or more values, which may be given several times."""
    flags.add_argument(name, nargs="+", default=[], action="extend", metavar=metavar, help=text)


def models(flags: Flags) -> None:
    """Add the flags that choose among the models of suites, as ``sweep`` and ``nightly`` have them."""
    text = "default: those that their suite marks, one of every family; all: every one"
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


class Look(NamedTuple):
    """How wide the lines of a stream may be (``None``: as long as they come), and whether they may have colours."""

    width: int | None
    colour: bool


def look_of(stream: TextIO | None) -> Look:
    """A terminal has a width, and colours unless ``NO_COLOR`` is set; anything else has colours where ``FORCE_COLOR``
    is."""
    on_terminal = stream is not None and stream.isatty()
    wanted = bool(os.environ.get("FORCE_COLOR")) or (on_terminal and os.environ.get("TERM") != "dumb")
    width = shutil.get_terminal_size().columns if on_terminal else None
    return Look(width, colour=wanted and not os.environ.get("NO_COLOR"))


@contextlib.contextmanager
def phases_shown() -> Iterator[None]:
    """A context in which a terminal's standard error shows what this process is doing, on a line that goes again. No
    thread draws it: experiments go on meanwhile."""
    from hashbench.processes import phases_told_to

    stream = sys.stderr
    if stream is None or not stream.isatty():
        yield
        return

    def show(text: str) -> None:
        with contextlib.suppress(OSError):
            stream.write(f"\r{text[: shutil.get_terminal_size().columns - 1]}\x1b[K")
            stream.flush()

    with phases_told_to(show):
        try:
            yield
        finally:
            show("")


def show(text: str, *, end: str = "\n") -> None:
    """Print ``text``, which may come from a file, without what steers a terminal."""
    print(printable(text), end=end)


def say(message: str, code: int = 0) -> int:
    """Print ``message`` as one line on standard error, where there is one that takes it, and return ``code``."""
    if sys.stderr is not None:  # Python has none where file descriptor 2 is closed, and would print it as a result
        with contextlib.suppress(OSError):
            print(f"hashbench: {printable(' '.join(message.split()))}", file=sys.stderr)
    return code
