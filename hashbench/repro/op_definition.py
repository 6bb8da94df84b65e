"""Where an op that torch does not have is defined, so that another process can have it too."""

from __future__ import annotations

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
from hashbench.replay.op_owner import is_custom

_TORCH = str(Path(torch.__file__).parent)
_REGISTERED = re.compile(r"registered at (?P<file>.+?\.py):\d+")


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
    return is_custom(func) and not (_made_by(func) or _registered_by(func) or "").startswith(_TORCH)


def definition_of(func: Any) -> Definition | None:
    """Where the op was defined; ``None`` where that cannot be found out.

    An op made by ``torch.library.custom_op`` keeps its Python function. For other ops the dispatcher knows which file
    registered them; where that is one of a C++ library, the library's Python package may bear the namespace's name.
    """
    file = _made_by(func) or _registered_by(func)
    if file is not None and Path(file).is_file():
        return Definition(_module_of(file), Path(file).resolve())
    namespace = func._schema.name.partition("::")[0]
    module = sys.modules.get(namespace)
    return Definition(namespace) if isinstance(module, ModuleType) and "." not in namespace else None


def _made_by(func: Any) -> str | None:
    """The file of the function that ``torch.library.custom_op`` made the op from."""
    from torch._library import custom_ops

    made = custom_ops.OPDEFS.get(func._schema.name)
    return inspect.getsourcefile(made._init_fn) if made is not None else None


def _registered_by(func: Any) -> str | None:
    """The Python file that registered the op or its kernel, not counting torch's own, unless there is no other."""
    try:
        dump = torch._C._dispatch_dump(func._schema.name)
    except RuntimeError:
        return None
    files = [match["file"] for match in _REGISTERED.finditer(dump)]
    return next((file for file in files if not file.startswith(_TORCH)), files[0] if files else None)


def _module_of(file: str) -> str:
    """The name of the module that was loaded from a file; empty for the main script."""
    for name, module in list(sys.modules.items()):
        if name != "__main__" and getattr(module, "__file__", None) == file:
            return name
    return ""


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
