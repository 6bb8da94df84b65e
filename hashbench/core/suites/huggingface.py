"""The ``huggingface`` suite: models of transformers with random weights, built from constants without any network.

Which models there are is data: ``models/huggingface.csv``, and ``models/huggingface_tiny.csv`` with the same names and
configurations of few narrow layers. The column ``arguments`` is a JSON object:

* ``class``: the class in transformers; absent where the model has its name,
* ``config``: what the configuration of that class is made with; what is absent keeps the default of transformers,
* whatever the task asks for, see :data:`TASKS`.

Token ids, labels and lengths are made as ``benchmarks/dynamo`` makes them where it has the task. Labels are there in
training only; every model of transformers computes its own loss from them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor, nn

from hashbench.core.errors import HashbenchError
from hashbench.core.processes import variables
from hashbench.core.records import ModelSpec
from hashbench.core.run.workload import Tokens, Workload, cache_among
from hashbench.core.suites.csv_file import task_of

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
"""What tells transformers and its hub client to look for nothing on the network."""


def load(spec: ModelSpec, *, batch_size: int, mode: str) -> Workload:
    """Build a model with random weights and the inputs of its task; for training with labels and the model's own loss.

    ``batch_size`` counts sequences, recordings or images.

    Raises:
        HashbenchError: ``spec.task`` is none of ``TASKS``, or the installed transformers lacks the class.
        Exception: whatever transformers raises for this model.
    """
    inputs = task_of(spec, TASKS)
    training = mode == "training"
    with variables(OFFLINE):  # they are read when transformers is imported
        module = _build(spec)
    request = InputRequest(module=module, spec=spec, batch_size=batch_size, training=training)
    loss = attrgetter("loss") if training else None
    return Workload(module=module, inputs=inputs(request), loss=loss, tokens=_tokens(module))


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


_RELATIVE = ("relative_attention_num_buckets", "relative_attention")
"""What the configurations of models have that know the distances of tokens and not their places."""


def _tokens(module: nn.Module) -> Tokens:
    """What the model takes of what :class:`Tokens` names."""
    taken, config = inspect.signature(module.forward).parameters, cast("Any", module.config)
    known = Tokens()
    relative = any(getattr(config, name, None) for name in _RELATIVE)
    return Tokens(
        mask=known.mask if known.mask in taken else "",
        positions="position_ids" if "position_ids" in taken else None if relative else "",
        padding=getattr(config.get_text_config(), "pad_token_id", None) or 0,
        decoded="decoder_input_ids" if "decoder_input_ids" in taken else "input_ids",
        cache=cache_among(taken),
        use_cache=known.use_cache if known.use_cache in taken else "",
    )


# ------------------------------------------------------------------------------------------- inputs for each task

Inputs = dict[str, Any]

BOXES_PER_IMAGE = 3


@dataclass(frozen=True, slots=True)
class InputRequest:
    """Inputs for ``module`` are asked for."""

    module: nn.Module
    spec: ModelSpec
    batch_size: int
    training: bool

    @property
    def config(self) -> Any:
        """The configuration that the model was built from."""
        return self.module.config

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a batch."""
        return (self.batch_size, *self.spec.input_shape)

    def length(self, name: str) -> int:
        """Return the length in ``arguments`` under ``name``, which is required."""
        length = self.spec.arguments.get(name)
        if not isinstance(length, int) or length < 1:
            raise HashbenchError(
                f"{self.spec.name} has no {name} among its arguments",
                consequence=f"its task {self.spec.task} needs one",
                tip="Give a positive integer.",
            )
        return length

    def tokens(self, *shape: int, lowest: int = 0, below: int | None = None) -> Tensor:
        """Draw token ids from ``lowest`` up to, but excluding, ``below`` (default: the size of the vocabulary)."""
        vocabulary = self.config.get_text_config().vocab_size
        return torch.randint(lowest, vocabulary if below is None else below, shape)

    def token_labels(self, *shape: int, lowest: int = 0) -> Inputs:
        """Draw a token id for each position, in training only."""
        return {"labels": self.tokens(*shape, lowest=lowest)} if self.training else {}

    def class_labels(self, *shape: int) -> Inputs:
        """Draw a class for each example, or for each position of ``shape`` in it, in training only."""
        if not self.training:
            return {}
        return {"labels": torch.randint(self.config.num_labels, (self.batch_size, *shape))}


def _language_model(request: InputRequest) -> Inputs:
    """Draw a token for each position, for masked and causal models alike."""
    return {"input_ids": request.tokens(*request.shape), **request.token_labels(*request.shape)}


def _text_to_text(request: InputRequest) -> Inputs:
    """Give the decoder the tokens of the encoder, as dynamo does."""
    inputs = _language_model(request)
    return {**inputs, "decoder_input_ids": inputs["input_ids"].clone()}


def _question_answering(request: InputRequest) -> Inputs:
    """Draw start and end positions of the answer."""
    inputs = {"input_ids": request.tokens(*request.shape)}
    if request.training:
        for end in ("start_positions", "end_positions"):
            inputs[end] = torch.randint(request.shape[1], (request.batch_size,))
    return inputs


def _sequence_classification(request: InputRequest) -> Inputs:
    """Draw tokens without padding (id 0, if the configuration says so), so that the last one ends the text."""
    return {"input_ids": request.tokens(*request.shape, lowest=1), **request.class_labels()}


def _values(request: InputRequest, *, name: str) -> Inputs:
    """Draw pixels, samples or spectrograms, with one class for each example."""
    return {name: torch.randn(request.shape), **request.class_labels()}


def _speech_recognition(request: InputRequest) -> Inputs:
    """Draw samples of speech, and in training characters, fewer than the model has frames; 0 is the blank."""
    target = (request.batch_size, request.length("target_length"))
    return {"input_values": torch.randn(request.shape), **request.token_labels(*target, lowest=1)}


def _speech_to_text(request: InputRequest) -> Inputs:
    """Draw spectrograms, and the text so far."""
    target = (request.batch_size, request.length("target_length"))
    inputs = {"input_features": torch.randn(request.shape), "decoder_input_ids": request.tokens(*target)}
    return {**inputs, **request.token_labels(*target)}


def _semantic_segmentation(request: InputRequest) -> Inputs:
    """Draw a class for each pixel."""
    return {"pixel_values": torch.randn(request.shape), **request.class_labels(*request.shape[2:])}


def _object_detection(request: InputRequest) -> Inputs:
    """In training, draw boxes of each image as centre and size, relative to the image, each with a class."""
    inputs: Inputs = {"pixel_values": torch.randn(request.shape)}
    if request.training:
        inputs["labels"] = [_boxes(request.config.num_labels) for _ in range(request.batch_size)]
    return inputs


def _boxes(classes: int) -> dict[str, Tensor]:
    centres = 0.25 + torch.rand(BOXES_PER_IMAGE, 2) / 2
    sizes = 0.1 + torch.rand(BOXES_PER_IMAGE, 2) * 0.4
    return {"class_labels": torch.randint(classes, (BOXES_PER_IMAGE,)), "boxes": torch.cat([centres, sizes], dim=1)}


def _image_text_matching(request: InputRequest) -> Inputs:
    """Draw pairs of an image and a text, to be matched within the batch."""
    text = request.tokens(request.batch_size, request.config.text_config.max_position_embeddings)
    inputs: Inputs = {"input_ids": text, "pixel_values": torch.randn(request.shape)}
    return {**inputs, "return_loss": True} if request.training else inputs


def _image_text_to_text(request: InputRequest) -> Inputs:
    """Draw a text that begins with an image: one image token, of the last ids, for each patch."""
    vision, image = request.config.vision_config, request.config.image_token_id
    patches = (vision.image_size // vision.patch_size) ** 2
    text = request.tokens(request.batch_size, request.length("text_length"), below=image)
    tokens = torch.cat([torch.full((request.batch_size, patches), image), text], dim=1)
    pixels = torch.randn(request.shape)
    return {"input_ids": tokens, "pixel_values": pixels, **request.token_labels(*tokens.shape)}


TASKS: Mapping[str, Callable[[InputRequest], Inputs]] = {
    "masked_lm": _language_model,
    "causal_lm": _language_model,
    "text_to_text": _text_to_text,
    "question_answering": _question_answering,
    "sequence_classification": _sequence_classification,
    "speech_recognition": _speech_recognition,
    "speech_to_text": _speech_to_text,
    "audio_classification": partial(_values, name="input_values"),
    "image_classification": partial(_values, name="pixel_values"),
    "semantic_segmentation": _semantic_segmentation,
    "object_detection": _object_detection,
    "image_text_matching": _image_text_matching,
    "image_text_to_text": _image_text_to_text,
}
"""What the column ``task`` may hold, each with the function that makes the keyword arguments of a forward pass.

``input_shape`` is tokens for text, samples or a spectrogram for sound, channels, height and width for images.
``speech_recognition`` and ``speech_to_text`` need ``target_length`` among the arguments, how many tokens the text has;
``image_text_to_text`` needs ``text_length``, how many come after the image.
"""
