"""The command line: the only place that prints, and the only place with exit codes.

Exit codes:
    0: success.
    1: a difference was found (``compare``, ``diff``, ``ranks``, ``replay``, ``sweep --strict``).
    2: bad usage, or the output cannot be written; one line says what, the consequence, and what to do.
    70: a bug in hashbench, with a traceback.
    130: interrupted by Ctrl-C or by a closed pipe.

Each module here adds some subcommands to the parser. What a subcommand needs is imported when it runs, so that
``--help`` and ``compare`` do not wait for torch.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence

from hashbench import __version__
from hashbench.cli import completion, flags, reading, sweep, tools
from hashbench.cli.flags import say
from hashbench.cli.parser import EXIT_FAULT, EXIT_INTERRUPTED, EXIT_USAGE, Commands, OneLineParser
from hashbench.core import extensions
from hashbench.core.errors import HashbenchError
from hashbench.core.finding import wrapped

__all__ = ["main"]

FILES = (sweep, reading, tools, completion)
"""Modules that add subcommands, beside those of extensions."""

SECTIONS = {
    "Sweep and report": ("list", "sweep", "merge", "compare", "nightly", "report", "expect", "dynamo"),
    "One program": ("run", "diff", "ranks", "watch", "replay", "numeric", "pipeline"),
    "Upgrades and machines": ("fingerprint", "audit", "env", "native"),
    "Help": ("docs", "completion"),
}
"""Title -> subcommands, as ``hashbench --help`` shows them."""

EXAMPLE = """\
Example:
  hashbench sweep --suite torchvision --only resnet18 --training

`hashbench COMMAND --help` lists the flags of a command.
`hashbench docs` lists the pages of the documentation.
"""

_TAKES_NO_MORE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Error numbers of a full or broken file or device, as ``> /dev/full``."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit code."""
    return guarded(lambda: _command(arguments))


def main_with(*arguments: str) -> int:
    """Run one subcommand in a new Python; see :func:`hashbench.core.processes.python_calling`."""
    return main(arguments)


def guarded(run: Callable[[], int]) -> int:
    """Call ``run`` and return its exit code; an exception becomes one line on standard error and a code."""
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
        return say("internal error in hashbench: please report it with the trace above", EXIT_FAULT)
    return code


def _command(arguments: Sequence[str] | None) -> int:
    parser = _parser()
    words = sys.argv[1:] if arguments is None else arguments
    # A path that cannot be written is refused as it is parsed.
    parsed = argparse.Namespace(json="--json" in words)
    with flags.errors_as_asked(parsed, command=parser.chosen(words)):
        parsed = parser.parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = parsed.command
    with flags.errors_as_asked(parsed, command=parser.chosen(words)):
        return command(parsed)


def _drop_output() -> None:
    """Redirect standard output to the null device, so that Python does not fail again when it flushes at exit."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Version(argparse.Action):
    """Print the version; unlike argparse's, raise where it cannot be written."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"hashbench {__version__}")
        parser.exit()


class _Hashbench(OneLineParser):
    """The parser of ``hashbench``, with help that groups the subcommands."""

    def format_help(self) -> str:
        """Return the usage, the subcommands by group, an example, and where the documentation is."""
        label = max(map(len, self.commands)) + 4
        width = shutil.get_terminal_size().columns
        sections = [self.format_usage(), f"{self.description}\n"]
        for title, names in SECTIONS.items():
            summaries = {name: self.summaries[name] for name in names if name in self.commands}
            sections.append(f"{title}:\n{_listed(summaries, label, width)}")
        flags = {", ".join(action.option_strings): action.help or "" for action in self.flags if action.option_strings}
        sections.append(f"Options:\n{_listed(flags, label, width)}")
        return "\n".join([*sections, EXAMPLE])


def _listed(texts: Mapping[str, str], label: int, width: int) -> str:
    """Return one paragraph for each name, wrapped at the terminal's width."""
    lines = (wrapped(text, width, first=f"{f'  {name}':{label}}", rest=" " * label) for name, text in texts.items())
    return "".join(f"{line}\n" for line in lines)


def _parser() -> OneLineParser:
    made = _Hashbench(prog="hashbench", description="Run every model of a zoo twice and name the kernel that differs.")
    made.add_argument("--version", action=_Version, nargs=0, help="Print the version and exit.")
    commands = Commands(made, "COMMAND")
    for file in (*FILES, *extensions.commands()):
        file.add(commands)
    return made
