"""How often ``--stress`` finds the specimens that pass a plain pair nearly always, and how often a plain pair of two
runs differs: sweeps in a row, each row a process of its own.

Rows are kept: the same command goes on where an earlier one stopped. ``python -m benchmarks.rare --sweeps 10 --plain 30
--output FOLDER`` runs it.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.table import Table
from hashbench.core.records import Row
from hashbench.core.results.rows import read_rows

SPECIMENS = Path(__file__).parent.parent / "models" / "specimens.csv"
SHARE = 0.9
"""Of the sweeps in which each must be found."""


def rare() -> dict[str, Mapping[str, str]]:
    """The specimens that are flaky, by name, with what a row must say of them."""
    with SPECIMENS.open(encoding="utf-8", newline="") as file:
        return {line["name"]: line for line in csv.DictReader(file) if line["truth_latent"]}


def swept(names: Sequence[str], *, mode: str, folder: Path, flags: Sequence[str]) -> list[Row]:
    """The rows of one sweep; of one that is there already, without another."""
    table = folder / mode / "accuracy.csv"
    if not table.exists():
        command = [sys.executable, "-m", "hashbench", "sweep", "--suite", "specimens", f"--{mode}", "--threads", "2"]
        command += [*flags, "--output", str(table.parent), "--resume", "--only", *names]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return read_rows(table)


def sweeps(names: Sequence[str], *, count: int, folder: Path, flags: Sequence[str]) -> Iterator[list[Row]]:
    """The rows of so many sweeps in both modes, as they are made."""
    for number in range(count):
        for mode in ("inference", "training"):
            rows = swept(names, mode=mode, folder=folder / f"{number:03}", flags=flags)
            yield [row for row in rows if row.accuracy != "pass_due_to_skip"]


def table_of(found: Sequence[Row], plain: Sequence[Row]) -> Table:
    """For each specimen how many stressed rows say what its truth says, those of its twin that differ, and how many
    plain rows of either differ."""
    lines: list[tuple[object, ...]] = []
    for name, line in rare().items():
        rows, twins = ([row for row in found if row.name == one] for one in (name, f"{name}_twin"))
        said: Counter[str] = Counter(f"{row.latent_kernel} {row.latent_cause}" for row in rows)
        truth = {column: line[f"truth_{column}"] for column in ("latent", "latent_kernel", "latent_cause")}
        right = [
            sum(not text or getattr(row, column) == text for row in rows if row.latent)
            for column, text in truth.items()
        ]
        pairs = [row for row in plain if row.name == name]
        differ = sum(row.accuracy != "pass" for row in pairs)
        counts = tuple(f"{number}/{len(rows)}" for number in right)
        wrong = sum(row.latent != "" or row.accuracy != "pass" for row in twins)
        reached = "yes" if rows and right[0] >= SHARE * len(rows) and not wrong else "no"
        words = ", ".join(f"{word} {number}" for word, number in said.most_common(3))
        lines.append((name, *counts, f"{wrong}/{len(twins)}", f"{differ}/{len(pairs)}", reached, words))
    headers = ("specimen", "found", "kernel", "cause", "twin found", "plain rows that differ", "reached", "said")
    note = "Found, kernel and cause: rows that say what the truth says, or leave open what it leaves open."
    return Table("Rare specimens under stress", headers, tuple(lines), (note,))


def main() -> None:
    """Make the sweeps and print their table."""
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="python -m benchmarks.rare", description=__doc__)
    parser.add_argument("--sweeps", type=int, default=10, metavar="N", help="under stress (default 10)")
    parser.add_argument("--plain", type=int, default=30, metavar="N", help="of plain pairs (default 30)")
    parser.add_argument("--budget", default="30", metavar="S", help="seconds to look for a cause (default 30)")
    parser.add_argument("--only", nargs="+", default=[], metavar="M", help="of the specimens")
    parser.add_argument("--without-twins", action="store_true", help="the specimens alone")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="where rows are kept")
    parsed = parser.parse_args()
    names = parsed.only or list(rare())
    both = names if parsed.without_twins else [*names, *(f"{name}_twin" for name in names)]
    plain_flags, stress_flags = ("--diagnose-budget", "0"), ("--stress", "--diagnose-budget", parsed.budget)
    plain, found = [], []
    for rows in sweeps(names, count=parsed.plain, folder=parsed.output / "plain", flags=plain_flags):
        plain += rows
    for rows in sweeps(both, count=parsed.sweeps, folder=parsed.output / "stress", flags=stress_flags):
        found += rows
        print(table_of(found, plain).text(), "\n", flush=True)


if __name__ == "__main__":
    main()
