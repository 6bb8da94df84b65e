"""What two folders of rank traces cost to read and judge: seconds and memory, for runs that differ and for equal ones.

The traces are synthetic: eight ranks of 20,000 records, as fully sharded training of a small transformer gives them. A
kernel on one rank differs in the middle, and from the next collective on everything differs on every rank.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from benchmarks.table import Table, against
from hashbench.core.records import Collective, Leaf, OpRecord, Ref, Result, TensorDigest, Trace, TracedRank, TracedStep
from hashbench.core.trace import file

RANKS, RECORDS, RECORDS_A_STEP = 8, 20_000, 1_144
SECONDS_GOAL, EQUAL_SECONDS_GOAL, MEMORY_GOAL, BYTES_GOAL = 10.0, 2.0, 500.0, 40.0
_GUILTY_RANK, _GUILTY_RECORD = 5, 9_205
_LAYERS, _PARAMETERS, _EVERY = 4, 52, 80
_OPS = ("aten.mm.default", "aten.add.Tensor", "aten.mul.Tensor", "aten.native_layer_norm.default", "aten.t.default")
_SHAPES = ((128, 128), (128, 512), (128,), (4, 32, 128))


@dataclass(frozen=True, slots=True)
class _Place:
    """A record's place in the program: its number, step, and whether all ranks meet there."""

    number: int
    step: int
    meets: bool


def measure() -> list[Table]:
    """Write folders, then read and judge a pair that differs and a pair that is equal, each in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder)
        for name, differs in (("a", False), ("b", True), ("same", False)):
            write_folder(at / name, differs=differs)
        size = sum(path.stat().st_size for path in (at / "a").iterdir()) / (RANKS * RECORDS)
        different, equal = (_judged(at / "a", at / other) for other in ("b", "same"))
    rows = (
        ("runs that differ: read", f"{different['read']:.3g} s", "", ""),
        ("runs that differ: read and judged", *against(different["all"], goal=SECONDS_GOAL, unit=" s")),
        ("runs that differ: processor time", f"{different['processor']:.3g} s", "", ""),
        ("runs that differ: largest memory", *against(different["memory"], goal=MEMORY_GOAL, unit=" MiB")),
        ("equal runs: read and judged", *against(equal["all"], goal=EQUAL_SECONDS_GOAL, unit=" s")),
        ("equal runs: processor time", f"{equal['processor']:.3g} s", "", ""),
        ("equal runs: largest memory", *against(equal["memory"], goal=MEMORY_GOAL, unit=" MiB")),
        ("a record on disk", *against(size, goal=BYTES_GOAL, unit=" B")),
    )
    return [
        Table(
            title=f"Two folders of {RANKS} ranks x {RECORDS} records",
            headers=("what", "figure", "goal", "reached"),
            rows=rows,
            notes=(f"Found: {different['found']}; {equal['found']}.",),
        )
    ]


def _judged(first: Path, second: Path) -> dict[str, Any]:
    command = [sys.executable, "-c", _JUDGE, str(first), str(second)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


_JUDGE = """
import json, pathlib, sys, time
begin = time.perf_counter()
from hashbench.extensions.ranks.find import find_across_ranks
from hashbench.extensions.ranks.text import diff_text
from hashbench.core.processes import uncollected
from hashbench.extensions.ranks.folder import read_both
with uncollected():
    first, second = read_both(*map(pathlib.Path, sys.argv[1:]))
    read = time.perf_counter() - begin
    verdict = find_across_ranks(first.traces, second.traces, world_size=first.world_size)
status = pathlib.Path("/proc/self/status")  # what getrusage says is never less than that of the parent
lines = dict(line.split(":") for line in status.read_text().splitlines()) if status.exists() else {}
print(json.dumps({
    "read": read,
    "all": time.perf_counter() - begin,
    "processor": time.process_time(),
    "memory": float(lines["VmHWM"].split()[0]) / 2**10 if lines else float("nan"),
    "found": diff_text(verdict).split("\\n")[0],
}))
"""


# ------------------------------------------------------------------------------------------- synthetic folders


def write_folder(folder: Path, *, differs: bool, ranks: int = RANKS, records: int = RECORDS) -> None:
    """Write the traces of all ranks of a run; with ``differs``, a kernel of one rank gives another output."""
    for rank in range(ranks):
        file.write(synthetic(rank, ranks, differs=differs, records=records), folder / f"rank{rank}.log.gz")


def synthetic(rank: int, ranks: int, *, differs: bool, records: int = RECORDS) -> Trace:
    """Make the trace of a rank whose ops each read the two before them, and which meets the others now and then."""
    guilty = (_GUILTY_RANK % ranks, min(_GUILTY_RECORD, records // 2))
    behind = (guilty[1] // _EVERY + 1) * _EVERY
    first_other = guilty[1] if rank == guilty[0] else behind
    made: list[OpRecord] = []
    writers: list[str] = []
    steps: list[TracedStep] = []
    leaves = tuple(
        Leaf(f"parameter/layers.{index}.weight", "parameter", _digest("p", index, 0), index)
        for index in range(_PARAMETERS)
    )
    for place in _places(records):
        other = int(differs and place.number >= first_other)
        read_other = int(differs and place.number > first_other)
        made.append(_record(writers, place, rank, ranks, other, read_other=read_other))
        writers += [made[-1].id] if made[-1].outputs else []
        if (place.number + 1) % RECORDS_A_STEP == 0 or place.number + 1 == records:
            results = tuple(
                Result(f"layers.{index}.weight", _digest("r", place.step, index, rank, other), writers[-1 - index])
                for index in range(_PARAMETERS)
            )
            steps.append(TracedStep(place.step, len(made), results))
    return Trace(
        tuple(made), leaves, steps[-1].results, tracer="native", rank=TracedRank(rank, ranks), steps=tuple(steps)
    )


def _places(records: int) -> Iterator[_Place]:
    for number in range(records):
        yield _Place(number, number // RECORDS_A_STEP, number % _EVERY == 0)


def _record(writers: list[str], place: _Place, rank: int, ranks: int, other: int, *, read_other: int) -> OpRecord:
    """Make the next record; ``other`` and ``read_other`` number the variants of what it writes and reads."""
    op = "c10d.allreduce_.default" if place.meets else _OPS[place.number % len(_OPS)]
    phase = ("forward", "backward", "optimizer")[place.number % RECORDS_A_STEP * 3 // RECORDS_A_STEP]
    module = f"Transformer.layers.{place.number // 60 % _LAYERS}.mlp.linear{place.number % 3}"
    parameter = Ref("1", f"parameter/layers.{place.number % _PARAMETERS}.weight")
    inputs = [Ref("0", writers[-1] if writers else parameter.source, 0, place.meets)]
    if place.meets:
        inputs = [Ref("0.0", inputs[0].source, 0, True, _digest("given", place.number, rank, read_other).value)]
    elif len(writers) > 2:
        inputs.append(Ref("1", writers[-3]) if place.number % 2 else parameter)
    given = ("0.0",) if place.meets else ()
    met = Collective("all_reduce", tuple(range(ranks)), 0, given) if place.meets else None
    who = "all" if place.meets else rank
    return OpRecord(
        id=f"{phase}.{place.step}/{module}/{op}#{place.number}",
        phase=phase,
        iteration=place.step,
        module=module,
        op=op,
        inputs=tuple(inputs),
        arguments="(<Tensor>, <Tensor>)" if place.number % 4 else "(<Tensor>, [128, 128], 1e-05)",
        outputs=() if op == "aten.t.default" else (_digest("o", place.number, who, other),),
        source=f"train.py:{40 + place.number % 30} forward",
        collective=met,
    )


def _digest(*of: object) -> TensorDigest:
    shape = _SHAPES[len(str(of)) % len(_SHAPES)]
    stride = (shape[1] * shape[2], shape[2], 1) if len(shape) == 3 else (*shape[1:], 1)
    return TensorDigest("float32", shape, stride, xxhash.xxh3_64_hexdigest(repr(of).encode()))
