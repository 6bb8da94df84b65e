"""The subcommand ``completion``: print a script that completes commands and flags in a shell."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from hashbench.cli.flags import PATHS
from hashbench.cli.parser import Commands, OneLineParser
from hashbench.core.errors import HashbenchError

SHELLS = ("bash", "zsh", "fish")

_SUITES = {
    "bash": "_hashbench_suites",
    "zsh": "_hashbench_suites",
    "fish": "(printf '%s\\n' NAMES; __fish_complete_path (commandline -ct))",
}
"""Shell -> what completes the name of a suite, or the path of a zoo file."""

_DEFINITIONS = {
    "bash": '_hashbench_suites() {\n  compgen -W "NAMES" -- "$1"\n  _shtab_compgen_files "$1"\n}',
    "zsh": "_hashbench_suites() {\n  _alternative 'suites:suite:(NAMES)' 'files:file:_files'\n}",
    "fish": "",
}
"""Shell -> the function that it names; NAMES stands for those of the suites."""

_INSTALL = {
    "bash": "hashbench completion bash > ~/.local/share/bash-completion/completions/hashbench",
    "zsh": "hashbench completion zsh > DIR/_hashbench, with DIR in $fpath",
    "fish": "hashbench completion fish > ~/.config/fish/completions/hashbench.fish",
}


def add(commands: Commands) -> None:
    """Add the subcommand."""
    completion = commands.add_parser("completion", help="Print a script that completes commands and flags in a shell.")
    text = f"Print the script for SHELL: {', '.join(SHELLS)}. To install it: `{_INSTALL['bash']}`."
    completion.add_argument("shell", choices=SHELLS, metavar="SHELL", help=text)
    completion.set_defaults(command=lambda parsed: _completion(commands.parser, parsed))


def _completion(parser: OneLineParser, parsed: argparse.Namespace) -> int:
    print(script(parser, parsed.shell))
    return 0


def script(parser: OneLineParser, shell: str) -> str:
    """Return the completion script of ``parser`` for ``shell``, one of :data:`SHELLS`.

    Raises:
        HashbenchError: shtab, which writes it, is not installed.
    """
    try:
        import shtab
    except ImportError as error:
        raise HashbenchError(
            "shtab, which writes the script, is not installed",
            consequence="nothing was printed",
            tip="Install it: pip install shtab.",
        ) from error
    from hashbench.core.suites import registry

    names = " ".join(dict.fromkeys((*registry.SUITES, *registry.names(), registry.ALL)))
    suites = {each: text.replace("NAMES", names) for each, text in _SUITES.items()}
    for each in every(parser):
        for action in each.flags:
            if action.type in PATHS:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
            elif action.dest == "suite":
                action.complete = suites  # type: ignore[attr-defined]
    preamble = _DEFINITIONS[shell].replace("NAMES", names)
    return str(shtab.complete(parser, shell, preamble=preamble)).rstrip("\n")


def every(parser: OneLineParser) -> Iterator[OneLineParser]:
    """Yield ``parser`` and the parsers of its subcommands, recursively."""
    yield parser
    for command in parser.commands.values():
        yield from every(command)
