"""Suites that installed packages bring: entry points of the group ``hashbench.suites``.

The entry point's name is the suite's; it points to a module, or to an object, with ``MODELS`` or functions marked with
``@hashbench.model``, or to such a dict itself.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from hashbench.errors import HashbenchError
from hashbench.records import ModelSpec
from hashbench.suites import functions, listing

if TYPE_CHECKING:
    from hashbench.run.workload import Workload

GROUP = "hashbench.suites"


def suite_names() -> tuple[str, ...]:
    """Names of all suites that installed packages bring, sorted. Imports none of these packages."""
    return tuple(sorted({point.name for point in entry_points(group=GROUP)}))


def catalog(suite: str, *, seconds: float = listing.LISTING_SECONDS) -> tuple[ModelSpec, ...]:
    """The models of a package's suite, sorted by name; ``seconds`` is the time limit for importing it.

    Raises:
        HashbenchError: two packages bring it, or it fails on import, hangs, or offers no usable models.
    """
    point = _point(suite)
    found = listing.offered("plugins", suite, suite=_called(point), hint=f"Try: {_trial(point)}", seconds=seconds)
    return tuple(sorted((ModelSpec(suite=suite, **facts) for facts in found), key=lambda spec: spec.name))


def offered(suite: str) -> list[dict[str, Any]]:
    """What the suite offers; imports its package here."""
    return functions.offered(_point(suite).load())


def build(suite: str, name: str, *, batch_size: int | None = None) -> Workload:
    """Import the package of a suite here and build one model.

    Raises:
        HashbenchError: it has no such model, or its function returned neither a pair nor a ``Workload``.
        Exception: whatever the package or the function raises.
    """
    point = _point(suite)
    models = functions.functions_in(point.load())
    if name not in models:
        tip = f"See the names with: hashbench list --suite {suite}"
        raise HashbenchError(f"no model is named {name!r}", consequence=f"looked in {_called(point)}", tip=tip)
    return functions.build(models[name], batch_size=batch_size, what=f"the function of {name!r} in {point.value}")


def _point(suite: str) -> EntryPoint:
    points = list({point.value: point for point in entry_points(group=GROUP, name=suite)}.values())
    if len(points) == 1:
        return points[0]
    if not points:
        raise HashbenchError(f"no installed package brings the suite {suite!r}", tip="Install it again.")
    raise HashbenchError(
        f"{len(points)} installed packages bring a suite {suite!r}",
        consequence=", ".join(sorted(_package(point) for point in points)),
        tip="Uninstall all but one.",
    )


def _called(point: EntryPoint) -> str:
    return f"{point.name} of the package {_package(point)}"


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.module


def _trial(point: EntryPoint) -> str:
    return f"python -c 'import {point.module}'"
