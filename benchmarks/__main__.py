"""``python -m benchmarks``: run the benchmarks and print their tables. See ``benchmarks/README.md``."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import bitwise, digests, fuzz, overhead, scale, sweep_overhead, traces
from benchmarks.table import Table, machine


def main() -> None:
    """Parse the command line, run what it asks for, print as the results come."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, metavar="S", help="for each workload (default 20)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of torch (default 1: steadier)")
    text = f"of each format, for fuzz (default {fuzz.MUTATIONS})"
    parser.add_argument("--mutations", type=int, default=fuzz.MUTATIONS, metavar="N", help=text)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine and tables there as well")
    benchmarks: dict[str, Callable[[], list[Table]]] = {
        "overhead": lambda: overhead.measure(seconds=parsed.seconds),
        "digests": digests.measure,
        "bitwise": lambda: bitwise.measure(seconds=parsed.seconds),
        "traces": traces.measure,
        "sweep": sweep_overhead.measure,
        "scale": scale.measure,
        "fuzz": lambda: fuzz.measure(mutations=parsed.mutations),
    }
    parser.add_argument("only", nargs="*", choices=[[], *benchmarks], help="which (default: all but fuzz)")
    parsed = parser.parse_args()
    torch.set_num_threads(parsed.threads)
    print("\n".join(f"{name}: {value}" for name, value in machine().items()))
    tables: list[Table] = []
    for name in parsed.only or [name for name in benchmarks if name != "fuzz"]:
        for table in benchmarks[name]():
            print("\n" + table.text(), flush=True)
            tables.append(table)
    if parsed.json is not None:
        document = {"machine": machine(), "tables": [dataclasses.asdict(table) for table in tables]}
        parsed.json.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
