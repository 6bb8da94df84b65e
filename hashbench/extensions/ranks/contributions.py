"""Save what the ranks contribute to one collective, and repeat it with that: a folder that torchrun runs.

    repro/specimens.training.model/
        repro.py     torchrun --nproc-per-node 2 repro.py
        rank0.pt     the call of the first member of the group: op and arguments
        rank1.pt     …

The script needs torch alone. It reads tensors, numbers and names, and runs nothing that a file holds.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from hashbench.core.diagnose.rank_processes import Peers, started
from hashbench.core.diagnose.repro import REPRO_SECONDS
from hashbench.core.diagnose.repro.writer import SCRIPT_FILE, heading, metadata, render
from hashbench.core.io import replace_file
from hashbench.core.records import ExperimentResult
from hashbench.core.trace.callbacks import TraceCallback
from hashbench.core.trace.digest import untraced

TIMES = 20
"""Repetitions that are compared with the first."""

_COUNTS = "counts.json"


class ContributionWatcher(TraceCallback):
    """Copies the arguments of the call with one record id, just before it is made.

    Attributes:
        call: op and arguments as plain values and tensors; ``None`` if the call was not made.
    """

    def __init__(self, node: str) -> None:
        self.node = node
        self.call: dict[str, Any] | None = None

    def before(self, node: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if node != self.node or kwargs:
            return
        with untraced():
            self.call = {"op": str(func), "arguments": [_plain(value) for value in args]}


def _plain(value: Any) -> Any:
    """Return an argument as what ``torch.load(weights_only=True)`` reads."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, torch.ScriptObject):
        if str(value._type()).endswith(".ReduceOp"):
            return {"reduce": _operation(value)}
        return {"group": ""}
    return value


def _operation(boxed: Any) -> str:
    """Return the name of a ``ReduceOp``; torch 2.11 has no ``ReduceOp.unbox``."""
    return str(torch.distributed.ReduceOp.RedOpType(boxed.op()).name)


def save(call: Mapping[str, Any], folder: Path, *, member: int) -> None:
    """Write the call of one member of the group, by its rank in the group."""
    torch.save(dict(call), folder / f"rank{member}.pt")


def write_script(folder: Path, *, members: int, backend: str, claim: str) -> None:
    """Write the script beside the calls."""
    values = {"members": members, "backend": backend, "times": TIMES}
    text = render("collective.py.jinja", package=__package__, metadata=metadata(), heading=heading(claim), **values)
    replace_file(folder / SCRIPT_FILE, text)


def repeat(peers: Peers, folder: Path, variables: Mapping[str, str]) -> None:
    """Entry point of a rank: run the script with further environment variables; rank 0 writes the counts."""
    os.environ.update(variables)
    os.environ["INIT_METHOD"] = f"file://{peers.folder / 'repro'}"
    source = (folder / SCRIPT_FILE).read_text(encoding="utf-8")
    counted: dict[str, Any] = {"__file__": str(folder / SCRIPT_FILE), "__name__": "repro"}
    exec(compile(source, SCRIPT_FILE, "exec"), counted)
    differing = counted["main"]()
    if peers.rank == 0:
        replace_file(peers.folder / _COUNTS, json.dumps(differing))


def counts_in(folder: Path) -> int | None:
    """Return how many repetitions differed from the first; ``None`` if the script did not end."""
    path = folder / _COUNTS
    return int(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def repeated_alone(
    name: str, folder: Path, *, members: int, change: Mapping[str, str] = MappingProxyType({})
) -> ExperimentResult:
    """Repeat the collective of a repro on ranks of its own, as the experiment ``name``.

    Args:
        name: of the experiment.
        folder: the repro.
        members: number of ranks of the group.
        change: further environment variables.
    """
    with tempfile.TemporaryDirectory(prefix="hashbench-") as meeting:
        arguments, place = (folder, dict(change)), Path(meeting)
        with started(f"{__name__}:repeat", arguments, world_size=members, folder=place) as ranks:
            ends = ranks.wait(REPRO_SECONDS)
        differing = counts_in(place)
        if differing is None:
            died = min(ends, key=lambda end: (not end.died, end.seconds))
            return ExperimentResult(name, "collective", note=died.in_words()[:200])
    return ExperimentResult(name, "collective", TIMES, differing, 1 + differing)
