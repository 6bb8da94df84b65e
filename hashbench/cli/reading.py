"""The subcommands that read what a sweep left, and ``env``: ``diff``, ``compare``, ``replay``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from hashbench.cli.flags import EXIT_DIFFERENCE, LONGEST_SECONDS, Commands, at_least
from hashbench.errors import HashbenchError


def add(commands: Commands) -> None:
    """Add the subcommands of this file."""
    diff = commands.add_parser("diff", help="the first divergence of two trace files")
    diff.add_argument("first", type=Path, metavar="A.log")
    diff.add_argument("second", type=Path, metavar="B.log")
    diff.add_argument("--context", type=at_least(0), default=3, metavar="N", help="records shown around it (default 3)")
    diff.set_defaults(command=_diff)

    compare = commands.add_parser("compare", help="what changed from one sweep, or audit, to another")
    compare.add_argument("base", type=Path, metavar="BASE", help="a CSV or results folder; dynamo's CSVs too")
    compare.add_argument("new", type=Path, metavar="NEW")
    compare.add_argument("--format", choices=("text", "markdown", "json", "csv"), default="text")
    compare.set_defaults(command=_compare)

    _add_replay(commands.add_parser("replay", help="repeat the experiments on the captured call of a repro"))

    env = commands.add_parser("env", help="the fingerprint of this machine")
    env.add_argument("-d", "--device", default="cpu", metavar="D")
    env.set_defaults(command=_env)


def _diff(parsed: argparse.Namespace) -> int:
    from hashbench.divergence import find as find_divergence
    from hashbench.report import trace_diff
    from hashbench.trace import file

    first, second = file.read(parsed.first), file.read(parsed.second)
    verdict = find_divergence(first, second)
    print(trace_diff.as_text(first, second, verdict, context=parsed.context))
    return EXIT_DIFFERENCE if verdict.divergence is not None or verdict.differing or verdict.benign else 0


def _compare(parsed: argparse.Namespace) -> int:
    from hashbench.report import compare, text
    from hashbench.results import audit_table, load

    no_audits = [path for path in (parsed.base, parsed.new) if not audit_table.is_audit(path)]
    if len(no_audits) < 2:
        return _compare_audits(parsed, no_audits)
    comparison = compare.compare(load.load_sweep(parsed.base), load.load_sweep(parsed.new))
    formats = {
        "text": text.as_text,
        "markdown": text.as_markdown,
        "json": text.as_json,
        "csv": text.as_csv,
    }
    print(formats[parsed.format](comparison).rstrip("\n"))
    return EXIT_DIFFERENCE if comparison.got_worse else 0


def _compare_audits(parsed: argparse.Namespace, no_audits: Sequence[Path]) -> int:
    from hashbench.results import audit_table
    from hashbench.tools.audit import report

    if no_audits:
        raise HashbenchError(
            f"{no_audits[0]} is not an audit and the other is",
            consequence="they cannot be compared",
            tip="Name two audits, or two sweeps.",
        )
    comparison = report.compare(audit_table.read(parsed.base), audit_table.read(parsed.new))
    formats = {
        "text": report.as_text,
        "markdown": report.as_markdown,
        "json": report.as_json,
        "csv": report.as_csv,
    }
    print(formats[parsed.format](comparison).rstrip("\n"))
    return EXIT_DIFFERENCE if comparison.got_worse else 0


def _replay(parsed: argparse.Namespace) -> int:
    from hashbench.replay import ops
    from hashbench.repro import rerun

    for definition in parsed.imports:
        ops.load(definition)
    made = rerun.rerun(parsed.folder, replays=parsed.replays, budget=parsed.budget)
    print({"text": rerun.as_text, "json": rerun.as_json}[parsed.format](made))
    return EXIT_DIFFERENCE if made.reproduced else 0


def _add_replay(replay: argparse.ArgumentParser) -> None:
    replay.add_argument("folder", type=Path, metavar="DIR", help="a folder with call.json and tensors.pt")
    replay.add_argument("--replays", type=at_least(2), default=20, metavar="N", help="calls of each (default 20)")
    replay.add_argument(
        "--budget",
        type=at_least(0.1, float, most=LONGEST_SECONDS),
        default=120.0,
        metavar="S",
        help="seconds for all of them (default 120)",
    )
    replay.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="FILE",
        help="a Python file, library or module that defines the op, where torch does not",
    )
    replay.add_argument("--format", choices=("text", "json"), default="text")
    replay.set_defaults(command=_replay)


def _env(parsed: argparse.Namespace) -> int:
    from hashbench.run.environment import collect_in_child
    from hashbench.sweep.executors.local import WORKER_VARIABLES

    print(json.dumps(collect_in_child(device=parsed.device, variables=WORKER_VARIABLES), indent=2))
    return 0
