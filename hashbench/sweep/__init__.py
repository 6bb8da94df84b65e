"""Many models: which run, when, where, and what becomes of those that never answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hashbench.records import ModelSpec, RunOptions
    from hashbench.sweep.executors import Executor


def _on_ray(specs: Sequence[ModelSpec], options: RunOptions, **how: Any) -> Executor:
    from hashbench.sweep.executors.ray import RayExecutor

    executor = RayExecutor(specs, options, **how)
    executor.connect()
    return executor


LOCAL = "local"

EXECUTORS: Mapping[str, Callable[..., Executor] | None] = MappingProxyType({LOCAL: None, "ray": _on_ray})
"""By the word after ``--executor``: called with the models and their options, with ``jobs`` (``None``: as many as it
can run), ``preload`` (what its workers import or call) and ``cluster``, returns the executor, connected. ``None`` for
worker processes of this machine."""
