"""The suites ``timm`` and ``torchbench``: models of the packages ``timm`` and ``torchbenchmark`` (pytorch/benchmark).

Everything random is drawn from torch's global generator, so a seed set before makes it reproducible. Nothing here
imports torch before a model is built.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hashbench.core.records import ModelSpec
from hashbench.core.suites.python_suites import offered

if TYPE_CHECKING:
    from torch import Tensor

    from hashbench.core.run.workload import Workload

TORCHBENCH_BATCH_SIZE = 4
"""Of an accuracy run in dynamo, for models that ``models/torchbench.csv`` does not know."""


def load_timm(spec: ModelSpec, *, batch_size: int, mode: str) -> Workload:
    """Build a model with random weights, normalised images of random bytes as in dynamo, and for training their labels.

    ``spec.arguments`` go to ``timm.create_model``. The loss is cross entropy of the first output; a model without a
    classifier keeps the harness's own loss.
    """
    import timm
    import torch

    from hashbench.core.run.workload import Workload

    module: Any = timm.create_model(spec.name, pretrained=False, **spec.arguments)
    pixels = torch.randint(256, (batch_size, *spec.input_shape)).float()
    inputs = ((pixels - pixels.mean()) / pixels.std(),)
    if mode != "training" or not module.num_classes:
        return Workload(module=module, inputs=inputs)
    labels = torch.randint(module.num_classes, (batch_size,))
    return Workload(module=module, inputs=inputs, loss=partial(_cross_entropy, target=labels))


def _cross_entropy(output: Tensor | Sequence[Any], *, target: Tensor) -> Tensor:
    from torch import Tensor
    from torch.nn import functional

    scores: Tensor = output if isinstance(output, Tensor) else output[0]
    loss: Tensor = functional.cross_entropy(scores, target.to(scores.device))
    return loss


def torchbench_models(known: Sequence[ModelSpec]) -> tuple[ModelSpec, ...]:
    """List the models in the registry of ``torchbenchmark``, sorted by name, with the facts of the ``known`` ones.

    Raises:
        HashbenchError: its import fails or takes too long.
    """
    facts = {spec.name: spec for spec in known}
    models = offered(f"{__name__}:registered", "", "torchbench", hint="Try: python -c 'import torchbenchmark'")
    names = sorted(model["name"] for model in models)
    new = partial(ModelSpec, suite="torchbench", batch_size=TORCHBENCH_BATCH_SIZE)
    return tuple(facts.get(name) or new(name=name) for name in names)


def registered(_argument: str) -> list[dict[str, Any]]:
    """Import ``torchbenchmark`` and list the names in its registry."""
    registry = importlib.import_module("torchbenchmark")
    return [{"name": Path(path).name} for path in registry._list_model_paths()]


def load_torchbench(spec: ModelSpec, *, batch_size: int, mode: str) -> Workload:
    """Build a model and its example inputs as its own benchmark does. The loss is the harness's own, as in dynamo.

    ``batch_size`` is for the models that can be given one; the others have their own.

    Raises:
        NotImplementedError: the model's folder has no class ``Model``.
        Exception: whatever the model raises.
    """
    from hashbench.core.run.workload import Workload

    kind: Any = getattr(importlib.import_module(f"torchbenchmark.models.{spec.name}"), "Model", None)
    if kind is None:
        raise NotImplementedError(f"torchbenchmark.models.{spec.name} has no class Model")
    settable = getattr(kind, "ALLOW_CUSTOMIZE_BSIZE", True)
    test = "train" if mode == "training" else "eval"
    benchmark = kind(test=test, device="cpu", batch_size=batch_size if settable else None, extra_args=[])
    module, inputs = benchmark.get_module()
    return Workload(module=module, inputs=inputs)
