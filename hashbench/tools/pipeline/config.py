"""What to run: a Python file with the pipeline's functions, by name or marked by a decorator, or a YAML file that names
them and gives values.

Loading a configuration executes the user's own file, so it is done in the child process of a check.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hashbench.errors import HashbenchError, first_line
from hashbench.suites.python_suites import import_file
from hashbench.tools.pipeline import MARK

EXAMPLE = "def make_loader(seed): return torch.utils.data.DataLoader(...)"
NAMES = ("make_loader", "make_model", "make_optimizer", "loss", "forward", "set_seed")
"""What a file's functions may be called; only ``make_loader`` must be there."""

_VALUES: Mapping[str, tuple[int, int, int]] = MappingProxyType({"seed": (1337, 0, 2**32 - 1), "steps": (3, 1, 10_000)})
"""The values that a configuration may give: default, least, greatest."""


@dataclass(frozen=True, slots=True)
class Config:
    """The parts of one pipeline: those functions of :data:`NAMES` that there are, and the number of batches that are
    looked at and trained on."""

    functions: Mapping[str, Callable[..., Any]]
    seed: int
    steps: int


def check_path(path: Path) -> None:
    """Raises :class:`HashbenchError` unless ``path`` is a file of a kind that :func:`load` knows."""
    if not path.is_file():
        raise _unusable(path, "it does not exist", tip="Check the path.")
    if path.suffix not in (".py", ".yaml", ".yml"):
        raise _unusable(path, "it is neither a Python file (.py) nor YAML (.yaml)", tip=f"Write one with `{EXAMPLE}`.")


def load(path: Path) -> Config:
    """Read a configuration; a Python file is executed here, with its folder first on ``sys.path``.

    Raises:
        HashbenchError: no such file, no loader in it, a value of another type, or a name that leads nowhere.
        Exception: whatever the file raises.
    """
    check_path(path)
    functions, content = _of_python(path) if path.suffix == ".py" else _of_yaml(path)
    if "make_loader" not in functions:
        raise _unusable(path, "it has no loader", tip=f"Add `{EXAMPLE}`, or mark a function with @pipeline.loader.")
    values = {}
    for name, (default, least, most) in _VALUES.items():
        value = values[name] = content.get(name, default)
        if type(value) is not int or not least <= value <= most:
            raise _unusable(path, f"{name} = {value!r} is not a whole number from {least} to {most}", tip="Correct it.")
    return Config(functions, **values)


def _of_python(path: Path) -> tuple[dict[str, Any], Mapping[Any, Any]]:
    module = vars(import_file(path.resolve()))
    functions = {name: module[name] for name in NAMES if callable(module.get(name))}
    for value in list(module.values()):
        part = getattr(value, MARK, "") if callable(value) else ""
        if isinstance(part, str) and part and functions.setdefault(part, value) is not value:
            raise _unusable(path, f"two functions are its {part}", tip="Mark or name only one of them.")
    return functions, module


def _of_yaml(path: Path) -> tuple[dict[str, Any], Mapping[Any, Any]]:
    try:
        import yaml
    except ImportError:
        raise _unusable(path, "reading YAML needs PyYAML", tip="pip install 'hashbench[pipeline]'") from None
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        first = first_line(error) or type(error).__name__
        raise _unusable(path, f"it is not YAML ({first})", tip="Check it with any YAML tool.") from error
    if not isinstance(content, Mapping):
        raise _unusable(path, "it is not a list of entries", tip="Begin with `loader: module:function`.")
    known = {*NAMES, *_VALUES, "loader", "model", "optimizer"}
    unknown = sorted(str(key) for key in content if key not in known)
    if unknown:
        tip = f"Known are {', '.join(sorted(known))}."
        raise _unusable(path, f"it has an unknown entry {unknown[0]!r}", tip=tip)
    sys.path.insert(0, str(path.resolve().parent))
    entries = {name: content.get(name, content.get(name.removeprefix("make_"))) for name in NAMES}
    return {name: _named(path, name, entry) for name, entry in entries.items() if entry is not None}, content


def _named(path: Path, part: str, entry: Any) -> Callable[..., Any]:
    """The function that ``module:function`` or ``file.py:function`` names, or ``{call: …, arguments: {…}}``."""
    arguments: Any = {}
    if isinstance(entry, Mapping):
        entry, arguments = entry.get("call"), entry.get("arguments", {})
    tip = "Write `module:function`, `file.py:function`, or `{call: …, arguments: {…}}`."
    if not isinstance(entry, str) or entry.count(":") != 1 or not isinstance(arguments, Mapping):
        raise _unusable(path, f"{part} names no function", tip=tip)
    where, _, name = entry.partition(":")
    if where.endswith(".py"):
        file = path.resolve().parent / where
        check_path(file)
        module = import_file(file)
    else:
        module = importlib.import_module(where)
    function = getattr(module, name, None)
    if not callable(function):
        raise _unusable(path, f"{where} has no function {name!r}", tip=tip)
    return functools.partial(function, **{str(key): value for key, value in arguments.items()})


def _unusable(path: Path, what: str, *, tip: str) -> HashbenchError:
    return HashbenchError(f"cannot use the pipeline {path}: {what}", consequence="nothing was run", tip=tip)
