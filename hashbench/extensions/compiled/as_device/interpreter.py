"""A private copy of Triton whose functions are interpreted, and Inductor's kernels in it.

Triton chooses between its compiler and its interpreter when a function is decorated, those of its own library
(``tl.sum``) when it is imported. So it is imported a second time with ``TRITON_INTERPRET``, under the same names; the
process's own modules and environment are as before afterwards. What is mended lies in the copy alone:

* Rounding to bfloat16 is to nearest, ties to even, as on a GPU; the interpreter cuts bits off. A value in bfloat16 is
  widened before any arithmetic, and before ``tl.dot``, which multiplies the bits as integers.
* Functions of ``libdevice`` are computed by torch, one element each.
* Reductions and scans with a function of their own fold whole blocks, in as many steps as the logarithm of their
  length. The interpreter takes element after element, in thousands of calls.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import inspect
import linecache
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from hashbench.extensions.compiled.as_device import libdevice
from hashbench.extensions.compiled.as_device.devices import NamedDevice

_TRITON = "triton"
_NATIVE = "triton._C"
"""Native code, which a process loads once."""
_RUNTIME = "torch._inductor.runtime"
_HELPERS = (f"{_RUNTIME}.triton_compat", f"{_RUNTIME}.triton_helpers")
_HEURISTICS = f"{_RUNTIME}.triton_heuristics"
_SWITCH = "TRITON_INTERPRET"


class NotInterpretedError(Exception):
    """Triton's interpreter cannot run a kernel."""


@dataclass(frozen=True, slots=True, eq=False)
class InterpretedTriton:
    """The private copy.

    Attributes:
        modules: by name, those of Triton and of Inductor's helpers.
        lock: held while it runs: it keeps the place in the grid in one object.
    """

    modules: Mapping[str, ModuleType]
    memory: InterpreterMemory
    lock: Any = field(default_factory=threading.RLock)

    @contextmanager
    def running(self, args: Iterable[Any]) -> Iterator[None]:
        """Return a context in which a call with these arguments runs: it reaches their memory, and no other."""
        with self.lock:
            self.memory.open(args)
            yield

    def load(self, source: str, path: str, name: str, decorated: Callable[..., Any]) -> Any:
        """Run the source of a kernel's module, and return its kernel.

        Args:
            source: as Inductor wrote it.
            path: of its file.
            name: of the kernel.
            decorated: called as ``triton_heuristics.cached_autotune``, returns a decorator.
        """
        linecache.checkcache(path)
        heuristics = _with_autotune(importlib.import_module(_HEURISTICS), decorated)
        known = {**self.modules, _HEURISTICS: heuristics}
        helpers: Any = known[_HELPERS[1]]
        known[_RUNTIME] = _Runtime(helpers, heuristics)
        space = {
            "__name__": name,
            "__file__": path,
            "__builtins__": {**vars(builtins), "__import__": _importing(known)},
        }
        helpers.set_driver_to_gpu = _no_driver
        with self.lock:
            exec(compile(source, path, "exec"), space)
        return space[name]


class InterpreterDriver:
    """Triton's driver of a device that is not there."""

    def __init__(self, device: NamedDevice) -> None:
        self._device = device

    def get_current_target(self) -> Any:
        target = importlib.import_module("triton.backends.compiler").GPUTarget
        return target("cuda", self._device.capability, self._device.warp_size)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return device * 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return torch.cuda

    def is_active(self) -> bool:
        return True


class _Runtime(ModuleType):
    """``torch._inductor.runtime`` as a kernel's module imports it."""

    def __init__(self, helpers: ModuleType, heuristics: Any) -> None:
        super().__init__(_RUNTIME)
        vars(self).update(triton_helpers=helpers, triton_heuristics=heuristics)

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.modules[_RUNTIME], name)


def _no_driver() -> None: ...


def _importing(known: Mapping[str, Any]) -> Callable[..., Any]:
    """Return ``__import__`` for a kernel's module, which finds these modules first."""

    def importing(name: str, values: Any = None, local: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        if level or name not in known:
            return importlib.__import__(name, values, local, fromlist, level)
        return known[name] if fromlist else known.get(name.partition(".")[0], known[name])

    return importing


def _with_autotune(heuristics: ModuleType, decorated: Callable[..., Any]) -> Any:
    """Return the heuristics whose decorators (``pointwise``, ``reduction``) give what ``decorated`` makes.

    They look ``cached_autotune`` up in their module: here, in a copy of its namespace.
    """
    values = dict(vars(heuristics))
    for name, value in vars(heuristics).items():
        if inspect.isfunction(value) and value.__globals__ is vars(heuristics):
            copied = FunctionType(value.__code__, values, name, value.__defaults__, value.__closure__)
            copied.__kwdefaults__ = value.__kwdefaults__
            values[name] = copied
    values["cached_autotune"] = decorated
    return SimpleNamespace(**values)


class InterpreterMemory:
    """Where the arguments of the running call lie. What the interpreter reads or writes is an address: a wrong one
    would end the process, or spoil it."""

    def __init__(self) -> None:
        self._first: Any = np.zeros(0, np.uint64)
        self._end: Any = np.zeros(0, np.uint64)

    def open(self, args: Iterable[Any]) -> None:
        """Let the storages of the tensors among ``args`` be all that is reached."""
        storages = [value.untyped_storage() for value in args if isinstance(value, torch.Tensor)]
        places = sorted((storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages)
        self._first, self._end = (np.array([place[at] for place in places], np.uint64) for at in (0, 1))

    def guarded(self, access: Callable[..., Any]) -> Callable[..., Any]:
        """Return a load or store of the interpreter that refuses addresses of other memory."""
        masks = inspect.signature(access).parameters

        @functools.wraps(access)
        def checked(builder: Any, *args: Any, **kwargs: Any) -> Any:
            given = dict(zip(list(masks)[1:], args, strict=False)) | kwargs
            pointers = given.get("ptrs", given.get("ptr"))
            self._check(pointers, given["mask"].data)
            return access(builder, *args, **kwargs)

        return checked

    def _check(self, pointers: Any, mask: Any) -> None:
        addresses, size = pointers.data, np.uint64(max(1, pointers.get_element_ty().primitive_bitwidth // 8))
        chosen = addresses[np.broadcast_to(mask, addresses.shape)]
        if not chosen.size:
            return
        least, most = chosen.min(), chosen.max() + size
        at = int(np.searchsorted(self._first, least, side="right")) - 1
        if at >= 0 and most <= self._end[at]:
            return
        place = np.searchsorted(self._first, chosen, side="right").astype(np.int64) - 1
        if not len(self._first) or ((place < 0) | (chosen + size > self._end[place])).any():
            raise NotInterpretedError("it reaches memory outside of its arguments")


@functools.cache
def interpreted(device: NamedDevice) -> InterpretedTriton:
    """Return the private copy for a device, imported at the first call.

    Raises:
        ImportError: Triton is not installed.
    """
    with _imported_anew() as modules:
        importlib.import_module(_TRITON)
        for name in ("language", "runtime.interpreter", "language.extra.cuda.libdevice"):
            importlib.import_module(f"{_TRITON}.{name}")
        importlib.import_module(_HELPERS[1])
        found = modules()
    memory = InterpreterMemory()
    _mend(found, device, memory)
    return InterpretedTriton(found, memory)


@contextmanager
def _imported_anew() -> Iterator[Callable[[], dict[str, ModuleType]]]:
    """Let imports of Triton and of Inductor's helpers load them again, to be interpreted; yield what returns the new
    modules by name. The modules, the attributes of packages and the environment are as before afterwards."""
    package = importlib.import_module(_RUNTIME)
    taken = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_copied(name)}
    names = [name.rpartition(".")[2] for name in _HELPERS]
    attributes = {name: vars(package).pop(name) for name in names if name in vars(package)}
    switch = os.environ.get(_SWITCH)
    os.environ[_SWITCH] = "1"
    try:
        with warnings.catch_warnings():
            yield lambda: {name: module for name, module in sys.modules.items() if _is_copied(name)}
    finally:
        os.environ.pop(_SWITCH)
        if switch is not None:
            os.environ[_SWITCH] = switch
        for name in [name for name in sys.modules if _is_copied(name)]:
            del sys.modules[name]
        for name in names:
            vars(package).pop(name, None)
        sys.modules.update(taken)
        vars(package).update(attributes)


def _is_copied(name: str) -> bool:
    inside = name == _TRITON or name.startswith(f"{_TRITON}.")
    return (inside and not name.startswith(_NATIVE)) or name in _HELPERS


# -------------------------------------------------------------------------------------------------- what is mended


def _mend(modules: Mapping[str, ModuleType], device: NamedDevice, memory: InterpreterMemory) -> None:
    interpreter: Any = modules[f"{_TRITON}.runtime.interpreter"]
    builder = interpreter.InterpreterBuilder
    values = _TritonValues(interpreter, modules[f"{_TRITON}.language"])
    builder.cast_impl = lambda _, source, kind: values.cast(source, kind)
    for name in ("create_masked_load", "create_masked_store", "create_atomic_rmw"):
        setattr(builder, name, memory.guarded(getattr(builder, name)))
    builder.create_dot = lambda _, a, b, d, *__: values.dot(a, b, d)
    builder.create_extern_elementwise = lambda _, __, ___, symbol, given, kind, ____: values.called(symbol, given, kind)
    builder.create_inline_asm = lambda _, asm, __, given, kinds, *___: values.instructed(asm, given, kinds)
    interpreter.ReduceOps.generic_reduce = lambda reduction, given: values.reduced(reduction, given)
    interpreter.ScanOps.generic_scan = lambda scan, given: values.scanned(scan, given)
    triton: Any = modules[_TRITON]
    triton.jit = lambda function=None, **_: interpreter.InterpretedFunction(function) if function else triton.jit
    modules[f"{_TRITON}.runtime"].driver._active = InterpreterDriver(device)
    _interpret_for_good(interpreter, modules[f"{_TRITON}.language"])
    functions = modules[f"{_TRITON}.language.extra.cuda.libdevice"]
    for name in _HELPERS:
        modules[name].libdevice = _Extern(functions, interpreter.interpreter_semantic)  # type: ignore[attr-defined]


def _interpret_for_good(interpreter: Any, tl: Any) -> None:
    """Let the language of the copy be the interpreter's from now on. It is replaced else at each call of a function,
    which takes longer than the call."""

    def sees(_: Any) -> None: ...

    space = {"tl": tl, "core": tl.core}
    interpreter._patch_lang(FunctionType(sees.__code__, space))
    interpreter._patch_lang = lambda _: interpreter._LangPatchScope()


class _Extern:
    """``libdevice`` in the interpreter."""

    def __init__(self, functions: ModuleType, semantic: Any) -> None:
        self._functions, self._semantic = functions, semantic

    def __getattr__(self, name: str) -> Any:
        return functools.partial(getattr(self._functions, name), _semantic=self._semantic)


class _TritonValues:
    """Arithmetic on the interpreter's values, NumPy arrays; bfloat16 is there as the bits in uint16.

    Args:
        interpreter: module of the private copy.
        tl: its language.
    """

    def __init__(self, interpreter: Any, tl: Any) -> None:
        self._handle, self._numpy_type, self._tl = interpreter.TensorHandle, interpreter._get_np_dtype, tl

    def cast(self, source: Any, kind: Any) -> Any:
        """Return a value in another dtype, rounded to the nearest, ties to even."""
        old, new, bfloat16 = source.dtype.scalar, kind.scalar, self._tl.bfloat16
        data = source.data
        if old == new:
            return self._handle(data, new)
        if old == bfloat16:
            data = widened(data)
        data = narrowed(data.astype(np.float32)) if new == bfloat16 else _converted(data, self._numpy_type(new))
        return self._handle(data, new)

    def dot(self, a: Any, b: Any, added: Any) -> Any:
        """Return ``a @ b + added``, products and sums in the dtype of ``added``."""
        left, right = (self._wide(each) for each in (a, b))
        return self._handle(np.matmul(left, right, dtype=added.data.dtype) + added.data, added.dtype.scalar)

    def _wide(self, value: Any) -> Any:
        kind = value.dtype.scalar
        if kind == self._tl.bfloat16:
            return widened(value.data)
        if kind.is_floating() and kind.primitive_bitwidth == 8:
            raise NotInterpretedError(f"tl.dot of {kind}")
        return value.data

    def called(self, symbol: str, given: Sequence[Any], kind: Any) -> Any:
        """Return what a function of ``libdevice`` gives."""
        data = libdevice.computed(symbol, [each.data for each in given])
        return self._handle(data.astype(self._numpy_type(kind)), kind.scalar)

    def instructed(self, asm: str, given: Sequence[Any], kinds: Sequence[Any]) -> Any:
        """Return the result of an instruction in PTX, as ``tl.inline_asm_elementwise`` takes it."""
        data = libdevice.instructed(asm, [each.data for each in given])
        result = self._handle(data.astype(self._numpy_type(kinds[0])), kinds[0].scalar)
        return SimpleNamespace(get_result=lambda _: result)

    def reduced(self, reduction: Any, given: Sequence[Any]) -> list[Any]:
        """Return what ``tl.reduce`` gives: the halves of what is reduced are combined until one element is left."""
        axis = reduction.axis
        datas = [each.handle.data for each in given]
        shape = datas[0].shape
        if axis is None:
            datas, axis = [data.reshape(-1) for data in datas], 0
        while datas[0].shape[axis] > 1:
            half = datas[0].shape[axis] // 2
            parts = [np.split(data, [half, 2 * half], axis=axis) for data in datas]
            folded = self._combined(reduction, given, [part[0] for part in parts], [part[1] for part in parts])
            datas = [np.concatenate([new, part[2]], axis=axis) for new, part in zip(folded, parts, strict=True)]
        if reduction.axis is None:
            datas = [data.reshape([1] * len(shape)) if reduction.keep_dims else data.item() for data in datas]
        elif not reduction.keep_dims:
            datas = [data.squeeze(axis) for data in datas]
        return [reduction.to_tensor(data, each.dtype) for data, each in zip(datas, given, strict=True)]

    def scanned(self, scan: Any, given: Sequence[Any]) -> list[Any]:
        """Return what ``tl.associative_scan`` gives: each element is combined with the one 1, 2, 4, … before it."""
        datas, axis = [each.handle.data for each in given], scan.axis
        step, size = 1, datas[0].shape[axis]
        place = np.arange(size).reshape([-1 if at == axis else 1 for at in range(datas[0].ndim)])
        while step < size:
            earlier = [np.roll(data, step, axis=axis) for data in datas]
            folded = self._combined(scan, given, earlier, datas)
            datas = [np.where(place >= step, new, data) for new, data in zip(folded, datas, strict=True)]
            step *= 2
        return [scan.to_tensor(data, each.dtype) for data, each in zip(datas, given, strict=True)]

    def _combined(self, operation: Any, given: Sequence[Any], left: Sequence[Any], right: Sequence[Any]) -> list[Any]:
        """Return what the function of a reduction or scan makes of two blocks."""
        operands = [
            operation.to_tensor(data, each.dtype)
            for side in (left, right)
            for data, each in zip(side, given, strict=True)
        ]
        found = operation.combine_fn(*operands)
        found = found if isinstance(found, (tuple, list)) else (found,)
        values = [each.handle.data if hasattr(each, "handle") else each for each in found]
        return [
            np.broadcast_to(np.asarray(value, data.dtype), data.shape)
            for value, data in zip(values, left, strict=False)
        ]


def widened(bits: Any) -> Any:
    """Return bfloat16 (bits in uint16) as float32, exactly."""
    return (np.ascontiguousarray(bits).astype(np.uint32) << 16).view(np.float32).reshape(np.shape(bits))


def narrowed(values: Any) -> Any:
    """Return float32 as bfloat16 (bits in uint16), rounded to the nearest, ties to even."""
    rounded = torch.from_numpy(np.array(values, np.float32)).to(torch.bfloat16)
    return rounded.view(torch.uint16).numpy()


def _converted(data: Any, kind: Any) -> Any:
    """Return a value in a NumPy dtype; what a conversion to integers overflows is undefined, as on a GPU."""
    with np.errstate(all="ignore"):
        return data.astype(kind)
