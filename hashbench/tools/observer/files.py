"""Files of a recording: ``<name>.json``, and beside it ``<name>.<digits>.safetensors`` with the tensors it saved.

The digits are the first of the SHA-256 of the tensors' file, which the JSON names in full. The tensors are written
first and the JSON then replaced in one step, so that at any moment the JSON and the tensors that it names belong to
one run. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from hashbench.errors import HashbenchError
from hashbench.io import replace_bytes, replace_file
from hashbench.tools.observer.document import BadDocumentError, bad, dumps, loads
from hashbench.tools.observer.recording import Recording, Saved

_DIGITS = 16
_TIP = "Record the reference again."


# -------------------------------------------------------------------------------------------------------- writing


def path_of(folder: str | Path, name: str) -> Path:
    """Where the recording of this name goes.

    Raises:
        HashbenchError: the name is no name of a file.
    """
    if not name or Path(name).name != name or "\0" in name or not _encodable(name):
        raise HashbenchError(
            f"{name!r} is no name of a run",
            consequence="its observations could not be written",
            tip="Choose one without slashes; the folder is dump_dir.",
        )
    return Path(folder) / f"{name}.json"


def _encodable(name: str) -> bool:
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return True


def write(path: Path, recording: Recording, tensors: Sequence[torch.Tensor]) -> None:
    """Write a recording and its saved tensors, which are on the host. One that ended with an error goes to
    ``<name>.incomplete.json`` without tensors, and leaves an earlier recording of that name as it is.

    Raises:
        OSError: it cannot be written; an earlier one is as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    incomplete = path.with_name(f"{path.stem}.incomplete.json")
    if recording.error:
        observations = tuple(replace(one, saved=()) for one in recording.observations)
        replace_file(incomplete, dumps(replace(recording, observations=observations), tensors=""))
        return
    sha256 = ""
    if tensors:
        content = safetensors.torch.save({str(number): _as_saved(tensor) for number, tensor in enumerate(tensors)})
        sha256 = hashlib.sha256(content).hexdigest()
        replace_bytes(_tensors_path(path, sha256), content)
    replace_file(path, dumps(recording, tensors=sha256))
    incomplete.unlink(missing_ok=True)
    _remove_earlier(path, keep=_tensors_path(path, sha256))


def _tensors_path(path: Path, sha256: str) -> Path:
    return path.with_name(f"{path.stem}.{sha256[:_DIGITS]}.safetensors")


def _remove_earlier(path: Path, *, keep: Path) -> None:
    ours = re.compile(re.escape(path.stem) + rf"\.[0-9a-f]{{{_DIGITS}}}\.safetensors")
    for other in path.parent.iterdir():
        if other != keep and ours.fullmatch(other.name):
            other.unlink(missing_ok=True)


def savable(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """A copy of a tensor on the host, in logical order, for the file of tensors.

    Raises:
        HashbenchError: it is no plain tensor with data: sparse, nested, quantized, a meta tensor, a wrapper.
    """
    kind = type(tensor).__name__ if type(tensor) not in (torch.Tensor, torch.nn.Parameter) else ""
    if tensor.is_nested:
        kind = "nested tensor"
    elif tensor.layout is not torch.strided:
        kind = f"{tensor.layout} tensor"
    elif tensor.is_quantized or tensor.is_meta:
        kind = "quantized tensor" if tensor.is_quantized else "meta tensor"
    if kind:
        raise HashbenchError(
            f"cannot save {name!r}, a {kind}",
            consequence="it could not be put back in a check",
            tip="Mark the plain tensors that it is made of, such as its values.",
        )
    plain = tensor.detach().resolve_conj().resolve_neg()
    return torch.empty(plain.shape, dtype=plain.dtype).copy_(plain)


def _as_saved(tensor: torch.Tensor) -> torch.Tensor:
    """Dtypes that the format lacks (complex128) as their bytes."""
    return tensor if tensor.dtype in _native() else tensor.reshape(-1).view(torch.uint8)


def _native() -> frozenset[torch.dtype]:
    # float4 is left out: two of them share a byte, and the format counts them one by one.
    return frozenset(dtype for dtype in safetensors.torch._TYPES.values() if dtype is not None)


# -------------------------------------------------------------------------------------------------------- reading


def read(path: str | Path) -> Recording:
    """The recording at ``path``, also that of a check, without its tensors.

    Raises:
        HashbenchError: it is missing, damaged, of another version, or of a run that ended with an error.
    """
    try:
        return _read(Path(path))[0]
    except BadDocumentError as error:
        raise _unusable(Path(path), error) from None


def reference_path(path: str | Path) -> Path:
    """The file that ``path`` means. One that ends in ``.pkl``, as an earlier tool wrote, means that in JSON."""
    path = Path(path)
    return path.with_suffix(".json") if path.suffix == ".pkl" and not path.exists() else path


def read_reference(path: str | Path) -> tuple[Recording, dict[int, torch.Tensor]]:
    """The recording at ``path`` to compare with, and its saved tensors by number.

    A path that ends in ``.pkl`` means the file of that name in JSON.

    Raises:
        HashbenchError: it is missing, damaged, of another version, of a run that ended with an error, or holds nothing
            to compare with; or its tensors are missing, damaged, or of another run.
    """
    path = reference_path(path)
    try:
        recording, sha256 = _read(path)
        if not recording.observations:
            bad("it holds no observations")
        if recording.put_back:
            bad(f"it is of a check, and the {recording.put_back} values put back in it stand in its own reference")
        return recording, _read_tensors(path, sha256, recording)
    except BadDocumentError as error:
        raise _unusable(path, error) from None


def _read(path: Path) -> tuple[Recording, str]:
    try:
        recording, sha256 = loads(path.read_bytes())
    except OSError as error:
        bad(error.strerror or "it cannot be read")
    if recording.error:
        bad(f"its run ended with an error: {recording.error:.200}")
    return recording, sha256


def _read_tensors(path: Path, sha256: str, recording: Recording) -> dict[int, torch.Tensor]:
    if not sha256:
        return {}
    place = _tensors_path(path, sha256)
    try:
        content = place.read_bytes()
    except OSError as error:
        bad(f"its tensors, {place.name}: {error.strerror}")
    if hashlib.sha256(content).hexdigest() != sha256:
        bad(f"its tensors, {place.name}, are damaged or of another run")
    try:
        found = safetensors.torch.load(content)
    except Exception as error:  # whatever the reader of a file made to harm raises
        bad(f"its tensors, {place.name}, cannot be read ({type(error).__name__})")
    every = [saved for one in recording.observations for saved in one.saved]
    if set(found) != {str(saved.number) for saved in every}:
        bad(f"its tensors, {place.name}, are others than it names")
    return {saved.number: _restored(found, saved) for saved in every}


def _restored(found: Mapping[str, torch.Tensor], saved: Saved) -> torch.Tensor:
    dtype: Any = getattr(torch, saved.dtype, None)
    if not isinstance(dtype, torch.dtype):
        bad(f"there is no dtype {saved.dtype!r:.40}")
    tensor = found[str(saved.number)]
    try:
        tensor = tensor if dtype in _native() else tensor.view(dtype).reshape(saved.shape)
    except RuntimeError:
        bad("a saved tensor has another size")
    if tensor.dtype is not dtype or tuple(tensor.shape) != saved.shape:
        bad("a saved tensor has another dtype or shape")
    return tensor


def _unusable(path: Path, error: BadDocumentError) -> HashbenchError:
    consequence = f"nothing was compared ({error})"
    return HashbenchError(f"cannot use the observations in {path}", consequence=consequence, tip=_TIP)
