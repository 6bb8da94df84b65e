"""Hand-made traces of the ranks of a small program: each rank multiplies, all reduce, each adds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import xxhash

from hashbench.core.records import Collective, Leaf, OpRecord, Ref, Result, TensorDigest, Trace, TracedRank, TracedStep
from hashbench.core.trace import file
from hashbench.core.trace.step_file import rank_path


def digest(*of: object) -> TensorDigest:
    return TensorDigest("float32", (2, 3), (3, 1), xxhash.xxh3_64_hexdigest(repr(of).encode()))


def rank_trace(
    rank: int, world_size: int = 2, *, steps: int = 3, guilty: int = -1, ended: str = "", run: int = 0
) -> Trace:
    """Make a trace. The kernel of rank ``guilty`` differs in step 1 between runs of other numbers ``run``."""
    records: list[OpRecord] = []
    kept: list[TracedStep] = []
    last, seen = "parameter/w", (0, 0)
    for step in range(steps):
        here = run if step >= 1 and rank == guilty else 0
        there = run if step >= 1 and guilty >= 0 else 0
        given = digest("mul", rank, step, seen, here)
        records.append(_record(step, "aten.mul.Tensor", (Ref("0", last),), given))
        met = Collective("all_reduce", tuple(range(world_size)), 0, ("0.0",))
        read = Ref("0.0", records[-1].id, 0, True, given.value)
        records.append(_record(step, "c10d.allreduce_.default", (read,), digest("sum", step, there), met))
        records.append(_record(step, "aten.add.Tensor", (Ref("0", records[-1].id),), digest("add", rank, step, there)))
        last, seen = records[-1].id, (step, there)
        kept.append(TracedStep(step, len(records), (Result("w", records[-1].outputs[0], last),)))
    leaf = Leaf("parameter/w", "parameter", digest("w"), 0)
    made = TracedRank(rank, world_size, ended)
    results = kept[-1].results if kept else ()
    return Trace(tuple(records), (leaf,), results, tracer="native", rank=made, steps=tuple(kept))


def _record(
    step: int, op: str, inputs: tuple[Ref, ...], output: TensorDigest, collective: Collective | None = None
) -> OpRecord:
    name = f"forward.{step}/Net/{op}#0"
    return OpRecord(name, "forward", step, "Net", op, inputs, "(<Tensor>)", (output,), collective=collective)


def traces(world_size: int = 2, *, guilty: int = -1, run: int = 0) -> dict[int, Trace]:
    """Make the traces of all ranks of a run."""
    return {rank: rank_trace(rank, world_size, guilty=guilty, run=run) for rank in range(world_size)}


def write(folder: Path, run: Mapping[int, Trace]) -> Path:
    """Write the traces of a run into a folder and return it."""
    for rank, trace in run.items():
        file.write(trace, rank_path(folder, rank))
    return folder
