"""The ``timm`` suite: its data, and models that stand for the rest."""

from __future__ import annotations

import dataclasses

import pytest

from hashbench.suites.registry import catalog, load

SPECS = {spec.name: spec for spec in catalog("timm")}


def test_every_name_is_known_to_timm_and_has_what_a_sweep_needs():
    import timm  # 1 s to import, which no other file has to wait for

    assert [name for name in SPECS if not timm.is_model(name)] == []
    assert {len(spec.input_shape) for spec in SPECS.values()} == {3}
    assert all(spec.parameters and spec.batch_size in (1, 4, 8) for spec in SPECS.values())
    assert all(spec.note for spec in SPECS.values() if spec.batch_size != 8)


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(
    ("name", "arguments", "shape"),
    [("lcnet_050", {}, (3, 64, 64)), ("vit_base_patch16_siglip_256", {"img_size": 32}, (3, 32, 32))],
    ids=["a classifier", "without a classifier"],
)
def test_a_model_is_built_at_random_and_takes_a_training_step(name, arguments, shape):
    spec = dataclasses.replace(SPECS[name], arguments=arguments, input_shape=shape)
    workload = load(spec, batch_size=2, mode="training")
    assert (workload.inputs[0].shape, workload.inputs[0].mean().abs() < 1e-4) == ((2, *shape), True)
    output = workload.module(*workload.inputs)
    loss = workload.loss(output) if workload.loss else output.mean()
    loss.backward()
    assert loss.isfinite()
    assert (workload.loss is None) == (not workload.module.num_classes)
    if not arguments:
        assert sum(parameter.numel() for parameter in workload.module.parameters()) == spec.parameters
