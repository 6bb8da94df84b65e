"""Whether a compiled run is accurate: the decision is torch's own (``torch._dynamo.utils.same``), as in the harness."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

TIGHT, LOOSE = 1e-4, 1e-3

_SUITES: Mapping[str, tuple[float, float]] = {"timm": (1e-2, 1e-3), "huggingface": (1e-2, 1e-3)}
"""Tolerance in training and in inference by suite (``benchmarks/dynamo/timm_models.py``, ``huggingface.py``)."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How the harness compares a model.

    Attributes:
        tolerance: absolute and relative.
        cosine: compare by cosine similarity, as where there is no float64 reference.
        options: further arguments of ``same``, by name.
    """

    tolerance: float
    cosine: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


def tolerance_of(suite: str, *, training: bool, device: str, dtype: str) -> Tolerance:
    """Return the tolerance of the harness: the suite's own, else that of ``benchmarks/dynamo/torchbench.py``."""
    for name, (in_training, in_inference) in _SUITES.items():
        if suite.startswith(name):
            return Tolerance(in_training if training else in_inference)
    if dtype in ("float16", "amp") or (training and device.partition(":")[0] in ("cuda", "xpu")):
        return Tolerance(LOOSE)
    return Tolerance(TIGHT)


def inaccurate(
    eager: Mapping[str, Any], compiled: Mapping[str, Any], reference: Mapping[str, Any] | None, tolerance: Tolerance
) -> tuple[str, ...]:
    """Return the names of results that ``same`` does not accept, in their order.

    Args:
        eager: results of the eager run by name.
        compiled: results of the compiled run.
        reference: results in float64; ``None``: none, and the cosine similarity decides.
        tolerance: of the comparison.
    """
    from torch._dynamo.utils import same

    said: list[str] = []

    def log(message: str, *args: object) -> None:
        said.append(message % args if args else message)

    if list(eager) != list(compiled):
        return tuple(sorted({*eager} ^ {*compiled})) or ("order of results",)
    failed = []
    for name, value in eager.items():
        exact = None if reference is None else reference.get(name)
        try:
            agrees = same(
                value,
                compiled[name],
                exact,
                cos_similarity=tolerance.cosine or exact is None,
                tol=tolerance.tolerance,
                log_error=log,
                **{"equal_nan": True, **tolerance.options},
            )
        except (RuntimeError, AssertionError):
            agrees = value == compiled[name] if not hasattr(value, "dtype") else False
        if not agrees:
            failed.append(name)
    return tuple(failed)


@dataclass(frozen=True, slots=True)
class Accepted:
    """A result that the harness accepts, and that is far off.

    Attributes:
        name: of the result.
        off: largest difference to eager mode over the largest magnitude; of results with a reference, to that.
        eager: the same of eager mode, to the reference; ``None``: there is none, and only cosine similarity decided.
    """

    name: str
    off: float
    eager: float | None = None


def by_cosine_only(
    eager: Mapping[str, Any], compiled: Mapping[str, Any], reference: Mapping[str, Any] | None, tolerance: Tolerance
) -> tuple[Accepted, ...]:
    """Return the results beyond the tolerance that ``same`` accepts by cosine similarity alone, worst first.

    A factor does not turn a vector.
    """
    from hashbench.core.run.distance import relative

    found = [
        Accepted(name, relative(other, value))
        for name, value, other in _beyond(eager, compiled, tolerance)
        if tolerance.cosine or (reference or {}).get(name) is None
    ]
    refused = inaccurate(eager, compiled, reference, tolerance) if found else ()
    return tuple(sorted((each for each in found if each.name not in refused), key=lambda each: -each.off))


def worse(
    eager: Mapping[str, Any], compiled: Mapping[str, Any], reference: Mapping[str, Any] | None
) -> Accepted | None:
    """Return the result of which the compiled model is farthest from float64, in units of what eager mode loses.

    ``None`` if it is no farther than a sum in another order may be
    (:func:`~hashbench.extensions.compiled.units.mistake_limit`).
    """
    from hashbench.core.run.distance import in_units, relative
    from hashbench.extensions.compiled.units import mistake_limit, smallest_unit

    exact = {name: value for name, value in (reference or {}).items() if _is_floating(value)}
    found: dict[str, tuple[float, Accepted]] = {}
    for name, value, other in _floating(eager, compiled):
        if name not in exact or exact[name].shape != value.shape or value.itemsize >= exact[name].itemsize:
            continue
        floor = smallest_unit(exact, value.dtype)
        apart = in_units(other, exact[name], value, floor=floor, own_dtype=value.dtype)
        if apart > mistake_limit(value.dtype):
            found[name] = apart, Accepted(name, relative(other, exact[name]), relative(value, exact[name]))
    return max(found.values(), key=lambda pair: pair[0])[1] if found else None


def _beyond(
    eager: Mapping[str, Any], compiled: Mapping[str, Any], tolerance: Tolerance
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the names and values of floating results that are apart by more than the tolerance."""
    import torch

    limit = tolerance.tolerance
    for name, value, other in _floating(eager, compiled):
        wide = value.detach().double(), other.detach().double()
        if not torch.allclose(*wide, atol=limit, rtol=limit, equal_nan=True):
            yield name, value, other


def _floating(eager: Mapping[str, Any], compiled: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield the names and values of floating results that have one shape."""
    for name, value in eager.items():
        other: Any = compiled.get(name)
        if _is_floating(value) and _is_floating(other) and value.shape == other.shape:
            yield name, value, other


def _is_floating(value: Any) -> bool:
    import torch

    strided = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return strided and value.is_floating_point() and value.numel() > 0


@dataclass(frozen=True, slots=True)
class Farther:
    """A result of which eager mode is farther from float64 than the compiled model.

    Attributes:
        name: of the result.
        eager: root mean square of eager mode's error over that of the reference.
        compiled: the same of the compiled model.
        largest: largest error of an element, of eager mode.
    """

    name: str
    eager: float
    compiled: float
    largest: float = 0.0


def farther(
    eager: Mapping[str, Any], compiled: Mapping[str, Any], reference: Mapping[str, Any] | None, tolerance: Tolerance
) -> Farther | None:
    """Return the result that eager mode loses most of, among those that are apart by more than the tolerance, and of
    which it is at least twice as far from float64 as the compiled model; ``None`` if there is none."""
    from torch._dynamo.utils import rmse

    found = []
    for name, value, other in _beyond(eager, compiled, tolerance):
        exact: Any = (reference or {}).get(name)
        if not _is_floating(exact) or value.shape != exact.shape:
            continue
        mine, theirs = float(rmse(exact, other)), float(rmse(exact, value))
        if theirs > 2 * mine:
            found.append(Farther(name, theirs, mine, float((value.double() - exact.double()).abs().max())))
    return max(found, key=lambda each: each.eager, default=None)
