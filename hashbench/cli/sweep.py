"""``hashbench sweep``: its flags, and the request that they make."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hashbench.catalog import kind_of
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
from hashbench.errors import HashbenchError
from hashbench.records import DTYPES, RunOptions
from hashbench.sweep.executors import EXECUTORS, LOCAL

if TYPE_CHECKING:
    from hashbench.sweep.request import RayCluster, SweepRequest
    from hashbench.sweep.run import SweepResult

_OF_RAY = {
    "address": "--address",
    "ray_resources": "--ray-resource",
    "ray_gpus": "--ray-gpus",
    "ray_wait": "--ray-wait",
}
"""Flags by the name under which they are parsed; each requires ``--executor ray``."""


def add(commands: Commands) -> None:
    """Add the subcommand of this file."""
    add_flags(commands.add_parser("sweep", help="run the models of a suite and write accuracy.csv"))


def _sweep(parsed: argparse.Namespace) -> int:
    from hashbench.sweep.run import SweepInterrupted

    mode = "training" if parsed.training else "inference"
    output = parsed.output or _default_output([*parsed.suite, *(["tiny"] if parsed.tiny else [])], mode)
    try:
        result = run(request_of(parsed, suites=suites_to_sweep(parsed), output=output))
    except SweepInterrupted as stopped:
        message = f"stopped: {stopped.done} of {stopped.total} rows are in {stopped.output}; go on with --resume"
        return say(message, EXIT_INTERRUPTED)
    worse = any(not kind_of(row.accuracy).is_fine for row in result.rows)
    return EXIT_DIFFERENCE if parsed.strict and worse else 0


def run(request: SweepRequest) -> SweepResult:
    """Run a sweep, show its progress on standard error, and print its table."""
    from hashbench.report.text import sweep_table
    from hashbench.sweep import request as requests
    from hashbench.sweep.progress import Progress

    with Progress() as progress:
        result = requests.run(request, on_event=progress, on_note=lambda note: say(note, 0))
    print(sweep_table(result.rows))
    print(f"\nResults: {result.output / 'accuracy.csv'}")
    return result


def request_of(parsed: argparse.Namespace, *, suites: Sequence[str], output: Path) -> SweepRequest:
    """The sweep that the flags ask for.

    Raises:
        HashbenchError: the flags contradict each other.
    """
    from hashbench.suites.selection import Selection
    from hashbench.sweep.request import SweepRequest

    return SweepRequest(
        Selection(
            tuple(suites),
            only=tuple(parsed.only),
            filters=tuple(parsed.filter),
            excludes=tuple(parsed.exclude),
            exclude_exact=tuple(parsed.exclude_exact),
            which=parsed.models,
            total_partitions=parsed.total_partitions,
            partition_id=parsed.partition_id,
        ),
        _run_options(parsed),
        output,
        command_line=("hashbench", *sys.argv[1:]),
        executor=parsed.executor,
        cluster=_cluster(parsed),
        jobs=parsed.jobs,
        resume=parsed.resume,
        timeout=parsed.timeout,
        times_from=parsed.times_from,
        memory_mib=parsed.memory_limit,
        retries=parsed.retries,
    )


def _cluster(parsed: argparse.Namespace) -> RayCluster:
    from hashbench.sweep.request import RayCluster

    if parsed.executor == "ray":
        if parsed.memory_limit is not None:
            raise HashbenchError(
                "--memory-limit is for one machine",
                consequence="Ray shares out the memory of its own",
                tip="Leave it out.",
            )
        resources = dict(parsed.ray_resources or ())
        return RayCluster(parsed.address or "", parsed.ray_gpus, resources, parsed.ray_wait)
    given = [flag for name, flag in _OF_RAY.items() if getattr(parsed, name) is not None]
    if given:
        raise HashbenchError(
            f"{given[0]} requires --executor ray", consequence="nothing was run", tip="Add --executor ray."
        )
    return RayCluster()


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


def _default_output(names: Sequence[str], mode: str) -> Path:
    stem = "+".join(Path(name).stem for name in names)
    return Path("results") / f"{time.strftime('%Y-%m-%d_%H%M%S')}_{stem}_{mode}"


def add_flags(sweep: argparse.ArgumentParser) -> None:
    """All flags of the subcommand."""
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
    _add_cluster(machinery)
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
    machinery.add_argument("--strict", action="store_true", help="exit 1 if any model does not pass")


def _add_cluster(machinery: argparse._ArgumentGroup) -> None:
    machinery.add_argument(
        "--executor", choices=tuple(EXECUTORS), default=LOCAL, help="run here, or on a Ray cluster (default local)"
    )
    machinery.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="the Ray cluster, or auto (default: $RAY_ADDRESS, else one that is started here and ends with the sweep)",
    )
    machinery.add_argument(
        "--ray-resource",
        dest="ray_resources",
        type=_resource,
        action="append",
        metavar="NAME[=N]",
        help="a custom resource that every model asks for, so that it runs on the wanted kind of machine",
    )
    machinery.add_argument(
        "--ray-gpus", type=at_least(0, float), metavar="N", help="GPUs of a model (default 1, with --device cpu 0)"
    )
    machinery.add_argument(
        "--ray-wait",
        type=at_least(0, float, most=LONGEST_SECONDS),
        metavar="S",
        help="seconds to wait for a machine that can run a model (default 30)",
    )


def _resource(text: str) -> tuple[str, float]:
    name, _, amount = text.partition("=")
    if not name or name in ("CPU", "GPU", "memory", "object_store_memory"):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME or NAME=N with a name of your own")
    value: float = at_least(0, float)(amount) if "=" in text else 1.0
    if not value or (value > 1 and value != int(value)):
        raise argparse.ArgumentTypeError(f"{amount} is not above 0, or above 1 and not whole")
    return name, value
