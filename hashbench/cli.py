"""The command line. The only place that prints and the only place with exit codes.

Exit codes: 0 it did its job · 1 a difference (``compare``, ``diff``, ``sweep --strict``) · 2 what was asked is wrong
(one line: what, consequence, what to do) · 70 a fault of hashbench, with a trace · 130 stopped by Ctrl-C or by a
closed pipe.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Never

from tabulate import tabulate

from hashbench.records import DTYPES, HashbenchError, ModelSpec, RunOptions

EXIT_DIFFERENCE, EXIT_USAGE, EXIT_FAULT, EXIT_INTERRUPTED = 1, 2, 70, 130
LARGEST_SEED = 2**32 - 1  # NumPy takes no larger one
LONGEST_SECONDS = 1e6  # eleven days; the kernel counts a wait in 31 bits of milliseconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit code."""
    try:
        parsed = _parser().parse_args(arguments)
        command: Callable[[argparse.Namespace], int] = parsed.command
        return command(parsed)
    except HashbenchError as error:
        return _say(str(error), EXIT_USAGE)
    except KeyboardInterrupt:
        return _say("stopped", EXIT_INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python fails once more when it flushes
        return EXIT_INTERRUPTED
    except Exception:
        traceback.print_exc()
        return _say("this is a fault of hashbench: please report it with the trace above", EXIT_FAULT)


def _say(message: str, code: int) -> int:
    print(f"hashbench: {' '.join(message.split())}", file=sys.stderr)
    return code


# ------------------------------------------------------------------------------------------------ subcommands


def _sweep(parsed: argparse.Namespace) -> int:
    from hashbench import suites
    from hashbench.environment import collect_in_child
    from hashbench.executors.local import WORKER_VARIABLES
    from hashbench.progress import Progress
    from hashbench.report.render import sweep_table
    from hashbench.sweep import SweepInterrupted, run_sweep

    options = _run_options(parsed)
    specs = _selected(parsed, [spec for suite in parsed.suite for spec in suites.catalog(suite)], options.mode)
    output = parsed.output or _default_output(parsed.suite, options.mode)
    environment = collect_in_child(device=options.device, variables=WORKER_VARIABLES)
    environment["command_line"] = ["hashbench", *sys.argv[1:]]
    try:
        with Progress() as progress:
            result = run_sweep(
                specs,
                options,
                output=output,
                environment=environment,
                timeout=parsed.timeout,
                jobs=parsed.jobs,
                resume=parsed.resume,
                on_event=progress,
            )
    except SweepInterrupted as stopped:
        message = f"stopped: {stopped.done} of {stopped.total} rows are in {stopped.output}; go on with --resume"
        return _say(message, EXIT_INTERRUPTED)
    print(sweep_table(result.rows))
    print(f"\nResults: {result.output / 'accuracy.csv'}")
    worse = any(row.accuracy not in ("pass", "pass_due_to_skip") for row in result.rows)
    return EXIT_DIFFERENCE if parsed.strict and worse else 0


def _list(parsed: argparse.Namespace) -> int:
    from hashbench import suites

    names = parsed.suite or list(suites.SUITES)
    specs = [spec for name in names for spec in suites.catalog(name)]
    headers = ("suite", "name", "task", "family", "batch size", "input", "default", "notes")
    print(tabulate([_listed(spec) for spec in specs], headers=headers))
    print(f"\n{len(specs)} models")
    return 0


def _listed(spec: ModelSpec) -> tuple[object, ...]:
    skipped = [
        f"no {mode}: {reason}"
        for mode, reason in (("training", spec.skip_training), ("inference", spec.skip_inference))
        if reason
    ]
    shape = "x".join(map(str, spec.input_shape))
    notes = "; ".join([*skipped, *([spec.note] if spec.note else [])])
    return spec.suite, spec.name, spec.task, spec.family, spec.batch_size, shape, "yes" if spec.default else "", notes


def _diff(parsed: argparse.Namespace) -> int:
    from hashbench import divergence, tracefile
    from hashbench.report import tracediff

    first, second = tracefile.read(parsed.first), tracefile.read(parsed.second)
    verdict = divergence.find(first, second)
    print(tracediff.as_text(first, second, verdict, context=parsed.context))
    return EXIT_DIFFERENCE if verdict.divergence is not None or verdict.differing or verdict.benign else 0


def _compare(parsed: argparse.Namespace) -> int:
    from hashbench.report import compare, load, render

    found = compare.compare(load.load_sweep(parsed.base), load.load_sweep(parsed.new))
    formats = {
        "text": render.as_text,
        "markdown": render.as_markdown,
        "json": render.as_json,
        "csv": render.as_csv,
    }
    print(formats[parsed.format](found).rstrip("\n"))
    return EXIT_DIFFERENCE if found.got_worse else 0


def _env(parsed: argparse.Namespace) -> int:
    from hashbench.environment import collect_in_child
    from hashbench.executors.local import WORKER_VARIABLES

    print(json.dumps(collect_in_child(device=parsed.device, variables=WORKER_VARIABLES), indent=2))
    return 0


# -------------------------------------------------------------------------------------------- what was asked


def _run_options(parsed: argparse.Namespace) -> RunOptions:
    return RunOptions(
        mode="training" if parsed.training else "inference",
        device=parsed.device,
        dtype=parsed.dtype or "",
        iterations=parsed.iterations,
        runs=parsed.runs,
        batch_size=parsed.batch_size,
        threads=parsed.threads,
        seed=parsed.seed,
        cotangent=parsed.cotangent,
        deterministic=parsed.deterministic or "",
        hash_inputs=parsed.hash_inputs,
        untraced_pair=parsed.untraced_pair,
        keep_traces=parsed.keep_traces,
    )


def _selected(parsed: argparse.Namespace, specs: Sequence[ModelSpec], mode: str) -> Sequence[ModelSpec]:
    from hashbench import suites

    chosen = suites.select(
        specs,
        only=parsed.only,
        filters=parsed.filter,
        excludes=parsed.exclude,
        exclude_exact=parsed.exclude_exact,
        which=parsed.models,
        total_partitions=parsed.total_partitions,
        partition_id=parsed.partition_id,
        mode=mode,
    )
    fixed = next((spec.name for spec in chosen if spec.batch_size is None), None)
    if parsed.batch_size is not None and fixed is not None:
        raise HashbenchError(
            f"--batch-size does not apply to {fixed}",
            consequence="its own function makes its inputs, so nothing was run",
            tip="Leave it out, or choose other models.",
        )
    return chosen


def _default_output(names: Sequence[str], mode: str) -> Path:
    stem = "+".join(Path(name).stem for name in names)
    return Path("results") / f"{time.strftime('%Y-%m-%d_%H%M%S')}_{stem}_{mode}"


class _OneLineParser(argparse.ArgumentParser):
    """Says what is wrong on one line, without the usage text."""

    def error(self, message: str) -> Never:
        self.exit(EXIT_USAGE, f"{self.prog}: {message}. See `{self.prog} --help`.\n")


def _at_least(lowest: float, kind: type = int, *, most: float = math.inf) -> Callable[[str], Any]:
    def check(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not value >= lowest:
            raise argparse.ArgumentTypeError(f"{text} is too small, the least is {lowest:g}")
        if value > most:
            raise argparse.ArgumentTypeError(f"{text} is too large, the most is {most:.0f}")
        return value

    return check


def _parser() -> argparse.ArgumentParser:
    parser = _OneLineParser(
        prog="hashbench", description="Run every model of a zoo twice and name the kernel that differs."
    )
    parser.add_argument("--version", action="version", version=f"hashbench {_version()}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_OneLineParser)
    _add_sweep(commands.add_parser("sweep", help="run the models of a suite and write accuracy.csv"))

    listing = commands.add_parser("list", help="the models of a suite")
    listing.add_argument(
        "--suite", nargs="+", default=[], metavar="S", help="suites or zoo files (default: all bundled)"
    )
    listing.set_defaults(command=_list)

    diff = commands.add_parser("diff", help="the first divergence of two trace files")
    diff.add_argument("first", type=Path, metavar="A.log")
    diff.add_argument("second", type=Path, metavar="B.log")
    diff.add_argument(
        "--context", type=_at_least(0), default=3, metavar="N", help="records shown around it (default 3)"
    )
    diff.set_defaults(command=_diff)

    compare = commands.add_parser("compare", help="what changed from one sweep to another")
    compare.add_argument("base", type=Path, metavar="BASE", help="a CSV or results folder; dynamo's CSVs too")
    compare.add_argument("new", type=Path, metavar="NEW")
    compare.add_argument("--format", choices=("text", "markdown", "json", "csv"), default="text")
    compare.set_defaults(command=_compare)

    env = commands.add_parser("env", help="the fingerprint of this machine")
    env.add_argument("-d", "--device", default="cpu", metavar="D")
    env.set_defaults(command=_env)
    return parser


def _version() -> str:
    from hashbench import __version__

    return __version__


def _add_sweep(sweep: argparse.ArgumentParser) -> None:
    sweep.set_defaults(command=_sweep)
    modes = sweep.add_mutually_exclusive_group(required=True)
    modes.add_argument("--training", action="store_true", help="forward, loss, backward and optimizer step")
    modes.add_argument("--inference", action="store_true", help="forward only")
    _add_selection(sweep)
    _add_run(sweep)
    _add_machinery(sweep)


def _add_selection(sweep: argparse.ArgumentParser) -> None:
    which = sweep.add_argument_group("which models")
    which.add_argument(
        "--suite", nargs="+", default=["torchvision"], metavar="S", help="suites, or zoo files with MODELS"
    )
    which.add_argument("--models", choices=("default", "all"), default="default", help="one of every family, or all")
    which.add_argument("--only", nargs="+", default=[], action="extend", metavar="M", help="these models")
    which.add_argument("-k", "--filter", action="append", default=[], metavar="RE", help="models that match")
    which.add_argument("-x", "--exclude", action="append", default=[], metavar="RE", help="but not those that match")
    which.add_argument("--exclude-exact", action="append", default=[], metavar="M", help="but not these")
    which.add_argument("--total-partitions", type=_at_least(1), default=1, metavar="N", help="split the suite in N")
    which.add_argument("--partition-id", type=_at_least(0), default=0, metavar="I", help="and run part I, from 0")


def _add_run(sweep: argparse.ArgumentParser) -> None:
    run = sweep.add_argument_group("how each model runs")
    run.add_argument("-d", "--device", "--devices", default="cpu", metavar="D", help="cpu, cuda, xpu, …")
    dtypes = run.add_mutually_exclusive_group()
    for dtype in DTYPES:
        dtypes.add_argument(f"--{dtype}", dest="dtype", action="store_const", const=dtype)
    run.add_argument("--batch-size", type=_at_least(1), metavar="N")
    run.add_argument("--iterations", type=_at_least(1), metavar="N", help="steps of one run (default 2)")
    run.add_argument(
        "--runs", type=_at_least(2), default=2, metavar="N", help="all compared with the first (default 2)"
    )
    run.add_argument("--threads", "-t", type=_at_least(1), metavar="N", help="torch.set_num_threads")
    run.add_argument("--seed", type=_at_least(0, most=LARGEST_SEED), default=1337, metavar="N")
    run.add_argument("--deterministic", choices=("on", "warn", "off"), help="use_deterministic_algorithms (default on)")
    run.add_argument(
        "--cotangent", choices=("ones", "random"), default="ones", help="random: a random projection as loss"
    )
    run.add_argument("--hash-inputs", action="store_true", help="hash what ops read as well")
    run.add_argument("--untraced-pair", action="store_true", help="also compare two runs without tracing")
    run.add_argument("--keep-traces", action="store_true", help="keep the traces of models that agree too")


def _add_machinery(sweep: argparse.ArgumentParser) -> None:
    machinery = sweep.add_argument_group("the sweep")
    machinery.add_argument("--output", type=Path, metavar="DIR", help="results folder (default: a new one in results/)")
    machinery.add_argument("--resume", action="store_true", help="complete the sweep in --output")
    machinery.add_argument("--jobs", type=_at_least(1), default=1, metavar="N", help="models at once")
    machinery.add_argument(
        "--timeout",
        type=_at_least(0.1, float, most=LONGEST_SECONDS),
        default=2000.0,
        metavar="S",
        help="seconds for one model",
    )
    machinery.add_argument("--strict", action="store_true", help="exit 1 where any model is no pass")
