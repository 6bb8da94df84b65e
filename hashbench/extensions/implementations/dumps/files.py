"""Dumps as a folder of files, one or several tensors in each: ``step_3/layers.0.mlp.npy``. Nothing is unpickled.

The step is a number behind ``step``, ``iter`` or ``pass`` in the path, or a folder whose name is a number. The order of
calls is a number that begins each file's name, or stands behind ``index=`` or ``call=``; else the times at which files
were written, unless these contradict the numbers of layers; else their names.
"""

from __future__ import annotations

import math
import re
import tokenize
import warnings
import zipfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hashbench.core.errors import HashbenchError, named_line
from hashbench.extensions.implementations.checkpoint import open_checkpoint
from hashbench.extensions.implementations.digest import TensorHeader, TensorSource
from hashbench.extensions.implementations.dtypes import SIZES, Bits, unsigned
from hashbench.extensions.implementations.dumps.dump import Dump, DumpedTensor, DumpReader, unreadable
from hashbench.extensions.implementations.names import split

_STEP = re.compile(r"(?:^|[/_.\-])(?:global_step|step|iteration|iter|forward_pass_id|pass)[_=\-]?(\d+)|^(\d+)/", re.I)
_CALL = re.compile(r"(?:^|/)(\d+)(?=[_.\-][^/]*$)|(?:index|idx|order|call)[_=\-]?(\d+)(?=[^/]*$)", re.I)
_NATURAL = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True)
class _Array:
    """A file of one array; a :class:`~..digest.TensorSource`."""

    headers: dict[str, TensorHeader]
    array: np.ndarray[Any, Any]

    def read(self, name: str, start: int, stop: int) -> Bits:
        """Return elements of the array, mapped from its file."""
        part = self.array.reshape(-1)[start:stop]
        return np.ascontiguousarray(part).view(unsigned(self.headers[name].dtype))


def _npy(file: Path) -> TensorSource:
    array = np.load(file, mmap_mode="r", allow_pickle=False)
    if array.dtype.kind == "V" or array.dtype.name not in SIZES:
        raise unreadable(file, f"its dtype is {array.dtype.name}", "Save bfloat16 as safetensors.")
    native = array.astype(array.dtype.newbyteorder("<"), order="C", copy=False)
    return _Array({"": TensorHeader(array.shape, array.dtype.name)}, native)


def _pt(file: Path) -> TensorSource:
    import torch

    from hashbench.extensions.implementations.state import state_of

    with zipfile.ZipFile(file) as archive:  # torch stores each member once, so that it needs no more than the file has
        members = archive.infolist()
    sizes = sum(member.file_size for member in members)
    if sizes > file.stat().st_size or any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise unreadable(file, "its members are compressed or overlap, which torch does not write")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that sparse tensors are checked
            held = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # of torch and of pickle: no common class
        raise unreadable(
            file,
            f"it holds more than tensors, and nothing is unpickled ({named_line(error, limit=80)})",
            "Save tensors, or a dict of them, with torch.save, or as safetensors.",
        ) from error
    try:
        return state_of(dict(_flat(held, "")), str(file))
    except HashbenchError as error:
        raise HashbenchError(f"cannot read {file}", consequence=error.consequence, tip="Save plain tensors.") from error


def _flat(held: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield what is nested in dicts and lists, by path."""
    if isinstance(held, Mapping | list | tuple):
        for key, each in held.items() if isinstance(held, Mapping) else enumerate(held):
            yield from _flat(each, f"{name}.{key}" if name else str(key))
    else:
        yield name, held


FORMATS: Mapping[str, Callable[[Path], TensorSource]] = {
    ".npy": _npy,
    ".pt": _pt,
    ".pth": _pt,
    ".safetensors": open_checkpoint,
}
"""Suffix of a file -> what opens it, without reading its tensors."""


def _applies(path: Path) -> bool:
    return path.is_dir() or path.suffix in FORMATS


def _read(path: Path) -> Dump:
    found = (
        [path] if path.is_file() else [file for file in path.rglob("*") if file.suffix in FORMATS and file.is_file()]
    )
    kinds = Counter(file.suffix for file in found)
    if not found:
        raise unreadable(path, f"it has no file *{', *'.join(FORMATS)}", "Name the folder that holds the tensors.")
    if len(kinds) > 1:
        said = ", ".join(f"{number} {suffix}" for suffix, number in kinds.items())
        raise unreadable(path, f"it mixes formats ({said}), of which one may be another run's", "Keep one format.")
    names = {
        file: file.relative_to(path if path.is_dir() else path.parent).with_suffix("").as_posix() for file in found
    }
    steps = {file: _number(_STEP, name) for file, name in names.items()}
    order, places = _order(names, steps)
    of_calls = order != "of names"
    tensors = []
    for file in sorted(found, key=lambda file: (_or_first(steps[file]), places[file])):
        source = _opened(file)
        ordered = file.suffix in (".pt", ".pth") or len(source.headers) == 1
        for key in source.headers if ordered else sorted(source.headers, key=_natural):
            name = f"{names[file]}:{key}" if len(source.headers) > 1 else names[file]
            tensors.append(DumpedTensor(name, source, key, steps[file]))
        of_calls = of_calls and ordered
    if len(found) == 1 and len(tensors) > 1 and ordered:
        order, of_calls = "as saved in the file", True
    stepped = "steps, then " if any(step is not None for step in steps.values()) else ""
    return Dump(f"files {found[0].suffix}", f"{stepped}{order}", of_calls, tuple(tensors))


def _opened(file: Path) -> TensorSource:
    try:
        return FORMATS[file.suffix](file)
    except (
        OSError,
        ValueError,
        EOFError,
        SyntaxError,
        tokenize.TokenError,
        zipfile.BadZipFile,
        NotImplementedError,
    ) as error:
        raise unreadable(
            file, f"it was cut, or holds more than numbers, and nothing is unpickled ({named_line(error, limit=80)})"
        ) from error


def _order(names: Mapping[Path, str], steps: Mapping[Path, int | None]) -> tuple[str, dict[Path, Any]]:
    """Return the order of the files of a step in words, and each file's place."""
    calls = {file: _number(_CALL, name) for file, name in names.items()}
    if None not in calls.values() and _distinct(calls, steps):
        return "of numbers in the names", dict(calls)
    times = {file: file.stat().st_mtime_ns for file in names}
    if _distinct(times, steps) and _rises(times, names, steps):
        return "of the times at which files were written", dict(times)
    return "of names", {file: _natural(name) for file, name in names.items()}


def _distinct(places: Mapping[Path, Any], steps: Mapping[Path, int | None]) -> bool:
    return len({(steps[file], place) for file, place in places.items()}) == len(places)


def _rises(times: Mapping[Path, int], names: Mapping[Path, str], steps: Mapping[Path, int | None]) -> bool:
    """Return whether tensors whose names differ in numbers alone were written in the order of these."""
    kinds = defaultdict[Any, list[tuple[tuple[int, ...], int]]](list)
    for file, name in names.items():
        template, numbers = split(name.replace("/", ".").replace("_", "."))
        kinds[steps[file], template].append((numbers, times[file]))
    return all([time for _, time in sorted(each)] == sorted(time for _, time in each) for each in kinds.values())


def _number(pattern: re.Pattern[str], name: str) -> int | None:
    found = pattern.search(name)
    return next(int(group) for group in found.groups() if group) if found else None


def _or_first(step: int | None) -> float:
    return -math.inf if step is None else step


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Return a key that sorts numbers in names as numbers."""
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in _NATURAL.split(name)]


READER = DumpReader(_applies, _read)
