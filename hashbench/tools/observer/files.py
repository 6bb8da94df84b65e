"""Files of a recording: ``<name>.json``, and beside it ``<name>.<digits>.safetensors`` with the tensors it saved.

The JSON ends with its own SHA-256 and names that of the tensors' file, whose first digits stand in that file's name, so
that what was cut, changed, or put together from two runs is refused. The tensors are written first and the JSON then
replaced in one step, so that at any moment the two belong to one run. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from hashbench.core.errors import HashbenchError
from hashbench.core.io import from_json, read_file, replace_bytes, replace_file, to_json
from hashbench.core.records import OpRecord
from hashbench.core.sealed import Sealed
from hashbench.core.trace.file import digest_text, parse_digest
from hashbench.tools.observer.recording import Observation, Recording, Saved

SCHEMA = 1
"""Version of the document; another one is refused."""

KIND = "hashbench-observations"

_FILE = Sealed(SCHEMA, "observations", consequence="nothing was compared ({})", tip="Record the reference again.")

_DIGITS = 16
_SHA256 = re.compile(r"[0-9a-f]{64}")
_TEXTS = ("id", "phase", "module", "op", "arguments", "scalar", "rng", "forward_op", "source")
"""The fields of a record that are kept, beside its iteration and outputs. What it read is not compared."""
_NO_RECORD = to_json(OpRecord("", "", None, "", ""))


@dataclass(frozen=True, slots=True)
class _Document:
    """The JSON file. ``tensors`` is the SHA-256 of the tensors' file in hexadecimal digits; empty: there is none."""

    kind: str
    schema: int
    name: str
    checked: bool
    put_back: int
    error: str
    tensors: str
    environment: Mapping[str, object]
    observations: tuple[object, ...]
    sha256: str = ""


# -------------------------------------------------------------------------------------------------------- writing


def path_of(folder: str | Path, name: str) -> Path:
    """Return the path of the recording of this name; :class:`HashbenchError` where a file cannot have it."""
    try:
        possible = bool(os.fsencode(name)) and Path(name).name == name and "\0" not in name
    except UnicodeEncodeError:
        possible = False
    if not possible:
        raise HashbenchError(
            f"invalid run name {name!r}",
            consequence="its observations could not be written",
            tip="Pass a file name without slashes; the folder is dump_dir.",
        )
    return Path(folder) / f"{name}.json"


def write(path: Path, recording: Recording, tensors: Sequence[torch.Tensor]) -> None:
    """Write a recording and its saved tensors, which are on the host. One that ended with an error goes to
    ``<name>.incomplete.json`` without tensors, and leaves an earlier recording of that name as it is.

    Raises:
        OSError: it cannot be written; an earlier one is as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    incomplete = path.with_name(f"{path.stem}.incomplete.json")
    if recording.error:
        observations = tuple(replace(observation, saved=()) for observation in recording.observations)
        replace_file(incomplete, _dumps(replace(recording, observations=observations), tensors=""))
        return
    sha256 = ""
    if tensors:
        content = safetensors.torch.save({str(number): _as_saved(tensor) for number, tensor in enumerate(tensors)})
        sha256 = hashlib.sha256(content).hexdigest()
        replace_bytes(_tensors_path(path, sha256), content)
    replace_file(path, _dumps(recording, tensors=sha256))
    incomplete.unlink(missing_ok=True)
    ours = re.compile(re.escape(path.stem) + rf"\.[0-9a-f]{{{_DIGITS}}}\.safetensors")
    for other in path.parent.iterdir():
        if other != _tensors_path(path, sha256) and ours.fullmatch(other.name):
            other.unlink(missing_ok=True)


def _tensors_path(path: Path, sha256: str) -> Path:
    return path.with_name(f"{path.stem}.{sha256[:_DIGITS]}.safetensors")


def _dumps(recording: Recording, *, tensors: str) -> str:
    own = {name: getattr(recording, name) for name in ("name", "checked", "put_back", "error", "environment")}
    observations = tuple(map(_entry, recording.observations))
    content = to_json(_Document(KIND, SCHEMA, **own, tensors=tensors, observations=observations))
    return _FILE.document(content) + "\n"


def _entry(observation: Observation) -> dict[str, object]:
    record = observation.record
    texts = {name: getattr(record, name) for name in _TEXTS if getattr(record, name)}
    counted = {} if record.iteration is None else {"iteration": record.iteration}
    more = {name: value for name, value in (("saved", observation.saved), ("note", observation.note)) if value}
    outputs = list(map(digest_text, record.outputs))
    return {"name": observation.name, **counted, **texts, "outputs": outputs, **more}


def savable(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Copy a tensor on the host, in logical order, for the file of tensors; :class:`HashbenchError` where it is not a
    plain tensor with data (sparse, nested, quantized, a meta tensor, a wrapper)."""
    kind = type(tensor).__name__ if type(tensor) not in (torch.Tensor, torch.nn.Parameter) else ""
    if tensor.is_nested:
        kind = "nested tensor"
    elif tensor.layout is not torch.strided:
        kind = f"{tensor.layout} tensor"
    elif tensor.is_quantized:
        kind = "quantized tensor"
    elif tensor.is_meta:
        kind = "meta tensor"
    if kind:
        raise HashbenchError(
            f"cannot save {name!r}, a {kind}",
            consequence="it could not be put back in a check",
            tip="Mark the plain tensors that it is made of, such as its values.",
        )
    plain = tensor.detach().resolve_conj().resolve_neg()
    return torch.empty(plain.shape, dtype=plain.dtype).copy_(plain)


def _as_saved(tensor: torch.Tensor) -> torch.Tensor:
    """View dtypes that the format lacks (complex128) as bytes."""
    return tensor if tensor.dtype in _native() else tensor.reshape(-1).view(torch.uint8)


def _native() -> frozenset[torch.dtype]:
    # float4 is left out: two of them share a byte, and the format counts them one by one.
    return frozenset(dtype for dtype in safetensors.torch._TYPES.values() if dtype is not None)


# -------------------------------------------------------------------------------------------------------- reading


def read(path: str | Path) -> Recording:
    """Read the recording at ``path``, also that of a check, without its tensors.

    Raises:
        HashbenchError: it is missing, damaged, of another version, or of a run that ended with an error.
    """
    with _FILE.refusing(Path(path)):
        return _read(Path(path))[0]


def read_reference(path: str | Path) -> tuple[Recording, dict[int, torch.Tensor]]:
    """Read the recording at ``path`` to compare with, and its saved tensors by number.

    Raises:
        HashbenchError: it is missing, damaged, of another version, of a run that ended with an error, or holds nothing
            to compare with; or its tensors are missing, damaged, or of another run.
    """
    path = Path(path)
    with _FILE.refusing(path):
        recording, sha256 = _read(path)
        if not recording.observations:
            raise ValueError("it holds no observations")
        if recording.put_back:
            count = recording.put_back
            raise ValueError(f"it is of a check, and the {count} values put back in it stand in its own reference")
        return recording, _read_tensors(path, sha256, recording)


def _read(path: Path) -> tuple[Recording, str]:
    """Read the recording, and the SHA-256 of its tensors' file."""
    document = _document(path)
    if document.error:
        raise ValueError(f"its run ended with an error: {document.error:.200}")
    if document.tensors and not _SHA256.fullmatch(document.tensors):
        raise ValueError("its tensors have no checksum")
    observations = tuple(map(_observation, document.observations))
    names, ids = {each.name for each in observations}, {each.record.id for each in observations}
    if not len(names) == len(ids) == len(observations):
        raise ValueError("two observations have one name")
    numbers = [saved.number for observation in observations for saved in observation.saved]
    if sorted(numbers) != list(range(len(numbers))) or bool(numbers) != bool(document.tensors):
        raise ValueError("its tensors are not those of its file of tensors")
    recording = Recording(
        document.name, observations, document.environment, checked=document.checked, put_back=document.put_back
    )
    return recording, document.tensors


def _document(path: Path) -> _Document:
    document = from_json(_Document, _FILE.read_document(path), where="it")
    if document.kind != KIND:
        raise ValueError("it holds no observations of hashbench")
    return document


def _observation(entry: Any) -> Observation:
    fields = dict(from_json(Mapping[str, object], entry, where="an observation"))
    name, note = (
        from_json(str, fields.pop(key, default), where=key) for key, default in (("name", None), ("note", ""))
    )
    outputs = from_json(tuple[str, ...], fields.pop("outputs", None), where="outputs")
    saved = from_json(tuple[tuple[int, str, tuple[int, ...], str], ...], fields.pop("saved", []), where="saved")
    content = {**_NO_RECORD, **fields, "outputs": list(map(parse_digest, outputs))}
    record = from_json(OpRecord, content, where="an observation")
    return Observation(name, record, tuple(Saved(*tensor) for tensor in saved), note)


def _read_tensors(path: Path, sha256: str, recording: Recording) -> dict[int, torch.Tensor]:
    if not sha256:
        return {}
    file = _tensors_path(path, sha256)
    _FILE.refuse_other_file(file, sha256)
    try:
        tensors = safetensors.torch.load(read_file(file))
    except Exception as error:  # whatever the reader of a file made to harm raises
        raise ValueError(f"its tensors, {file.name}, cannot be read ({type(error).__name__})") from None
    every = [saved for observation in recording.observations for saved in observation.saved]
    if set(tensors) != {str(saved.number) for saved in every}:
        raise ValueError(f"its tensors, {file.name}, are others than it names")
    return {saved.number: _restored(tensors[str(saved.number)], saved) for saved in every}


def _restored(tensor: torch.Tensor, saved: Saved) -> torch.Tensor:
    dtype: Any = getattr(torch, saved.dtype, None)  # whatever a sender may have named
    if isinstance(dtype, torch.dtype) and dtype not in _native():
        try:
            tensor = tensor.view(dtype).reshape(saved.shape)
        except (RuntimeError, OverflowError, TypeError):
            raise ValueError("a saved tensor has another size") from None
    if tensor.dtype is not dtype or tuple(tensor.shape) != saved.shape:
        raise ValueError("a saved tensor has a different dtype or shape")
    return tensor
