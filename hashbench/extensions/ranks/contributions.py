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

from hashbench.core.diagnose.repro import REPRO_SECONDS
from hashbench.core.io import replace_file
from hashbench.core.records import ExperimentResult
from hashbench.core.trace.callbacks import TraceCallback
from hashbench.core.trace.digest import untraced
from hashbench.extensions.ranks.processes import Peers, started

TIMES = 20
"""Repetitions that are compared with the first."""

SCRIPT_FILE = "repro.py"

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


def write_script(folder: Path, *, members: int, backend: str, heading: str) -> None:
    """Write the script beside the calls."""
    text = _SCRIPT.format(heading=heading, members=members, backend=backend, times=TIMES, torch=torch.__version__)
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


_SCRIPT = '''# /// script
# requires-python = ">=3.10"
# dependencies = ["torch=={torch}"]
# ///
"""{heading}

Repeats the collective with what each rank gave: torchrun --nproc-per-node {members} repro.py

BACKEND=gloo chooses another backend, NCCL_ALGO and NCCL_PROTO those of NCCL.
"""

import os

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

FOLDER, TIMES = os.path.dirname(os.path.abspath(__file__)), {times}


class Boxed(Exception):
    pass


class CaughtOperation(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise Boxed(args[2])


def boxed(operation):
    """As an op takes it: from a call that is not made, for torch before ReduceOp.boxed."""
    tensors = [torch.zeros(1, device=DEVICE)]
    try:
        with CaughtOperation():
            dist.group.WORLD.allreduce(tensors, operation)
    except Boxed as caught:
        return caught.args[0]


def built(value):
    if isinstance(value, torch.Tensor):
        return value.clone().to(DEVICE) if value.device.type != DEVICE else value.clone()
    if isinstance(value, list):
        return [built(item) for item in value]
    if isinstance(value, dict):
        if "group" in value:
            return dist.group.WORLD.boxed()
        return boxed(getattr(dist.ReduceOp, value["reduce"]))
    return dist.group.WORLD.group_name if isinstance(value, str) and value == GROUP_NAME else value


def tensors_of(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [one for item in value for one in tensors_of(item)] if isinstance(value, (list, tuple)) else []


def repeated(call):
    name, overload = call["op"].rsplit(".", 1)
    namespace, op = name.split(".")
    arguments = [built(value) for value in call["arguments"]]
    output = getattr(getattr(getattr(torch.ops, namespace), op), overload)(*arguments)
    for one in output if isinstance(output, (list, tuple)) else [output]:
        if isinstance(one, torch.ScriptObject):
            dist.Work.unbox(one).wait()
    left = tensors_of(output) + tensors_of(arguments)
    if namespace == "_c10d_functional":
        left = [torch.ops._c10d_functional.wait_tensor(one) for one in tensors_of(output)] + tensors_of(arguments)
    return [one.detach().cpu().contiguous().view(torch.uint8) if one.dim() else one.cpu() for one in left]


def main():
    global DEVICE, GROUP_NAME
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    backend = os.environ.get("BACKEND", "{backend}")
    dist.init_process_group(backend, init_method=os.environ.get("INIT_METHOD", "env://"), rank=rank, world_size=size)
    DEVICE = f"cuda:{{rank}}" if backend == "nccl" else "cpu"
    call = torch.load(os.path.join(FOLDER, f"rank{{rank}}.pt"), weights_only=True)
    names = [value for value in call["arguments"] if isinstance(value, str)]
    GROUP_NAME = names[-1] if names else ""
    first, differing = repeated(call), 0
    for _ in range(TIMES):
        other = repeated(call)
        differs = torch.tensor(int(not all(torch.equal(a, b) for a, b in zip(first, other))), device=DEVICE)
        dist.all_reduce(differs, dist.ReduceOp.MAX)
        differing += int(differs)
    if rank == 0:
        print(f"{{differing}} of {{TIMES}} repetitions differ from the first")
    dist.destroy_process_group()
    return differing


if __name__ == "__main__":
    main()
'''
