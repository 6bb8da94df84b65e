"""Store a captured call as two files: ``call.json``, its description, and ``tensors.pt``, the bytes.

Reading them runs nothing and unpickles nothing but tensors: JSON, ``weights_only=True``, and every number is checked
before a tensor is laid over memory. A file that is truncated, changed or of another version is refused, and so is a
call that its op would not take.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hashbench.core.commands import CALL_FILE
from hashbench.core.diagnose.calls.call import (
    CapturedCall,
    Memory,
    TensorForm,
    compiled_kernel,
    generator_slots,
    is_triton,
)
from hashbench.core.diagnose.calls.ops import path_among, why_unchecked
from hashbench.core.diagnose.repro.call_arguments import (
    LARGEST,
    Arguments,
    RefusedOpError,
    bad,
    check_arguments,
    check_kernel_arguments,
    encoded,
    find_op,
    within,
)
from hashbench.core.diagnose.repro.writer import TENSORS_FILE, kernel_file
from hashbench.core.errors import HashbenchError, first_line
from hashbench.core.inductor.triton_source import arguments_of
from hashbench.core.io import from_json, read_text, sha256_of, to_json
from hashbench.core.run.rng import preserved_rng, restore_random_states
from hashbench.core.run.settings import applied
from hashbench.core.sealed import Sealed
from hashbench.core.trace.arguments import leaves
from hashbench.core.trace.op_schema import OpPlan

CALL_SCHEMA = 1
"""Version of ``call.json``; a file of another one is refused."""

_FILE = Sealed(CALL_SCHEMA, "call")

TIP = "Regenerate it with `hashbench sweep`."
_DISTRUST = "Do not trust this folder, nor its repro.py: no sweep writes the repro of such a call."
_MOST_THREADS = 4096

_LONGEST_SETTING = 200
"""Characters: torch 2.15 crashes while it warns of a precision of 1,000."""


# ---------------------------------------------------------------------------------------- what stands in call.json


@dataclass(frozen=True, slots=True)
class _MemoryEntry:
    bytes: int
    alignment: int
    device: str


@dataclass(frozen=True, slots=True)
class _WholeEntry:
    """A tensor that lies over no memory: by its number among those in ``tensors.pt``."""

    whole: int
    device: str
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class _FormEntry:
    """A :class:`TensorForm`."""

    storage: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    requires_grad: bool
    parameter: bool
    conj: bool
    neg: bool


@dataclass(frozen=True, slots=True)
class _KernelEntry:
    """A generated kernel, whose source is the file beside.

    Attributes:
        types: of its arguments, in C++ or as Triton has them.
        sha256: of that file.
    """

    types: tuple[str, ...]
    sha256: str


@dataclass(frozen=True, slots=True, eq=False)
class SavedKernel:
    """A generated kernel in a folder: described, never compiled nor called.

    Attributes:
        plan: its name, and the arguments that it writes.
        types: of its arguments, in C++ or as Triton has them.
        source: in that language.
    """

    plan: OpPlan
    types: tuple[str, ...]
    source: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class _CallSite:
    node: str
    phase: str
    module: str
    forward_op: str
    source: str


@dataclass(frozen=True, slots=True)
class _CallDocument:
    """``args``, ``kwargs``: see :func:`encoded`. ``recorded`` is kept as it is. ``kernel``: where ``op`` is no op."""

    schema: int
    op: str
    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    tensors: tuple[object, ...]
    memories: tuple[_MemoryEntry, ...]
    random_states: tuple[str, ...]
    settings: Mapping[str, str]
    threads: int
    grad_enabled: bool
    place: _CallSite
    recorded: Mapping[str, object]
    tensors_sha256: str
    kernel: _KernelEntry | None = None
    sha256: str = ""


# ------------------------------------------------------------------------------------------------------- writing


def payload(call: CapturedCall) -> dict[str, Any]:
    """Return the content of ``tensors.pt``, on the host.

    ``memories`` (flat ``uint8``), ``whole`` tensors without a memory, states of ``generators`` and of the default
    generators (``random_states``).
    """
    return {
        "memories": [memory.content.detach().cpu().clone() for memory in call.memories],
        "whole": [tensor.detach().cpu() for tensor in call.tensors if isinstance(tensor, torch.Tensor)],
        "generators": [state.cpu() for state in call.generators],
        "random_states": {device: state.cpu() for device, state in call.random_states.items()},
    }


def document(call: CapturedCall, *, tensors: Path, recorded: Mapping[str, Any]) -> str:
    """Return the text of ``call.json``. ``tensors`` is the finished ``tensors.pt``, beside which the source of a
    generated kernel is; ``recorded`` is stored unchanged.

    Raises:
        BadCallError: an argument cannot be written.
    """
    entries: list[_WholeEntry | _FormEntry] = []
    for tensor in call.tensors:
        if isinstance(tensor, torch.Tensor):
            number = sum(isinstance(entry, _WholeEntry) for entry in entries)
            entries.append(_WholeEntry(number, str(tensor.device), tensor.requires_grad))
        else:
            fields = {item.name: getattr(tensor, item.name) for item in dataclasses.fields(tensor)}
            entries.append(_FormEntry(**{**fields, "dtype": str(tensor.dtype)}))
    kernel = compiled_kernel(call.func)
    content = to_json(
        _CallDocument(
            schema=CALL_SCHEMA,
            op=call.op,
            args=tuple(encoded(value) for value in call.args),
            kwargs={name: encoded(value) for name, value in call.kwargs.items()},
            tensors=tuple(entries),
            memories=tuple(
                _MemoryEntry(memory.content.numel(), memory.alignment, str(memory.content.device))
                for memory in call.memories
            ),
            random_states=tuple(call.random_states),
            settings=call.settings,
            threads=call.threads,
            grad_enabled=call.grad_enabled,
            place=_CallSite(*(getattr(call, name) for name in _CallSite.__slots__)),
            recorded=recorded,
            tensors_sha256=sha256_of(tensors),
            kernel=None
            if kernel is None
            else _KernelEntry(kernel.types, sha256_of(tensors.with_name(kernel_file(kernel.types)))),
        )
    )
    if kernel is None:
        del content["kernel"]
    return _FILE.document(content)


# ------------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True, slots=True)
class SavedCall:
    """A call read from a folder.

    Attributes:
        call: the call.
        recorded: what was recorded with it.
        moved: for a device of its capture that is not here, the first of its kind, on which the call lies instead.
    """

    call: CapturedCall
    recorded: Mapping[str, Any]
    moved: Mapping[str, str]


def read(folder: Path) -> SavedCall:
    """Read the call in this folder, on the devices of its capture, or on the first of their kind.

    Raises:
        HashbenchError: a file is missing, truncated, changed, of another version, or has impossible numbers, the call's
            op does not check its arguments, or it is a generated kernel.
    """
    try:
        saved = read_checked(folder)
    except ValueError as error:
        raise unusable(folder, error) from None
    if isinstance(saved.call.func, SavedKernel):
        raise HashbenchError(
            f"cannot replay {folder}",
            consequence=f"nothing was run ({saved.call.op} is code in the folder, and no code of a folder is run)",
            tip="If you trust the folder, run its repro.py.",
        )
    if unchecked := why_unchecked(saved.call.func):
        raise HashbenchError(
            f"cannot use the repro in {folder}",
            consequence=f"nothing was run ({unchecked}, and bad ones write outside its tensors)",
            tip="If you trust the folder, run its repro.py.",
        )
    return saved


def unusable(folder: Path, error: ValueError) -> HashbenchError:
    """Return the error for an invalid repro."""
    tip = _DISTRUST if isinstance(error, RefusedOpError) else TIP
    return HashbenchError(f"cannot use the repro in {folder}", consequence=f"nothing was run ({error})", tip=tip)


def read_checked(folder: Path) -> SavedCall:
    """Read the call as :func:`read` does; raise ``ValueError`` for invalid files."""
    tensors = _Tensors(folder / TENSORS_FILE)
    try:
        content = _FILE.read_document(folder / CALL_FILE, where=CALL_FILE)
    except OSError as error:
        bad(f"{CALL_FILE}: {error.strerror}")
    tensors.load(str(content.get("tensors_sha256")))
    document = from_json(_CallDocument, content, where=CALL_FILE)
    named = named_in([content[name] for name in ("args", "kwargs", "tensors", "memories")])
    named |= {name for name in tensors.held("random_states", dict) if isinstance(name, str)}
    tensors.moved = substitutes(named, devices_here())
    kernel = None if document.kernel is None else _kernel(document.op, document.kernel, folder)
    return SavedCall(_call(document, tensors, kernel), document.recorded, tensors.moved)


def _kernel(name: str, entry: _KernelEntry, folder: Path) -> SavedKernel:
    if not name.isidentifier() or not name.isascii():
        bad(f"{name[:40]!r} is not the name of a kernel")
    path = folder / kernel_file(entry.types)
    _FILE.refuse_other_file(path, entry.sha256)
    source = read_text(path)
    if is_triton(entry.types):
        written = tuple(at for at, argument in enumerate(arguments_of(source)) if argument.writes)
    else:
        pointers = (at for at, kind in enumerate(entry.types) if kind.endswith("*") and not kind.startswith("const "))
        written = tuple(pointers)
    return SavedKernel(OpPlan(name, call=_not_called, written=written, writes_arguments=True), entry.types, source)


def _not_called(*_: Any) -> None:
    raise NotImplementedError("a kernel from a folder is never run")


def _call(document: _CallDocument, tensors: _Tensors, kernel: SavedKernel | None) -> CapturedCall:
    memories = tensors.memories(document.memories)
    forms = tuple(tensors.tensor(entry, memories) for entry in document.tensors)
    generators = tuple(_flat(item, torch.uint8) for item in tensors.held("generators", list))
    arguments = Arguments(tensors=len(forms), generators=len(generators), moved=tensors.moved)
    func = find_op(document.op) if kernel is None else kernel
    args = tuple(arguments.decoded(value) for value in document.args)
    kwargs = {name: arguments.decoded(value) for name, value in document.kwargs.items()}
    if kernel is not None:
        if kwargs:
            bad(f"{document.op} has no such arguments")
        check_kernel_arguments(document.op, kernel.types, args, forms)
    else:
        check_arguments(func, args, kwargs)
        path = path_among(func, leaves([args, kwargs]))
        if path:
            raise RefusedOpError(path)
    if document.settings.get("num_threads", str(document.threads)) != str(document.threads):
        bad("it names two numbers of threads")
    if name := next((name for name, value in document.settings.items() if len(value) > _LONGEST_SETTING), ""):
        bad(f"the setting {name[:40]!r} is too long")
    call = CapturedCall(
        op=str(func) if kernel is None else document.op,
        func=func,
        args=args,
        kwargs=kwargs,
        tensors=forms,
        memories=memories,
        generators=generators,
        random_states=tensors.random_states(),
        settings={name: tensors.moved.get(value, value) for name, value in document.settings.items()},
        grad_enabled=document.grad_enabled,
        threads=within(document.threads, "threads", least=1, most=_MOST_THREADS),
        **{name: getattr(document.place, name) for name in _CallSite.__slots__},
    )
    try:
        with preserved_rng(), applied(call.settings):
            restore_random_states(call.random_states)
        for slot in generator_slots([call.args, call.kwargs]):
            torch.Generator(slot.device).set_state(call.generators[slot.index])
    except Exception as error:  # each library has its own for a state that it does not take
        bad(f"torch refuses a setting or random state ({first_line(error)})")
    return call


@dataclass(slots=True)
class _Tensors:
    """The content of ``tensors.pt``, checked piece by piece against ``call.json``."""

    path: Path
    content: dict[str, Any] = field(default_factory=dict)
    moved: Mapping[str, str] = field(default_factory=dict)

    def load(self, sha256: str) -> None:
        _FILE.refuse_other_file(self.path, sha256)
        _check_archive(self.path)
        try:
            # Kernels read where the indices of a sparse tensor say. Older torches check them only where asked to.
            with warnings.catch_warnings(), torch.sparse.check_sparse_tensor_invariants():
                warnings.simplefilter("ignore")  # that sparse tensors are checked, which is wanted
                content = torch.load(self.path, map_location="cpu", weights_only=True)
        except Exception as error:  # whatever the unpickler of a file made to harm raises
            bad(f"{self.path.name} holds more than tensors, or is damaged ({type(error).__name__})")
        self.content = content if isinstance(content, dict) else bad(f"{self.path.name} holds no tensors by name")

    def held(self, name: str, kind: type) -> Any:
        value = self.content.get(name)
        return value if isinstance(value, kind) else bad(f"{self.path.name} has no {name}")

    def memories(self, entries: Sequence[_MemoryEntry]) -> tuple[Memory, ...]:
        contents = self.held("memories", list)
        if len(entries) != len(contents):
            bad("it has another number of memories than tensors.pt")
        memories = []
        for entry, item in zip(entries, contents, strict=True):
            saved = _flat(item, torch.uint8)
            if entry.bytes != saved.numel():
                bad("a memory has another size in tensors.pt")
            alignment = within(entry.alignment, "alignment", most=4095)
            memories.append(Memory(self.on_device(saved, entry.device), alignment))
        return tuple(memories)

    def tensor(self, content: Any, memories: Sequence[Memory]) -> TensorForm | torch.Tensor:
        if isinstance(content, dict) and "whole" in content:
            whole, held = from_json(_WholeEntry, content, where="tensors"), self.held("whole", list)
            if not 0 <= whole.whole < len(held) or not isinstance(held[whole.whole], torch.Tensor):
                bad("a tensor is missing in tensors.pt")
            if held[whole.whole].layout is torch.jagged:  # torch checks no offsets of it, and 2.15 does not load it
                bad("a jagged tensor is not replayed")
            return self.on_device(held[whole.whole], whole.device).requires_grad_(whole.requires_grad)
        entry = from_json(_FormEntry, content, where="tensors")
        fields = {name: getattr(entry, name) for name in _FormEntry.__slots__}
        form = TensorForm(**{**fields, "dtype": _dtype(entry.dtype)})
        for name, sizes in (("shape", form.shape), ("stride", form.stride), ("offset", (form.offset,))):
            for size in sizes:
                within(size, name)
        within(form.storage, "storage", most=len(memories) - 1)
        _check_form(form, nbytes=memories[form.storage].content.numel())
        return form

    def random_states(self) -> dict[str, torch.Tensor]:
        states = self.held("random_states", dict)
        for name in states:
            if not isinstance(name, str):
                bad("a random state has no name")
            if name not in ("python", "numpy"):
                self.on_device(torch.empty(0), name)  # CUDA where there is none takes a state, and fails with it later
        return {self.moved.get(name, name): _flat(state, torch.uint8, torch.int64) for name, state in states.items()}

    def on_device(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        try:
            moved = tensor.to(torch.device(self.moved.get(name, name)))
        except (RuntimeError, AssertionError, NotImplementedError):
            bad(f"the device {name!r:.60} is not here")
        return bad("the device 'meta' has no data") if moved.is_meta else moved


def _check_archive(path: Path) -> None:
    """Refuse an archive with compressed or overlapping members, and torch's older format.

    ``torch.save`` stores each member once and uncompressed, so that loading takes no more memory than the file has
    bytes; the older format's sizes are trusted before any byte is read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError) as error:
        bad(f"{path.name} holds more than tensors, or is damaged ({type(error).__name__})")
    stored = all(member.compress_type == zipfile.ZIP_STORED for member in members)
    if not stored or sum(member.file_size for member in members) > path.stat().st_size:
        bad(f"members of {path.name} are compressed or overlap, which torch does not write")


def _check_form(form: TensorForm, *, nbytes: int) -> None:
    """Refuse a form that reaches outside its memory: it would read or write other objects."""
    if len(form.shape) != len(form.stride):
        bad("a tensor has another number of strides than sizes")
    if math.prod(form.shape) > LARGEST:
        bad("a tensor is too large")
    if form.span()[1] > nbytes or form.offset * form.dtype.itemsize > nbytes:
        bad("a tensor reaches outside its memory")
    differentiable = form.dtype.is_floating_point or form.dtype.is_complex
    if (form.conj and not form.dtype.is_complex) or (form.requires_grad and not differentiable):
        bad(f"a tensor of {form.dtype} cannot be conjugated or require a gradient")


def _dtype(text: str) -> torch.dtype:
    dtype = getattr(torch, text.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype) or str(dtype).startswith(("torch.q", "torch.bits")):
        bad(f"{text!r:.60} is not a dtype")
    return dtype


def _flat(value: Any, *dtypes: torch.dtype) -> torch.Tensor:
    if type(value) is not torch.Tensor or value.layout is not torch.strided or value.dtype not in dtypes:
        bad("tensors.pt holds something else where bytes belong")
    return value if value.dim() == 1 and value.is_contiguous() else bad("bytes in tensors.pt are not in order")


# ------------------------------------------------------------- devices of the capture that this machine does not have


def devices_here() -> dict[str, int]:
    """Return the number of devices of each numbered kind; empty on a machine without any."""
    current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return {} if current is None else {current.type: torch.accelerator.device_count()}


def substitutes(named: Iterable[str], here: Mapping[str, int]) -> dict[str, str]:
    """Map a device that is ``named`` and not ``here`` to the first of its kind.

    Not for a call that names several devices of a kind, which would be another call on one, nor for a kind that is
    missing.
    """
    numbers: dict[str, set[str]] = defaultdict(set)
    for name in named:
        kind, colon, number = name.partition(":")
        if colon and number.isdecimal():
            numbers[kind].add(number)
    alone = {kind: int(*of_kind) for kind, of_kind in numbers.items() if len(of_kind) == 1}
    return {f"{kind}:{number}": f"{kind}:0" for kind, number in alone.items() if 0 < here.get(kind, 0) <= number}


def named_in(content: Any) -> set[str]:
    """Collect the devices of tensors, memories, generators and arguments in this part of a ``call.json``."""
    if isinstance(content, list):
        return set().union(*map(named_in, content))
    if not isinstance(content, dict):
        return set()
    own = {content["device"]} if isinstance(content.get("device"), str) else set()
    return own.union(*map(named_in, content.values()))
