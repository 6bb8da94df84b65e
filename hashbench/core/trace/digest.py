"""Hash a tensor's content: XXH3 over its bytes (:func:`hash_memory`), with dtype, shape and stride beside it.

Bytes are hashed in memory order, so positions, signs and NaN payloads count, and equal contents have equal digests at
any address. By kind of tensor, this is hashed:

* dense in any order of dimensions (contiguous, channels-last, transposed): the buffer, without a copy;
* with holes or overlaps (a strided slice, an expanded view): a contiguous copy, in logical order;
* sparse, nested and wrapper tensors: their component tensors, in order;
* a ``DTensor`` and other tensors of ``torch.distributed``: the local tensor, once it has arrived;
* quantized: the stored integers and the quantization parameters;
* on an accelerator: the same bytes there, by another function (:mod:`hashbench.core.devices`). With a ledger this is
  asynchronous: the value is a future that :func:`readable` resolves. Digests of different kinds of devices are never
  equal and never compared;
* without data: ``meta`` (meta device) or ``fake``.
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

from hashbench.core.devices.ledger import Ledger, Pending
from hashbench.core.native.library import unrecorded
from hashbench.core.records import PENDING, TensorDigest, contiguous_stride

RawDigest = tuple[torch.dtype, tuple[int, ...], tuple[int, ...] | None, Any]
"""``(dtype, shape, stride, value)`` as the tracing mode keeps it. A ``stride`` of ``None`` means contiguous; ``value``
is an int, a text for tensors without data, ``None`` for uninitialized memory, or, on an accelerator, an object whose
``resolve`` waits for the number."""

_hash = xxhash.xxh3_64_intdigest
_digest = xxhash.xxh3_64_digest


class _BufferTypes(dict[int, Callable[[int], Any]]):
    """Cache by size in bytes: the function from an address to a buffer of that size.

    ctypes keeps the type ``c_char * size`` only while it is referenced: the garbage collector frees it between two
    calls, and creating it anew costs 10 µs.
    """

    MOST = 4096  # a type takes about 1 KB; data-dependent sizes would grow it without bound

    def __missing__(self, size: int) -> Callable[[int], Any]:
        if len(self) >= self.MOST:
            self.clear()
        self[size] = made = (ctypes.c_char * size).from_address
        return made


_buffer = _BufferTypes()

EMPTY = _hash(b"")

BY_DTYPE: Mapping[torch.dtype, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType({})
"""By dtype, for dtypes in which different bits are the same value: the tensor hashed in place of a strided tensor. All
other dtypes are hashed as stored."""


PIECE = 2**16
"""Bytes per piece. The digest of a larger buffer combines the digests of its pieces, which the native tracer computes
in parallel."""


def hash_memory(address: int, nbytes: int) -> int:
    """Compute XXH3-64 of ``nbytes`` bytes at ``address``, in place.

    A buffer larger than :data:`PIECE` is split into pieces of that size (the last may be shorter); its digest is that
    of the pieces' digests, concatenated, each most significant byte first.
    """
    if not (nbytes and address):
        return EMPTY
    content = _buffer[nbytes](address)
    if nbytes <= PIECE:
        return _hash(content)
    view = memoryview(content)
    return _hash(b"".join([_digest(view[start : start + PIECE]) for start in range(0, nbytes, PIECE)]))


@dataclass(frozen=True, slots=True)
class PendingHash:
    """Digest of a tensor with ``parts``, some of which are still on their device; ``text`` is hashed with them once
    they are read."""

    parts: tuple[Any, ...]
    text: Callable[[], str]

    def resolve(self) -> int:
        return _hash(self.text().encode())

    def at_once(self) -> int | PendingHash:
        """Return the digest itself if no part is pending, else this object."""
        return self if any(isinstance(part, _WAITING) for part in self.parts) else self.resolve()


UNDEFINED = "undefined"
"""Value of a digest in place of content that no kernel defines: the generator's state in attention without dropout."""


class Arrival:
    """Digest of a tensor that a collective fills: :data:`PENDING` until its ``value`` is known."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: Any = PENDING

    def resolve(self) -> Any:
        return _number(self.value)


_WAITING = (Pending, PendingHash, Arrival)


def _number(value: Any) -> Any:
    return value.resolve() if isinstance(value, _WAITING) else value


def raw_digest(tensor: torch.Tensor, ledger: Ledger | None = None) -> RawDigest:
    """Compute the digest of ``tensor`` in its cheapest form.

    With a ``ledger``, accelerators are not synchronized. Call it with dispatch modes disabled (inside
    ``__torch_dispatch__`` they are), or it traces itself.
    """
    if has_no_data(type(tensor)):
        return tensor.dtype, tuple(tensor.shape), (), "fake"
    if type(tensor) is not torch.Tensor and is_lazy(tensor):  # its class raises for shape
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
    """Hide ops in this block from dispatch modes and native traces."""
    with unrecorded(), _disable_current_modes():
        yield


@contextmanager
def untraced() -> Iterator[None]:
    """Hide ops in this block from dispatch modes, native traces and autograd."""
    with unobserved(), torch.no_grad():
        yield


@functools.cache
def has_no_data(*kinds: type) -> bool:
    """Return True if tensors of one of these types are placeholders: the fake and functional tensors of torch.export,
    torch.compile and make_fx. Their ops compute nothing, and reading their memory raises, which terminates the process
    where C++ expects no exception."""
    return any(issubclass(kind, (FakeTensor, FunctionalTensor)) for kind in kinds)


def digest(tensor: torch.Tensor) -> TensorDigest:
    """Return the digest of ``tensor`` as a :class:`TensorDigest`; ``value`` is 16 hexadecimal digits, or ``meta``."""
    with untraced():
        return readable(raw_digest(tensor))


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def is_waiting(raw: RawDigest) -> bool:
    """Return True if :func:`readable` would synchronize a device."""
    return isinstance(raw[3], _WAITING)


def undefined(tensor: torch.Tensor) -> RawDigest:
    """Return the digest of a plain tensor whose content no kernel defines."""
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), UNDEFINED


def readable(raw: RawDigest | TensorDigest) -> TensorDigest:
    """Convert a raw digest to its final form; a value of ``None`` (uninitialized memory) becomes ``""``."""
    if isinstance(raw, TensorDigest):
        return raw
    dtype, shape, stride, value = raw
    if stride is None:
        stride = contiguous_stride(shape)
    value = _number(value)
    text = f"{value:016x}" if type(value) is int else (value or "")
    return TensorDigest(dtype_name(dtype), tuple(shape), tuple(stride), text)


def python_digest(value: object) -> TensorDigest:
    """Return the digest of a non-tensor value that a model returned: its exact ``repr``."""
    return TensorDigest(type(value).__name__, (), (), repr(value))


def is_dense(tensor: torch.Tensor) -> bool:
    """Return True if the elements fill one block of memory without holes or overlaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def is_whole(tensor: torch.Tensor) -> bool:
    """Return True if the storage covers the whole tensor: a storage may be shrunk under it."""
    try:
        there = tensor.untyped_storage().nbytes()
        span = tensor.numel()
        if span and not tensor.is_contiguous():
            span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    except (NotImplementedError, RuntimeError):
        return True  # meta: it has none
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
    """Return a dense tensor with the same content as ``tensor``: itself if possible."""
    lazy = tensor._is_zerotensor() or tensor.is_conj() or tensor.is_neg() or tensor.dtype in BY_DTYPE
    if not lazy and (tensor.is_contiguous() or is_dense(tensor)):
        return tensor
    with unrecorded():
        return _copied(tensor)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    if tensor._is_zerotensor():  # zeros without memory
        tensor = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    if tensor.is_conj() or tensor.is_neg():  # views that share the bytes of the conjugated or negated tensor
        tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.dtype in BY_DTYPE:
        return BY_DTYPE[tensor.dtype](tensor.detach()).contiguous()
    if tensor.is_contiguous() or is_dense(tensor):
        return tensor
    return without_repetition(tensor.detach()).contiguous()


def without_repetition(tensor: torch.Tensor) -> torch.Tensor:
    """Drop the repeated rows of an expanded tensor: its shape and stride imply them."""
    shape = [1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.as_strided(shape, tensor.stride())


def _hash_quantized(tensor: torch.Tensor, ledger: Ledger | None) -> int | Pending | PendingHash:
    parameters: tuple[Any, ...]
    try:
        scheme = tensor.qscheme()
    except RuntimeError:  # allocated without quantization parameters: hash the bytes alone
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
    """Return True for tensor classes of ``torch.distributed`` that wrap a local tensor: ``DTensor``,
    ``AsyncCollectiveTensor``. These classes turn an op into ops, and collectives, on local tensors."""
    ours = any(base.__module__.startswith("torch.distributed.") for base in kind.__mro__)
    return ours and hasattr(kind, "__tensor_flatten__")


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor that a tensor of ``torch.distributed`` wraps on this rank, waiting for it if necessary.
    Any other tensor is returned unchanged."""
    while is_distributed(type(tensor)):
        (held,) = _wrapped(tensor)
        if hasattr(tensor, "trigger_wait"):
            with unrecorded():
                held = torch.ops._c10d_functional.wait_tensor(held)  # a second wait has no effect
        tensor = held
    return tensor


def _hash_parts(parts: Iterable[torch.Tensor], ledger: Ledger | None) -> int | PendingHash:
    raw = [raw_digest(part, ledger) for part in parts]
    return PendingHash(tuple(value for *_, value in raw), lambda: repr([readable(digest) for digest in raw])).at_once()


def components(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors that hold the data of ``tensor``: itself, or the parts of a sparse or wrapper tensor."""
    if type(tensor) is not torch.Tensor and is_traceable_wrapper_subclass(tensor):
        return [leaf for part in _wrapped(tensor) for leaf in components(part)]
    if tensor.layout is not torch.strided:
        opaque = tensor.layout is torch._mkldnn  # type: ignore[attr-defined]
        return [] if opaque else _sparse_parts(tensor)
    return [tensor]
