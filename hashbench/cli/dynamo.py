"""``hashbench dynamo``: PyTorch's own harness with our trace around its two eager runs."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from hashbench.cli.flags import LONGEST_SECONDS, Commands, at_least
from hashbench.errors import HashbenchError

if TYPE_CHECKING:
    from hashbench.integrations.dynamo.session import Session
    from hashbench.integrations.dynamo.table import Both

_SIGNAL_BASE = 128


def add(commands: Commands) -> None:
    """Add the subcommand of this file."""
    dynamo = commands.add_parser(
        "dynamo",
        help="run PyTorch's benchmarks/dynamo with a trace around its two eager runs",
        usage="hashbench dynamo [-h] [--trace WHEN] [--results DIR] [--diagnose-budget S] SUITE.py [FLAG ...]",
        description="Everything after SUITE.py is the harness's own and passed through; its exit code is returned.",
    )
    dynamo.add_argument(
        "--trace",
        choices=("always", "on-demand"),
        default="always",
        help="always: its own two runs (default); on-demand: only further runs of models that differ",
    )
    dynamo.add_argument(
        "--results", type=Path, metavar="DIR", help="our folder (default: beside --output, as <its name>.hashbench)"
    )
    dynamo.add_argument(
        "--diagnose-budget",
        type=at_least(0, float, most=LONGEST_SECONDS),
        default=120.0,
        metavar="S",
        help="seconds for the experiments on one model (default 120; 0: none)",
    )
    dynamo.add_argument("script", type=Path, metavar="SUITE.py", help="path/to/benchmarks/dynamo/huggingface.py")
    dynamo.add_argument("arguments", nargs=argparse.REMAINDER, metavar="FLAG", help="its own flags")
    dynamo.set_defaults(command=_dynamo)


def _dynamo(parsed: argparse.Namespace) -> int:
    from hashbench.integrations.dynamo import table
    from hashbench.integrations.dynamo.check import check_harness
    from hashbench.integrations.dynamo.launch import read_flags, run_harness
    from hashbench.integrations.dynamo.session import Session

    harness = check_harness(parsed.script)
    flags = read_flags(parsed.arguments)
    folder = parsed.results or _default_folder(flags.csv, parsed.script.stem, flags.mode)
    session = Session(
        folder=str(folder.absolute()),
        script=str(harness.script),
        arguments=tuple(parsed.arguments),
        trace=parsed.trace,
        budget=parsed.diagnose_budget,
        csv=flags.csv,
        mode=flags.mode,
    )
    with session.results.claimed(resume=True):
        try:
            session.prepare(anew=flags.begins_anew)
        except OSError as error:
            raise _cannot_write(session, error) from error
        try:
            code = run_harness(session, meanwhile=lambda: _write_tables(session))
        except KeyboardInterrupt:
            _write_tables(session)
            raise
        ended = _ended(session, code) if flags.accuracy else ""
        rows = table.collect(session, ended=ended, environment=_write_environment(session))
        _say(session, rows, table.write(session, rows))
    return code if code >= 0 else _SIGNAL_BASE - code


def _write_tables(session: Session) -> None:
    """While the harness runs: what there is so far."""
    from hashbench.integrations.dynamo import table

    with contextlib.suppress(OSError):  # the end says so, if it still is so
        rows = table.collect(session)
        if rows:
            table.write(session, rows)


def _default_folder(csv: str, suite: str, mode: str) -> Path:
    if csv:
        return Path(csv).with_suffix(".hashbench")
    return Path("results") / f"{time.strftime('%Y-%m-%d_%H%M%S')}_dynamo_{suite}_{mode}"


def _ended(session: Session, code: int) -> str:
    """How the process of a model ended that left nothing: in a sweep of its own, only the harness has seen it."""
    from hashbench.integrations.dynamo.session import chosen_model
    from hashbench.processes import describe_end

    if chosen_model(session.arguments):
        return describe_end(code)
    return "its process ended without a row; how, the harness has printed"


def _write_environment(session: Session) -> str:
    """Describe the machine in our folder; returns the key of the description for the rows."""
    from hashbench.integrations.dynamo.session import read_notes
    from hashbench.run.environment import collect_in_child

    device = next((note.device for note in read_notes(session) if note.device), "cpu")
    try:
        environment = collect_in_child(device=device, variables={})
    except HashbenchError as error:
        print(f"hashbench: {error}", file=sys.stderr)
        return ""
    environment["command_line"] = ["hashbench", *sys.argv[1:]]
    session.results.write_environment(environment)
    return str(environment.get("key", ""))


def _say(session: Session, rows: list[Both], path: Path) -> None:
    from hashbench.report.text import sweep_table

    if not rows:
        print("hashbench: the harness made no accuracy check, so there is nothing to say.", file=sys.stderr)
        return
    print(f"\n{sweep_table([both.row for both in rows])}")
    others = [both for both in rows if both.harness_accuracy not in (both.row.accuracy, "")]
    for both in others:
        print(f"{both.row.name}: the harness says {both.harness_accuracy}, hashbench {both.row.accuracy}")
    print(f"\nResults: {path}\nThe harness's own: {session.csv or 'where it puts its CSV'}")


def _cannot_write(session: Session, error: OSError) -> HashbenchError:
    return HashbenchError(
        f"cannot write results into {session.folder}",
        consequence=f"{error.strerror or error}; nothing was run",
        tip="Choose another folder with --results.",
    )
