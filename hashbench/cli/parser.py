"""Parsers of the command line: errors of one line, near misses of names, and the table of flags that require or exclude
each other. Nothing here reads a private name of argparse."""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Never, Protocol, Self

EXIT_DIFFERENCE, EXIT_USAGE, EXIT_FAULT, EXIT_INTERRUPTED = 1, 2, 70, 130

_FLAG = re.compile(r"--[\w-]+")


class Flags(Protocol):
    """A parser or a group of its flags."""

    def add_argument(self, *names: str, **more: Any) -> argparse.Action:
        """Add a flag or a positional argument."""

    def exclusive(self, *, required: bool = False) -> Flags:
        """Return a group of flags that exclude each other."""


class FlagGroup:
    """A group of flags of ``parser``, which lists them."""

    def __init__(self, parser: OneLineParser, group: Any) -> None:
        self._parser, self._group = parser, group

    def add_argument(self, *names: str, **more: Any) -> argparse.Action:
        """Add a flag or a positional argument."""
        return self._parser.listed(self._group.add_argument(*names, **_completed(more)))

    def exclusive(self, *, required: bool = False) -> Flags:
        """Return a group of flags that exclude each other."""
        return FlagGroup(self._parser, self._group.add_mutually_exclusive_group(required=required))


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line: what is wrong, the name that may have been meant, and the command whose help
    to read. Flags are not abbreviated: a mistyped one would run something else, for hours.

    Attributes:
        flags: what was added to the parser and to its groups.
        commands: name -> parser of each subcommand.
        summaries: name -> one sentence on each subcommand.
        tip_for: returns what more to say of a flag that this command does not have.
        after_dashes: the positional argument, a list, that takes all words behind ``--``, wherever flags stand.
    """

    after_dashes = ""

    tip_for: Callable[[str], str] = staticmethod(lambda _: "")

    def __init__(self, *arguments: Any, **more: Any) -> None:
        self.flags: list[argparse.Action] = []
        self.commands: dict[str, OneLineParser] = {}
        self.summaries: dict[str, str] = {}
        super().__init__(*arguments, **{**more, "allow_abbrev": False, "add_help": False})
        self.add_argument("-h", "--help", action="help", help="Show this help and exit.")

    def add_argument(self, *names: Any, **more: Any) -> argparse.Action:
        """Add a flag or a positional argument; see :func:`_completed`."""
        return self.listed(super().add_argument(*names, **_completed(more)))

    def listed(self, action: argparse.Action) -> argparse.Action:
        """Append ``action`` to :attr:`flags` and return it."""
        self.flags.append(action)
        return action

    def group(self, title: str) -> FlagGroup:
        """Return a new group of flags, which ``--help`` shows below ``title``."""
        return FlagGroup(self, self.add_argument_group(title))

    def exclusive(self, *, required: bool = False) -> Flags:
        """Return a group of flags that exclude each other."""
        return FlagGroup(self, self.add_mutually_exclusive_group(required=required))

    @property
    def names(self) -> list[str]:
        """All spellings of all flags."""
        return [name for action in self.flags for name in action.option_strings]

    def find(self, name: str) -> argparse.Action | None:
        """Return the flag that is spelled ``name``; ``None`` where this command has none."""
        return next((action for action in self.flags if name in action.option_strings), None)

    def chosen(self, words: Sequence[str]) -> str:
        """Return the command that ``words`` name, with its subcommand: ``hashbench ranks diff``."""
        chosen = self.commands.get(words[0]) if words else None
        return self.prog if chosen is None else chosen.chosen(words[1:])

    def error(self, message: str) -> Never:
        """Print ``message`` with the command whose help to read, and exit with 2."""
        sentence = message if message.endswith("?") else f"{message}."
        self.exit(EXIT_USAGE, f"{self.prog}: {sentence} See `{self.prog} --help`.\n")

    def exit(self, status: int = 0, message: str | None = None) -> Never:
        """Print ``message`` on standard error and exit; unlike argparse's, raise where it cannot be written."""
        if message and sys.stderr is not None:  # Python has none where its file descriptor is closed
            sys.stderr.write(message)
        sys.exit(status)

    def print_help(self, file: Any = None) -> None:
        """Print the help; unlike argparse's, raise where it cannot be written."""
        stream = sys.stdout if file is None else file
        if stream is not None:
            stream.write(self.format_help())

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does; what is unknown is an error of this command, not of the one that it belongs to."""
        words = sys.argv[1:] if args is None else list(args)
        if problem := self._misspelt(words):  # before argparse asks for something else that is missing
            self.error(problem)
        behind: list[str] = []
        if self.after_dashes and "--" in words:
            words, behind = words[: words.index("--")], words[words.index("--") + 1 :]
        parsed, unknown = super().parse_known_args(words, namespace)
        if unknown:
            self.error(self._about(unknown[0]))
        if behind:  # argparse gives a list of positional arguments those words alone that stand before the first flag
            setattr(parsed, self.after_dashes, [*getattr(parsed, self.after_dashes), *behind])
        for rule in RULES:
            if rule.is_broken(self, parsed):
                self.error(str(rule))
        return parsed, unknown

    def _misspelt(self, words: Sequence[str]) -> str:
        """Return what is wrong with the first unknown flag or command; empty where all are known."""
        passes_on = any(action.nargs == argparse.REMAINDER for action in self.flags)
        for word in itertools.takewhile(lambda word: word != "--", words):
            name = word.partition("=")[0]
            if not word.startswith("-") and self.commands:
                return "" if word in self.commands else _unknown_command(word, self.commands)
            if not word.startswith("-") and passes_on:
                return ""
            if _FLAG.fullmatch(name) and name not in self.names:
                return self._about(name)
        return ""

    def _about(self, unknown: str) -> str:
        is_flag = unknown.startswith("-")
        near = did_you_mean(unknown, self.names if is_flag else {f"--{unknown}"} & {*self.names})
        return f"unknown {'flag' if is_flag else 'argument'} {unknown}{self.tip_for(unknown) or near}"


def _completed(more: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``add_argument`` with the default in the help, and near misses of choices in errors."""
    if "choices" in more and "type" not in more:
        more = {**more, "type": _one_of(tuple(more["choices"]), more.get("default"))}
    words = default_words(more.get("default")).replace("%", "%%")
    if words and "default:" not in more["help"]:
        more = {**more, "help": f"{more['help'].rstrip('.')} (default: {words})."}
    return more


def default_words(default: object) -> str:
    """Return the default of a flag as it is given on a command line; empty where there is none to show."""
    if default in (None, False, argparse.SUPPRESS):
        return ""
    if isinstance(default, (list, tuple)):
        return " ".join(map(str, default))
    return f"{default:g}" if isinstance(default, float) else str(default)


def _one_of(choices: Sequence[str], default: object) -> Callable[[str], str]:
    def check(text: str) -> str:
        if text in choices or text == default:  # argparse converts a default as well
            return text
        problem = f"invalid choice: {text!r} (choose from {', '.join(choices)})"
        raise argparse.ArgumentTypeError(f"{problem}{did_you_mean(text, choices)}")

    return check


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``. Did you mean --runs?``; empty where nothing ``known`` is near. A name that begins with ``word`` is."""
    from difflib import get_close_matches  # a hundredth of a second, which --help need not take

    names = {name.lstrip("-"): name for name in sorted(known, reverse=True)}  # dashes are no likeness
    bare = word.lstrip("-")
    near = [name for name in sorted(names) if bare and name.startswith(bare)] or get_close_matches(bare, names, n=1)
    return f". Did you mean {names[near[0]]}?" if near else ""


def _unknown_command(word: str, known: Iterable[str]) -> str:
    choices = f" (choose from {', '.join(known)})"
    return f"unknown command {word!r}{did_you_mean(word, known) or choices}"


class Commands:
    """The subcommands of ``parser``. Without one, it prints its help and exits with 2: nothing was run."""

    def __init__(self, parser: OneLineParser, metavar: str) -> None:
        def show_help(_: argparse.Namespace) -> int:
            parser.print_help(sys.stderr)
            return EXIT_USAGE

        parser.set_defaults(command=show_help)
        self.parser = parser
        self._added = parser.add_subparsers(metavar=metavar, parser_class=OneLineParser)

    def add_parser(self, name: str, *, help: str, **more: Any) -> OneLineParser:  # noqa: A002
        """Add the subcommand ``name``; ``help`` is one sentence, for its own help and that of the parser."""
        added = self._added.add_parser(name, **{"help": help, "description": help, **more})
        self.parser.commands[name], self.parser.summaries[name] = added, help
        return added


# ------------------------------------------------------------------------------------------------------- rules


class Condition(NamedTuple):
    """A flag that was given; with ``value``, given with this value."""

    flag: str
    value: str = ""

    @classmethod
    def of(cls, text: str) -> Self:
        """Return the condition that ``text``, as ``--executor ray``, stands for."""
        flag, _, value = text.partition(" ")
        return cls(flag, value)

    def holds(self, parser: OneLineParser, parsed: argparse.Namespace) -> bool | None:
        """Return whether the flag was given; ``None`` where the command does not have it."""
        action = parser.find(self.flag)
        if action is None:
            return None
        given = getattr(parsed, action.dest)
        return str(given) == self.value if self.value else given != action.default


@dataclass(frozen=True, slots=True)
class Requires:
    """``flag`` may only be given together with ``other``. Either may be a flag with a value."""

    flag: str
    other: str

    def __str__(self) -> str:
        return f"{self.flag} requires {self.other}"

    def is_broken(self, parser: OneLineParser, parsed: argparse.Namespace) -> bool:
        """Return True if a command that has both flags was given only ``flag``."""
        given, other = (Condition.of(flag).holds(parser, parsed) for flag in (self.flag, self.other))
        return given is True and other is False


@dataclass(frozen=True, slots=True)
class Excludes:
    """``flag`` may not be given together with ``other``. Either may be a flag with a value."""

    flag: str
    other: str

    def __str__(self) -> str:
        return f"{self.flag} cannot be combined with {self.other}"

    def is_broken(self, parser: OneLineParser, parsed: argparse.Namespace) -> bool:
        """Return True if both flags were given."""
        return all(Condition.of(flag).holds(parser, parsed) for flag in (self.flag, self.other))


RULES: tuple[Requires | Excludes, ...] = (
    Requires("--resume", "--output"),
    Excludes("--stress", "--batch-invariant"),
    Excludes("--untraced-pair", "--batch-invariant"),
    Excludes("--fingerprints", "--batch-invariant"),
    Requires("--compilations", "--backend"),
    Requires("--as", "--backend"),
    Excludes("--backend", "--batch-invariant"),
    Excludes("--backend", "--stress"),
    Excludes("--backend", "--untraced-pair"),
    Requires("--address", "--executor ray"),
    Requires("--ray-resource", "--executor ray"),
    Requires("--ray-gpus", "--executor ray"),
    Requires("--ray-wait", "--executor ray"),
    Excludes("--memory-limit", "--executor ray"),
    Excludes("--rows", "--results"),
    Excludes("--weights", "--training"),
    Excludes("--weights", "--iterations"),
    Excludes("--weights", "--precision"),
    Excludes("--weights", "--rtol"),
    Excludes("--weights", "--atol"),
    Excludes("--weights", "--stages"),
    Excludes("--weights", "--ignore"),
    Excludes("--weights", "--trace"),
    Excludes("--weights", "--same-function"),
    Excludes("--same-function", "--iterations"),
    Excludes("--same-function", "--precision"),
    Excludes("--same-function", "--rtol"),
    Excludes("--same-function", "--atol"),
    Excludes("--same-function", "--stages"),
    Excludes("--same-function", "--ignore"),
    Excludes("--same-function", "--deterministic"),
    Excludes("--same-function", "--tracer"),
    *(
        Excludes("--dumps", flag)
        for flag in (
            "--training",
            "--iterations",
            "--precision",
            "--atol",
            "--stages",
            "--ignore",
            "--trace",
            "--same-function",
        )
    ),
    *(
        Requires(flag, "--kernel")
        for flag in (
            "--reference",
            "--inputs",
            "--backward",
            "--approximate",
            "--dtypes",
            "--without",
            "--seconds",
        )
    ),
    *(
        Excludes("--kernel", flag)
        for flag in (
            "--training",
            "--iterations",
            "--precision",
            "--rtol",
            "--atol",
            "--stages",
            "--ignore",
            "--trace",
            "--tracer",
            "--deterministic",
            "--lines",
            "--same-function",
        )
    ),
    Requires("--kernel", "--reference"),
)
"""Flags that require or exclude each other, in every command that has both. Alternatives of one setting (``--training |
--inference``, dtypes) are groups of :meth:`OneLineParser.exclusive`, which the usage shows as such."""
