"""Collect op signatures from the calls of a traced run, and rebuild runnable calls from them."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from hashbench.core.diagnose.calls.call import CapturedCall, Memory, TensorForm
from hashbench.core.diagnose.calls.capture import CaptureError, Slots, Windows, is_plain, may_resize, refuse_shadows
from hashbench.core.diagnose.calls.ops import TORCH_NAMESPACES, path_among, why_refused
from hashbench.core.diagnose.repro.call_arguments import Arguments, BadCallError, check_arguments, encoded, find_op
from hashbench.core.trace.arguments import leaves, mapped
from hashbench.core.trace.callbacks import TraceCallback
from hashbench.core.trace.digest import dtype_name, untraced
from hashbench.core.trace.op_schema import plan_of
from hashbench.extensions.fingerprint.document import Kernel, TensorWord, tensor_word
from hashbench.extensions.fingerprint.values import (
    ANY,
    POSITIVE,
    UNIT,
    Arena,
    NoValuesError,
    bits_of,
    content_from,
    content_of,
    fill,
    range_of,
)

MOST_BYTES = 2**31
"""Limit on the inputs of one call."""

_WIDEST_FIRST = (ANY, POSITIVE, UNIT)


@functools.cache
def why_left_out(func: Any) -> str:
    """Return why an op has no fingerprint; empty if it computes something repeatable."""
    if not isinstance(func, torch._ops.OpOverload):
        return "runs other ops that it is given"
    plan = plan_of(func)
    if plan.collective:
        return "exchanges data with other processes"
    if plan.blank or plan.resizes:
        return "allocates memory"
    if not plan.fresh and not plan.writes_arguments:
        return "a view"
    return "does something else than compute on tensors" if why_refused(func) else ""


class KernelCollector(TraceCallback):
    """Collects the op signatures of one traced run, in the order of their first calls. Keeps no tensor.

    ``kernels`` have no outputs yet; ``contents`` and ``left_out`` are those of a
    :class:`~hashbench.extensions.fingerprint.document.ModelFingerprint`.
    """

    wants_trace = False

    def __init__(self) -> None:
        self.contents: dict[str, int] = {}
        self.left_out: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._calls: Counter[Hashable] = Counter()
        self._kernels: dict[Hashable, Kernel] = {}

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """One kernel per signature, with its number of calls."""
        return tuple(replace(kernel, calls=self._calls[key]) for key, kernel in self._kernels.items())

    def before(self, node: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Record the pending call."""
        if reason := why_left_out(func) or self._note(node, func, args, kwargs):
            self.left_out[reason][str(func)] += 1

    def _note(self, node: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Count the call under its signature; return the reason if it has none."""
        key = _signature(func, args, kwargs)
        if key not in self._kernels:
            try:
                with untraced():
                    self._kernels[key] = self._kernel(node, func, args, kwargs)
            except (CaptureError, BadCallError, NoValuesError) as error:
                return str(error)
        self._calls[key] += 1
        return ""

    def _kernel(self, node: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Kernel:
        slots = Slots()
        new_args, new_kwargs = mapped(tuple(args), slots.slot), mapped(dict(kwargs), slots.slot)
        tensors = slots.tensors
        if slots.generators:
            raise CaptureError("draws random numbers")
        for tensor in tensors:
            refuse_shadows(tensor)
            if not is_plain(tensor) or tensor.is_conj() or tensor.is_neg():
                raise CaptureError("an argument is a tensor of a special kind")
        windows = Windows(tensors, whole=may_resize(func))
        if windows.nbytes > MOST_BYTES:
            raise CaptureError(f"its inputs take more than {MOST_BYTES // 2**20} MiB")
        forms = [windows.form(tensor) for tensor in tensors]
        step, _, module = node.rpartition("/")[0].partition("/")
        module = module.partition(".")[2]  # without the model's own class
        return Kernel(
            op=str(func),
            args=tuple(encoded(value) for value in new_args),
            kwargs={name: encoded(value) for name, value in new_kwargs.items()},
            tensors=tuple(self._words(tensors, forms, custom=func.namespace not in TORCH_NAMESPACES)),
            place=f"{step.partition('.')[0]} {module}".strip(),
            calls=0,
            library="",
            outputs=(),
            samples=(),
        )

    def _words(self, tensors: Sequence[torch.Tensor], forms: Sequence[TensorForm], *, custom: bool) -> list[str]:
        numbers: dict[int, int] = {}
        words = []
        for tensor, form in zip(tensors, forms, strict=True):
            shared = numbers.get(form.storage)
            numbers.setdefault(form.storage, len(numbers))
            word = TensorWord(
                dtype_name(form.dtype),
                form.shape,
                form.stride,
                form.offset,
                shared,
                self._values(tensor, custom=custom),
            )
            words.append(word.text())
        return words

    def _values(self, tensor: torch.Tensor, *, custom: bool) -> str:
        """Return the specification of a tensor's synthetic values.

        A custom op may use floating-point values as indices and access memory unchecked, so it gets values from 0 to 1.
        """
        if tensor.is_floating_point() or tensor.is_complex():
            return UNIT if custom else range_of(tensor)
        content, limits = content_of(tensor)
        return f"#{self.contents.setdefault(content, len(self.contents))}" if content else limits


_EXACT = frozenset((int, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))
"""Types whose values are equal only if their text is."""


def _signature(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable:
    """Return the key of a call, equal for calls of one signature. On the hot path of every call."""
    tensors: list[torch.Tensor] = []
    described = _argument_key(args, tensors), _argument_key(kwargs, tensors)
    return func.name(), described, _storage_layout(tensors)


def _argument_key(value: Any, tensors: list[torch.Tensor]) -> Hashable:
    """Return the key of an argument, without storage; its tensors are appended to ``tensors``."""
    kind = type(value)
    if kind in _EXACT:
        return kind, value
    if isinstance(value, (list, tuple)):
        return kind, tuple([_argument_key(item, tensors) for item in value])
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        if not is_plain(value):
            return kind, value.layout
        return value.dtype, value.shape, value.stride(), None if value.is_cpu else value.device.type
    if isinstance(value, Mapping):
        return kind, tuple([(repr(name), _argument_key(item, tensors)) for name, item in value.items()])
    return kind, repr(value)


def _storage_layout(tensors: Sequence[torch.Tensor]) -> tuple[tuple[int, int], ...]:
    """Return, per tensor, the first tensor with its storage and the byte distance from it, or from a cache line."""
    first: dict[int, tuple[int, int]] = {}
    shared = []
    for number, tensor in enumerate(tensors):
        if not is_plain(tensor):
            continue
        begin = int(tensor.storage_offset()) * tensor.itemsize
        known = first.setdefault(tensor.untyped_storage()._cdata, (number, begin))
        shared.append((known[0], begin % 64 if known[0] == number else begin - known[1]))
    return tuple(shared)


# ------------------------------------------------------------------------------------------ a call from a signature


def call_of(
    kernel: Kernel,
    contents: Sequence[str],
    *,
    device: torch.device,
    arena: Arena | None = None,
    repetition: int = -1,
) -> CapturedCall:
    """Rebuild the call of a signature with synthetic values on ``device``.

    Its memories are allocated in the ``arena``, on the host, at the offset of this ``repetition``.

    Raises:
        HashbenchError: the op is not loaded.
        ValueError: the op has no fingerprint or does not take these arguments, or a tensor is invalid or too large.
    """
    words = tuple(tensor_word(text) for text in kernel.tensors)
    forms = _forms(words)
    func = find_op(kernel.op)
    decode = Arguments(tensors=len(forms), generators=0, moved={}).decoded
    args = tuple(decode(value) for value in kernel.args)
    kwargs = {name: decode(value) for name, value in kernel.kwargs.items()}
    check_arguments(func, args, kwargs)
    reason = why_left_out(func) or path_among(func, leaves([args, kwargs]))
    if reason:
        raise BadCallError(f"{func}: {reason}")
    rooms = _filled_rooms(forms, words, contents, arena or Arena(), repetition)
    return CapturedCall(
        op=str(func),
        func=func,
        args=args,
        kwargs=kwargs,
        tensors=forms,
        memories=tuple(Memory(torch.from_numpy(room).to(device)) for room in rooms),
    )


def _forms(words: Sequence[TensorWord]) -> tuple[TensorForm, ...]:
    forms, memories = [], 0
    for word in words:
        dtype = getattr(torch, word.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise NoValuesError(f"{word.dtype!r} is not a dtype")
        number = memories if word.memory is None else word.memory
        if number > memories or (word.memory is not None and number == memories):
            raise NoValuesError("a tensor lies in a memory that is not there")
        memories = max(memories, number + 1)
        forms.append(TensorForm(number, dtype, word.shape, word.stride, word.offset))
    if sum(form.span()[1] for form in forms) > 2 * MOST_BYTES:
        raise NoValuesError(f"its inputs take more than {MOST_BYTES // 2**20} MiB")
    return tuple(forms)


_Held = Sequence[tuple[TensorForm, TensorWord]]
"""The tensors in one memory."""


def _filled_rooms(
    forms: Sequence[TensorForm],
    words: Sequence[TensorWord],
    contents: Sequence[str],
    arena: Arena,
    repetition: int,
) -> list[np.ndarray[Any, Any]]:
    """Return the memories of a call as flat bytes."""
    held: defaultdict[int, list[tuple[TensorForm, TensorWord]]] = defaultdict(list)
    for form, word in zip(forms, words, strict=True):
        held[form.storage].append((form, word))
    sizes = [max(form.span()[1] for form, _ in held[number]) for number in sorted(held)]
    rooms = arena.rooms(sizes, repetition=repetition)
    for number, room in enumerate(rooms):
        _fill(room, number, held[number], contents)
    return rooms


def _range(held: _Held) -> str | None:
    """Return the range of floating-point values in a memory; ``None`` for other dtypes."""
    dtype = held[0][0].dtype
    if any(form.dtype != dtype for form, _ in held):
        raise NoValuesError("two arguments of different dtypes share memory")
    if not (dtype.is_floating_point or dtype.is_complex):
        return None
    return min((word.values for _, word in held), key=lambda value: _WIDEST_FIRST.index(_checked_range(value)))


def _fill(room: np.ndarray[Any, Any], number: int, held: _Held, contents: Sequence[str]) -> None:
    """Write the bytes of one memory, with all tensors in it."""
    dtype, values = held[0][0].dtype, _range(held)
    if values is not None:
        fill(room, dtype, values=values, number=number)
        return
    limits = [word.values for _, word in held if not word.values.startswith("#")]
    fill(room, dtype, values=limits[0] if limits else "0..0", number=number)
    for form, word in held:
        if word.values.startswith("#"):
            place = word.values[1:]
            if not place.isdecimal() or int(place) >= len(contents):
                raise NoValuesError("a recorded content is missing")
            _write_elements(content_from(contents[int(place)], dtype, form.shape), room, form)


def _write_elements(values: torch.Tensor, memory: np.ndarray[Any, Any], form: TensorForm) -> None:
    """Write values to the elements of a tensor over this memory; elements may overlap."""
    flat, width = memory.view(f"u{form.dtype.itemsize}"), form.dtype.itemsize
    steps = [step * width for step in form.stride]
    np.lib.stride_tricks.as_strided(flat[form.offset :], form.shape, steps)[...] = bits_of(values)


def _checked_range(values: str) -> str:
    if values not in _WIDEST_FIRST:
        raise NoValuesError(f"{values[:40]!r} is not a range of synthetic numbers")
    return values
