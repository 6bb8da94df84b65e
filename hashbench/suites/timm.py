"""The ``timm`` suite: image models of ``models/timm.csv`` with random weights.

Everything here is drawn from torch's global generator, so a seed set before :func:`load` makes it reproducible.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hashbench.records import ModelSpec
from hashbench.run.workload import Workload


def load(spec: ModelSpec, *, batch_size: int, mode: str) -> Workload:
    """Build a model with random weights, normalised images of random bytes as in dynamo, and for training their labels.

    ``spec.arguments`` go to ``timm.create_model``. The loss is cross entropy of the first output; a model without a
    classifier keeps the harness's own loss.
    """
    import timm

    module: Any = timm.create_model(spec.name, pretrained=False, **spec.arguments)
    pixels = torch.randint(256, (batch_size, *spec.input_shape)).float()
    inputs = ((pixels - pixels.mean()) / pixels.std(),)
    if mode != "training" or not module.num_classes:
        return Workload(module=module, inputs=inputs)
    labels = torch.randint(module.num_classes, (batch_size,))
    return Workload(module=module, inputs=inputs, loss=partial(_cross_entropy, target=labels))


def _cross_entropy(output: Tensor | Sequence[Any], *, target: Tensor) -> Tensor:
    scores: Tensor = output if isinstance(output, Tensor) else output[0]
    loss: Tensor = functional.cross_entropy(scores, target.to(scores.device))
    return loss
