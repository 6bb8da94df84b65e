"""``hashbench pipeline check`` and ``compare``: does a training pipeline repeat, and where does it part?"""

from __future__ import annotations

import argparse
from pathlib import Path

from hashbench.cli.flags import EXIT_DIFFERENCE, LONGEST_SECONDS, Commands, OneLineParser, at_least


def add(commands: Commands) -> None:
    """Add the subcommand of this file."""
    pipeline = commands.add_parser("pipeline", help="data loading, transforms, initial weights, first predictions")
    kinds = pipeline.add_subparsers(metavar="check|compare", required=True, parser_class=OneLineParser)
    _add_check(kinds.add_parser("check", help="run a pipeline twice, in fresh processes, and write what was seen"))
    compare = kinds.add_parser("compare", help="the first stage at which two checks differ, and why")
    compare.add_argument("first", type=Path, metavar="CHECK1")
    compare.add_argument("second", type=Path, metavar="CHECK2")
    _add_format(compare)
    compare.set_defaults(command=_compare)


def _add_check(check: argparse.ArgumentParser) -> None:
    check.add_argument(
        "--config",
        type=Path,
        required=True,
        metavar="FILE",
        help="Python with make_loader(seed), or YAML that names it",
    )
    check.add_argument("--output-dir", type=Path, required=True, metavar="DIR", help="a new folder")
    check.add_argument(
        "--timeout",
        type=at_least(1, float, most=LONGEST_SECONDS),
        default=600.0,
        metavar="S",
        help="seconds for each run (default 600)",
    )
    check.add_argument("--once", action="store_true", help="do not run it again")
    _add_format(check)
    check.set_defaults(command=_check)


def _add_format(command: argparse.ArgumentParser) -> None:
    command.add_argument("--format", choices=("text", "json"), default="text")


def _check(parsed: argparse.Namespace) -> int:
    from hashbench.tools.pipeline import checking, comparing

    made = checking.check(parsed.config, parsed.output_dir, timeout=parsed.timeout, repeat=not parsed.once)
    if made.verdict is None:
        print(f"Check: {parsed.output_dir}")
        return 0
    if parsed.format == "json":
        print(comparing.as_json(made.verdict))
    else:
        print(comparing.as_text(made.verdict, first="the first run", second="the second"))
        print(f"\nCheck: {parsed.output_dir}")
    return 0 if made.verdict.repeats else EXIT_DIFFERENCE


def _compare(parsed: argparse.Namespace) -> int:
    from hashbench.tools.pipeline import checkfolder, comparing

    comparison = comparing.compare(checkfolder.read(parsed.first), checkfolder.read(parsed.second))
    if parsed.format == "json":
        print(comparing.as_json(comparison))
    else:
        print(comparing.as_text(comparison, first=str(parsed.first), second=str(parsed.second)))
    return 0 if comparison.repeats else EXIT_DIFFERENCE
