"""Whether an op is torch's own, a custom one, or composed of others; and where a custom one is defined."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from hashbench.errors import HashbenchError

TORCH_NAMESPACES = frozenset(
    {
        # Those that `import torch` registers in torch 2.15 and that hold kernels: the first words of
        # torch._C._jit_get_all_schemas(). What a newer torch adds is taken for custom until it is named here; that
        # costs four more experiments.
        *("aten", "prim", "prims", "quantized", "_quantized", "quantization", "sparse", "rngprims", "profiler", "cuda"),
        *("mkldnn", "mkldnn_prepacked", "onednn", "mkl", "inductor", "inductor_prims", "_native", "static_runtime"),
        *("c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "symm_mem", "fsdp", "_dtensor"),
    }
)

_TORCH = f"{Path(torch.__file__).parent}/"
_DECORATORS = ("library.py", "_library/custom_ops.py")
"""Files of torch in whose name users' kernels are registered."""

_REGISTERED = re.compile(r"registered at (?P<file>.+?\.py):\d+")
_COMPUTES = re.compile(
    r"^(?!Meta|Fake|Python|Autograd|Functionalize|Tracer|Autocast|ADInplace)\S+: registered at (?P<file>.*?):\d+"
)


@functools.cache
def is_custom(func: Any) -> bool:
    """Whether code other than torch's own computes this op, and so may read anything in the process.

    That is so where the namespace is not one of torch's, and where somebody registered a kernel of their own for an op
    of torch's, in Python (an extension in C++ that does is not told from torch). An op without a schema (a higher-order
    operator) runs whatever it is given.
    """
    schema = getattr(func, "_schema", None)
    if schema is None or schema.name.partition("::")[0] not in TORCH_NAMESPACES:
        return True
    if schema.name.startswith("prims::"):  # torch registers these through the decorator that users have
        return False
    name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
    kernels = (_COMPUTES.match(line) for line in torch._C._dispatch_dump(name).splitlines())
    files = [match["file"] for match in kernels if match is not None]
    python = [file for file in files if file.endswith(".py") or file.startswith("/dev/null")]
    return any(not file.startswith(_TORCH) or file.removeprefix(_TORCH) in _DECORATORS for file in python)


@functools.cache
def calls_others(func: Any) -> bool:
    """Whether torch composes this op of other ops on every device; it then obeys settings that choose among those. Seen
    in inference mode: elsewhere torch takes such ops apart before anybody sees them."""
    schema = getattr(func, "_schema", None)
    return schema is None or torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


# ------------------------------------------------------------------------------------------- where one is defined


@dataclass(frozen=True, slots=True)
class Definition:
    """What defines an op: a Python ``file``, or where that is empty the ``module`` to import."""

    module: str = ""
    file: Path | None = None

    @property
    def argument(self) -> str:
        """What ``repro.py`` is given to have the op: a path, or the name of a module."""
        return str(self.file) if self.file is not None else self.module

    def word(self) -> str:
        """As a text for other machines: names, no paths of this one."""
        named = f"module {self.module}" if self.module else ""
        return ", ".join(part for part in (named, f"file {self.file.name}" if self.file is not None else "") if part)


def needs_definition(func: Any) -> bool:
    """Whether a process that has imported nothing but torch lacks the op, or has another one of that name."""
    return is_custom(func) and not _defining_file(func).startswith(_TORCH)


def definition_of(func: Any) -> Definition | None:
    """Where an op that :func:`needs_definition` was defined; ``None`` for any other, and where that cannot be found
    out. Where a C++ library registered it, the library's Python package may bear the namespace's name."""
    if not needs_definition(func):
        return None
    file = _defining_file(func)
    if file and Path(file).is_file():
        loaded = [name for name, module in list(sys.modules.items()) if getattr(module, "__file__", None) == file]
        return Definition(next((name for name in loaded if name != "__main__"), ""), Path(file).resolve())
    namespace = func._schema.name.partition("::")[0]
    module = sys.modules.get(namespace)
    return Definition(namespace) if isinstance(module, ModuleType) and "." not in namespace else None


def _defining_file(func: Any) -> str:
    """The file of the function that ``torch.library.custom_op`` made the op from; else the Python file that registered
    the op or its kernel, not counting torch's own unless there is no other; else empty."""
    from torch._library import custom_ops

    made = custom_ops.OPDEFS.get(func._schema.name)
    source = inspect.getsourcefile(made._init_fn) if made is not None else None
    if source:
        return source
    try:
        dump = torch._C._dispatch_dump(func._schema.name)
    except RuntimeError:
        return ""
    files = [match["file"] for match in _REGISTERED.finditer(dump)]
    return next((file for file in files if not file.startswith(_TORCH)), files[0] if files else "")


def load(argument: str) -> None:
    """Define the ops that a Python file, a library (``.so``) or a module of this name defines.

    Raises:
        HashbenchError: that failed.
    """
    try:
        if argument.endswith(".py"):
            runpy.run_path(argument)
        elif argument.endswith(".so"):
            torch.ops.load_library(argument)
        else:
            importlib.import_module(argument)
    except Exception as error:  # it is somebody's code
        raise HashbenchError(
            f"cannot import {argument}",
            consequence=f"its ops are not defined ({type(error).__name__}: {error})",
            tip="Give a Python file, a library or the name of a module.",
        ) from error
