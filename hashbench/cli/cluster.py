"""The flags of ``hashbench sweep`` that say on which machines models run, and the executor that they ask for."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from hashbench.cli.flags import LONGEST_SECONDS, at_least
from hashbench.errors import HashbenchError
from hashbench.records import ModelSpec, RunOptions

_OF_RAY = {
    "address": "--address",
    "ray_resources": "--ray-resource",
    "ray_gpus": "--ray-gpus",
    "ray_wait": "--ray-wait",
}
"""Flags by the name under which they are parsed; each means something with ``--executor ray`` only."""


def add_flags(machinery: Any) -> None:
    """Add the flags to an argument group."""
    machinery.add_argument(
        "--executor", choices=("local", "ray"), default="local", help="run here, or on a Ray cluster (default local)"
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


@contextlib.contextmanager
def chosen(parsed: argparse.Namespace, options: RunOptions, specs: Sequence[ModelSpec]) -> Iterator[Any]:
    """The executor that the flags ask for, connected; ``None`` for workers of this machine. It is closed at the end.

    Raises:
        HashbenchError: the flags contradict each other, Ray is not installed or the cluster cannot be reached.
    """
    _refuse_contradictions(parsed)
    if parsed.executor == "local":
        yield None
        return
    from hashbench.sweep.executors.ray import PATIENCE, RayExecutor

    executor = RayExecutor(
        address=parsed.address or "",
        jobs=parsed.jobs,
        threads=options.threads or 1,
        device=options.device,
        gpus=parsed.ray_gpus,
        resources=dict(parsed.ray_resources or ()),
        patience=PATIENCE if parsed.ray_wait is None else parsed.ray_wait,
        suites=sorted({spec.suite for spec in specs if not spec.source}),
        zoo_files=sorted({spec.source for spec in specs} - {""}),
    )
    with contextlib.closing(executor):
        executor.connect()
        yield executor


def _refuse_contradictions(parsed: argparse.Namespace) -> None:
    if parsed.executor == "ray":
        if parsed.memory_limit is not None:
            raise HashbenchError(
                "--memory-limit is for one machine",
                consequence="Ray shares out the memory of its own",
                tip="Leave it out.",
            )
        return
    given = [flag for name, flag in _OF_RAY.items() if getattr(parsed, name) is not None]
    if given:
        raise HashbenchError(
            f"{given[0]} means nothing without --executor ray", consequence="nothing was run", tip="Add --executor ray."
        )


def _resource(text: str) -> tuple[str, float]:
    name, _, amount = text.partition("=")
    if not name or name in ("CPU", "GPU", "memory", "object_store_memory"):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME or NAME=N with a name of your own")
    value: float = at_least(0, float)(amount) if "=" in text else 1.0
    if not value or (value > 1 and value != int(value)):
        raise argparse.ArgumentTypeError(f"{amount} is not above 0, or above 1 and not whole")
    return name, value
