"""The flags of a Ray cluster."""

from __future__ import annotations

import argparse

from hashbench.cli.flags import LONGEST_SECONDS, at_least
from hashbench.cli.parser import Flags


def add_flags(flags: Flags) -> None:
    """Add ``--address``, ``--ray-resource``, ``--ray-gpus`` and ``--ray-wait``."""
    text = "Connect to the Ray cluster at HOST:PORT, or auto (default: $RAY_ADDRESS, else start one for this sweep)."
    flags.add_argument("--address", metavar="HOST:PORT", help=text)
    flags.add_argument(
        "--ray-resource",
        dest="resources",
        type=_resource,
        action="append",
        metavar="NAME[=N]",
        help="Request N of the custom resource NAME for every model, to choose a kind of machine.",
    )
    text = "Request N GPUs for each model (default: 1; with --device cpu 0)."
    flags.add_argument("--ray-gpus", dest="gpus", type=at_least(0, float), metavar="N", help=text)
    text = "Wait at most S seconds for a machine that can run a model (default: 30)."
    kind = at_least(0, float, most=LONGEST_SECONDS)
    flags.add_argument("--ray-wait", dest="patience", type=kind, metavar="S", help=text)


def _resource(text: str) -> tuple[str, float]:
    name, _, amount = text.partition("=")
    if not name or name in ("CPU", "GPU", "memory", "object_store_memory"):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME or NAME=N with a name of your own")
    value: float = at_least(0, float)(amount) if "=" in text else 1.0
    if not value or (value > 1 and value != int(value)):
        raise argparse.ArgumentTypeError(f"{amount} is not above 0, or above 1 and not whole")
    return name, value
