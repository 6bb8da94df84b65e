"""``hashbench sweep``: which models, how they run, where the results go."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hashbench.catalog import kind_of
from hashbench.cli import cluster
from hashbench.cli.flags import (
    EXIT_DIFFERENCE,
    EXIT_INTERRUPTED,
    LARGEST_SEED,
    LONGEST_SECONDS,
    Commands,
    at_least,
    say,
)
from hashbench.cli.listing import add_suites, suites_to_sweep
from hashbench.cli.placing import placed
from hashbench.errors import HashbenchError
from hashbench.records import DTYPES, ModelSpec, RunOptions

if TYPE_CHECKING:
    from hashbench.results.manifest import Partition
    from hashbench.sweep.estimates import EarlierSweep


def add(commands: Commands) -> None:
    """Add the subcommands of this file."""
    _add_sweep(commands.add_parser("sweep", help="run the models of a suite and write accuracy.csv"))


def _sweep(parsed: argparse.Namespace) -> int:
    from hashbench.report.text import sweep_table
    from hashbench.run.environment import digests_note
    from hashbench.suites import registry
    from hashbench.sweep.progress import Progress
    from hashbench.sweep.run import SweepInterrupted, run_sweep

    options = _run_options(parsed)
    catalog = [spec for suite in suites_to_sweep(parsed) for spec in registry.catalog(suite)]
    specs = _selected(parsed, catalog, options.mode)
    output = parsed.output or _default_output([*parsed.suite, *(["tiny"] if parsed.tiny else [])], options.mode)
    try:
        with cluster.chosen(parsed, options, specs) as executor, Progress() as progress:
            environment, options, executor = _placed(options, executor, jobs=parsed.jobs or 1)
            if note := digests_note(environment):
                print(note, file=sys.stderr)
            environment["command_line"] = ["hashbench", *sys.argv[1:]]
            result = run_sweep(
                specs,
                options,
                output=output,
                environment=environment,
                timeout=parsed.timeout,
                jobs=parsed.jobs or 1,
                resume=parsed.resume,
                on_event=progress,
                partition=_partition(parsed, catalog, options.mode),
                earlier=_earlier(parsed, specs, output, options),
                memory_mib=parsed.memory_limit,
                retries=parsed.retries,
                executor=executor,
            )
    except SweepInterrupted as stopped:
        message = f"stopped: {stopped.done} of {stopped.total} rows are in {stopped.output}; go on with --resume"
        return say(message, EXIT_INTERRUPTED)
    print(sweep_table(result.rows))
    print(f"\nResults: {result.output / 'accuracy.csv'}")
    worse = any(not kind_of(row.accuracy).is_fine for row in result.rows)
    return EXIT_DIFFERENCE if parsed.strict and worse else 0


def _placed(options: RunOptions, executor: Any, *, jobs: int) -> tuple[dict[str, Any], RunOptions, Any]:
    """The environment's fingerprint, and options and executor of a sweep whose workers have a device each.

    Where others run the models, this machine need not have the device; each of theirs tells its own.
    """
    from hashbench.sweep.executors.local import LocalExecutor

    found = placed(options.device if executor is None else "cpu")
    if not found.shares:
        return found.environment, options, executor
    return (
        found.environment,
        replace(options, device=found.device),
        LocalExecutor(jobs=jobs, devices=found.shares),
    )


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
        all_sources=parsed.all_sources,
        replays=parsed.replays,
        diagnose_budget=parsed.diagnose_budget,
        capture_mib=parsed.capture_limit,
    )


def _selected(parsed: argparse.Namespace, specs: Sequence[ModelSpec], mode: str) -> Sequence[ModelSpec]:
    from hashbench.suites import registry

    chosen = registry.select(
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


def _partition(parsed: argparse.Namespace, catalog: Sequence[ModelSpec], mode: str) -> Partition:
    """Which part of the whole selection this is; with --only partitions play no part, so it is all of it."""
    from hashbench.results.manifest import Partition

    if parsed.total_partitions == 1 or parsed.only:
        return Partition()
    whole = argparse.Namespace(**{**vars(parsed), "total_partitions": 1, "partition_id": 0})
    models = tuple((spec.suite, spec.name) for spec in _selected(whole, catalog, mode))
    return Partition(parsed.partition_id, parsed.total_partitions, models)


def _earlier(
    parsed: argparse.Namespace, specs: Sequence[ModelSpec], output: Path, options: RunOptions
) -> EarlierSweep | None:
    """The sweep that tells how long each model takes. One worker at a time runs the models in their own order."""
    from hashbench.sweep import estimates

    if parsed.times_from is not None:
        return estimates.read(parsed.times_from, mode=options.mode, device=options.device)
    if (parsed.jobs or 1) == 1 and parsed.executor == "local":
        return None
    models = {(spec.suite, spec.name) for spec in specs}
    return estimates.newest_before(output, models=models, mode=options.mode, device=options.device)


def _default_output(names: Sequence[str], mode: str) -> Path:
    stem = "+".join(Path(name).stem for name in names)
    return Path("results") / f"{time.strftime('%Y-%m-%d_%H%M%S')}_{stem}_{mode}"


def _add_sweep(sweep: argparse.ArgumentParser) -> None:
    sweep.set_defaults(command=_sweep)
    modes = sweep.add_mutually_exclusive_group(required=True)
    modes.add_argument("--training", action="store_true", help="forward, loss, backward and optimizer step")
    modes.add_argument("--inference", action="store_true", help="forward only")
    _add_selection(sweep)
    _add_run(sweep)
    _add_diagnosis(sweep)
    _add_machinery(sweep)


def _add_selection(sweep: argparse.ArgumentParser) -> None:
    which = sweep.add_argument_group("which models")
    add_suites(which, default=["torchvision"], otherwise="torchvision")
    which.add_argument("--models", choices=("default", "all"), default="default", help="one of every family, or all")
    which.add_argument("--only", nargs="+", default=[], action="extend", metavar="M", help="these models")
    which.add_argument("-k", "--filter", action="append", default=[], metavar="RE", help="models that match")
    which.add_argument("-x", "--exclude", action="append", default=[], metavar="RE", help="but not those that match")
    which.add_argument("--exclude-exact", action="append", default=[], metavar="M", help="but not these")
    which.add_argument("--total-partitions", type=at_least(1), default=1, metavar="N", help="split the suite in N")
    which.add_argument("--partition-id", type=at_least(0), default=0, metavar="I", help="and run part I, from 0")


def _add_run(sweep: argparse.ArgumentParser) -> None:
    run = sweep.add_argument_group("how each model runs")
    run.add_argument(
        "-d",
        "--device",
        "--devices",
        default="cpu",
        metavar="D",
        help="cpu, cuda, xpu, …: workers get all that are alike, in turn; cuda:1: that one only",
    )
    dtypes = run.add_mutually_exclusive_group()
    for dtype in DTYPES:
        dtypes.add_argument(f"--{dtype}", dest="dtype", action="store_const", const=dtype)
    run.add_argument("--batch-size", type=at_least(1), metavar="N")
    run.add_argument("--iterations", type=at_least(1), metavar="N", help="steps of one run (default 2)")
    run.add_argument(
        "--runs", type=at_least(2), metavar="N", help="all compared with the first (default 2, or as the model asks)"
    )
    run.add_argument("--threads", "-t", type=at_least(1), metavar="N", help="torch.set_num_threads")
    run.add_argument("--seed", type=at_least(0, most=LARGEST_SEED), default=1337, metavar="N")
    run.add_argument("--deterministic", choices=("on", "warn", "off"), help="use_deterministic_algorithms (default on)")
    run.add_argument(
        "--cotangent", choices=("ones", "random"), default="ones", help="random: a random projection as loss"
    )
    run.add_argument("--hash-inputs", action="store_true", help="hash what ops read as well")
    run.add_argument("--untraced-pair", action="store_true", help="also compare two runs without tracing")
    run.add_argument("--keep-traces", action="store_true", help="keep the traces of models that agree too")


def _add_diagnosis(sweep: argparse.ArgumentParser) -> None:
    why = sweep.add_argument_group("why runs differ")
    why.add_argument(
        "--replays",
        type=at_least(2),
        default=20,
        metavar="N",
        help="repetitions of an experiment, at least (default 20)",
    )
    why.add_argument(
        "--diagnose-budget",
        type=at_least(0, float, most=LONGEST_SECONDS),
        default=120.0,
        metavar="S",
        help="seconds for the experiments on one model (default 120; 0: none)",
    )
    why.add_argument(
        "--capture-limit",
        type=at_least(0, float),
        default=2048.0,
        metavar="MIB",
        help="largest call captured for them, in MiB (default 2048)",
    )
    why.add_argument("--all-sources", action="store_true", help="name every independent source, not only the first")


def _add_machinery(sweep: argparse.ArgumentParser) -> None:
    machinery = sweep.add_argument_group("the sweep")
    machinery.add_argument("--output", type=Path, metavar="DIR", help="results folder (default: a new one in results/)")
    machinery.add_argument("--resume", action="store_true", help="complete the sweep in --output")
    machinery.add_argument(
        "--jobs",
        type=at_least(1),
        metavar="N",
        help="models at once, on cores of their own (default 1; on a cluster as many as it can run)",
    )
    cluster.add_flags(machinery)
    machinery.add_argument(
        "--memory-limit",
        type=at_least(1, float),
        metavar="MIB",
        help="what they may be expected to take together (default: 90 %% of what is free)",
    )
    machinery.add_argument(
        "--times-from",
        type=Path,
        metavar="DIR|CSV",
        help="start the longest first as this sweep saw them (default: the newest one of the same kind nearby)",
    )
    machinery.add_argument(
        "--retries",
        type=at_least(0),
        default=1,
        metavar="N",
        help="run what died or ran out of memory beside others again, alone, N times at most (default 1)",
    )
    machinery.add_argument(
        "--timeout",
        type=at_least(0.1, float, most=LONGEST_SECONDS),
        default=2000.0,
        metavar="S",
        help="seconds for one model",
    )
    machinery.add_argument("--strict", action="store_true", help="exit 1 where any model is no pass")
