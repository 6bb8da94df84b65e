"""Makes a function answer otherwise for a while, whoever holds it and under whatever name.

``from time import perf_counter`` binds a name that a patched ``time`` module never reaches, and so do a default
argument and ``self.now = time.time``. So the function object itself is changed: of a Python function its code; of a
builtin, in its ``PyCFunctionObject``, the C function that it calls and what that is bound to.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_void_p, py_object
from types import FrameType
from typing import Any

_VARARGS_AND_KEYWORDS = 0x1 | 0x2  # Include/methodobject.h
_FIELDS = c_void_p * 5
"""The last fields of a ``PyCFunctionObject``: method definition, self, module, weak references, vectorcall."""

_new_builtin = ctypes.PYFUNCTYPE(py_object, c_void_p, py_object, py_object, c_void_p)(
    ("PyCMethod_New", ctypes.pythonapi)
)


class _MethodDef(ctypes.Structure):
    _fields_ = (("name", c_void_p), ("function", c_void_p), ("flags", ctypes.c_int), ("doc", c_void_p))


class _Answer(types.ModuleType):
    """What a builtin is bound to meanwhile. A module, by which ``pickle`` and ``repr`` tell functions from methods."""

    def __init__(
        self, original: Callable[..., Any], answer: Callable[..., Any], is_spared: Callable[[FrameType], bool] | None
    ) -> None:
        super().__init__(original.__name__)
        self.original, self.answer, self.is_spared = original, answer, is_spared

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_spared is not None and self.is_spared(sys._getframe(1)):
            return self.original(*args, **kwargs)
        return self.answer(*args, **kwargs)


@contextmanager
def builtin_answering(
    builtin: Any, answer: Callable[..., Any], *, is_spared: Callable[[FrameType], bool] | None = None
) -> Iterator[None]:
    """A call of ``builtin`` (a function in C, or a bound method in C) returns what ``answer`` does; callers
    whose frame ``is_spared`` get what the original returns."""
    offset = types.BuiltinFunctionType.__basicsize__ - ctypes.sizeof(_FIELDS)
    fields = _FIELDS.from_address(id(builtin) + offset)
    definition, bound_to, vectorcall = fields[0] or 0, fields[1], fields[4]
    known = _MethodDef.from_address(definition)
    original = _new_builtin(definition, builtin.__self__, builtin.__module__, None)
    bound = _Answer(original, answer, is_spared)
    # Called as function(bound, args, kwargs): that is the signature of PyObject_Call.
    call = ctypes.cast(ctypes.pythonapi.PyObject_Call, c_void_p).value
    asking = _MethodDef(known.name, call, _VARARGS_AND_KEYWORDS, known.doc)
    ctypes.pythonapi.Py_IncRef(py_object(bound))  # the garbage collector counts what a builtin is bound to
    # In one step, while this thread holds the interpreter lock: another one may be about to call it.
    fields[:] = [ctypes.addressof(asking), id(bound), fields[2], fields[3], None]
    try:
        yield
    finally:
        fields[:] = [definition, bound_to, fields[2], fields[3], vectorcall]
        ctypes.pythonapi.Py_DecRef(py_object(bound))


@contextmanager
def function_answering(function: types.FunctionType, answer: Callable[..., Any]) -> Iterator[None]:
    """A call of a Python ``function`` without a closure returns ``answer(original, …)`` of its arguments, where
    ``original`` does what the function did."""
    code, defaults, keyword_defaults = function.__code__, function.__defaults__, function.__kwdefaults__
    original = types.FunctionType(code, function.__globals__, function.__name__, defaults)
    original.__kwdefaults__ = keyword_defaults
    function.__kwdefaults__ = {"_answer": functools.partial(answer, original)}
    function.__code__ = _ask.__code__
    try:
        yield
    finally:
        function.__code__ = code
        function.__kwdefaults__ = keyword_defaults


def _ask(*args: Any, _answer: Callable[..., Any], **kwargs: Any) -> Any:
    return _answer(*args, **kwargs)


@contextmanager
def attribute_of_type(owner: type, name: str, value: object) -> Iterator[None]:
    """An attribute of a class changed, also where the class is written in C and refuses it. Every reference to the
    class, and every instance, sees it."""
    (attributes,) = gc.get_referents(owner.__dict__)  # the dict, of which ``__dict__`` is only a view
    before = attributes[name]
    try:
        _set(owner, attributes, name, value)
        yield
    finally:
        _set(owner, attributes, name, before)


def _set(owner: type, attributes: dict[str, Any], name: str, value: object) -> None:
    attributes[name] = value
    ctypes.pythonapi.PyType_Modified(py_object(owner))  # the interpreter caches what it found on a class
