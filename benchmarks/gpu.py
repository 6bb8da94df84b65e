"""``python -m benchmarks.gpu``: what tracing costs on an accelerator, and how fast digests are made there.

Where there is no accelerator it says so in one line and exits with 2. ``--device cpu --small`` runs the same code on
the CPU, with tiny models and the device's kind of digests, to see that it works: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import gpu_workloads
from benchmarks.overhead import Arm, NoOp, debug_mode, interleaved, ratio, times_less
from benchmarks.table import Table, against, machine
from benchmarks.workloads import TrainingStep
from hashbench import HashDebugTrace
from hashbench.core.devices.ledger import Ledger, digest_path
from hashbench.core.trace.digest import raw_digest

BANDWIDTH_GOAL, LARGE = 0.8, 1 << 26
TOTAL_GOAL, ADDED_GOAL = 1.3, 10.0
MEMORY_GOAL, RECORDS = 16.0, 100_000
PARTS = ("digests", "memory", "steps")
_ABSENT = "not measured"
_LABELS = {0: "B", 10: "KiB", 20: "MiB", 30: "GiB"}


def main() -> int:
    """Parse the command line, measure, print as the results come; returns the exit code."""
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", metavar="D", help="cuda, xpu, … (default: the accelerator that is here)")
    parser.add_argument("--seconds", type=float, default=20.0, metavar="S", help="for each workload (default 20)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="which tables (default: all)")
    parser.add_argument("--workloads", nargs="+", metavar="W", help="measure steps of these workloads (default: all)")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS), help="which (default: all)")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that everything runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine and tables there as well")
    parsed = parser.parse_args()
    device = _device(parsed.device)
    if device is None:
        print(_nothing(parsed.device or "accelerator"), file=sys.stderr)
        return 2
    found = machine() | accelerator(device)
    print("\n".join(f"{name}: {value}" for name, value in found.items()))
    tables = []
    steps = StepsAsked(small=parsed.small, seconds=parsed.seconds, workloads=parsed.workloads, arms=parsed.arms)
    for table in measure(device, steps, only=parsed.only):
        print("\n" + table.text(), flush=True)
        tables.append(table)
        if parsed.json is not None:  # after each: the next one may not end
            document = {"machine": found, "tables": [dataclasses.asdict(table) for table in tables]}
            parsed.json.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print("\n" + summary(tables, small=parsed.small))
    return 0


def _nothing(wanted: str) -> str:
    return (
        f"benchmarks.gpu: there is no {wanted} here, so nothing was measured. Run it where `hashbench env -d cuda` "
        "works; `python -m benchmarks.gpu --device cpu --small` shows that the benchmark itself does."
    )


def _device(asked: str | None) -> torch.device | None:
    """The device to measure; ``None`` where it is not there."""
    wanted = None if asked is None else torch.device(asked)
    if wanted is not None and wanted.type == "cpu":
        return wanted
    current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if current is None or (wanted is not None and wanted.type != current.type):
        return None
    return torch.device(current.type, torch.accelerator.current_device_index() if wanted is None else wanted.index or 0)


def accelerator(device: torch.device) -> dict[str, str]:
    """What the figures were measured on: card, driver, builds, and the function that makes the digests."""
    from hashbench.core.run.environment import collect

    known = collect(str(device))
    path = digest_path(device)
    # With --device cpu the digests are those of accelerators all the same.
    digests = Ledger(everywhere=True).path(device).name if device.type == "cpu" else path.name
    return {
        "device": " ".join(str(value) for value in known["device"].values()),
        "CUDA, HIP": f"{torch.version.cuda or 'no'}, {torch.version.hip or 'no'}",
        "Triton": known["packages"].get("triton", "not installed"),
        "digests made by": f"{digests}{f' ({path.reason})' if path.reason else ''}",
    }


@dataclass(frozen=True, slots=True)
class StepsAsked:
    """What to measure of training steps.

    Attributes:
        small: tiny sizes, also of the other tables.
        seconds: measure each workload for about so long, at least five repetitions; one where it is small.
        workloads: names; ``None``: all.
        arms: names of :data:`ARMS`; ``no mode``, which all are compared with, is always among them.
    """

    small: bool
    seconds: float
    workloads: Sequence[str] | None
    arms: Sequence[str]

    def makes(self) -> dict[str, gpu_workloads.Make]:
        """The workloads by name."""
        known = gpu_workloads.workloads(small=self.small)
        unknown = [name for name in self.workloads or () if name not in known]
        if unknown:
            sys.exit(
                f"benchmarks.gpu: no workload {unknown[0]!r}: nothing was measured. There are: {'; '.join(known)}."
            )
        return {name: known[name] for name in self.workloads or known}


def measure(device: torch.device, asked: StepsAsked, *, only: Sequence[str] = PARTS) -> Iterator[Table]:
    """The tables, one after the other.

    Args:
        device: where.
        asked: sizes, and which steps.
        only: which of :data:`PARTS`.
    """
    makes = asked.makes()
    torch.manual_seed(0)
    if "digests" in only:
        yield _bandwidth(device, small=asked.small)
    if "memory" in only:
        yield _memory(device, records=RECORDS // 50 if asked.small else RECORDS)
    if "steps" in only:
        yield from _overhead(device, asked, makes)


def summary(tables: Sequence[Table], *, small: bool) -> str:
    """How many goals were met and missed, over all tables."""
    cells = [cell for table in tables for row in table.rows for cell in row]
    meaning = " (of a small run: they mean nothing)" if small else ""
    return f"Goals: {cells.count('met')} met, {cells.count('missed')} missed{meaning}."


def goal(figure: float, **kwargs: Any) -> tuple[str, str, str]:
    """Three cells: the figure, its goal, and ``met`` or ``missed``."""
    shown, wanted, reached = against(figure, **kwargs)
    return shown, wanted, "met" if reached == "yes" else "missed"


# ----------------------------------------------------------------------------------------------------- bandwidth


@dataclass(frozen=True, slots=True)
class _Pool:
    """Memory that calls walk through, so that no cache holds what the next one reads."""

    source: torch.Tensor
    target: torch.Tensor

    def slices(self, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """``(source, target)`` of so many bytes each, one after the other."""
        places = range(0, self.source.numel() - size + 1, size)
        return [(self.source[at : at + size], self.target[at : at + size]) for at in places[:64]]


def _bandwidth(device: torch.device, *, small: bool) -> Table:
    sizes = [1 << shift for shift in ((10, 14, 18) if small else (10, 14, 18, 22, 26, 28, 30))]
    largest = max(sizes)
    source = torch.randint(0, 256, (largest,), dtype=torch.uint8, device=device)
    pool = _Pool(source, torch.empty_like(source))
    rows = [_bandwidth_row(pool, size) for size in sizes]
    return Table(
        title="Digests, GB/s of the tensor's bytes",
        headers=(
            *("size", "digest", "plain read", "copy", "digest / plain read", "goal", "reached"),
            *("digest, µs a call of the host", "digest, µs on the device"),
        ),
        rows=tuple(rows),
        notes=(
            "Plain read: `torch.sum` over int64 or float32, whichever is faster. A copy reads and writes.",
            "Device time is taken between two events in a full queue: launches do not count. Other memory each time.",
        ),
    )


def _bandwidth_row(pool: _Pool, size: int) -> tuple[object, ...]:
    book, parts = Ledger(everywhere=True), pool.slices(size)
    functions: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
        "digest": lambda source, _target: book.add(source),
        "int64": lambda source, _target: source.view(torch.int64).sum(),
        "float32": lambda source, _target: source.view(torch.float32).sum(),
        "copy": lambda source, target: target.copy_(source),
    }
    calls = 2 if pool.source.is_cpu else max(2, min(100, (1 << 28) // size))
    taken: dict[str, list[float]] = {name: [] for name in functions}
    host: list[float] = []
    for repetition in range(2 + 9):
        for name, function in functions.items():
            seconds, launching = _queued(function, parts, calls, device=pool.source.device)
            if repetition >= 2:  # the first two compile and warm up
                taken[name].append(seconds)
                host += [launching] if name == "digest" else []
    speed = {name: size / statistics.median(times) / 1e9 for name, times in taken.items()}
    read = max(speed["int64"], speed["float32"])
    share = goal(speed["digest"] / read, goal=BANDWIDTH_GOAL, at_most=False)
    return (
        _size(size),
        *(f"{value:.4g}" for value in (speed["digest"], read, speed["copy"])),
        *(share if size >= LARGE else (share[0], "", "")),
        f"{statistics.median(host) * 1e6:.3g}",
        f"{statistics.median(taken['digest']) * 1e6:.3g}",
    )


def _queued(
    function: Callable[[torch.Tensor, torch.Tensor], object],
    parts: Sequence[tuple[torch.Tensor, torch.Tensor]],
    calls: int,
    *,
    device: torch.device,
) -> tuple[float, float]:
    """Seconds of one call on the device, and seconds that the host takes to ask for it."""
    if device.type == "cpu":
        begin = time.perf_counter()
        for number in range(calls):
            function(*parts[number % len(parts)])
        seconds = (time.perf_counter() - begin) / calls
        return seconds, seconds
    start, end = torch.Event(device, enable_timing=True), torch.Event(device, enable_timing=True)
    torch.accelerator.synchronize(device)
    if device.type == "cuda":
        torch.cuda._sleep(calls * 200_000)  # clock cycles, 0.1 ms a call: the host is done asking before the first runs
    start.record(torch.accelerator.current_stream(device))
    begin = time.perf_counter()
    for number in range(calls):
        function(*parts[number % len(parts)])
    launching = time.perf_counter() - begin
    end.record(torch.accelerator.current_stream(device))
    torch.accelerator.synchronize(device)
    return start.elapsed_time(end) / 1e3 / calls, launching / calls


def _size(nbytes: int) -> str:
    shift = max(shift for shift in _LABELS if nbytes >> shift)
    return f"{nbytes >> shift} {_LABELS[shift]}"


# -------------------------------------------------------------------------------------------------------- memory


def _memory(device: torch.device, *, records: int) -> Table:
    """The memory of a trace of so many records of small ops, in MB."""
    value = torch.ones(16, device=device)
    torch.ones(16, device=device).mul(1.0)
    before = _allocated(device)
    with HashDebugTrace(digests="device") as trace, torch.no_grad():
        for _ in range(records):
            value.mul_(1.0)
    buffers, held = trace._tracer.raw.ledger.nbytes / 1e6, (_allocated(device) - before) / 1e6
    begin = time.perf_counter()
    found = len(trace.finish().records)
    seconds = time.perf_counter() - begin
    rows = [("buffers of digests", *goal(buffers, goal=MEMORY_GOAL, unit=" MB"))]
    if device.type != "cpu":
        rows.append(("all that the allocator gave out", *goal(held, goal=MEMORY_GOAL, unit=" MB")))
    rows.append(("finishing the trace", f"{seconds:.3g} s", "", ""))
    return Table(
        title=f"Memory on the device for a trace of {found} records",
        headers=("what", "figure", "goal", "reached"),
        rows=tuple(rows),
    )


def _allocated(device: torch.device) -> int:
    if device.type == "cpu":
        return 0
    torch.accelerator.synchronize(device)
    return torch.accelerator.memory_allocated(device)


# ------------------------------------------------------------------------------------------------------ overhead


class HashOnHost(TorchDispatchMode):
    """Copies all that an op returns to the host and hashes it there: what one writes without a kernel for it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor):
                raw_digest(tensor.detach().cpu())
        return output


@contextlib.contextmanager
def _finished() -> Iterator[None]:
    with HashDebugTrace(digests="device") as trace:
        yield
    trace.finish()


ARMS: Mapping[str, Arm] = {
    "no mode": contextlib.nullcontext,
    "no-op mode": NoOp,
    "hashbench": lambda: HashDebugTrace(digests="device"),
    "hashbench + finish": _finished,
    "DebugMode": debug_mode,
    "hash on the host": HashOnHost,
}


def _overhead(device: torch.device, asked: StepsAsked, makes: Mapping[str, gpu_workloads.Make]) -> Iterator[Table]:
    measured: dict[str, dict[str, list[float]]] = {}
    notes = [
        "Wall time from one synchronization to the next; medians of ratios within one repetition, in which every arm "
        "runs once in random order."
    ]
    wanted = {name: arm for name, arm in ARMS.items() if name == "no mode" or name in asked.arms}
    for name, make in makes.items():
        try:
            step = make(device)
            arms, left_out = _arms_that_fit(step, device, wanted)
            least = {"warm_ups": 0, "fewest": 1} if asked.small else {}
            timed = _synchronized(device)
            measured[name] = interleaved(step, seconds=asked.seconds, arms=arms, timed=timed, **least)
        except torch.OutOfMemoryError:
            notes.append(f"{name}: left out, the device has too little memory for it.")
            continue
        finally:
            step = None  # type: ignore[assignment]
            _empty_cache(device)
        notes += [f"{name}, {arm}: left out, it ran out of memory." for arm in left_out]
    yield _multiples(measured, tuple(notes))
    yield _goals(measured)


def _arms_that_fit(
    step: TrainingStep, device: torch.device, wanted: Mapping[str, Arm]
) -> tuple[dict[str, Arm], list[str]]:
    """The arms that do not run out of memory, and the others. The step without a mode must fit."""
    fitting: dict[str, Arm] = {}
    for name, arm in wanted.items():
        try:
            _synchronized(device)(arm, step)
        except torch.OutOfMemoryError:
            if name == "no mode":
                raise
            _empty_cache(device)
        else:
            fitting[name] = arm
    return fitting, [name for name in wanted if name not in fitting]


def _synchronized(device: torch.device) -> Callable[[Arm, TrainingStep], float]:
    def wait() -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    def timed(arm: Arm, step: TrainingStep) -> float:
        mode = arm()
        wait()
        begin = time.perf_counter()
        with mode:
            step()
        wait()
        return time.perf_counter() - begin

    return timed


def _empty_cache(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.empty_cache()


def _multiples(measured: Mapping[str, Mapping[str, Sequence[float]]], notes: tuple[str, ...]) -> Table:
    rows = []
    for workload, taken in measured.items():
        base = taken["no mode"]
        cells = [f"{ratio(taken[name], base):.2f}" if name in taken else _ABSENT for name in ARMS if name != "no mode"]
        rows.append((workload, f"{statistics.median(base) * 1e3:.1f} ms", *cells, len(base)))
    return Table(
        title="One training step under tracing, as a multiple of the untraced step",
        headers=("workload", *ARMS, "repetitions"),
        rows=tuple(rows),
        notes=notes,
    )


def _goals(measured: Mapping[str, Mapping[str, Sequence[float]]]) -> Table:
    rows: list[tuple[object, ...]] = []
    for workload, taken in measured.items():
        total = (_ABSENT, "", "")
        if {"hashbench", "no-op mode"} <= taken.keys():
            total = goal(ratio(taken["hashbench"], taken["no-op mode"]), goal=TOTAL_GOAL)
            if workload not in (
                gpu_workloads.GPT,
                gpu_workloads.SMALL_GPT,
            ):  # the goal is for the large step; the others tell where the host decides
                total = (total[0], "", "")
        less = (_ABSENT, "", "")
        if {"hashbench", "DebugMode"} <= taken.keys():
            figure, bound = times_less(taken)
            shown, wanted, reached = goal(figure, goal=ADDED_GOAL, at_most=False)
            less = (bound + shown, wanted, reached)
        rows.append((workload, *total, *less))
    return Table(
        title="Goals of tracing",
        headers=(
            *("workload", "hashbench / no-op mode", "goal", "reached"),
            *("added by DebugMode / added by hashbench", "goal", "reached"),
        ),
        rows=tuple(rows),
    )


if __name__ == "__main__":
    sys.exit(main())
