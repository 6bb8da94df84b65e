"""The subcommand ``watch``: compare recordings of training loops."""

from __future__ import annotations

import argparse
from pathlib import Path

from hashbench.cli import flags
from hashbench.cli.parser import EXIT_DIFFERENCE, Commands, OneLineParser


def add(commands: Commands) -> None:
    """Add the subcommand."""
    text = "Find the first training step that differs between two runs, and what differs in it."
    watch = commands.add_parser("watch", help=text)
    kinds = Commands(watch, "diff|resume")
    _add_diff(kinds.add_parser("diff", help="Compare the recordings of two runs, and their traces of steps."))


def _add_diff(diff: OneLineParser) -> None:
    diff.add_argument("first", type=Path, metavar="A", help="Read the recording of one run from the folder A.")
    diff.add_argument("second", type=Path, metavar="B", help="Read the recording of the second run from B.")
    text = "Compare further runs C with the first as well, for the rate."
    diff.add_argument("further", type=Path, nargs="*", metavar="C", help=text)
    diff.add_argument("--html", type=Path, metavar="F", help="Write a page with a plot of all steps into F.")
    flags.output_format(diff, "text", "json")
    diff.set_defaults(command=_diff)


def _diff(parsed: argparse.Namespace) -> int:
    from hashbench.training import text
    from hashbench.training.traced import compare_folders

    verdict = compare_folders(parsed.first, parsed.second, further=parsed.further)
    flags.show(getattr(text, f"as_{parsed.format}")(verdict))
    return 0 if verdict.equal else EXIT_DIFFERENCE
