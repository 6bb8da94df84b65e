"""Represent kernel fingerprints as data, and read and write the file with those of several models. Imports no torch.

The file is JSON: schema, environment, models, and a SHA-256 of all of it. The kernels of a model are one compressed
table with one row per op signature. A tensor is one word, ``float32[8,64]``, see :class:`TensorWord`.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Never

from hashbench.errors import HashbenchError
from hashbench.io import document_digest, from_json, read_json_object, to_json, write_file
from hashbench.records import DETERMINISTIC, contiguous_stride
from hashbench.results.folder import file_key

FINGERPRINT_SCHEMA = 1
"""Version of the file; another version is refused."""

FOLDER = "fingerprints"
"""Folder within a results folder, with one file per model."""

MOST_KERNELS = 100_000
"""Limit per file; ten times the models of the largest zoo together."""

MOST_TENSORS = 20_000
"""Limit per call: an optimizer's call may have those of all parameters several times."""

MOST_VALUES = 5 * MOST_TENSORS
"""Limit on the arguments of one call, and times 100 of one file: few bytes may expand to many."""

MOST_BYTES = 2**24
"""Limit on the uncompressed kernels of one model. The largest of torchvision take 200 KB."""

_LARGEST = 2**48
_TIP = "Record it again with `hashbench fingerprint record`."

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
        digest: of an output's content, as in :mod:`hashbench.trace.digest`.
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
        return dataclasses.replace(self, offset=0, memory=None, values="", digest="").text()


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
        library: which library computed it (:mod:`hashbench.fingerprint.library`).
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
        forms = [dataclasses.replace(tensor_word(word), values="").text() for word in self.tensors]
        return json.dumps([self.op, to_json(self.args), to_json(self.kwargs), forms], sort_keys=True)

    def outcome(self) -> str:
        """Return a key that is equal for equal signatures with equal outputs."""
        return f"{self.signature()} {self.outputs}"


COLUMNS = ("op", "arguments", "tensors", "place", "calls", "library", "outputs", "samples")
"""Columns of a kernel's row in a file; ``arguments`` are ``args`` and ``kwargs``."""


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
            :mod:`hashbench.fingerprint.values`.
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
        environment: of the recording (:mod:`hashbench.run.environment`).
        models: one per model.
    """

    environment: Mapping[str, object]
    models: tuple[ModelFingerprint, ...]

    @property
    def kernels(self) -> int:
        """Total number of kernels."""
        return sum(len(model.kernels) for model in self.models)


# --------------------------------------------------------------------------------------- one kernel in few bytes


@dataclass(slots=True)
class _Tables:
    """Tables that the rows of a model index: tensor words, runs of words of long lists, arguments as JSON, and
    libraries."""

    words: dict[str, int]
    lists: dict[tuple[int, ...], int]
    arguments: dict[str, int]
    libraries: dict[str, int]


_KINDS = {
    "words": tuple[str, ...],
    "lists": tuple[tuple[int, ...], ...],
    "arguments": tuple[tuple[object, ...], ...],
    "libraries": tuple[str, ...],
}
"""The tables of a file by name, with their types."""

_LONG = 6
"""Minimum length of a list of tensors, such as an optimizer's, that is stored once for all calls that use it."""


def _packed(kernel: Kernel, tables: _Tables) -> list[Any]:
    """Convert a kernel to a row that indexes ``tables``, which grow."""
    arguments = _shorten([to_json(kernel.args), *([to_json(kernel.kwargs)] if kernel.kwargs else [])])
    row: dict[str, Any] = {name: to_json(getattr(kernel, name, None)) for name in COLUMNS}
    row["arguments"] = tables.arguments.setdefault(json.dumps(arguments), len(tables.arguments))
    places = [tables.words.setdefault(word, len(tables.words)) for word in kernel.tensors]
    row["tensors"], done = [], 0
    for first, last in sorted(_successive_tensors(arguments)):
        if first >= done and last - first + 1 >= _LONG:
            same = tuple(places[first : last + 1])
            row["tensors"] += [*places[done:first], f"*{tables.lists.setdefault(same, len(tables.lists))}"]
            done = last + 1
    row["tensors"] += places[done:]
    row["library"] = tables.libraries.setdefault(kernel.library, len(tables.libraries))
    outputs = [(dataclasses.replace(word, digest="").text(), word.digest) for word in map(tensor_word, kernel.outputs)]
    row["outputs"] = [f"{tables.words.setdefault(form, len(tables.words))}:{digest}" for form, digest in outputs]
    return [row[name] for name in COLUMNS]


class _Unpacker:
    """Converts rows of one model from :func:`_packed` back to kernel fields; ``values`` counts what they hold."""

    def __init__(self, model: Mapping[str, object]) -> None:
        self._tables = {name: from_json(kind, model.get(name), where=name) for name, kind in _KINDS.items()}
        self._sizes = [_size(list(arguments)) for arguments in self._tables["arguments"]]
        self._arguments: dict[tuple[int, int], tuple[Any, Any]] = {}
        self.values = 0

    def unpacked(self, row: Sequence[Any]) -> dict[str, Any]:
        """Return the fields of one kernel; raise ``ValueError`` if they are invalid."""
        fields = dict(zip(COLUMNS, row, strict=True))
        words, lists = self._tables["words"], self._tables["lists"]
        places: list[object] = []
        for word in from_json(tuple[object, ...], fields["tensors"], where="tensors"):
            places += _lookup(lists, word[1:]) if isinstance(word, str) else [word]
            if len(places) > MOST_TENSORS:
                raise ValueError(f"a kernel has more than {MOST_TENSORS} tensors")
        outputs = [text.partition(":") for text in from_json(tuple[str, ...], fields["outputs"], where="outputs")]
        place = _lookup(range(len(self._sizes)), fields.pop("arguments"))
        self.values += len(places) + self._sizes[place]
        fields["args"], fields["kwargs"] = self._args(place, tensors=len(places))
        fields["tensors"] = [_lookup(words, place) for place in places]
        fields["outputs"] = [f"{_lookup(words, place)}:{digest}" for place, _, digest in outputs]
        fields["library"] = _lookup(self._tables["libraries"], fields["library"])
        return fields

    def _args(self, place: int, *, tensors: int) -> tuple[Any, Any]:
        if self._sizes[place] > MOST_VALUES:
            raise ValueError(f"a kernel has more than {MOST_VALUES} arguments")
        if (place, tensors) not in self._arguments:
            args, *kwargs = _expand(list(self._tables["arguments"][place]), tensors=tensors) or [None]
            if len(kwargs) > 1:
                raise ValueError("the arguments of a kernel are not a list and a mapping")
            self._arguments[place, tensors] = args, kwargs[0] if kwargs else {}
        return self._arguments[place, tensors]


def _lookup(table: Sequence[Any], place: object) -> Any:
    """Look up a table entry by index, which may be a decimal string; raise ``ValueError`` if it is missing."""
    number = int(place) if isinstance(place, str) and place.isdecimal() and len(place) < 10 else place
    if type(number) is not int or not 0 <= number < len(table):
        raise ValueError("a tensor, argument or library of a kernel is missing")
    return table[number]


def _shorten(value: Any) -> Any:
    """Shorten an argument: ``{"tensor": 3}`` to ``"$3"``, a list of successive ones to ``"$3..9"``, a long list of
    equal plain values to ``{"each": 0.1, "times": 142}``. A leading dollar sign is doubled."""
    match value:
        case {"tensor": int(number)}:
            return f"${number}"
        case str():
            return f"${value}" if value.startswith("$") else value
        case [{"tensor": int(first)}, _, *_] if value == [{"tensor": first + place} for place in range(len(value))]:
            return f"${first}..{first + len(value) - 1}"
        case [bool() | int() | float() as each, *_] if len(value) >= _LONG and len(set(map(repr, value))) == 1:
            return {"each": each, "times": len(value)}
        case list():
            return [_shorten(item) for item in value]
        case dict():
            return {key: _shorten(item) for key, item in value.items()}
    return value


_REFERENCE = re.compile(r"\$(\d{1,6})(?:\.\.(\d{1,6}))?", re.ASCII)


def _successive_tensors(value: Any) -> Iterator[tuple[int, int]]:
    """Yield first and last index of each list of successive tensors in shortened arguments."""
    if isinstance(value, (list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _successive_tensors(item)
    elif isinstance(value, str) and (found := _REFERENCE.fullmatch(value)) and found[2] is not None:
        yield int(found[1]), int(found[2])


def _expand(value: Any, *, tensors: int) -> Any:
    """Expand an argument shortened by :func:`_shorten`, of a call with so many ``tensors``."""
    match value:
        case str() if found := _REFERENCE.fullmatch(value):
            first, last = int(found[1]), int(found[2] or found[1])
            if last >= tensors:
                raise ValueError("a tensor of a kernel is missing")
            return {"tensor": first} if found[2] is None else [{"tensor": place} for place in range(first, last + 1)]
        case str():
            return value.removeprefix("$")
        case {"each": bool() | int() | float() as each, "times": int(times)} if 0 <= times <= MOST_TENSORS:
            return [each] * times
        case list():
            return [_expand(item, tensors=tensors) for item in value]
        case dict():
            return {key: _expand(item, tensors=tensors) for key, item in value.items()}
    return value


def _size(value: Any) -> int:
    """Count the values to which :func:`_expand` expands a shortened argument."""
    match value:
        case str() if (found := _REFERENCE.fullmatch(value)) and found[2] is not None:
            return max(0, int(found[2]) - int(found[1])) + 1
        case {"times": int(times)}:
            return max(0, times)
        case list():
            return sum(map(_size, value))
        case dict():
            return sum(map(_size, value.values()))
    return 1


# ----------------------------------------------------------------------------------------------------- the file


def text_of(fingerprints: Fingerprints) -> str:
    """Serialise to the text of the file, one line per model's kernels."""
    models = []
    for model in fingerprints.models:
        tables = _Tables({}, {}, {}, {})
        rows = [_packed(kernel, tables) for kernel in model.kernels]
        table = {"columns": list(COLUMNS), **{name: to_json(list(getattr(tables, name))) for name in _KINDS}}
        table["arguments"] = [json.loads(text) for text in tables.arguments]
        table["kernels"] = list(zip(*rows, strict=True))  # columns: what is alike then stands together
        models.append({**to_json(dataclasses.replace(model, kernels=())), "kernels": _compressed(table)})
    content = {"schema": FINGERPRINT_SCHEMA, "environment": to_json(fingerprints.environment), "models": models}
    content["sha256"] = document_digest(content)
    return _format_json(content) + "\n"


_compact = functools.partial(json.dumps, separators=(",", ":"))


def _compressed(table: Mapping[str, Any]) -> str:
    return base64.b85encode(zlib.compress(_compact(table).encode(), 9)).decode()


def _table_of(model: Mapping[str, object]) -> Mapping[str, Any]:
    """Decompress the table written by :func:`_compressed`, rows as ``kernels``; return the model if it is not
    compressed."""
    text = model.get("kernels")
    if not isinstance(text, str):
        return model
    try:
        decoder = zlib.decompressobj()
        content = decoder.decompress(base64.b85decode(text), MOST_BYTES + 1)
        if len(content) <= MOST_BYTES:
            table = from_json(Mapping[str, object], json.loads(content) if decoder.eof else None, where="kernels")
    except (zlib.error, ValueError, RecursionError):
        raise ValueError("the kernels of a model are damaged") from None
    if len(content) > MOST_BYTES:
        raise ValueError(f"the kernels of a model take more than {MOST_BYTES // 2**20} MiB")
    columns = table.get("kernels")
    if (
        not isinstance(columns, list)
        or len({len(column) if isinstance(column, list) else -1 for column in columns}) > 1
    ):
        raise ValueError("a kernel has another number of columns")
    return {**table, "kernels": [list(row) for row in zip(*columns, strict=True)]}


def _format_json(content: Mapping[str, Any]) -> str:
    """Format as JSON with one line per field of a model."""
    models = []
    for model in content["models"]:
        fields = ",\n".join(f"{_compact(name)}:{_compact(value)}" for name, value in model.items())
        models.append(f"{{{fields}}}")
    head = ",\n".join(f"{_compact(name)}:{_compact(value)}" for name, value in content.items() if name != "models")
    return f'{{{head},\n"models":[{",".join(models)}]}}'


def path_in(folder: Path, model: Sequence[str]) -> Path:
    """Return the path of a model's file in a folder; ``model`` is its :attr:`ModelFingerprint.key`."""
    suite, name, mode, *_ = model
    return folder / FOLDER / f"{file_key(suite=suite, mode=mode, name=name)}.json"


def write(path: Path, fingerprints: Fingerprints) -> None:
    """Write a file; raise :class:`HashbenchError` if that fails."""
    write_file(path, text_of(fingerprints), tip="Choose another file.")


def read(path: Path) -> Fingerprints:
    """Read the fingerprints in a file, completely or not at all.

    Raises:
        HashbenchError: the file cannot be read, is truncated or modified, has another schema, or holds no fingerprints.
    """
    content = read_json_object(path)
    if "schema" not in content or "models" not in content:
        _raise_unusable(path, "it holds no fingerprints")
    if content["schema"] != FINGERPRINT_SCHEMA:
        _raise_unusable(
            path, f"it is of schema {str(content['schema'])[:20]}, and this hashbench reads {FINGERPRINT_SCHEMA}"
        )
    if content.get("sha256") != document_digest(content):
        _raise_unusable(path, "it was changed or is truncated: its checksum is another")
    try:
        return _fingerprints(content)
    except ValueError as error:
        _raise_unusable(path, str(error))


def _raise_unusable(path: Path, reason: str) -> Never:
    raise HashbenchError(f"cannot use {path}", consequence=reason, tip=_TIP)


def _fingerprints(content: Mapping[str, Any]) -> Fingerprints:
    """Validate and convert the parsed document; raise ``ValueError`` if it is invalid."""
    environment = from_json(Mapping[str, object], content.get("environment"), where="environment")
    models, values, total = [], 0, 0
    for model in from_json(tuple[Mapping[str, object], ...], content["models"], where="models"):
        table = _table_of(model)
        if table.get("columns") != list(COLUMNS):
            raise ValueError("the kernels of a model have other columns")
        rows = table.get("kernels")
        if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) == len(COLUMNS) for row in rows):
            raise ValueError("a kernel has another number of columns")
        total += len(rows)
        if total > MOST_KERNELS:
            raise ValueError(f"it has more than {MOST_KERNELS} kernels")
        unpacker = _Unpacker(table)
        kernels = []
        for row in rows:
            kernels.append(unpacker.unpacked(row))
            if values + unpacker.values > 100 * MOST_VALUES:
                raise ValueError(f"it has more than {100 * MOST_VALUES} arguments")
        values += unpacker.values
        rest = {name: value for name, value in model.items() if name not in ("columns", *_KINDS)}
        models.append(from_json(ModelFingerprint, {**rest, "kernels": kernels}, where="a model"))
    fingerprints = Fingerprints(environment, tuple(models))
    if any(model.deterministic not in DETERMINISTIC or model.threads < 1 for model in models):
        raise ValueError("a model has settings that do not exist")
    if len({model.key for model in models}) < len(models):
        raise ValueError("it has a model twice")
    for kernel in (kernel for model in models for kernel in model.kernels):
        for word in (*kernel.tensors, *kernel.outputs):
            tensor_word(word)
    return fingerprints
