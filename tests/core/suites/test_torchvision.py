"""The torchvision zoo: its data against the installed torchvision, and real models built from it."""

from __future__ import annotations

import warnings
from collections import Counter

import pytest
import torch
import torchvision
from torch.utils._pytree import tree_leaves

from hashbench.core.errors import HashbenchError
from hashbench.core.records import ModelSpec
from hashbench.core.suites.registry import catalog, load
from hashbench.core.suites.torchvision import TASKS

ZOO_VERSION = "0.29"
"""The torchvision that ``models/torchvision.csv`` was written for."""

SPECS = {spec.name: spec for spec in catalog("torchvision")}

CHEAP = [
    "shufflenet_v2_x0_5",
    "googlenet",
    "lraspp_mobilenet_v3_large",
    "fcn_resnet50",
    "fasterrcnn_mobilenet_v3_large_320_fpn",
    "maskrcnn_resnet50_fpn",
    "keypointrcnn_resnet50_fpn",
    "ssdlite320_mobilenet_v3_large",
    "mc3_18",
    "raft_small",
]
"""The cheapest of each task, and of each kind of output."""


def test_the_zoo_holds_every_model_of_torchvision():
    installed = set(torchvision.models.list_models())
    if not torchvision.__version__.startswith(f"{ZOO_VERSION}."):
        missing, gone = sorted(installed - set(SPECS)), sorted(set(SPECS) - installed)
        if missing or gone:
            pytest.skip(
                f"written for torchvision {ZOO_VERSION}: {torchvision.__version__} adds {missing}, lacks {gone}"
            )
    assert set(SPECS) == installed


def test_every_family_has_exactly_one_default():
    defaults = Counter(spec.family for spec in SPECS.values() if spec.default)
    assert {spec.family: 1 for spec in SPECS.values()} == defaults


def test_every_model_has_a_batch_a_shape_a_family_and_a_known_task():
    lacking = [
        spec.name
        for spec in SPECS.values()
        if spec.batch_size is None or len(spec.input_shape) < 3 or not spec.family or spec.task not in TASKS
    ]
    assert lacking == []


def test_a_mode_is_skipped_with_a_reason_in_words_and_never_both():
    for spec in SPECS.values():
        reasons = [reason for reason in (spec.skip_training, spec.skip_inference) if reason]
        assert len(reasons) < 2
        assert all(len(reason.split()) > 3 for reason in reasons)


def test_the_cheap_models_cover_every_task_that_trains():
    assert {SPECS[name].task for name in CHEAP} == set(TASKS) - {"quantized"}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHEAP)
def test_a_training_step_has_a_finite_loss_that_reaches_the_parameters(name):
    torch.manual_seed(1337)
    workload = load(SPECS[name], batch_size=2, mode="training")
    module = workload.module.train()
    loss = workload.loss(module(*workload.inputs))
    loss.backward()
    assert loss.ndim == 0
    assert loss.isfinite()
    reached = [parameter.grad is not None and bool(parameter.grad.any()) for parameter in module.parameters()]
    # Heads may be unreached: a box that no anchor matches has no regression loss.
    assert sum(reached) > 0.7 * len(reached)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CHEAP, "quantized_shufflenet_v2_x0_5"])
def test_inference_gives_something_to_compare(name):
    torch.manual_seed(1337)
    workload = load(SPECS[name], batch_size=1, mode="inference")
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):
        output = workload.module.eval()(*workload.inputs)
    tensors = tree_leaves(output)
    assert tensors
    assert all(tensor.numel() > 0 for tensor in tensors)
    assert workload.loss is None


@pytest.mark.parametrize("mode", ["training", "inference"])
def test_detection_has_targets_in_training_only(mode):
    workload = load(SPECS["fasterrcnn_mobilenet_v3_large_320_fpn"], batch_size=3, mode=mode)
    assert [len(part) for part in workload.inputs] == ([3, 3] if mode == "training" else [3])


@pytest.mark.slow
def test_boxes_masks_and_keypoints_agree():
    _, mask_targets = load(SPECS["maskrcnn_resnet50_fpn"], mode="training").inputs
    _, person_targets = load(SPECS["keypointrcnn_resnet50_fpn"], mode="training").inputs
    height, width = SPECS["maskrcnn_resnet50_fpn"].input_shape[1:]
    for target in (*mask_targets, *person_targets):
        left, top, right, bottom = target["boxes"].T
        assert bool(((left >= 0) & (left < right) & (right <= width)).all())
        assert bool(((top >= 0) & (top < bottom) & (bottom <= height)).all())
        assert int(target["labels"].min()) >= 1
    for target in mask_targets:
        covered = target["masks"].flatten(1).sum(1) / (height * width)
        area = (target["boxes"][:, 2:] - target["boxes"][:, :2]).prod(1) / (height * width)
        assert torch.allclose(covered, area, atol=0.02)
    for target in person_targets:
        corner, end = target["boxes"][:, None, :2], target["boxes"][:, None, 2:]
        assert bool(((target["keypoints"][..., :2] >= corner) & (target["keypoints"][..., :2] <= end)).all())


def test_the_flow_target_is_the_flow():
    torch.manual_seed(0)
    workload = load(SPECS["raft_small"], mode="training")
    target = workload.loss.keywords["target"]
    first, second = workload.inputs
    across, down = (round(float(value)) for value in target.mean(dim=(0, 2, 3)))
    moved = first[..., : -down or None, : -across or None]
    assert float((second[..., down:, across:] - moved).abs().mean()) < 0.1


def test_the_auxiliary_heads_take_part_in_the_loss():
    workload = load(SPECS["googlenet"], mode="training")
    main, second, first = torch.zeros(3, SPECS["googlenet"].batch_size, 1000)
    alone, together = workload.loss(main), workload.loss((main, second, first))
    assert float(together) == pytest.approx(1.8 * float(alone))


def test_building_a_quantized_model_prints_no_warnings():
    with warnings.catch_warnings(action="error"):
        load(SPECS["quantized_shufflenet_v2_x0_5"], mode="inference")


def test_an_unknown_task_is_refused():
    with pytest.raises(HashbenchError, match="unknown task 'poetry'"):
        load(ModelSpec(suite="torchvision", name="alexnet", task="poetry", batch_size=1), mode="training")
