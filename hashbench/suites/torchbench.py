"""The ``torchbench`` suite: the models of pytorch/benchmark, where its package ``torchbenchmark`` can be imported.

Which models there are is what its own registry says; ``models/torchbench.csv`` adds what is known of them: the batch
size of an accuracy run in dynamo, and what cannot run.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hashbench.records import ModelSpec
from hashbench.suites.python_suites import offered

if TYPE_CHECKING:
    from hashbench.run.workload import Workload

BATCH_SIZE = 4
"""Of an accuracy run in dynamo, for models that the data do not know."""


def catalog(known: Sequence[ModelSpec]) -> tuple[ModelSpec, ...]:
    """The models of the installed ``torchbenchmark``, sorted by name, each with what is ``known`` of it.

    Raises:
        HashbenchError: its import fails or takes too long.
    """
    facts = {spec.name: spec for spec in known}
    models = offered(f"{__name__}:registered", "", "torchbench", hint="Try: python -c 'import torchbenchmark'")
    names = sorted(model["name"] for model in models)
    return tuple(facts.get(name) or ModelSpec(suite="torchbench", name=name, batch_size=BATCH_SIZE) for name in names)


def registered(_argument: str) -> list[dict[str, Any]]:
    """The names in the registry of ``torchbenchmark``, which is imported here."""
    registry = importlib.import_module("torchbenchmark")
    return [{"name": Path(path).name} for path in registry._list_model_paths()]


def load(spec: ModelSpec, *, batch_size: int, mode: str) -> Workload:
    """Build a model and its example inputs as its own benchmark does. The loss is the harness's own, as in dynamo.

    ``batch_size`` is for the models that can be given one; the others have their own.

    Raises:
        NotImplementedError: the model's folder has no class ``Model``.
        Exception: whatever the model raises.
    """
    from hashbench.run.workload import Workload

    kind: Any = getattr(importlib.import_module(f"torchbenchmark.models.{spec.name}"), "Model", None)
    if kind is None:
        raise NotImplementedError(f"torchbenchmark.models.{spec.name} has no class Model")
    settable = getattr(kind, "ALLOW_CUSTOMIZE_BSIZE", True)
    test = "train" if mode == "training" else "eval"
    benchmark = kind(test=test, device="cpu", batch_size=batch_size if settable else None, extra_args=[])
    module, inputs = benchmark.get_module()
    return Workload(module=module, inputs=inputs)
