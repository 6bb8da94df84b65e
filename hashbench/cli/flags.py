"""Flags that several subcommands share, values made of parsed flags, and output on terminals."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO, TypeVar

from hashbench.cli.parser import EXIT_DIFFERENCE, EXIT_USAGE, Flags
from hashbench.core import records
from hashbench.core.errors import HashbenchError
from hashbench.core.finding import WIDTH, Finding, as_json, as_text, error_as_json
from hashbench.core.io import refuse_unwritable
from hashbench.core.records import DETERMINISTIC, DTYPES, TRACERS
from hashbench.core.text import printable

LARGEST_SEED = 2**32 - 1  # NumPy takes no larger one
LONGEST_SECONDS = 1e6  # eleven days; the kernel counts a wait in 31 bits of milliseconds

_Value = TypeVar("_Value")


def at_least(lowest: float, kind: type = int, *, most: float = math.inf) -> Callable[[str], Any]:
    """Return a parser of numbers of ``kind`` from ``lowest`` to ``most``."""

    def check(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not value >= lowest:
            raise argparse.ArgumentTypeError(f"must be >= {lowest:g}, got {text}")
        if value > most:
            raise argparse.ArgumentTypeError(f"must be <= {most:.0f}, got {text}")
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
    text = "Seed all random generators with N."
    flags.add_argument("--seed", type=at_least(0, most=LARGEST_SEED), default=1337, metavar="N", help=text)


def dtype(flags: Flags) -> None:
    """Add ``--bfloat16`` and the like."""
    group = flags.exclusive()
    for name in DTYPES:
        text = "Run under torch.autocast." if name == "amp" else f"Cast the model and its inputs to {name}."
        group.add_argument(f"--{name}", dest="dtype", action="store_const", const=name, default="", help=text)


def deterministic(flags: Flags) -> None:
    """Add ``--deterministic``."""
    text = "Set torch.use_deterministic_algorithms (default: on)."
    flags.add_argument("--deterministic", choices=DETERMINISTIC, default="", help=text)


def tracer(flags: Flags) -> None:
    """Add ``--tracer``."""
    text = "Record ops by the native tracer, by the Python dispatch mode, or by the former where it can be used."
    flags.add_argument("--tracer", choices=TRACERS, default="auto", help=text)


def output_format(flags: Flags, *forms: str) -> None:
    """Add ``--format``; the first form is the default."""
    flags.add_argument("--format", choices=forms, default=forms[0], help="Choose the format of the output.")


def several(flags: Flags, *names: str, metavar: str, text: str, dest: str | None = None) -> None:
    """Add a flag that may be given several times; its values become a list."""
    more: dict[str, Any] = {} if dest is None else {"dest": dest}
    flags.add_argument(*names, action="append", default=[], metavar=metavar, help=text, **more)


def invariances_of(text: str) -> tuple[str, ...]:
    """Return the invariances in a value of ``--invariance``, each once.

    Raises:
        argparse.ArgumentTypeError: a word is no invariance.
    """
    try:
        return records.invariances_of([word.strip() for word in text.split(",")])
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def words(flags: Flags, name: str, *, metavar: str, text: str) -> None:
    """Add a flag with one or more values, which may be given several times."""
    flags.add_argument(name, nargs="+", default=[], action="extend", metavar=metavar, help=text)


def models(flags: Flags) -> None:
    """Add the flags that select models of suites, for ``sweep`` and ``nightly``."""
    text = "Select one model of every family, as its suite marks them, or all."
    flags.add_argument("--models", dest="which", choices=("default", "all"), default="default", help=text)
    words(flags, "--only", metavar="M", text="Select only the models M.")
    several(
        flags,
        "-k",
        "--filter",
        dest="filters",
        metavar="RE",
        text="Select the models whose name matches the regular expression RE.",
    )
    several(
        flags,
        "-x",
        "--exclude",
        dest="excludes",
        metavar="RE",
        text="Exclude the models whose name matches the regular expression RE.",
    )


def made_of(kind: type[_Value], parsed: argparse.Namespace, **more: Any) -> _Value:
    """Build the dataclass ``kind`` from the parsed flags named as its fields and from ``more``; lists become tuples."""
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    given = {name: value for name, value in vars(parsed).items() if name in names}
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()} | more)


def new_folder(*names: str) -> Path:
    """Return the default results folder, ``results/<date>_<time>_<names>``."""
    return Path("results") / "_".join([time.strftime("%Y-%m-%d_%H%M%S"), *names])


class Look(NamedTuple):
    """The look of a stream.

    Attributes:
        width: maximum length of a line; ``None``: unlimited.
        colour: escape sequences for colours are allowed.
    """

    width: int | None
    colour: bool


def look_of(stream: TextIO | None) -> Look:
    """Return the width of a terminal (other streams have none), and whether to use colours: on a terminal unless
    ``NO_COLOR`` is set, elsewhere with ``FORCE_COLOR``."""
    on_terminal = stream is not None and stream.isatty()
    wanted = bool(os.environ.get("FORCE_COLOR")) or (on_terminal and os.environ.get("TERM") != "dumb")
    width = shutil.get_terminal_size().columns if on_terminal else None
    return Look(width, colour=wanted and not os.environ.get("NO_COLOR"))


@contextlib.contextmanager
def phases_shown() -> Iterator[None]:
    """Show the current phase of this process on a terminal's standard error, in a line that is erased at the end. No
    thread redraws it: experiments are running."""
    from hashbench.core.processes import phases_told_to

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
    """Print ``text``, which may come from a file, with escapes for characters that control a terminal."""
    print(printable(text), end=end)


def file_to_write(text: str) -> Path:
    """Return the path of a file that a command is to write when it is done; the parser of such flags.

    Raises:
        HashbenchError: it could not be written.
    """
    return _writable(text, folder=False)


def folder_to_fill(text: str) -> Path:
    """Return the path of a folder that a command is to write into; raises as :func:`file_to_write`."""
    return _writable(text, folder=True)


def _writable(text: str, *, folder: bool) -> Path:
    try:
        refuse_unwritable(Path(text), folder=folder)
    except OSError as error:
        consequence = f"{error.strerror or error}; nothing was run"
        raise HashbenchError(f"cannot write {text}", consequence=consequence, tip="Choose another path.") from error
    return Path(text)


PATHS = (Path, file_to_write, folder_to_fill)
"""Parsers of flags whose values are paths."""


def document(flags: Flags) -> None:
    """Add ``--json``, for commands that print a verdict in a form of their own."""
    flags.add_argument("--json", action="store_true", help="Print the verdict as a JSON document.")


def report(flags: Flags) -> None:
    """Add the flags of all commands that print a verdict."""
    document(flags)
    flags.add_argument("--html", type=file_to_write, metavar="F", help="Write the verdict as a page into F as well.")


def show_finding(finding: Finding, parsed: argparse.Namespace, *, title: str, **page: Any) -> int:
    """Print a finding as :func:`report` asks, write its page, and return the exit code.

    Args:
        finding: the verdict.
        parsed: the command line.
        title: the command.
        page: see :func:`~hashbench.core.finding.page.as_html`.
    """
    if parsed.html is not None:
        from hashbench.core.finding.page import as_html
        from hashbench.core.io import write_file

        write_file(parsed.html, as_html(finding, title=title, **page), tip="Choose another file with --html.")
    if parsed.json:
        show_document(finding, command=title)
    else:
        show(as_text(finding, width=terminal_width()))
    return EXIT_DIFFERENCE if finding.differs else 0 if finding.equal else EXIT_USAGE


def show_document(finding: Finding, *, command: str) -> None:
    """Print a finding as JSON, all of whose characters are ASCII."""
    print(as_json(finding, command=command))


@contextlib.contextmanager
def errors_as_asked(parsed: argparse.Namespace, *, command: str) -> Iterator[None]:
    """Print an error as a JSON document, too, where ``--json`` was given."""
    try:
        yield
    except HashbenchError as error:
        if getattr(parsed, "json", False) or getattr(parsed, "format", "") == "json":
            print(error_as_json(error, command=command))
        raise


def prints_aside(parsed: argparse.Namespace) -> contextlib.AbstractContextManager[object]:
    """Send what a user's program prints in this process to standard error, where ``--json`` was given."""
    return contextlib.redirect_stdout(sys.stderr) if parsed.json else contextlib.nullcontext()


def terminal_width() -> int:
    """Return the characters of a line: those of the terminal or of ``COLUMNS``, else of a file."""
    named = "COLUMNS" in os.environ or (sys.stdout is not None and sys.stdout.isatty())
    return shutil.get_terminal_size((WIDTH, 0)).columns if named else WIDTH


def say(message: str, code: int = 0) -> int:
    """Print ``message`` as one line on standard error, if that is open, and return ``code``."""
    if sys.stderr is not None:  # Python has none where file descriptor 2 is closed, and would print it as a result
        with contextlib.suppress(OSError):
            print(f"hashbench: {printable(' '.join(message.split()))}", file=sys.stderr)
    return code
