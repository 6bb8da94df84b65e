"""Read checkpoints of safetensors part by part: a file, or a folder with its index. Nothing is unpickled. No torch.

The format: 8 bytes with the length of a JSON object, the object with dtype, shape and place of each tensor, the data
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hashbench.core.errors import HashbenchError, named_line
from hashbench.core.io import open_file, read_file
from hashbench.extensions.implementations.digest import TensorHeader
from hashbench.extensions.implementations.dtypes import SIZES, Bits, unsigned

DTYPES = {
    **{"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "C64": "complex64", "BOOL": "bool"},
    **{"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8"},
    **{"U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8"},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"},
    **{"F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz"},
}
"""The format's name of a dtype -> torch's."""

PICKLED = (".pt", ".pth", ".bin", ".ckpt", ".pkl")
LONGEST_HEADER = 100_000_000
"""Bytes, as the format has it."""

INDEX = "*.safetensors.index.json"
_TIP = "Save it again as safetensors."


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor lies: the file, and the byte at which it begins there."""

    file: Path
    start: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose headers were read and checked; a :class:`~.digest.TensorSource`."""

    headers: dict[str, TensorHeader]
    places: dict[str, TensorPlace]

    def read(self, name: str, start: int, stop: int) -> Bits:
        """Return the elements from ``start`` to ``stop`` of a tensor.

        Raises:
            HashbenchError: the file became shorter, or cannot be read.
        """
        kind, place = unsigned(self.headers[name].dtype), self.places[name]
        try:
            with place.file.open("rb") as file:
                file.seek(place.start + start * kind.itemsize)
                found = np.fromfile(file, kind, stop - start)
        except OSError as error:
            raise _unreadable(place.file, error.strerror or str(error)) from error
        if found.size != stop - start:
            raise _unreadable(place.file, f"it ends inside the tensor {name}")
        return found


def open_checkpoint(path: Path) -> Checkpoint:
    """Read the headers of a ``.safetensors`` file, or of a folder of them with or without an index.

    Raises:
        HashbenchError: it is no checkpoint of safetensors, or not whole; nothing was compared.
    """
    if path.suffix in PICKLED and not path.is_dir():
        raise _pickled(path)
    if not path.exists():
        raise HashbenchError(f"cannot read {path}", consequence="it does not exist", tip="Check the path.")
    named = _indexed(path) if path.is_dir() else None
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if named is not None:
        files = sorted({path / file for file in named.values()})
    if not files:
        if any(file.suffix in PICKLED for file in path.iterdir()):
            raise _pickled(path)
        raise _unreadable(path, "it has no file *.safetensors", tip="Name a folder or file of safetensors.")
    headers: dict[str, TensorHeader] = {}
    places: dict[str, TensorPlace] = {}
    for file in files:
        for name, (header, place) in _tensors(file).items():
            if named is not None and named.get(name, file.name) != file.name:
                continue  # the index says which file has it
            if name in headers:
                raise _unreadable(file, f"{places[name].file.name} has a tensor {name} as well")
            headers[name], places[name] = header, place
    if missing := sorted({*(named or ())} - headers.keys()):
        raise _unreadable(path, f"its index names the tensor {missing[0]}, which no file has", tip="Copy it again.")
    if not headers:
        raise _unreadable(path, "it holds no tensor", tip="Check the path.")
    return Checkpoint(headers, places)


def _pickled(path: Path) -> HashbenchError:
    return HashbenchError(
        f"cannot read {path}",
        consequence="it is a pickle, and to read one runs the code in it, so nothing was compared",
        tip="Save the weights as safetensors: safetensors.torch.save_model(model, 'a.safetensors').",
    )


def _unreadable(path: Path, why: str, *, tip: str = _TIP) -> HashbenchError:
    return HashbenchError(f"cannot read {path}", consequence=f"{why}, so nothing was compared", tip=tip)


def _indexed(folder: Path) -> dict[str, str] | None:
    """Return the file of each tensor as the index of a folder has it; ``None`` without an index."""
    found = sorted(folder.glob(INDEX))
    if not found:
        return None
    if len(found) > 1:
        raise _unreadable(folder, f"it has {len(found)} files {INDEX}", tip="Keep one of them.")
    try:
        named = json.loads(read_file(found[0]))["weight_map"]
        whole = {str(name): str(file) for name, file in named.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _unreadable(found[0], f"it is no index of safetensors ({named_line(error, limit=80)})") from error
    for file in whole.values():
        if Path(file).name != file or not (folder / file).is_file():
            raise _unreadable(found[0], f"it names the file {file}, which is not in the folder", tip="Copy it again.")
    return whole


def _tensors(file: Path) -> dict[str, tuple[TensorHeader, TensorPlace]]:
    """Return header and place of every tensor of a file."""
    try:
        with os.fdopen(open_file(file), "rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            length = int.from_bytes(opened.read(8), "little")
            if size < 8 or length > min(LONGEST_HEADER, size - 8):
                raise _unreadable(file, "it is no file of safetensors, or it was cut")
            text = opened.read(length)
    except OSError as error:
        raise _unreadable(file, error.strerror or str(error), tip="Check the path.") from error
    try:
        described = json.loads(text)
        found = {str(name): _tensor(file, 8 + length, of) for name, of in described.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _unreadable(file, f"its header is no list of tensors ({named_line(error, limit=80)})") from error
    for name, (header, place) in found.items():
        if place.start + header.count * SIZES[header.dtype] > size:
            raise _unreadable(file, f"it ends before the tensor {name} does: it was cut", tip="Copy it again.")
    return found


def _tensor(file: Path, data: int, described: Any) -> tuple[TensorHeader, TensorPlace]:
    """Return header and place of one tensor.

    Raises:
        ValueError: dtype, shape and place do not fit.
    """
    if described["dtype"] not in DTYPES:
        raise ValueError(f"the dtype {described['dtype']} is not known")
    shape = tuple(described["shape"])
    start, stop = described["data_offsets"]
    if not all(type(size) is int and 0 <= size < 2**48 for size in (*shape, start, stop)):
        raise ValueError("a size is no whole number")
    header = TensorHeader(shape, DTYPES[described["dtype"]])
    if stop - start != header.count * SIZES[header.dtype]:
        raise ValueError("a tensor's bytes do not fit its shape")
    return header, TensorPlace(file, data + start)
