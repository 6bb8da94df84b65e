"""What tracing costs: one training step with and without it, beside a mode that does nothing and beside DebugMode."""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.table import Table, against
from benchmarks.workloads import WORKLOADS
from hashbench import HashDebugTrace

Arm = Callable[[], AbstractContextManager[Any]]

TOTAL_GOAL, ADDED_GOAL = 1.25, 5.0
NATIVE_GOAL, NATIVE_ADDED_GOAL = {"BERT-like, 4 layers, 128 wide, 1x32": 1.15}, 20.0  # all other workloads: 1.10
NOISE = 0.01  # of a step: less than this cannot be told from nothing
_WARM_UPS, _FEWEST = 3, 5
_FEWEST_STEPS = 15  # of five, as a step of a second had, the ratio of what two arms add said little


class NoOp(TorchDispatchMode):
    """A mode as users write it, that does nothing: what Python dispatch itself costs."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class LeanNoOp(NoOp):
    """The same with the switch that ``HashDebugTrace`` uses: without the frame of ``torch._disable_dynamo``."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def finished_trace() -> Iterator[None]:
    """Full tracing, and the raw records made into a :class:`~hashbench.core.records.Trace` afterwards."""
    with HashDebugTrace(tracer="python") as trace:
        yield
    trace.finish()


def _native() -> AbstractContextManager[Any]:
    return HashDebugTrace(tracer="native")


@contextlib.contextmanager
def finished_native_trace() -> Iterator[None]:
    """The same by the native tracer."""
    with HashDebugTrace(tracer="native") as trace:
        yield
    trace.finish()


@contextlib.contextmanager
def debug_mode(**options: bool) -> Iterator[None]:
    """torch's own ``DebugMode`` with its hash of every output, on a torch that has it."""
    from torch.utils._debug_mode import DebugMode

    with DebugMode(**options), DebugMode.log_tensor_hashes(hash_fn="hash_tensor"):
        yield


def _stack_and_modules() -> AbstractContextManager[None]:
    return debug_mode(record_stack_trace=True, record_nn_module=True)


ARMS: Mapping[str, Arm] = {
    "no mode": contextlib.nullcontext,
    "no-op mode": NoOp,
    "lean no-op mode": LeanNoOp,
    "hashbench": lambda: HashDebugTrace(tracer="python"),
    "hashbench + finish": finished_trace,
    "native": _native,
    "native + finish": finished_native_trace,
    "DebugMode": debug_mode,
    "DebugMode + stack, modules": _stack_and_modules,
}


def measure(*, seconds: float) -> list[Table]:
    """One row for each workload: time as a multiple of the untraced step, then the two goals.

    Args:
        seconds: measure each workload for about so long, at least fifteen repetitions.
    """
    torch.manual_seed(0)
    measured = {name: interleaved(make(), seconds=seconds, fewest=_FEWEST_STEPS) for name, make in WORKLOADS.items()}
    return [multiples(measured), _goals(measured), _native_goals(measured)]


def _timed(arm: Arm, step: Callable[[], object]) -> float:
    # CPU time where one thread works: time that other processes take is not counted. With several threads, waiting for
    # each other is part of the cost.
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    mode = arm()
    begin = clock()
    with mode:
        step()
    return clock() - begin


def interleaved(
    step: Callable[[], object],
    *,
    seconds: float,
    arms: Mapping[str, Arm] = ARMS,
    timed: Callable[[Arm, Callable[[], object]], float] = _timed,
    warm_ups: int = _WARM_UPS,
    fewest: int = _FEWEST,
) -> dict[str, list[float]]:
    """Seconds by arm, one entry a repetition. Each repetition runs every arm once, in random order, so that whatever
    else happens on the machine meets all arms alike. ``timed`` runs one arm and returns its seconds; ``fewest``
    repetitions at least count, after ``warm_ups`` that do not."""
    order, draw = list(arms), random.Random(0)
    taken: dict[str, list[float]] = {name: [] for name in arms}
    end = 0.0
    for repetition in range(100_000):
        if repetition == warm_ups:
            end = time.perf_counter() + seconds
        draw.shuffle(order)
        for name in order:
            duration = timed(arms[name], step)
            if repetition >= warm_ups:
                taken[name].append(duration)
        if repetition >= warm_ups + fewest - 1 and time.perf_counter() > end:
            break
    return taken


def ratio(times: Sequence[float], base: Sequence[float]) -> float:
    """The median over the repetitions of what ``times`` are of ``base``."""
    return statistics.median(one / other for one, other in zip(times, base, strict=True))


def added(taken: Mapping[str, Sequence[float]], name: str, to: str = "no mode") -> float:
    """Seconds that an arm adds to another, median over the repetitions."""
    return statistics.median(one - base for one, base in zip(taken[name], taken[to], strict=True))


def times_less(taken: Mapping[str, Sequence[float]], arm: str = "hashbench") -> tuple[float, str]:
    """How many times more DebugMode adds than an arm, and ``>`` where what that arm adds is lost in the noise."""
    noise = NOISE * statistics.median(taken["no mode"])
    ours = added(taken, arm)
    return added(taken, "DebugMode") / max(noise, ours), "> " if ours < noise else ""


def multiples(
    measured: Mapping[str, Mapping[str, Sequence[float]]],
    *,
    title: str = "One training step under tracing, as a multiple of the untraced step",
) -> Table:
    """One row for each workload: the median step without a mode, and the other arms as multiples of it."""
    rows = []
    for workload, taken in measured.items():
        base = taken["no mode"]
        multiples = [f"{ratio(times, base):.2f}" for name, times in taken.items() if name != "no mode"]
        rows.append((workload, f"{statistics.median(base) * 1e3:.1f} ms", *multiples, len(base)))
    return Table(
        title=title,
        headers=("workload", *next(iter(measured.values())), "repetitions"),
        rows=tuple(rows),
        notes=("Medians of ratios within one repetition; in each, every arm runs once in random order.",),
    )


def _goals(measured: Mapping[str, Mapping[str, Sequence[float]]]) -> Table:
    rows: list[tuple[object, ...]] = []
    for workload, taken in measured.items():
        total = ratio(taken["hashbench"], taken["no-op mode"])
        lean = ratio(taken["hashbench"], taken["lean no-op mode"])
        less, bound = times_less(taken)
        figure, goal, reached = against(less, goal=ADDED_GOAL, at_most=False)
        rows.append(
            (
                workload,
                *against(total, goal=TOTAL_GOAL),
                f"{lean:.3g}",
                f"{bound}{figure}",
                goal,
                reached,
            )
        )
    return Table(
        title="Goals of tracing",
        headers=(
            *("workload", "hashbench / no-op mode", "goal", "reached", "hashbench / lean no-op mode"),
            *("added by DebugMode / added by hashbench", "goal", "reached"),
        ),
        rows=tuple(rows),
    )


def _native_goals(measured: Mapping[str, Mapping[str, Sequence[float]]]) -> Table:
    rows: list[tuple[object, ...]] = []
    for workload, taken in measured.items():
        less, bound = times_less(taken, "native")
        figure, goal, reached = against(less, goal=NATIVE_ADDED_GOAL, at_most=False)
        total, finished = (ratio(taken[name], taken["no mode"]) for name in ("native", "native + finish"))
        first = against(total, goal=NATIVE_GOAL.get(workload, 1.1))
        rows.append((workload, *first, f"{finished:.3g}", f"{bound}{figure}", goal, reached))
    return Table(
        title="Goals of the native tracer",
        headers=(
            *("workload", "native / no mode", "goal", "reached", "native + finish / no mode"),
            *("added by DebugMode / added by native", "goal", "reached"),
        ),
        rows=tuple(rows),
    )
