"""A captured call as two files: ``call.json``, all of it in words and numbers, and ``tensors.pt``, the bytes.

Reading them runs nothing and unpickles nothing but tensors: JSON, ``weights_only=True``, and every number is checked
before a tensor is laid over memory. A file that is truncated, changed or of another version is refused, and so is a
call that its op would not take.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hashbench.errors import HashbenchError, first_line
from hashbench.io import document_digest
from hashbench.replay.call import CapturedCall, Memory, TensorForm, generator_slots
from hashbench.repro.call_values import (
    LARGEST,
    Arguments,
    BadCallError,
    bad,
    check_arguments,
    encoded,
    flag_at,
    integer_at,
    list_at,
    mapping_at,
    sizes_at,
    text_at,
)
from hashbench.run.rng import preserved_rng, restore_random_states
from hashbench.run.settings import applied

CALL_SCHEMA = 1
"""Version of ``call.json``; a file of another one is refused."""

CALL_FILE, TENSORS_FILE = "call.json", "tensors.pt"

TIP = "Regenerate it with `hashbench sweep`."
_MOST_THREADS = 4096
_PLACE = ("node", "phase", "module", "forward_op", "source")


# ------------------------------------------------------------------------------------------------------- writing


def payload(call: CapturedCall) -> dict[str, Any]:
    """What ``tensors.pt`` holds: ``memories`` (flat ``uint8``), ``whole`` tensors that lie over no memory, states of
    ``generators`` and of the default generators (``random_states``). All of it on the host."""
    return {
        "memories": [memory.content.detach().cpu().clone() for memory in call.memories],
        "whole": [tensor.detach().cpu() for tensor in whole_tensors(call)],
        "generators": [state.cpu() for state in call.generators],
        "random_states": {device: state.cpu() for device, state in call.random_states.items()},
    }


def whole_tensors(call: CapturedCall) -> list[torch.Tensor]:
    """The tensors of a call that lie over no memory, in order."""
    return [tensor for tensor in call.tensors if isinstance(tensor, torch.Tensor)]


def document(call: CapturedCall, *, tensors: Path, recorded: Mapping[str, Any]) -> str:
    """The text of ``call.json``. ``tensors`` is the finished ``tensors.pt``; ``recorded`` is kept as it is, under that
    name.

    Raises:
        BadCallError: an argument cannot be written.
    """
    found = {
        "schema": CALL_SCHEMA,
        "op": call.op,
        "args": [encoded(value) for value in call.args],
        "kwargs": {name: encoded(value) for name, value in call.kwargs.items()},
        "tensors": _encoded_tensors(call),
        "memories": [
            {"bytes": memory.content.numel(), "alignment": memory.alignment, "device": str(memory.content.device)}
            for memory in call.memories
        ],
        "random_states": list(call.random_states),
        "settings": call.settings,
        "threads": call.threads,
        "grad_enabled": call.grad_enabled,
        "place": {name: getattr(call, name) for name in _PLACE},
        "recorded": dict(recorded),
        "tensors_sha256": _sha256(tensors),
    }
    return json.dumps({**found, "sha256": document_digest(found)}, indent=1)


def _encoded_tensors(call: CapturedCall) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for tensor in call.tensors:
        if isinstance(tensor, torch.Tensor):
            place = {"whole": sum("whole" in entry for entry in found), "device": str(tensor.device)}
            found.append({**place, "requires_grad": tensor.requires_grad})
        else:
            fields = {field.name: getattr(tensor, field.name) for field in dataclasses.fields(tensor)}
            found.append({**fields, "dtype": str(tensor.dtype)})
    return found


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ------------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True, slots=True)
class SavedCall:
    """The ``call`` of a folder and what was ``recorded`` with it. ``moved`` names, for a device of its capture that is
    not here, the first of its kind, on which the call lies instead."""

    call: CapturedCall
    recorded: Mapping[str, Any]
    moved: Mapping[str, str]


def read(folder: Path) -> SavedCall:
    """The call in this folder, on the devices that it was captured on, or on the first of their kind.

    Raises:
        HashbenchError: a file is missing, truncated, changed, of another version, or asks for what cannot be.
    """
    try:
        return read_checked(folder)
    except BadCallError as error:
        consequence = f"nothing was run ({error})"
        raise HashbenchError(f"cannot use the repro in {folder}", consequence=consequence, tip=TIP) from None


def read_checked(folder: Path) -> SavedCall:
    """The same; raises ``BadCallError`` for what is wrong with the files."""
    found = _read_document(folder / CALL_FILE)
    content = _read_tensors(folder / TENSORS_FILE, str(found.get("tensors_sha256")))
    moved = _moved(found, content)
    return SavedCall(_call(found, content, moved), mapping_at(found, "recorded"), moved)


def _read_document(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        bad(f"{path.name}: {error.strerror}")
    except (ValueError, RecursionError):
        bad(f"{path.name} is truncated or no JSON")
    if not isinstance(found, dict) or "op" not in found:
        bad(f"{path.name} describes no call")
    if found.get("schema") != CALL_SCHEMA:
        bad(f"{path.name} is of version {found.get('schema')!r}, this is hashbench for version {CALL_SCHEMA}")
    if found.get("sha256") != document_digest(found):
        bad(f"{path.name} was changed")
    return found


def _read_tensors(path: Path, sha256: str) -> dict[str, Any]:
    try:
        same = _sha256(path) == sha256
    except OSError as error:
        bad(f"{path.name}: {error.strerror}")
    if not same:
        bad(f"{path.name} is truncated, changed, or of another call")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that sparse tensors are checked, which is wanted
            found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever the unpickler of a file made to harm raises
        bad(f"{path.name} holds more than tensors, or is damaged ({type(error).__name__})")
    if not isinstance(found, dict):
        bad(f"{path.name} holds no tensors by name")
    return found


def _moved(found: Mapping[str, Any], content: Mapping[str, Any]) -> dict[str, str]:
    named = named_in([found.get(name) for name in ("args", "kwargs", "tensors", "memories")])
    named |= {name for name in _held(content, "random_states", dict) if isinstance(name, str)}
    return substitutes(named, devices_here())


def _call(found: Mapping[str, Any], content: Mapping[str, Any], moved: Mapping[str, str]) -> CapturedCall:
    memories = _memories(found, content, moved)
    tensors = tuple(_tensor(entry, memories, content, moved) for entry in list_at(found, "tensors"))
    generators = tuple(_flat(item, torch.uint8) for item in _held(content, "generators", list))
    arguments = Arguments(tensors=len(tensors), generators=len(generators), moved=moved)
    func = find_op(text_at(found, "op"))
    args = tuple(arguments.decoded(value) for value in list_at(found, "args"))
    kwargs = {name: arguments.decoded(value) for name, value in mapping_at(found, "kwargs").items()}
    check_arguments(func, args, kwargs)
    place = mapping_at(found, "place")
    call = CapturedCall(
        op=str(func),
        func=func,
        args=args,
        kwargs=kwargs,
        tensors=tensors,
        memories=memories,
        generators=generators,
        random_states=_random_states(content, moved),
        settings={name: moved.get(value, value) for name, value in _settings(found).items()},
        grad_enabled=flag_at(found, "grad_enabled"),
        threads=integer_at(found, "threads", least=1, most=_MOST_THREADS),
        **{name: text_at(place, name) for name in _PLACE},
    )
    _check_surroundings(call)
    return call


def _random_states(content: Mapping[str, Any], moved: Mapping[str, str]) -> dict[str, torch.Tensor]:
    states = _held(content, "random_states", dict)
    for name in states:
        if not isinstance(name, str):
            bad("a random state has no name")
        if name not in ("python", "numpy"):
            _on_device(torch.empty(0), name, moved)  # CUDA where there is none takes a state, and fails with it later
    return {moved.get(name, name): _flat(state, torch.uint8, torch.int64) for name, state in states.items()}


def _check_surroundings(call: CapturedCall) -> None:
    """Whether torch takes the settings, and every generator its state."""
    try:
        with preserved_rng(), applied(call.settings):
            restore_random_states(call.random_states)
        for slot in generator_slots([call.args, call.kwargs]):
            torch.Generator(slot.device).set_state(call.generators[slot.index])
    except Exception as error:  # each library has its own for a state that is none
        bad(f"a setting or random state is none ({first_line(error)})")


def _settings(found: Mapping[str, Any]) -> dict[str, str]:
    settings = mapping_at(found, "settings")
    if not all(isinstance(value, str) for value in settings.values()):
        bad("a setting is no text")
    if settings.get("num_threads", str(found.get("threads"))) != str(found.get("threads")):
        bad("it names two numbers of threads")
    return dict(settings)


# ------------------------------------------------------------- devices of the capture that this machine does not have


def devices_here() -> dict[str, int]:
    """How many devices there are of each kind that is numbered; empty on a machine that has none."""
    current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return {} if current is None else {current.type: torch.accelerator.device_count()}


def substitutes(named: Iterable[str], here: Mapping[str, int]) -> dict[str, str]:
    """For a device that is ``named`` and not ``here``, the first of its kind.

    A call that names several devices of a kind is not moved: with two of them made one it would be another call. Nor is
    one whose kind is missing altogether. The device that neither is here nor has a substitute is refused where it is
    used.
    """
    numbers: dict[str, set[str]] = defaultdict(set)
    for name in named:
        kind, colon, number = name.partition(":")
        if colon and number.isdecimal():
            numbers[kind].add(number)
    return {
        f"{kind}:{number}": f"{kind}:0"
        for kind, found in numbers.items()
        if len(found) == 1
        for number in found
        if 0 < here.get(kind, 0) <= int(number)
    }


def named_in(document: Any) -> set[str]:
    """The devices of tensors, memories, generators and arguments in this part of a ``call.json``."""
    found: set[str] = set()
    todo = [document]
    while todo:
        value = todo.pop()
        if isinstance(value, list):
            todo += value
        elif isinstance(value, dict):
            todo += value.values()
            if isinstance(value.get("device"), str):
                found.add(value["device"])
    return found


# ---------------------------------------------------------------------------------------------------- its tensors


def _memories(found: Mapping[str, Any], content: Mapping[str, Any], moved: Mapping[str, str]) -> tuple[Memory, ...]:
    entries, contents = list_at(found, "memories"), _held(content, "memories", list)
    if len(entries) != len(contents):
        bad("it has another number of memories than tensors.pt")
    memories = []
    for entry, item in zip(entries, contents, strict=True):
        saved = _flat(item, torch.uint8)
        if integer_at(entry, "bytes") != saved.numel():
            bad("a memory has another size in tensors.pt")
        alignment = integer_at(entry, "alignment", most=4095)
        memories.append(Memory(_on_device(saved, text_at(entry, "device"), moved), alignment))
    return tuple(memories)


def _on_device(tensor: torch.Tensor, name: str, moved: Mapping[str, str]) -> torch.Tensor:
    try:
        found = tensor.to(torch.device(moved.get(name, name)))
    except (RuntimeError, AssertionError, NotImplementedError):
        bad(f"the device {name!r} is not here")
    return bad("the device 'meta' has no data") if found.is_meta else found


def _tensor(
    entry: Any, memories: Sequence[Memory], content: Mapping[str, Any], moved: Mapping[str, str]
) -> TensorForm | torch.Tensor:
    if isinstance(entry, dict) and "whole" in entry:
        held = _held(content, "whole", list)
        index = integer_at(entry, "whole")
        if index >= len(held) or not isinstance(held[index], torch.Tensor):
            bad("a tensor is missing in tensors.pt")
        found = _on_device(held[index], text_at(entry, "device"), moved)
        return found.requires_grad_(flag_at(entry, "requires_grad"))
    form = TensorForm(
        storage=integer_at(entry, "storage", most=len(memories) - 1),
        dtype=_dtype(text_at(entry, "dtype")),
        shape=sizes_at(entry, "shape"),
        stride=sizes_at(entry, "stride"),
        offset=integer_at(entry, "offset"),
        **{name: flag_at(entry, name) for name in ("requires_grad", "parameter", "conj", "neg")},
    )
    _check_form(form, nbytes=memories[form.storage].content.numel())
    return form


def _check_form(form: TensorForm, *, nbytes: int) -> None:
    """A form that reaches outside its memory would read or write somebody else's."""
    if len(form.shape) != len(form.stride):
        bad("a tensor has another number of strides than sizes")
    if math.prod(form.shape) > LARGEST:
        bad("a tensor is too large")
    if form.span()[1] > nbytes or form.offset * form.dtype.itemsize > nbytes:
        bad("a tensor reaches outside its memory")
    if (form.conj and not form.dtype.is_complex) or (form.requires_grad and not _differentiable(form.dtype)):
        bad(f"a tensor of {form.dtype} cannot be conjugated or require a gradient")


def _differentiable(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _dtype(text: str) -> torch.dtype:
    found = getattr(torch, text.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or str(found).startswith(("torch.q", "torch.bits")):
        bad(f"there is no dtype {text!r}")
    return found


def _held(content: Mapping[str, Any], name: str, kind: type) -> Any:
    found = content.get(name)
    return found if isinstance(found, kind) else bad(f"tensors.pt has no {name}")


def _flat(value: Any, *dtypes: torch.dtype) -> torch.Tensor:
    if type(value) is not torch.Tensor or value.layout is not torch.strided or value.dtype not in dtypes:
        bad("tensors.pt holds something else where bytes belong")
    return value if value.dim() == 1 and value.is_contiguous() else bad("bytes in tensors.pt are not in order")


# --------------------------------------------------------------------------------------------- its op and arguments


def find_op(name: str) -> Any:
    """The op overload of this name (``aten.add.Tensor``), which must be loaded.

    Raises:
        HashbenchError: its library is not loaded.
    """
    parts = name.split(".")
    if len(parts) != 3 or not all(re.fullmatch(r"[A-Za-z_]\w*", part, re.ASCII) for part in parts):
        bad(f"{name!r} is no name of an op")
    namespace = getattr(torch.ops, parts[0], None)
    packet = getattr(namespace, parts[1], None) if isinstance(namespace, torch._ops._OpNamespace) else None
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        raise HashbenchError(
            f"there is no op {name}",
            consequence="nothing was run",
            tip="If it is not torch's own, say with --import FILE which file defines it.",
        )
    found = getattr(packet, parts[2], None) if parts[2] in packet.overloads() else None
    if not isinstance(found, torch._ops.OpOverload):
        bad(f"{name} is not an overload of an op")
    return found
