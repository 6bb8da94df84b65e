"""Suites that installed packages bring: entry points of the group ``hashbench.suites``.

The entry point's name is the suite's; it points to a module, or to an object, with ``MODELS`` or functions marked with
``@hashbench.model``, or to such a dict itself.
"""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class PackageSuite:
    """The suite ``name`` of an installed package; a :class:`~hashbench.suites.catalog.Suite`. Importing the package may
    take ``seconds``."""

    name: str
    seconds: float = listing.LISTING_SECONDS

    def catalog(self) -> tuple[ModelSpec, ...]:
        """The models, sorted by name.

        Raises:
            HashbenchError: two packages bring it, or it fails on import, hangs, or offers no usable models.
        """
        point = _point(self.name)
        hint = f"Try: {_trial(point)}"
        models = listing.offered("plugins", self.name, suite=_called(point), hint=hint, seconds=self.seconds)
        return tuple(sorted((ModelSpec(suite=self.name, **facts) for facts in models), key=lambda spec: spec.name))

    def load(self, spec: ModelSpec, *, batch_size: int | None, mode: str) -> Workload:  # noqa: ARG002 - a Suite's
        """Import the package here and build one model.

        Raises:
            HashbenchError: it has no such model, or its function returned neither a pair nor a ``Workload``.
            Exception: whatever the package or the function raises.
        """
        point = _point(self.name)
        models = functions.functions_in(point.load())
        if spec.name not in models:
            tip = f"See the names with: hashbench list --suite {self.name}"
            raise HashbenchError(f"no model is named {spec.name!r}", consequence=f"looked in {_called(point)}", tip=tip)
        what = f"the function of {spec.name!r} in {point.value}"
        return functions.build(models[spec.name], batch_size=batch_size, what=what)


def offered(suite: str) -> list[dict[str, Any]]:
    """What the suite offers; imports its package here."""
    return functions.offered(_point(suite).load())


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
