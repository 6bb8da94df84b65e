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

FEWEST_THREADS = 8
"""Threads that share few cores interrupt each other, and races that two threads hardly ever show become plain."""

DTYPES = ("float32", "bfloat16", "complex64", "int64")
"""One of each class: the common one, a narrow one, a complex and a whole one."""

KNOWN_DTYPES = (*DTYPES, "float64", "float16", "complex128", "complex32", "bool", "int32", "int16", "int8", "uint8")


def add(commands: Commands) -> None:
    """Add the subcommand of this file."""
    audit = commands.add_parser("audit", help="every op in torch's own op database: documented against measured")
    audit.set_defaults(command=_audit)
    which = audit.add_argument_group("which ops")
    which.add_argument("--ops", nargs="+", default=[], action="extend", metavar="OP", help="these ops")
    which.add_argument("-k", "--filter", action="append", default=[], metavar="RE", help="ops that match")
    which.add_argument(
        "--dtypes", nargs="+", default=DTYPES, type=_dtype, metavar="T", help="default: one of each class"
    )
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


def _dtype(text: str) -> str:
    if text not in KNOWN_DTYPES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a dtype; it is one of: {', '.join(KNOWN_DTYPES)}")
    return text


def _audit(parsed: argparse.Namespace) -> int:
    from hashbench.results.audit_table import AUDIT_FILE, AuditOptions
    from hashbench.sweep.executors.local import LocalExecutor
    from hashbench.sweep.request import local_devices
    from hashbench.tools.audit import driver, report

    output = parsed.output or Path("results") / f"{time.strftime('%Y-%m-%d_%H%M%S')}_audit_{parsed.device}"
    kind = parsed.device.partition(":")[0]
    sweep_rows = _rows_of_sweeps(parsed.results, kind)
    devices = local_devices(parsed.device)
    for note in devices.notes:
        say(note, 0)
    options = AuditOptions(
        device=devices.device,
        dtypes=tuple(dict.fromkeys(parsed.dtypes)),
        samples=parsed.samples,
        runs=parsed.runs,
        seed=parsed.seed,
        budget=parsed.budget,
        replays=parsed.replays,
        threads=parsed.threads or (max(FEWEST_THREADS, os.cpu_count() or 1) if kind == "cpu" else None),
    )
    try:
        rows = driver.audit(
            driver.AuditRequest(options, tuple(parsed.ops), tuple(parsed.filter), parsed.timeout, sweep_rows),
            output=output,
            environment={**devices.environment, "command_line": ["hashbench", *sys.argv[1:]]},
            resume=parsed.resume,
            executor=LocalExecutor(jobs=parsed.jobs, devices=devices.assignments),
            on_progress=_show,
        )
    except KeyboardInterrupt:
        return say(f"stopped: what is done is in {output}; go on with --resume", EXIT_INTERRUPTED)
    print(report.summary(rows))
    print(f"\nResults: {output / AUDIT_FILE}")
    if parsed.write is not None:
        _copy(output, parsed.write)
    return 0


def _show(done: int, total: int, note: str) -> None:
    say(f"{done} of {total} ops{'; ' if note else ''}{note}", 0)


def _rows_of_sweeps(folders: Sequence[Path], device: str) -> tuple[AuditRow, ...]:
    if not folders:
        return ()
    from hashbench.tools.audit.verdict import rows_from  # imports torch

    return rows_from(folders, device=device)


def _copy(output: Path, path: Path) -> None:
    """The rows, and beside them the environment in which they were measured."""
    from hashbench.errors import HashbenchError
    from hashbench.io import replace_bytes
    from hashbench.results.audit_table import AUDIT_FILE

    beside = path.with_name(f"{path.stem}.environment.json")
    try:
        replace_bytes(path, (output / AUDIT_FILE).read_bytes())
        replace_bytes(beside, (output / "environment.json").read_bytes())
    except OSError as error:
        raise HashbenchError(
            f"cannot write {path}", consequence=f"{error.strerror or error}; the rows are in {output}", tip=""
        ) from error
    print(f"Written: {path} and {beside.name}")
