"""``hashbench merge``: the shards of one sweep into one folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from hashbench.cli.flags import Commands


def add(commands: Commands) -> None:
    """Add the subcommand of this file."""
    merge = commands.add_parser("merge", help="shards of one sweep into one folder")
    merge.add_argument("output", type=Path, metavar="OUTPUT", help="a new folder for the whole sweep")
    merge.add_argument(
        "folders",
        nargs="+",
        type=Path,
        metavar="DIR",
        help="what `hashbench sweep --partition-id` left, each part once",
    )
    merge.add_argument(
        "--allow-missing", action="store_true", help="merge what is there; the models of other parts count as missing"
    )
    merge.set_defaults(command=_merge)


def _merge(parsed: argparse.Namespace) -> int:
    from hashbench.results.merge import merge
    from hashbench.text import a_few

    merged = merge(parsed.output, parsed.folders, allow_missing=parsed.allow_missing)
    if merged.missing:
        names = a_few([name for _, name in merged.missing], 5)
        print(f"{len(merged.missing)} models have no row: {names}. ")
        print(f"To run them: the sweep's command without partitions, with --resume --output {merged.output}")
    print(f"{merged.rows} rows of {merged.shards} shards. Results: {merged.output / 'accuracy.csv'}")
    return 0
