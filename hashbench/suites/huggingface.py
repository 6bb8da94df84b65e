"""The ``huggingface`` suite: models of transformers with random weights, built from constants without any network.

Which models there are is data: ``models/huggingface.csv``, and ``models/huggingface_tiny.csv`` with the same names and
configurations of few narrow layers. The column ``arguments`` is a JSON object:

* ``class``: the class in transformers; absent where the model has its name,
* ``config``: what the configuration of that class is made with; what is absent keeps the default of transformers,
* whatever the task asks for, see :data:`hashbench.suites.huggingface_inputs.TASKS`.

Everything is drawn from torch's global generator, so a seed set before :func:`load` makes it reproducible.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hashbench.errors import HashbenchError
from hashbench.processes import variables
from hashbench.records import ModelSpec
from hashbench.run.workload import Workload
from hashbench.suites.huggingface_inputs import TASKS, Request

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
"""What tells transformers and its hub client to look for nothing on the network."""


def load(spec: ModelSpec, *, batch_size: int, mode: str) -> Workload:
    """Build a model with random weights and the inputs of its task; for training with labels and the model's own loss.

    Args:
        spec: a line of ``models/huggingface.csv``.
        batch_size: number of sequences, recordings or images.
        mode: ``training`` or ``inference``; labels are among the inputs in training only.

    Raises:
        HashbenchError: ``spec.task`` is none of ``TASKS``, or the installed transformers lacks the class.
        Exception: whatever transformers raises for this model.
    """
    if spec.task not in TASKS:
        raise HashbenchError(
            f"{spec.name} has the unknown task {spec.task!r}",
            consequence="no inputs can be made for it",
            tip=f"Known tasks: {', '.join(TASKS)}.",
        )
    training = mode == "training"
    with variables(OFFLINE):  # they are read when transformers is imported
        module = _build(spec)
    request = Request(module=module, spec=spec, batch_size=batch_size, training=training)
    return Workload(module=module, inputs=TASKS[spec.task](request), loss=_own_loss if training else None)


def _build(spec: ModelSpec) -> nn.Module:
    import transformers

    name = spec.arguments.get("class", spec.name)
    kind: Any = getattr(transformers, name, None)
    if kind is None:
        raise HashbenchError(
            f"transformers {transformers.__version__} has no {name}",
            consequence=f"{spec.name} cannot be built",
            tip="Install another version: pip install --upgrade transformers",
        )
    module: nn.Module = kind(kind.config_class(**spec.arguments.get("config", {})))
    for part in module.modules():  # a decoder may have a configuration of its own
        config: Any = getattr(part, "config", None)
        if hasattr(config, "use_cache"):
            # As in dynamo: the cache of keys and values is for generating, and no step here generates.
            config.use_cache = False
    return module


def _own_loss(output: Any) -> Tensor:
    loss: Tensor = output.loss
    return loss
