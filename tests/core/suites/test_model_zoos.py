"""The suites ``timm``, by its data and models that stand for the rest, and ``torchbench``, by a stand-in for it."""

from __future__ import annotations

import dataclasses
import sys
import textwrap

import pytest
import torch

from hashbench.core.errors import HashbenchError
from hashbench.core.records import ModelSpec
from hashbench.core.suites.registry import catalog, load

SPECS = {spec.name: spec for spec in catalog("timm")}


@pytest.mark.slow
def test_every_name_is_known_to_timm_and_has_what_a_sweep_needs():
    # 1 s to import, which no other file has to wait for
    timm = pytest.importorskip("timm", reason="comes with the extra timm")

    assert [name for name in SPECS if not timm.is_model(name)] == []
    assert {len(spec.input_shape) for spec in SPECS.values()} == {3}
    assert all(spec.parameters and spec.batch_size in (1, 4, 8) for spec in SPECS.values())
    assert all(spec.note for spec in SPECS.values() if spec.batch_size != 8)


@pytest.mark.slow
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


# ------------------------------------------------------------------------------------------------- torchbench

REGISTRY = """
    from pathlib import Path

    def _list_model_paths():
        return [str(path) for path in sorted(Path(__file__).parent.joinpath("models").iterdir()) if path.is_dir()]
"""
MODEL = """
    import torch

    class Model:
        ALLOW_CUSTOMIZE_BSIZE = {settable}

        def __init__(self, test, device, batch_size=None, extra_args=()):
            self.test, self.device, self.batch_size = test, device, batch_size or 9

        def get_module(self):
            inputs = torch.full((self.batch_size, 2), 1.0 if self.test == "train" else 0.0, device=self.device)
            return torch.nn.Linear(2, 2), (inputs,)
"""
FILES = {
    "__init__.py": REGISTRY,
    "models/__init__.py": "",
    "models/alexnet/__init__.py": MODEL.format(settable=True),
    "models/own_size/__init__.py": MODEL.format(settable=False),
    "models/nothing/__init__.py": "",
}


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """``torchbenchmark`` with these models, importable here and in children; forgotten afterwards."""
    for name, text in FILES.items():
        path = tmp_path / "torchbenchmark" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    yield tmp_path / "torchbenchmark"
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchbenchmark"]:
        del sys.modules[name]


def test_the_registry_says_which_models_there_are_and_the_data_what_is_known(installed):
    assert [(spec.name, spec.batch_size) for spec in catalog("torchbench")] == [
        ("alexnet", 4),
        ("nothing", 4),
        ("own_size", 4),
    ]
    (installed / "models" / "cm3leon_generate").mkdir()
    known = {spec.name: spec.skip_inference for spec in catalog("torchbench")}
    assert known["cm3leon_generate"] == "runs on CUDA only"


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "mode", "rows", "value"),
    [("alexnet", "training", 4, 1.0), ("alexnet", "inference", 4, 0.0), ("own_size", "inference", 9, 0.0)],
)
def test_a_model_is_built_as_its_benchmark_builds_it(name, mode, rows, value):
    workload = load(ModelSpec(suite="torchbench", name=name, batch_size=4), mode=mode)
    assert torch.equal(workload.inputs[0], torch.full((rows, 2), value))
    assert workload.loss is None


@pytest.mark.usefixtures("installed")
def test_a_folder_without_a_model_says_so():
    with pytest.raises(NotImplementedError, match=r"torchbenchmark\.models\.nothing has no class Model"):
        load(ModelSpec(suite="torchbench", name="nothing", batch_size=4), mode="inference")


def test_a_broken_registry_is_one_line(installed):
    (installed / "__init__.py").write_text("raise ImportError('no components')")
    with pytest.raises(
        HashbenchError, match=r"cannot use torchbench as a suite: its import raised ImportError: no com"
    ):
        catalog("torchbench")
