"""Counts the parameters of a bundled suite's models, for the column ``parameters`` of its CSV.

    python -m benchmarks.parameters timm            # name, what the CSV says, what was counted; 1 where they differ
    python -m benchmarks.parameters timm --write    # and write what was counted into models/timm.csv

A model is built on the meta device, which takes no memory, or on the CPU where its constructor needs values.
"""

from __future__ import annotations

import argparse
import csv
import warnings
from pathlib import Path

import torch

from hashbench.core.records import ModelSpec
from hashbench.core.suites import csv_file, registry


def counted(spec: ModelSpec) -> int:
    """Elements of all parameters of a model. What quantized modules have packed are none."""
    try:
        with torch.device("meta"):
            module = registry.load(spec, mode="inference").module
    except (RuntimeError, NotImplementedError):
        module = registry.load(spec, mode="inference").module
    return sum(parameter.numel() for parameter in module.parameters())


def write(path: Path, counts: dict[str, int]) -> None:
    """Replace the column ``parameters`` of the CSV at ``path``; where it is not there, it goes before ``note``."""
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        columns, rows = list(reader.fieldnames or ()), list(reader)
    if "parameters" not in columns:
        columns.insert(columns.index("note") if "note" in columns else len(columns), "parameters")
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows({**row, "parameters": counts.get(row["name"]) or ""} for row in rows)


def main() -> int:
    """Count, print, write; returns the exit code."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suite", choices=registry.SUITES)
    parser.add_argument("--write", action="store_true")
    parsed = parser.parse_args()
    warnings.simplefilter("ignore")
    specs = registry.catalog(parsed.suite)
    counts = {spec.name: counted(spec) for spec in specs}
    for spec in specs:
        print(f"{spec.name},{spec.parameters or ''},{counts[spec.name] or ''}")
    if parsed.write:
        write(csv_file.data_folder() / f"{parsed.suite}.csv", counts)
        return 0
    return int(any((spec.parameters or 0) != counts[spec.name] for spec in specs))


if __name__ == "__main__":
    raise SystemExit(main())
