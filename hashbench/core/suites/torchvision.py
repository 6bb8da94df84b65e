"""The ``torchvision`` suite: models of ``models/torchvision.csv`` with random weights, and inputs, targets and a loss
for each task."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchvision import models

from hashbench.core.records import ModelSpec
from hashbench.core.run.workload import Workload
from hashbench.core.suites.csv_file import task_of

Loss = Callable[[Any], Tensor]
Task = Callable[..., Workload]

IMAGENET_CLASSES = 1000
KINETICS_CLASSES = 400
VOC_CLASSES = 21
COCO_CLASSES = 91
PERSON_KEYPOINTS = 17
BOXES_PER_IMAGE = 3

AUXILIARY_WEIGHT = 0.4
"""Weight of auxiliary heads in the loss: GoogLeNet's paper has 0.3, Inception v3 and segmentation 0.4 to 0.5."""

FLOW_DECAY = 0.8
"""Weight of an earlier flow estimate relative to the next one: equation 7 of the RAFT paper (arXiv 2003.12039)."""


def load(spec: ModelSpec, *, batch_size: int, mode: str) -> Workload:
    """Build a model with random weights, its inputs and, for training, the loss of its task.

    ``batch_size`` counts images, clips or image pairs. Detection has targets among its inputs in training only.

    Raises:
        HashbenchError: ``spec.task`` is none of :data:`TASKS`.
        Exception: whatever torchvision raises for this model.
    """
    task = task_of(spec, TASKS)
    return task(_build(spec), spec=spec, batch_size=batch_size, training=mode == "training")


def _build(spec: ModelSpec) -> nn.Module:
    builder = models.get_model_builder(spec.name)
    arguments: dict[str, Any] = {"weights": None, **spec.arguments}
    # Left out, weights_backbone downloads ImageNet weights although weights is None.
    if "weights_backbone" in inspect.signature(builder).parameters:
        arguments["weights_backbone"] = None
    with warnings.catch_warnings():
        # Every quantized model warns about observers, defaults and the age of eager quantization: nothing to act upon.
        warnings.filterwarnings("ignore", module=r"torch\.ao\.|torchvision\.models\.quantization\.")
        module: nn.Module = builder(**arguments)
    return module


def _labelled(
    module: nn.Module, *, spec: ModelSpec, batch_size: int, training: bool, classes: int, pixels: bool = False
) -> Workload:
    """One class for each image or clip, or with ``pixels`` for each of those: cross entropy."""
    inputs = (torch.randn(batch_size, *spec.input_shape),)
    if not training:
        return Workload(module=module, inputs=inputs)
    labelled = (batch_size, *spec.input_shape[1:]) if pixels else (batch_size,)
    labels = torch.randint(spec.arguments.get("num_classes", classes), labelled)
    return Workload(module=module, inputs=inputs, loss=partial(_cross_entropy, target=labels))


def _cross_entropy(output: Any, *, target: Tensor) -> Tensor:
    main, *auxiliary = _heads(output)
    target = target.to(main.device)
    loss: Tensor = functional.cross_entropy(main, target)
    for head in auxiliary:
        loss = loss + AUXILIARY_WEIGHT * functional.cross_entropy(head, target)
    return loss


def _heads(output: Any) -> list[Tensor]:
    """The main output and then the auxiliary ones, which exist in training only."""
    if isinstance(output, Tensor):
        return [output]
    heads = output.values() if isinstance(output, Mapping) else output
    return [head for head in heads if head is not None]


def _detection(
    module: nn.Module,
    *,
    spec: ModelSpec,
    batch_size: int,
    training: bool,
    masks: bool = False,
    keypoints: bool = False,
) -> Workload:
    """Boxes with classes, and masks or keypoints where the model has that head: the sum of the model's own losses."""
    images = [torch.rand(spec.input_shape) for _ in range(batch_size)]
    if not training:
        return Workload(module=module, inputs=(images,))
    # The keypoint model knows two classes: background and person.
    classes = spec.arguments.get("num_classes", 2 if keypoints else COCO_CLASSES)
    targets = [_target(spec.input_shape, classes=classes, masks=masks, keypoints=keypoints) for _ in images]
    return Workload(module=module, inputs=(images, targets), loss=_sum_of_losses)


def _sum_of_losses(output: Mapping[str, Tensor]) -> Tensor:
    return torch.stack(list(output.values())).sum()


def _target(shape: Sequence[int], *, classes: int, masks: bool, keypoints: bool) -> dict[str, Tensor]:
    """What COCO says of one image: ``boxes`` [N, 4] in pixels with x1 < x2 and y1 < y2, ``labels`` [N] from 1."""
    size = torch.tensor([shape[-1], shape[-2]], dtype=torch.float32)
    corner = torch.rand(BOXES_PER_IMAGE, 2) * size / 2
    extent = (torch.rand(BOXES_PER_IMAGE, 2) + 1) * size / 4
    boxes = torch.cat([corner, corner + extent], dim=1)
    target = {"boxes": boxes, "labels": torch.randint(1, classes, (BOXES_PER_IMAGE,))}
    if masks:
        target["masks"] = _filled(boxes, height=shape[-2], width=shape[-1])
    if keypoints:
        points = corner[:, None] + torch.rand(BOXES_PER_IMAGE, PERSON_KEYPOINTS, 2) * extent[:, None]
        visible = torch.ones(BOXES_PER_IMAGE, PERSON_KEYPOINTS, 1)
        target["keypoints"] = torch.cat([points, visible], dim=2)
    return target


def _filled(boxes: Tensor, *, height: int, width: int) -> Tensor:
    """A mask [N, H, W] of uint8 for each box, one inside it."""
    rows = torch.arange(height)[None, :, None]
    columns = torch.arange(width)[None, None, :]
    left, top, right, bottom = boxes.T[..., None, None]
    inside: Tensor = (columns >= left) & (columns < right) & (rows >= top) & (rows < bottom)
    return inside.to(torch.uint8)


def _optical_flow(module: nn.Module, *, spec: ModelSpec, batch_size: int, training: bool) -> Workload:
    """Two images, the second a shift of the first with noise, and the flow between them: RAFT's sequence loss."""
    first = torch.rand(batch_size, *spec.input_shape) * 2 - 1
    shift = (3, 5)
    second = first.roll(shift, dims=(-2, -1)) + 0.05 * torch.randn_like(first)
    if not training:
        return Workload(module=module, inputs=(first, second))
    flow = torch.tensor([float(shift[1]), float(shift[0])])[None, :, None, None]
    flow = flow + 0.1 * torch.randn(batch_size, 2, *spec.input_shape[1:])
    return Workload(module=module, inputs=(first, second), loss=partial(_sequence_loss, target=flow))


def _sequence_loss(output: Sequence[Tensor], *, target: Tensor) -> Tensor:
    target = target.to(output[0].device)
    weights = [FLOW_DECAY**age for age in reversed(range(len(output)))]
    losses = [weight * (flow - target).abs().mean() for weight, flow in zip(weights, output, strict=True)]
    return torch.stack(losses).sum()


TASKS: Mapping[str, Task] = {
    "classification": partial(_labelled, classes=IMAGENET_CLASSES),
    "quantized": partial(_labelled, classes=IMAGENET_CLASSES),
    "video": partial(_labelled, classes=KINETICS_CLASSES),
    "segmentation": partial(_labelled, classes=VOC_CLASSES, pixels=True),
    "detection": _detection,
    "instance_segmentation": partial(_detection, masks=True),
    "keypoint_detection": partial(_detection, keypoints=True),
    "optical_flow": _optical_flow,
}
"""What the column ``task`` may hold, each with the function that makes its inputs, targets and loss."""
