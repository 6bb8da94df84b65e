"""Hash of a tensor's content: XXH3 over its bytes (:func:`hash_memory`), with dtype, shape and stride beside it.

It goes over the bytes in memory order, so it sees positions, signs and NaN payloads, and is equal for equal content at
any address. What is hashed, by kind of tensor:

* dense in any order of dimensions (contiguous, channels-last, transposed): the buffer, without a copy;
* with holes or overlaps (a strided slice, an expanded view): a contiguous copy, in logical order;
* sparse, nested and wrapper tensors: their component tensors, in order;
* a ``DTensor`` and other tensors of ``torch.distributed``: as their local tensor, once it is there;
* quantized: the stored integers and the quantization parameters;
* on another device than the CPU: there, by another function over the same bytes (:mod:`hashbench.devices`). With a
  ledger nothing is waited for: the value is a promise that :func:`readable` keeps. Digests that were made on different
  kinds of devices are never equal, and nothing compares them;
* without data: ``meta`` (on the meta device) or ``fake``.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import xxhash
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from hashbench.devices.ledger import Ledger, Pending
from hashbench.native.library import unrecorded
from hashbench.records import TensorDigest, contiguous_stride

RawDigest = tuple[torch.dtype, tuple[int, ...], tuple[int, ...] | None, Any]
"""``(dtype, shape, stride, value)`` as the tracing mode keeps it. A ``stride`` of ``None`` means contiguous; ``value``
is an int, a text for tensors without data, ``None`` for blank memory, or, for what is on an accelerator, an object
whose ``resolve`` waits for the number."""

_hash = xxhash.xxh3_64_intdigest
_digest = xxhash.xxh3_64_digest


class _BufferTypes(dict[int, Callable[[int], Any]]):
    """By size in bytes: the function from an address to a buffer of that size.

    ctypes itself keeps the type ``c_char * size`` only while somebody uses it: the garbage collector takes it away
    between two calls, and making it anew costs 10 µs.
    """

    MOST = 4096  # a type is about 1 KB; models with sizes that depend on their data would add to it for ever

    def __missing__(self, size: int) -> Callable[[int], Any]:
        if len(self) >= self.MOST:
            self.clear()
        self[size] = made = (ctypes.c_char * size).from_address
        return made


_buffer = _BufferTypes()

EMPTY = _hash(b"")

BY_DTYPE: Mapping[torch.dtype, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType({})
"""By dtype: what is hashed in place of a strided tensor, for a dtype of which other bits are the same value. All others
are hashed as they are."""


PIECE = 2**16
"""Bytes. The digest of more is made of the digests of its pieces, which the native tracer has several threads make."""


def hash_memory(address: int, nbytes: int) -> int:
    """XXH3-64 of ``nbytes`` bytes at ``address``, read in place; of more than :data:`PIECE`, that of the digests of its
    pieces of so many bytes (the last may be shorter), one after another, most significant byte first."""
    if not (nbytes and address):
        return EMPTY
    content = _buffer[nbytes](address)
    if nbytes <= PIECE:
        return _hash(content)
    view = memoryview(content)
    return _hash(b"".join([_digest(view[start : start + PIECE]) for start in range(0, nbytes, PIECE)]))


@dataclass(frozen=True, slots=True)
class PendingHash:
    """The digest of a tensor that is made of ``parts``, some of which are still on their device; ``text`` is what is
    hashed once they are read."""

    parts: tuple[Any, ...]
    text: Callable[[], str]

    def resolve(self) -> int:
        return _hash(self.text().encode())

    def at_once(self) -> int | PendingHash:
        """The digest itself where nothing has to be waited for."""
        return self if any(isinstance(part, _WAITING) for part in self.parts) else self.resolve()


PENDING = "pending"
"""In place of a digest: other processes' data were to come, and the trace ended before they were known to be there."""


class Arrival:
    """The digest of a tensor that a collective fills: :data:`PENDING` until its ``value`` is known."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: Any = PENDING

    def resolve(self) -> Any:
        return _number(self.value)


_WAITING = (Pending, PendingHash, Arrival)


def _number(value: Any) -> Any:
    return value.resolve() if isinstance(value, _WAITING) else value


def raw_digest(tensor: torch.Tensor, ledger: Ledger | None = None) -> RawDigest:
    """The digest of ``tensor``, in the form that costs least to make.

    Where ``ledger`` is given, what lies on an accelerator is not waited for. Must be called with dispatch modes
    disabled (inside ``__torch_dispatch__`` they are), else it traces itself.
    """
    if has_no_data(type(tensor)):
        return tensor.dtype, tuple(tensor.shape), (), "fake"
    if type(tensor) is not torch.Tensor and is_lazy(tensor):  # its class refuses to be asked for a shape
        return tensor.dtype, (), (), EMPTY
    if type(tensor) is not torch.Tensor and is_traceable_wrapper_subclass(tensor):
        with unrecorded():
            if is_distributed(type(tensor)):
                return raw_digest(local_tensor(tensor), ledger)
            shape = () if tensor.is_nested else tuple(tensor.shape)
            return tensor.dtype, shape, (), _hash_parts(_wrapped(tensor), ledger)
    if tensor.is_nested:
        with unrecorded():
            return tensor.dtype, (), (), _hash_parts([tensor.values(), tensor._nested_tensor_size()], ledger)
    shape = tuple(tensor.shape)
    if tensor.layout is not torch.strided:
        return tensor.dtype, shape, (), _hash_parts(_sparse_parts(tensor), ledger)
    stride = tensor.stride()
    if tensor.is_meta:
        return tensor.dtype, shape, stride, "meta"
    if tensor.is_quantized:
        with unrecorded():
            return tensor.dtype, shape, stride, _hash_quantized(tensor, ledger)
    return tensor.dtype, shape, stride, _hash_strided(tensor, ledger)


@contextmanager
def unobserved() -> Iterator[None]:
    """Let nobody see what torch computes in here: neither dispatch modes nor a native trace."""
    with unrecorded(), _disable_current_modes():
        yield


@contextmanager
def untraced() -> Iterator[None]:
    """Let nobody see what torch computes in here, and keep no derivative of it."""
    with unobserved(), torch.no_grad():
        yield


@functools.cache
def has_no_data(*kinds: type) -> bool:
    """Whether a tensor of one of these types stands for one that is computed later: the fake and functional tensors by
    which torch.export, torch.compile and make_fx trace. Their ops compute nothing, and to ask such a tensor for its
    memory raises, which ends the process where C++ expects no exception."""
    return any(issubclass(kind, (FakeTensor, FunctionalTensor)) for kind in kinds)


def digest(tensor: torch.Tensor) -> TensorDigest:
    """The digest of ``tensor`` as a :class:`TensorDigest`; ``value`` is 16 hexadecimal digits, or ``meta``."""
    with untraced():
        return readable(raw_digest(tensor))


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def is_waiting(raw: RawDigest) -> bool:
    """Whether :func:`readable` would wait for a device."""
    return isinstance(raw[3], _WAITING)


def readable(raw: RawDigest | TensorDigest) -> TensorDigest:
    """A raw digest in its final form; a value of ``None`` (blank memory) becomes the empty text."""
    if isinstance(raw, TensorDigest):
        return raw
    dtype, shape, stride, value = raw
    if stride is None:
        stride = contiguous_stride(shape)
    value = _number(value)
    text = f"{value:016x}" if type(value) is int else (value or "")
    return TensorDigest(dtype_name(dtype), tuple(shape), tuple(stride), text)


def python_digest(value: object) -> TensorDigest:
    """The digest of a Python value that a model returned beside its tensors: its ``repr``, exactly."""
    return TensorDigest(type(value).__name__, (), (), repr(value))


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one block of memory without holes or overlaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether the memory of a tensor is all there: a storage may be made smaller under it."""
    try:
        there = tensor.untyped_storage().nbytes()
        span = tensor.numel()
        if span and not tensor.is_contiguous():
            span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    except (NotImplementedError, RuntimeError):
        return True  # it has none
    return bool(not span or (tensor.storage_offset() + span) * tensor.element_size() <= there)


def _hash_strided(tensor: torch.Tensor, ledger: Ledger | None = None) -> int | Pending:
    if not tensor.is_cpu or (ledger is not None and ledger.everywhere):
        with unrecorded():
            return (ledger or Ledger()).add(_dense(tensor))
    if tensor.numel() == 0 or not is_whole(tensor):
        return EMPTY
    packed = _dense(tensor)
    return hash_memory(packed.data_ptr(), packed.nbytes)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without holes and overlaps whose bytes stand for those of ``tensor``: itself wherever possible."""
    lazy = tensor._is_zerotensor() or tensor.is_conj() or tensor.is_neg() or tensor.dtype in BY_DTYPE
    if not lazy and (tensor.is_contiguous() or is_dense(tensor)):
        return tensor
    with unrecorded():
        return _copied(tensor)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    if tensor._is_zerotensor():  # stands for zeros without holding any
        tensor = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    if tensor.is_conj() or tensor.is_neg():  # views whose bytes are those of the tensor they conjugate or negate
        tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.dtype in BY_DTYPE:
        return BY_DTYPE[tensor.dtype](tensor.detach()).contiguous()
    if tensor.is_contiguous() or is_dense(tensor):
        return tensor
    return without_repetition(tensor.detach()).contiguous()


def without_repetition(tensor: torch.Tensor) -> torch.Tensor:
    """One of each row that an expanded tensor shows many times: its shape and stride say the rest."""
    shape = [1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.as_strided(shape, tensor.stride())


def _hash_quantized(tensor: torch.Tensor, ledger: Ledger | None) -> int | Pending | PendingHash:
    parameters: tuple[Any, ...]
    try:
        scheme = tensor.qscheme()
    except RuntimeError:  # allocated without quantization parameters: there are only bytes
        storage = tensor.untyped_storage()
        return _hash_strided(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage), ledger)
    if scheme in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        parameters = (tensor.q_scale(), tensor.q_zero_point())
    else:
        scales, zero_points = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
        parameters = (tensor.q_per_channel_axis(), _hash_strided(scales, ledger), _hash_strided(zero_points, ledger))
    values = _hash_strided(tensor.int_repr(), ledger)
    return PendingHash(
        (values, *parameters), lambda: repr((_number(values), scheme, tuple([_number(value) for value in parameters])))
    ).at_once()


@unrecorded()
def _sparse_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    if tensor.layout is torch.jagged:
        return [tensor.values(), tensor.offsets()]  # type: ignore[attr-defined]
    return [tensor.to_dense()]


def _wrapped(tensor: torch.Tensor) -> list[torch.Tensor]:
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    parts = (getattr(tensor, name) for name in names)
    return [part for part in parts if isinstance(part, torch.Tensor)]


@functools.cache
def is_distributed(kind: type) -> bool:
    """Whether tensors of this class are those of ``torch.distributed`` that hold a local one: ``DTensor``,
    ``AsyncCollectiveTensor``. Their class turns an op into ops, and collectives, on local tensors."""
    ours = any(base.__module__.startswith("torch.distributed.") for base in kind.__mro__)
    return ours and hasattr(kind, "__tensor_flatten__")


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor of ``torch.distributed`` holds on this rank; where it still comes from others, waits for it. Any
    other tensor is returned as it is."""
    while is_distributed(type(tensor)):
        (held,) = _wrapped(tensor)
        if hasattr(tensor, "trigger_wait"):
            with unrecorded():
                held = torch.ops._c10d_functional.wait_tensor(held)  # a second wait does nothing
        tensor = held
    return tensor


def _hash_parts(parts: Iterable[torch.Tensor], ledger: Ledger | None) -> int | PendingHash:
    raw = [raw_digest(part, ledger) for part in parts]
    return PendingHash(tuple(value for *_, value in raw), lambda: repr([readable(digest) for digest in raw])).at_once()


def components(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that hold the data of ``tensor``: itself, or the parts of a sparse or wrapper tensor."""
    if type(tensor) is not torch.Tensor and is_traceable_wrapper_subclass(tensor):
        return [leaf for part in _wrapped(tensor) for leaf in components(part)]
    if tensor.layout is not torch.strided:
        opaque = tensor.layout is torch._mkldnn  # type: ignore[attr-defined]
        return [] if opaque else _sparse_parts(tensor)
    return [tensor]
