"""``python -m benchmarks``: run the benchmarks and print their tables. See ``benchmarks/README.md``."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import (
    bitwise,
    calls,
    compiled_overhead,
    digests,
    fingerprint,
    fuzz,
    overhead,
    ranks,
    ranks_reading,
    scale,
    sweep_overhead,
    traces,
)
from benchmarks.table import Table, machine


def main() -> None:
    """Parse the command line, run what it asks for, print as the results come."""
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, metavar="S", help="for each workload (default 20)")
    text = "of torch (default 1: steadier); with several of this flag all is measured with each"
    parser.add_argument("--threads", type=int, action="append", metavar="N", help=text)
    text = f"of each format, for fuzz (default {fuzz.MUTATIONS})"
    parser.add_argument("--mutations", type=int, default=fuzz.MUTATIONS, metavar="N", help=text)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine and tables there as well")
    benchmarks: dict[str, Callable[[], list[Table]]] = {
        "overhead": lambda: overhead.measure(seconds=parsed.seconds),
        "compiled": lambda: compiled_overhead.measure(seconds=parsed.seconds),
        "calls": lambda: calls.measure(seconds=parsed.seconds),
        "digests": digests.measure,
        "bitwise": lambda: bitwise.measure(seconds=parsed.seconds),
        "traces": traces.measure,
        "fingerprint": fingerprint.measure,
        "sweep": sweep_overhead.measure,
        "ranks": ranks.measure,
        "scale": scale.measure,
        "ranks_reading": ranks_reading.measure,
        "fuzz": lambda: fuzz.measure(mutations=parsed.mutations),
    }
    parser.add_argument("only", nargs="*", choices=[[], *benchmarks], help="which (default: all but fuzz)")
    parsed = parser.parse_args()
    tables: list[Table] = []
    numbers = parsed.threads or [1]
    for threads in numbers:
        torch.set_num_threads(threads)
        print("\n".join(f"{name}: {value}" for name, value in machine().items()))
        for name in parsed.only or [name for name in benchmarks if name != "fuzz"]:
            for table in benchmarks[name]():
                more = dataclasses.replace(table, title=f"{table.title}, {threads} threads")
                tables.append(table if threads == numbers[0] else more)
                print("\n" + tables[-1].text(), flush=True)
    if parsed.json is not None:
        described = {**machine(), "threads": ", ".join(map(str, numbers))}
        document = {"machine": described, "tables": [dataclasses.asdict(table) for table in tables]}
        parsed.json.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
