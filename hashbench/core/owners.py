"""Whose code a file is: torch's, hashbench's, Python's, or the user's. Imports no torch."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sysconfig
from pathlib import Path

_HERE = str(Path(__file__).parents[1])
_ZOO = str(Path(_HERE) / "models")
_STANDARD = sysconfig.get_path("stdlib")
_INSTALLED = sysconfig.get_path("purelib")
_TYPED = ("<ipython-input-", "<python-input-", "<stdin>")
"""What code typed into IPython, Python since 3.13 and older Pythons has as its file."""


@functools.cache
def torch_folder() -> str:
    """Return the folder of the torch that is, or would be, imported; ``"<none>"`` without one."""
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.origin:
            return str(Path(spec.origin).parent)
    return "<none>"


def is_users(file: str) -> bool:
    """Return True if code of this file is neither torch's, hashbench's nor the standard library's."""
    if file.startswith((_INSTALLED, _HERE)):  # torchvision's code counts as the model's, as does an installed zoo
        return file.startswith(_ZOO) or not file.startswith((torch_folder(), _HERE))
    return file.startswith(_TYPED) or not file.startswith((_STANDARD, torch_folder(), "<"))
