"""The ``huggingface`` suite and its small variant: the data, and one small model for every task."""

from __future__ import annotations

import dataclasses
import inspect
import os

import pytest
import torch
from runner_helpers import FunctionRunner

from hashbench.core.check.subject import Subject
from hashbench.core.errors import HashbenchError
from hashbench.core.records import ModelSpec, RunOptions
from hashbench.core.run.leaves import leaves
from hashbench.core.run.workload import CACHES, Workload, cache_among, call
from hashbench.core.suites.huggingface import OFFLINE, TASKS
from hashbench.core.suites.registry import catalog, load

SPECS = {spec.name: spec for spec in catalog("huggingface")}
SMALL = {spec.name: spec for spec in catalog("huggingface_tiny")}
OF_TASK = {
    "masked_lm": "BigBird",
    "causal_lm": "MixtralForCausalLM",
    "text_to_text": "T5Small",
    "question_answering": "BertForQuestionAnswering",
    "sequence_classification": "GPT2ForSequenceClassification",
    "speech_recognition": "Wav2Vec2ForCTC",
    "speech_to_text": "openai/whisper-tiny",
    "audio_classification": "ASTForAudioClassification",
    "image_classification": "ViTForImageClassification",
    "semantic_segmentation": "SegformerForSemanticSegmentation",
    "object_detection": "DetrForObjectDetection",
    "image_text_matching": "CLIPModel",
    "image_text_to_text": "LlavaForConditionalGeneration",
}


@pytest.fixture
def transformers():
    """The package, for tests that build models."""
    return pytest.importorskip("transformers", reason="comes with the extra huggingface")


def test_the_small_variant_has_the_same_names_tasks_and_classes():
    kept = ("name", "task", "family", "default", "skip_training", "skip_inference")
    facts = [
        {name: ([getattr(spec, field) for field in kept], spec.arguments.get("class")) for name, spec in specs.items()}
        for specs in (SPECS, SMALL)
    ]
    assert facts[0] == facts[1]


def test_the_small_variant_is_small():
    assert max(spec.parameters for spec in SMALL.values()) < 1e6
    assert all(SMALL[name].parameters < SPECS[name].parameters for name in SPECS)


def test_every_task_is_known_every_family_is_in_the_default_sweep_and_every_task_has_its_example():
    assert {spec.task for spec in SPECS.values()} == set(TASKS) == set(OF_TASK)
    assert {spec.family for spec in SPECS.values()} == {spec.family for spec in SPECS.values() if spec.default}
    assert {name: SPECS[name].task for name in OF_TASK.values()} == {name: task for task, name in OF_TASK.items()}


@pytest.mark.slow
@pytest.mark.usefixtures("transformers")
def test_every_class_is_known_to_transformers():
    import transformers

    known = set(dir(transformers))
    assert [name for name, spec in SPECS.items() if spec.arguments.get("class", name) not in known] == []


@pytest.mark.slow
@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("name", OF_TASK.values(), ids=OF_TASK)
@pytest.mark.usefixtures("transformers")
def test_a_small_model_of_each_task_runs_and_learns_without_network(name):
    torch.manual_seed(1337)
    inference = load(SMALL[name], mode="inference")
    assert inference.loss is None
    assert not {"labels", "start_positions", "return_loss"} & set(inference.inputs)
    assert sum(parameter.numel() for parameter in inference.module.parameters()) == SMALL[name].parameters
    with torch.no_grad():
        output = inference.module.eval()(**inference.inputs)
    assert getattr(output, "loss", None) is None
    assert [name for name in CACHES if getattr(output, name, None) is not None] == []

    training = load(SMALL[name], mode="training")
    loss = training.loss(training.module.train()(**training.inputs))
    loss.backward()
    assert (loss.shape, bool(loss.isfinite())) == ((), True)
    assert any(parameter.grad is not None and parameter.grad.any() for parameter in training.module.parameters())


@pytest.mark.usefixtures("transformers")
def test_a_batch_size_reaches_every_input():
    workload = load(SMALL["T5Small"], batch_size=3, mode="training")
    assert {name: len(value) for name, value in workload.inputs.items()} == dict.fromkeys(workload.inputs, 3)


@pytest.mark.usefixtures("transformers")
def test_transformers_is_told_to_stay_offline_and_the_environment_is_put_back(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    seen = {}

    def build(_spec):
        seen.update({name: os.environ.get(name) for name in OFFLINE})
        raise KeyError

    monkeypatch.setattr("hashbench.core.suites.huggingface._build", build)
    with pytest.raises(KeyError):
        load(SMALL["T5Small"], mode="inference")
    assert seen == OFFLINE
    assert (os.environ["HF_HUB_OFFLINE"], "TRANSFORMERS_OFFLINE" in os.environ) == ("0", False)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"task": "divination"}, r"unknown task 'divination'.*Known tasks: masked_lm"),
        (
            {"arguments": {"class": "GoneForCausalLM"}},
            r"has no GoneForCausalLM: T5Small cannot be built.*Install another",
        ),
    ],
    ids=["task", "class"],
)
@pytest.mark.usefixtures("transformers")
def test_what_cannot_be_built_says_why(changed, said):
    with pytest.raises(HashbenchError, match=said):
        load(dataclasses.replace(SMALL["T5Small"], **changed), mode="inference")


@pytest.mark.usefixtures("transformers")
def test_a_task_that_lacks_its_length_says_so():
    spec = SMALL["Wav2Vec2ForCTC"]
    spec = dataclasses.replace(spec, arguments={"config": spec.arguments["config"]})
    with pytest.raises(HashbenchError, match="Wav2Vec2ForCTC has no target_length among its arguments"):
        load(spec, mode="training")


@pytest.mark.parametrize("kind", ["GPT2LMHeadModel", "T5ForConditionalGeneration"])
@pytest.mark.usefixtures("transformers")
def test_cache_of_keys_and_values_is_compared_beside_the_logits(kind):
    import transformers

    def build():
        if kind == "GPT2LMHeadModel":
            config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=16)
        else:
            sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "vocab_size": 16}
            config = transformers.T5Config(num_layers=1, num_heads=2, decoder_start_token_id=0, **sizes)
        tokens = torch.zeros(1, 4, dtype=torch.long)
        inputs = (
            {"input_ids": tokens} if kind.startswith("GPT2") else {"input_ids": tokens, "decoder_input_ids": tokens}
        )
        return Workload(getattr(transformers, kind)(config), inputs)

    for mode in ("inference", "training"):
        runner = FunctionRunner(RunOptions(mode=mode, diagnose_budget=0))
        runner.build = build
        row = runner.run_model(ModelSpec(suite="here", name=kind))
        assert (row.accuracy, row.error, row.not_compared) == ("pass", "", "")
    with torch.no_grad():
        workload = build()
        names = {name for name, _ in leaves(call(workload.module, workload.inputs), "output")}
    of_self = "" if kind.startswith("GPT2") else ".self_attention_cache"
    cache = cache_among(inspect.signature(workload.module.forward).parameters)  # `cache` since transformers 5.24
    assert {"output.logits", f"output.{cache}{of_self}.layers.0.keys"} <= names


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("name", ["DistillGPT2", "T5ForConditionalGeneration", "MambaForCausalLM"])
@pytest.mark.usefixtures("transformers")
def test_a_small_text_model_is_given_a_cache_by_the_name_that_it_takes(name: str) -> None:
    variants = pytest.importorskip("hashbench.extensions.invariance.variants")
    workload = load(SMALL[name], mode="inference")
    assert workload.tokens is not None
    assert workload.tokens.cache in inspect.signature(workload.module.forward).parameters
    model = workload.module.eval()
    subject = Subject(model, model=model, inputs=workload.inputs, tokens=workload.tokens)
    (variant,) = variants.variants_of(subject, "cached-decode")
    with torch.no_grad():
        given = variant.given(variant.subset.size)(workload.module, workload.inputs)
    assert given[workload.tokens.cache] is not None
