"""Represent kernel fingerprints as data, and read and write the file with those of several models. Imports no torch.

The file is lines of JSON, gzip-compressed if its name ends in ``.gz``: first schema, environment, models, and a SHA-256
of all lines, then one line per op signature. A tensor is one word, ``float32[8,64]``, see :class:`TensorWord`.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from hashbench.core.io import bytes_for, from_json, to_json, write_file
from hashbench.core.records import DETERMINISTIC, contiguous_stride
from hashbench.core.results.folder import file_key
from hashbench.core.sealed import Sealed

FINGERPRINT_SCHEMA = 1
"""Version of the file; another version is refused."""

FOLDER = "fingerprints"
"""Folder within a results folder, with one file per model."""

MOST_BYTES = 2**27
"""Limit on the text of a file; densenet121 has half a MiB."""

MOST_IN_A_LINE = 2**24
"""Limit on one line: an optimizer's call may have the tensors of all parameters several times."""

VARIES = "gives other results when it is repeated"
"""Why a kernel has no fingerprint whose outputs are not those of its first run."""

_LARGEST = 2**48
_FILE = Sealed(FINGERPRINT_SCHEMA, "fingerprints", tip="Record it again with `hashbench fingerprint record`.")

_WORD = re.compile(
    r"(?P<dtype>[a-z]\w{1,30})\[(?P<shape>[\d,]{0,400})\](?:/(?P<stride>[\d,]{0,400}))?(?:\+(?P<offset>\d{1,15}))?"
    r"(?:@(?P<memory>\d{1,6}))?(?: (?P<values>[^\s:]{1,48}))?(?::(?P<digest>[0-9a-z]{1,32}))?",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class TensorWord:
    """One tensor as text: ``float32[64,8]/1,64+16@0 >=0``.

    Attributes:
        dtype: name of the torch dtype.
        shape: elements per dimension.
        stride: in elements; omitted from the text if contiguous.
        offset: elements from the start of its memory; omitted if 0.
        memory: number of the memory, in order of appearance, if an earlier tensor shares it.
        values: content of an argument: empty for synthetic numbers of both signs, ``>=0`` and ``0..1`` for those in
            that range, ``5..9`` for integers from 5 to 9, ``#2`` for the model's recorded content number 2.
        digest: of an output's content, as in :mod:`hashbench.core.trace.digest`.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] = ()
    offset: int = 0
    memory: int | None = None
    values: str = ""
    digest: str = ""

    def text(self) -> str:
        """Format the word."""
        words = [f"{self.dtype}[{_joined(self.shape)}]"]
        if self.stride != contiguous_stride(self.shape):
            words.append(f"/{_joined(self.stride)}")
        words += [f"+{self.offset}"] if self.offset else []
        words += [f"@{self.memory}"] if self.memory is not None else []
        words += [f" {self.values}"] if self.values else []
        return "".join([*words, f":{self.digest}" if self.digest else ""])

    @property
    def shown(self) -> str:
        """Short form for people: dtype, shape and stride."""
        return replace(self, offset=0, memory=None, values="", digest="").text()


@functools.lru_cache(maxsize=65536)
def tensor_word(text: str) -> TensorWord:
    """Parse the word of a tensor; raise ``ValueError`` if it is invalid."""
    match = _WORD.fullmatch(text)
    if match is None:
        raise ValueError(f"{text[:60]!r} describes no tensor")
    shape = _numbers(match["shape"])
    stride = contiguous_stride(shape) if match["stride"] is None else _numbers(match["stride"])
    if (
        len(stride) != len(shape)
        or math.prod(max(1, size) for size in shape) > _LARGEST
        or max(stride, default=0) > _LARGEST
    ):
        raise ValueError(f"{text[:60]!r} describes no tensor that fits into a machine")
    memory = None if match["memory"] is None else int(match["memory"])
    return TensorWord(
        match["dtype"], shape, stride, int(match["offset"] or 0), memory, match["values"] or "", match["digest"] or ""
    )


def _joined(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(","))) if text else ()


@dataclass(frozen=True, slots=True)
class Kernel:
    """One op signature of a model, and its outputs.

    Attributes:
        op: name of the op.
        args: positional arguments, encoded as in a repro's ``call.json``.
        kwargs: keyword arguments, likewise.
        tensors: words of the tensors that the arguments refer to.
        place: phase and module of its first call (``backward layer1.0.conv2``).
        calls: number of calls per run.
        library: which library computed it (:mod:`hashbench.extensions.fingerprint.library`).
        outputs: words of the tensors that it wrote.
        samples: some elements of each output: little-endian bytes in base64.
    """

    op: str
    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    tensors: tuple[str, ...]
    place: str
    calls: int
    library: str
    outputs: tuple[str, ...]
    samples: tuple[str, ...]

    @property
    def shown(self) -> str:
        """The op and its tensors: ``aten.mm.default(float32[8,64], float32[64,8]/1,64)``."""
        return f"{self.op}({', '.join(tensor_word(word).shown for word in self.tensors)})"

    @property
    def phase(self) -> str:
        """``forward``, ``backward`` or ``optimizer``."""
        return self.place.partition(" ")[0]

    def signature(self) -> str:
        """Return a key that is equal for equal ops, dtypes, shapes, strides and plain arguments."""
        forms = [replace(tensor_word(word), values="").text() for word in self.tensors]
        return json.dumps([self.op, to_json(self.args), to_json(self.kwargs), forms], sort_keys=True)

    def outcome(self) -> str:
        """Return a key that is equal for equal signatures with equal outputs."""
        return f"{self.signature()} {self.outputs}"


@dataclass(frozen=True, slots=True)
class ModelFingerprint:
    """The kernels of one model.

    Attributes:
        suite: name of the suite.
        name: of the model.
        mode: of the sweep.
        device: of the kernels.
        dtype: of the sweep.
        deterministic: deterministic level under which the kernels ran.
        threads: number of threads with which they ran.
        kernels: one per op signature.
        contents: recorded content of arguments that depend on data (indices, masks, lengths), see
            :mod:`hashbench.extensions.fingerprint.values`.
        left_out: by reason, the number of calls per run by op.
    """

    suite: str
    name: str
    mode: str
    device: str
    dtype: str
    deterministic: str
    threads: int
    kernels: tuple[Kernel, ...]
    contents: tuple[str, ...]
    left_out: Mapping[str, Mapping[str, int]]

    @property
    def key(self) -> tuple[str, ...]:
        """Identity of the model within a file."""
        return self.suite, self.name, self.mode, self.device, self.dtype

    def inputs_of(self, kernel: Kernel) -> tuple[str, ...]:
        """Return the content of the tensors of one of its kernels, and the settings under which it ran."""
        values = (tensor_word(word).values for word in kernel.tensors)
        held = (self.contents[int(each[1:])] if self._has_content(each) else each for each in values)
        return self.deterministic, self.dtype, *held

    def run_of(self, kernel: Kernel) -> tuple[str, ...]:
        """Return a key that is equal for kernels, also of other models, with equal inputs and recorded outputs."""
        return kernel.signature(), *self.inputs_of(kernel), self.device, *kernel.outputs

    def _has_content(self, values: str) -> bool:
        return values.startswith("#") and values[1:].isdecimal() and int(values[1:]) < len(self.contents)


@dataclass(frozen=True, slots=True)
class Fingerprints:
    """A whole file.

    Attributes:
        environment: of the recording (:mod:`hashbench.core.run.environment`).
        models: one per model.
    """

    environment: Mapping[str, object]
    models: tuple[ModelFingerprint, ...]

    @property
    def kernels(self) -> int:
        """Total number of kernels."""
        return sum(len(model.kernels) for model in self.models)


# ----------------------------------------------------------------------------------------------------- the file


@dataclass(frozen=True, slots=True)
class _Header:
    """The first line: ``models`` without kernels, of which each has a number."""

    schema: int
    environment: Mapping[str, object]
    models: tuple[Mapping[str, object], ...]
    sha256: str


def text_of(fingerprints: Fingerprints) -> str:
    """Serialise to the text of the file."""
    models = [{**to_json(replace(model, kernels=())), "kernels": len(model.kernels)} for model in fingerprints.models]
    header = {"environment": to_json(fingerprints.environment), "models": models}
    return _FILE.lines(header, (kernel for model in fingerprints.models for kernel in model.kernels))


def path_in(folder: Path, model: Sequence[str]) -> Path:
    """Return the path of a model's file in a folder; ``model`` is its :attr:`ModelFingerprint.key`."""
    suite, name, mode, *_ = model
    return folder / FOLDER / f"{file_key(suite=suite, mode=mode, name=name)}.jsonl.gz"


def write(path: Path, fingerprints: Fingerprints) -> None:
    """Write a file, gzip-compressed if its name ends in ``.gz``; raise :class:`HashbenchError` if that fails."""
    write_file(path, bytes_for(path, text_of(fingerprints)), tip="Choose another file.")


def read(path: Path) -> Fingerprints:
    """Read the fingerprints in a file, completely or not at all.

    Raises:
        HashbenchError: the file cannot be read, is truncated or modified, has another schema, or holds no fingerprints.
    """
    with _FILE.refusing(path):
        return _fingerprints(*_FILE.read_lines(path, Kernel, most=MOST_BYTES, longest=MOST_IN_A_LINE))


def _fingerprints(content: Any, every: Sequence[Kernel]) -> Fingerprints:
    """Validate the header and the kernels of a file; raise ``ValueError`` if they are invalid."""
    header = from_json(_Header, content, where="line 1")
    for kernel in every:
        for word in (*kernel.tensors, *kernel.outputs):
            tensor_word(word)
    left, models = iter(every), []
    for model in header.models:
        kernels = tuple(islice(left, _count_of(model)))
        models.append(replace(from_json(ModelFingerprint, {**model, "kernels": []}, where="a model"), kernels=kernels))
        if models[-1].deterministic not in DETERMINISTIC or models[-1].threads < 1:
            raise ValueError("a model has settings that do not exist")
    if sum(map(_count_of, header.models)) != len(every):
        raise ValueError("its models have another number of kernels")
    if len({model.key for model in models}) < len(models):
        raise ValueError("it has a model twice")
    return Fingerprints(header.environment, tuple(models))


def _count_of(model: Mapping[str, object]) -> int:
    count = from_json(int, model.get("kernels"), where="the number of kernels of a model")
    if not 0 <= count < MOST_BYTES:
        raise ValueError(f"the number of kernels of a model is {count!s:.20}")
    return count
