"""Find the stage of the compiler that first changes what a model computes: one backend after another, in float64.

Rounding is out of the way there: every semantic mistake stays, and nothing else does. ``eager`` runs the graphs that
dynamo captured, ``aot_eager`` those of AOTAutograd, ``aot_eager_decomp_partition`` those after TorchInductor's
decompositions and the partitioning; ``inductor`` generates code. Only the last needs a C++ compiler.

What does not run in float64 is compared in the model's own dtype, in units of what random roundings change: a mistake
of some percent shows there too, one of the size of rounding does not.
"""

from __future__ import annotations

import enum
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hashbench.core.errors import named_line
from hashbench.core.run.distance import in_units
from hashbench.core.trace.arguments import tensors_in
from hashbench.core.trace.op_schema import plan_of
from hashbench.extensions.compiled.aot import Results, StepRunner
from hashbench.extensions.compiled.roundings import SEEDS, rounding_backend
from hashbench.extensions.compiled.units import EXPLAINED, mistake_limit, moved_by_one_unit, smallest_unit

STAGES: Mapping[str, str] = MappingProxyType(
    {
        "eager": "dynamo",
        "aot_eager": "aot_autograd",
        "aot_eager_decomp_partition": "decomposition",
        "inductor": "inductor",
    }
)
"""The stage that each backend adds to those before it."""

BACKENDS = ("eager", "aot_eager", "aot_eager_decomp_partition")
"""Those that need no C++ compiler."""

LIMIT = 1e-4
"""Distance from which a difference is a mistake, in units of what eager mode loses in its own dtype. Right programs
reach 5e-8, planted mistakes begin at 1e-3."""


class Semantic(enum.StrEnum):
    """Whether the compiler changes what a model computes, apart from rounding."""

    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Rung:
    """One backend of the ladder.

    Attributes:
        backend: of ``torch.compile``.
        error: largest distance of a result to eager mode, both in float64, in units of what eager mode loses in its own
            dtype; both in the own dtype, in units of what random roundings change; ``None`` if it was not measured.
        result: name of that result; of the first one that rounding does not explain, if the error is beyond the limit.
        seconds: for compilation and the step.
        raised: the exception on one line; empty if none.
        rounding: largest distance of that result if every op rounds at random, in the same units; ``None`` if it was
            not needed.
        limit: of the error.
    """

    backend: str
    error: float | None = None
    result: str = ""
    seconds: float = 0.0
    raised: str = ""
    rounding: float | None = None
    limit: float = LIMIT

    @property
    def beyond(self) -> bool:
        """Whether it differs from eager mode by more than the limit and by more than rounding explains."""
        return self.error is not None and self.error > self.limit and not _explains(self.rounding, self.error)


def _explains(rounding: float | None, error: float) -> bool:
    return rounding is not None and error <= EXPLAINED * rounding


@dataclass(frozen=True, slots=True)
class Ladder:
    """The backends that were run, in order, up to the first that computes something else or raises.

    Attributes:
        rungs: one for each.
        stage: that first computes something else or raises; empty if none does.
        semantic: no, only if TorchInductor's results were compared.
        reason: why it is unknown.
        dtype: in which the last one was compared; ``None``: the model's own.
    """

    rungs: tuple[Rung, ...]
    stage: str = ""
    semantic: Semantic = Semantic.UNKNOWN
    reason: str = ""
    dtype: torch.dtype | None = torch.float64

    @property
    def measured(self) -> bool:
        """Whether every backend was compared with eager mode, in one dtype or the other."""
        return bool(self.rungs) and all(rung.error is not None for rung in self.rungs)


@dataclass(frozen=True, slots=True, eq=False)
class _Eager:
    """Results of eager mode that backends are compared with.

    Attributes:
        dtype: of the runs; ``None``: the model's own.
        results: in that dtype.
        own: those of the model's own dtype; where that is the dtype of the runs, ``results`` moved by random roundings.
        own_dtype: of the model.
        limit: distance from which a difference is a mistake.
        lower: op that computed in a lower dtype although the model was cast to float64.
    """

    dtype: torch.dtype | None
    results: Results
    own: Results
    own_dtype: torch.dtype
    limit: float = LIMIT
    lower: str = ""

    def distances(self, results: Results, reference: Results | None = None) -> dict[str, float]:
        """Return the distance of every result to that of eager mode, or to another reference, by name."""
        reference = self.results if reference is None else reference
        floor = smallest_unit(self.results, self.own_dtype)
        found = {}
        for name in {**reference, **results}:  # what one side lacks is zero: eager mode leaves out gradients that are
            value, exact = results.get(name), reference.get(name)
            value = torch.zeros_like(reference[name]) if value is None else value
            exact = torch.zeros_like(value) if exact is None else exact
            found[name] = in_units(value, exact, self.own.get(name), floor=floor, own_dtype=self.own_dtype)
        return found


def climb(
    run: StepRunner,
    *,
    backends: Sequence[str] = BACKENDS,
    inductor: Results | Exception | None = None,
    dtype: torch.dtype | None = torch.float64,
) -> Ladder:
    """Return the ladder of a model, up to the first backend that computes something else than eager mode, or raises.

    Args:
        run: one step of the model; the same step each time it is called with the same arguments, also in eager mode.
        backends: in order; with ``inductor`` among them, that is compiled and run too.
        inductor: what ``run("inductor", dtype)`` returned or raised, if it has been run elsewhere: the last rung.
        dtype: float64, or ``None``: only the model's own.

    Nothing that ``run`` raises leaves this function. Where eager mode or a backend raises in float64 only, backends are
    compared in the model's own dtype.
    """
    if dtype is None:
        return _in_own_dtype(run, backends, inductor, "")
    try:
        eager = _eager(run)
    except Exception as error:
        return _in_own_dtype(run, backends, None, f"eager mode does not run in float64: {named_line(error, limit=200)}")
    ladder = _climbed(run, backends, inductor, eager)
    raised = next((rung for rung in ladder.rungs if rung.raised), None)
    if ladder.stage or raised is None:
        return ladder
    return _in_own_dtype(run, backends, None, f"{raised.backend} raises in float64 only: {raised.raised}")


def _climbed(run: StepRunner, backends: Sequence[str], inductor: Results | Exception | None, eager: _Eager) -> Ladder:
    rungs: list[Rung] = []
    rounding = functools.cache(lambda: _rounding(run, eager))
    given = [] if inductor is None else ["inductor"]
    for backend in [*(name for name in backends if name not in given), *given]:
        rung = _measured(run, backend, eager, rounding, inductor if backend in given else None)
        rungs.append(rung)
        stage = STAGES.get(backend.partition("@")[0], backend)
        if rung.beyond:
            known = Semantic.UNKNOWN if eager.dtype is None else Semantic.YES
            return Ladder(tuple(rungs), stage, known, dtype=eager.dtype)
        if rung.raised and (eager.dtype is None or _raises(run, backend)):
            return Ladder(tuple(rungs), stage, reason=f"{backend}: {rung.raised}", dtype=eager.dtype)
    return _same(tuple(rungs), eager)


def _same(rungs: tuple[Rung, ...], eager: _Eager) -> Ladder:
    """Conclude from rungs none of which is beyond."""
    raised = [rung for rung in rungs if rung.raised]
    explained = [rung for rung in rungs if rung.error is not None and rung.error > rung.limit]
    if raised:
        reason = f"{raised[0].backend} raises in float64 only: {raised[0].raised}"
    elif eager.dtype is None:
        reason = ""
    elif explained:
        lower = f", and {eager.lower} computes in a lower dtype" if eager.lower else ""
        reason = f"{explained[0].result} differs by no more than rounding explains in float64{lower}"
    elif not rungs or rungs[-1].backend.partition("@")[0] != "inductor":
        reason = "inductor was not compared in float64"
    else:
        return Ladder(rungs, semantic=Semantic.NO)
    return Ladder(rungs, reason=reason, dtype=eager.dtype)


def _in_own_dtype(
    run: StepRunner, backends: Sequence[str], inductor: Results | Exception | None, reason: str
) -> Ladder:
    """Compare in the model's own dtype; ``reason``: why not in float64. Where eager mode does not run there either,
    nothing is measured."""
    try:
        ladder = _climbed(run, backends, inductor, _moved_by_rounding(run))
    except Exception as error:
        return Ladder((), reason=reason or named_line(error, limit=200), dtype=None)
    return replace(ladder, reason="; ".join(dict.fromkeys(filter(None, (reason, ladder.reason)))))


def _eager(run: StepRunner) -> _Eager:
    with _LowerDtype() as watch:
        float64 = run(None, torch.float64)
    own = run(None, None)
    own_dtype = _dtype_of(own)
    if own_dtype == torch.float64:  # nothing is lost to compare with
        own, own_dtype = run(None, torch.float32), torch.float32
    return _Eager(torch.float64, float64, own, own_dtype, lower=watch.op)


def _moved_by_rounding(run: StepRunner) -> _Eager:
    """Return eager mode in the model's own dtype, and what it becomes if every op rounds at random.

    The graphs of dynamo that round are held against the same graphs: they may be wrong themselves.
    """
    results = run(None, None)
    own_dtype = _dtype_of(results)
    own = {name: moved_by_one_unit(value) for name, value in results.items()}
    try:
        captured, rounded = run("eager", None), run(rounding_backend(0), None)
    except Exception:
        captured, rounded = {}, {}
    for name, value in results.items():
        there = [found[name] for found in (captured, rounded) if name in found and found[name].shape == value.shape]
        if len(there) == 2 and (value.is_floating_point() or value.is_complex()):
            own[name] = (value + (there[1] - there[0])).detach()
    return _Eager(None, results, own, own_dtype, mistake_limit(own_dtype))


def _dtype_of(results: Results) -> torch.dtype:
    return next((tensor.dtype for tensor in results.values() if tensor.is_floating_point()), torch.float32)


def _measured(
    run: StepRunner,
    backend: str,
    eager: _Eager,
    distances_by_rounding: Callable[[], Mapping[str, float]],
    given: Results | Exception | None,
) -> Rung:
    began = time.perf_counter()
    results, raised = given, named_line(given, limit=200) if isinstance(given, Exception) else ""
    try:
        results = run(backend, eager.dtype) if given is None else given
    except Exception as error:
        raised = named_line(error, limit=200)
    seconds = 0.0 if given is not None else time.perf_counter() - began
    rung = Rung(backend, seconds=seconds, raised=raised, limit=eager.limit)
    if results is None or isinstance(results, Exception):
        return rung
    distances = eager.distances(results)
    worst = max(distances, key=lambda name: distances[name], default="")
    if distances.get(worst, 0.0) <= eager.limit:
        return replace(rung, error=distances.get(worst, 0.0), result=worst)
    rounding = distances_by_rounding()
    unexplained = [
        name for name, apart in distances.items() if apart > eager.limit and not _explains(rounding.get(name), apart)
    ]
    worst = max(unexplained, key=lambda name: distances[name], default=worst)
    return replace(rung, error=distances[worst], result=worst, rounding=rounding.get(worst))


def _rounding(run: StepRunner, eager: _Eager) -> dict[str, float]:
    """Return the distance of every result of dynamo's graphs to the same graphs if each op rounds at random; empty if
    that cannot be run."""
    found: dict[str, float] = {}
    try:
        reference = run("eager", eager.dtype)
        rounded = [run(rounding_backend(seed), eager.dtype) for seed in SEEDS]
    except Exception:
        return {}
    for results in rounded:
        distances = eager.distances(results, reference)
        found = {name: max(apart, found.get(name, 0.0)) for name, apart in distances.items()}
    return found


def _raises(run: StepRunner, backend: str) -> bool:
    try:
        run(backend, None)
    except Exception:
        return True
    return False


class _LowerDtype(TorchDispatchMode):
    """Keep the name of the first op that reads float64 and returns a floating-point tensor of a lower dtype."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.op = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.op and plan_of(func).fresh:
            lower = [tensor for tensor in tensors_in(result) if tensor.is_floating_point() and tensor.itemsize < 8]
            if lower and any(tensor.dtype == torch.float64 for tensor in tensors_in([args, kwargs or {}])):
                self.op = str(func)
        return result
