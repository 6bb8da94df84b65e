"""``hashbench audit``: every op in torch's own op database, documented against measured."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hashbench.cli.flags import EXIT_INTERRUPTED, LARGEST_SEED, LONGEST_SECONDS, Commands, at_least, say

if TYPE_CHECKING:
    from hashbench.results.audit_table import AuditRow
    from hashbench.tools.audit.driver import Op, Progress

FEWEST_THREADS = 8
"""Threads that share few cores interrupt each other, and races that two threads hardly ever show become plain."""


def add(commands: Commands) -> None:
    """Add the subcommand of this file."""
    audit = commands.add_parser("audit", help="every op in torch's own op database: documented against measured")
    audit.set_defaults(command=_audit)
    which = audit.add_argument_group("which ops")
    which.add_argument("--ops", nargs="+", default=[], action="extend", metavar="OP", help="these ops")
    which.add_argument("-k", "--filter", action="append", default=[], metavar="RE", help="ops that match")
    which.add_argument("--dtypes", nargs="+", default=[], metavar="T", help="default: one of each class")
    which.add_argument(
        "--samples", type=at_least(1), default=3, metavar="N", help="inputs for each op and dtype (default 3)"
    )
    which.add_argument(
        "--results", nargs="+", type=Path, default=[], metavar="DIR", help="sweeps whose kernels add rows"
    )
    run = audit.add_argument_group("how each op runs")
    run.add_argument("-d", "--device", default="cpu", metavar="D", help="cpu, cuda, xpu, …")
    run.add_argument("--runs", type=at_least(2), default=20, metavar="N", help="under each setting (default 20)")
    run.add_argument(
        "--threads", "-t", type=at_least(1), metavar="N", help="default on the CPU: one a core, at least 8"
    )
    run.add_argument("--seed", type=at_least(0, most=LARGEST_SEED), default=1337, metavar="N")
    run.add_argument("--replays", type=at_least(2), default=20, metavar="N", help="of each experiment (default 20)")
    run.add_argument(
        "--budget",
        type=at_least(0, float, most=LONGEST_SECONDS),
        default=20.0,
        metavar="S",
        help="seconds for the causes of one op (default 20; 0: none is looked for)",
    )
    machinery = audit.add_argument_group("the audit")
    machinery.add_argument("--output", type=Path, metavar="DIR", help="results folder (default: a new one in results/)")
    machinery.add_argument("--resume", action="store_true", help="complete the audit in --output")
    machinery.add_argument("--jobs", type=at_least(1), default=1, metavar="N", help="ops at once (default 1)")
    machinery.add_argument(
        "--timeout",
        type=at_least(1, float, most=LONGEST_SECONDS),
        default=120.0,
        metavar="S",
        help="seconds for one op",
    )
    machinery.add_argument(
        "--write", type=Path, metavar="CSV", help="also write the rows there, and the environment beside it"
    )


def _audit(parsed: argparse.Namespace) -> int:
    from hashbench.sweep.executors.local import LocalExecutor
    from hashbench.sweep.local_devices import local_devices
    from hashbench.tools.audit import choice, driver, from_sweeps, tables

    options = _options(parsed)
    output = parsed.output or Path("results") / f"{time.strftime('%Y-%m-%d_%H%M%S')}_audit_{parsed.device}"

    def choose(known: Sequence[Op]) -> Sequence[Op]:
        return choice.chosen_ops(known, only=parsed.ops, filters=parsed.filter)

    sweep_rows = from_sweeps.rows_from(parsed.results, device=parsed.device.partition(":")[0])
    devices = local_devices(parsed.device)
    for note in devices.notes:
        say(note, 0)
    environment = {**devices.environment, "command_line": ["hashbench", *sys.argv[1:]]}
    asked = driver.Asked({**options, "device": devices.device}, choose, parsed.timeout, sweep_rows)
    try:
        rows = driver.audit(
            asked,
            output=output,
            environment=environment,
            resume=parsed.resume,
            executor=LocalExecutor(jobs=parsed.jobs, devices=devices.assignments),
            on_progress=_show,
        )
    except KeyboardInterrupt:
        return say(f"stopped: what is done is in {output}; go on with --resume", EXIT_INTERRUPTED)
    print(tables.summary(rows))
    print(f"\nResults: {output / 'audit.csv'}")
    if parsed.write is not None:
        _write(parsed.write, rows, output)
    return 0


def _options(parsed: argparse.Namespace) -> dict[str, object]:
    """What ``rows.AuditOptions`` holds, as plain values: this process imports no torch."""
    from hashbench.errors import HashbenchError
    from hashbench.tools.audit.choice import DTYPES, KNOWN_DTYPES

    unknown = [name for name in parsed.dtypes if name not in KNOWN_DTYPES]
    if unknown:
        raise HashbenchError(
            f"there is no dtype called {unknown[0]!r}",
            consequence="nothing was run",
            tip=f"It is one of: {', '.join(KNOWN_DTYPES)}.",
        )
    threads = parsed.threads
    if threads is None and parsed.device.partition(":")[0] == "cpu":
        threads = max(FEWEST_THREADS, os.cpu_count() or 1)
    return {
        "device": parsed.device,
        "dtypes": list(dict.fromkeys(parsed.dtypes)) or list(DTYPES),
        "samples": parsed.samples,
        "runs": parsed.runs,
        "seed": parsed.seed,
        "budget": parsed.budget,
        "replays": parsed.replays,
        "threads": threads,
    }


def _show(progress: Progress) -> None:
    told = f"; {progress.told}" if progress.told else ""
    say(f"{progress.done} of {progress.total} ops{told}", 0)


def _write(path: Path, rows: Sequence[AuditRow], output: Path) -> None:
    """The rows, and beside them the environment in which they were measured."""
    from hashbench.errors import HashbenchError
    from hashbench.io import replace_bytes, replace_file
    from hashbench.results.audit_table import AUDIT_ROWS

    try:
        replace_file(path, AUDIT_ROWS.text(rows))
        beside = path.with_name(f"{path.stem}.environment.json")
        replace_bytes(beside, (output / "environment.json").read_bytes())
    except OSError as error:
        raise HashbenchError(
            f"cannot write {path}", consequence=f"{error.strerror or error}; the rows are in {output}", tip=""
        ) from error
    print(f"Written: {path} and {beside.name}")
