"""Fingerprints of kernels as data, and the file that holds those of several models. Imports no torch.

The file is JSON: schema, environment, models, and a SHA-256 over all of it. The kernels of a model are one text: a
table with one row for each op signature, compressed. A tensor is one word, ``float32[8,64]``, see :class:`TensorWord`.
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
"""Version of the file; one of another version is refused. (Until version 3, what is large had other
digests; until 4, kernels ran on other numbers.)"""

FOLDER = "fingerprints"
"""In a results folder: a file for each model."""

MOST_KERNELS = 100_000
"""Of one file. The models of the largest zoo have a tenth of this together."""

MOST_TENSORS = 20_000
"""Of one call: an optimizer's may have those of all parameters several times."""

MOST_VALUES = 5 * MOST_TENSORS
"""Among the arguments of one call, and a hundred times as many in one file: few bytes may stand for many of them."""

MOST_BYTES = 2**24
"""That the kernels of one model take when they are not compressed. The largest of torchvision's take 200 KB."""

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

    ``stride`` stands there where it is not that of a contiguous tensor, ``offset`` (elements from the start of its
    memory) where it is not 0, ``memory`` where the tensor shares that of an earlier one, by the number of that memory
    in order of appearance. ``values`` says what an argument holds: nothing for synthetic numbers of both signs,
    ``>=0`` and ``0..1`` for those in that range, ``5..9`` for whole numbers from 5 to 9, ``#2`` for the recorded
    content number 2 of the model. Of an output, ``digest`` is what :mod:`hashbench.trace.digest` says of its content.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] = ()
    offset: int = 0
    memory: int | None = None
    values: str = ""
    digest: str = ""

    def text(self) -> str:
        """The word."""
        words = [f"{self.dtype}[{_joined(self.shape)}]"]
        if self.stride != contiguous_stride(self.shape):
            words.append(f"/{_joined(self.stride)}")
        words += [f"+{self.offset}"] if self.offset else []
        words += [f"@{self.memory}"] if self.memory is not None else []
        words += [f" {self.values}"] if self.values else []
        return "".join([*words, f":{self.digest}" if self.digest else ""])

    @property
    def shown(self) -> str:
        """The word without what only a machine wants to know."""
        return dataclasses.replace(self, offset=0, memory=None, values="", digest="").text()


@functools.lru_cache(maxsize=65536)
def tensor_word(text: str) -> TensorWord:
    """The tensor that a word describes; ``ValueError`` where it is none."""
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
    """One op signature of a model, and what it gave.

    ``args`` and ``kwargs`` are as in a repro's ``call.json``; ``tensors`` are the words of those that they refer to.
    ``place`` is where the model called it first (``backward layer1.0.conv2``), ``calls`` how often in one run.
    ``library`` is what computed it (:mod:`hashbench.fingerprint.library`). ``outputs`` are the words of what it wrote,
    and of each, ``samples`` has some elements: their bytes, little-endian, in base64.
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
        """Equal for equal ops, dtypes, shapes, strides and plain arguments."""
        forms = [dataclasses.replace(tensor_word(word), values="").text() for word in self.tensors]
        return json.dumps([self.op, to_json(self.args), to_json(self.kwargs), forms], sort_keys=True)


COLUMNS = ("op", "arguments", "tensors", "place", "calls", "library", "outputs", "samples")
"""Of the row of a kernel in a file; ``arguments`` are ``args`` and ``kwargs``."""


@dataclass(frozen=True, slots=True)
class ModelFingerprint:
    """The kernels of one model.

    They ran with ``threads`` threads at deterministic level ``deterministic``. ``contents`` are what arguments held
    that follow from data (indices, masks, lengths), see :mod:`hashbench.fingerprint.values`. ``left_out`` has for each
    reason the calls of one run by op.
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
        """What identifies a model within a file."""
        return self.suite, self.name, self.mode, self.device, self.dtype

    def inputs_of(self, kernel: Kernel) -> tuple[str, ...]:
        """What the tensors of one of its kernels hold, and the settings that it ran under."""
        values = (tensor_word(word).values for word in kernel.tensors)
        held = (self.contents[int(each[1:])] if self._has_content(each) else each for each in values)
        return self.deterministic, self.dtype, *held

    def run_of(self, kernel: Kernel) -> tuple[str, ...]:
        """Equal for kernels, of whatever models, that run the same and recorded the same: one of them need be run."""
        return kernel.signature(), *self.inputs_of(kernel), self.device, *kernel.outputs

    def _has_content(self, values: str) -> bool:
        return values.startswith("#") and values[1:].isdecimal() and int(values[1:]) < len(self.contents)


@dataclass(frozen=True, slots=True)
class Fingerprints:
    """A whole file: the models, and the environment (:mod:`hashbench.run.environment`) that they were recorded in."""

    environment: Mapping[str, object]
    models: tuple[ModelFingerprint, ...]

    @property
    def kernels(self) -> int:
        """How many there are."""
        return sum(len(model.kernels) for model in self.models)


# --------------------------------------------------------------------------------------- one kernel in few bytes


@dataclass(slots=True)
class _Tables:
    """What the rows of a model name by its place: words of tensors, successive ones of long lists, arguments as JSON,
    and libraries."""

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
"""The tables by name, as a file has them."""

_LONG = 6
"""Tensors from which on a list among the arguments, such as an optimizer's, is kept once for all calls that have it."""


def _packed(kernel: Kernel, tables: _Tables) -> list[Any]:
    """The row of a kernel: what is in ``tables``, which grow, by its place there, references in short."""
    arguments = _short([to_json(kernel.args), *([to_json(kernel.kwargs)] if kernel.kwargs else [])])
    row: dict[str, Any] = {name: to_json(getattr(kernel, name, None)) for name in COLUMNS}
    row["arguments"] = tables.arguments.setdefault(json.dumps(arguments), len(tables.arguments))
    places = [tables.words.setdefault(word, len(tables.words)) for word in kernel.tensors]
    row["tensors"], done = [], 0
    for first, last in sorted(_runs(arguments)):
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
    """Makes fields of kernels of the rows of one model that :func:`_packed` made; ``values`` counts what they hold."""

    def __init__(self, model: Mapping[str, object]) -> None:
        self._tables = {name: from_json(kind, model.get(name), where=name) for name, kind in _KINDS.items()}
        self._sizes = [_size(list(arguments)) for arguments in self._tables["arguments"]]
        self._arguments: dict[tuple[int, int], tuple[Any, Any]] = {}
        self.values = 0

    def unpacked(self, row: Sequence[Any]) -> dict[str, Any]:
        """The fields of one kernel; ``ValueError`` says what is wrong."""
        fields = dict(zip(COLUMNS, row, strict=True))
        words, lists = self._tables["words"], self._tables["lists"]
        places: list[object] = []
        for word in from_json(tuple[object, ...], fields["tensors"], where="tensors"):
            places += _at(lists, word[1:]) if isinstance(word, str) else [word]
            if len(places) > MOST_TENSORS:
                raise ValueError(f"a kernel has more than {MOST_TENSORS} tensors")
        outputs = [text.partition(":") for text in from_json(tuple[str, ...], fields["outputs"], where="outputs")]
        place = _at(range(len(self._sizes)), fields.pop("arguments"))
        self.values += len(places) + self._sizes[place]
        fields["args"], fields["kwargs"] = self._args(place, tensors=len(places))
        fields["tensors"] = [_at(words, place) for place in places]
        fields["outputs"] = [f"{_at(words, place)}:{digest}" for place, _, digest in outputs]
        fields["library"] = _at(self._tables["libraries"], fields["library"])
        return fields

    def _args(self, place: int, *, tensors: int) -> tuple[Any, Any]:
        if self._sizes[place] > MOST_VALUES:
            raise ValueError(f"a kernel has more than {MOST_VALUES} arguments")
        if (place, tensors) not in self._arguments:
            args, *kwargs = _long(list(self._tables["arguments"][place]), tensors=tensors) or [None]
            if len(kwargs) > 1:
                raise ValueError("the arguments of a kernel are not a list and a mapping")
            self._arguments[place, tensors] = args, kwargs[0] if kwargs else {}
        return self._arguments[place, tensors]


def _at(table: Sequence[Any], place: object) -> Any:
    """What stands at this place in a table, which may be named in digits; ``ValueError`` where nothing does."""
    number = int(place) if isinstance(place, str) and place.isdecimal() and len(place) < 10 else place
    if type(number) is not int or not 0 <= number < len(table):
        raise ValueError("a tensor, argument or library of a kernel is missing")
    return table[number]


def _short(value: Any) -> Any:
    """An argument in which ``{"tensor": 3}`` is ``"$3"``, a list of successive ones ``"$3..9"``, a long one of equal
    plain values ``{"each": 0.1, "times": 142}``; what begins with a dollar sign itself gets another one."""
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
            return [_short(item) for item in value]
        case dict():
            return {key: _short(item) for key, item in value.items()}
    return value


_REFERENCE = re.compile(r"\$(\d{1,6})(?:\.\.(\d{1,6}))?", re.ASCII)


def _runs(value: Any) -> Iterator[tuple[int, int]]:
    """First and last of each list of successive tensors in shortened arguments."""
    if isinstance(value, (list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _runs(item)
    elif isinstance(value, str) and (found := _REFERENCE.fullmatch(value)) and found[2] is not None:
        yield int(found[1]), int(found[2])


def _long(value: Any, *, tensors: int) -> Any:
    """The argument that :func:`_short` shortened, of a call with so many ``tensors``."""
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
            return [_long(item, tensors=tensors) for item in value]
        case dict():
            return {key: _long(item, tensors=tensors) for key, item in value.items()}
    return value


def _size(value: Any) -> int:
    """How many values :func:`_long` will make of a shortened argument."""
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
    """The file's text, a line for each model's kernels."""
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
    return _laid_out(content) + "\n"


_compact = functools.partial(json.dumps, separators=(",", ":"))


def _compressed(table: Mapping[str, Any]) -> str:
    return base64.b85encode(zlib.compress(_compact(table).encode(), 9)).decode()


def _table_of(model: Mapping[str, object]) -> Mapping[str, Any]:
    """The table that :func:`_compressed` wrote, with its rows as ``kernels``; of a model whose kernels are not
    compressed, that is the model."""
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


def _laid_out(content: Mapping[str, Any]) -> str:
    """JSON with a line for each field of a model."""
    models = []
    for model in content["models"]:
        fields = ",\n".join(f"{_compact(name)}:{_compact(value)}" for name, value in model.items())
        models.append(f"{{{fields}}}")
    head = ",\n".join(f"{_compact(name)}:{_compact(value)}" for name, value in content.items() if name != "models")
    return f'{{{head},\n"models":[{",".join(models)}]}}'


def path_in(folder: Path, model: Sequence[str]) -> Path:
    """The file of the model with this key (:attr:`ModelFingerprint.key`) in a folder of files of one model each."""
    suite, name, mode, *_ = model
    return folder / FOLDER / f"{file_key(suite=suite, mode=mode, name=name)}.json"


def write(path: Path, fingerprints: Fingerprints) -> None:
    """Write a file; :class:`HashbenchError` where it cannot be."""
    write_file(path, text_of(fingerprints), tip="Choose another file.")


def read(path: Path) -> Fingerprints:
    """The fingerprints in a file.

    Raises:
        HashbenchError: it cannot be read, is truncated, changed, of another schema, or no such file at all. Nothing of
            it is used then.
    """
    content = read_json_object(path)
    if "schema" not in content or "models" not in content:
        _refuse(path, "it holds no fingerprints")
    if content["schema"] != FINGERPRINT_SCHEMA:
        _refuse(path, f"it is of schema {str(content['schema'])[:20]}, and this hashbench reads {FINGERPRINT_SCHEMA}")
    if content.get("sha256") != document_digest(content):
        _refuse(path, "it was changed or is truncated: its checksum is another")
    try:
        return _fingerprints(content)
    except ValueError as error:
        _refuse(path, str(error))


def _refuse(path: Path, reason: str) -> Never:
    raise HashbenchError(f"cannot use {path}", consequence=reason, tip=_TIP)


def _fingerprints(content: Mapping[str, Any]) -> Fingerprints:
    """The parsed document, all of it checked; ``ValueError`` says what is wrong."""
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
