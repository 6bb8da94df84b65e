"""A Python file with the two models of a check: what ``hashbench numeric FILE.py`` takes.

It is the user's own code, and is run in this process.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from hashbench.errors import HashbenchError
from hashbench.run.rng import preserved_rng, reset_rng_state
from hashbench.suites.python_suites import import_file
from hashbench.text import squeezed
from hashbench.tools.numeric.findings import Rename

EXAMPLE = "before() and inputs(), and after(model) or after()"


@dataclass(frozen=True, slots=True)
class UserFile:
    """What a file offers: ``before``, ``after`` (both called), ``inputs``, and, if they are there, ``loss``,
    ``make_optimizer``, ``RENAME`` (or a function ``rename``) and ``STAGES``."""

    before: Callable[..., Any]
    after: Callable[..., Any]
    inputs: Any
    loss: Callable[..., Any] | None = None
    make_optimizer: Callable[..., Any] | None = None
    rename: Rename = None
    stages: Sequence[str] | None = None


def load(path: Path, *, seed: int) -> UserFile:
    """Run the file and call its functions, each in the random state that ``seed`` gives.

    ``after`` gets, if it takes an argument, a model that ``before`` builds anew, so it may change that in place.

    Raises:
        HashbenchError: there is no such file, it lacks a function, or something in it fails or returns no model.
    """
    module = _imported(path)
    with preserved_rng():
        before = _model(path, "before", _function(path, module, "before"), seed)
        after = _after(path, module, seed)
        inputs = _called(path, "inputs()", _function(path, module, "inputs"), seed)
    if inputs is None:
        raise _unusable(path, "inputs() returned None", "Return a tuple, a dict or a tensor.")
    return UserFile(
        before,
        after,
        inputs,
        loss=_optional(path, module, "loss"),
        make_optimizer=_optional(path, module, "make_optimizer"),
        rename=_rename(path, module),
        stages=_stages(path, module),
    )


def _imported(path: Path) -> ModuleType:
    if not path.is_file():
        raise _unusable(path, "there is no such file", "Check the path.")
    if path.suffix != ".py":
        raise _unusable(path, "it is not a Python file (.py)", f"Give a Python file with {EXAMPLE}.")
    try:
        return import_file(path)
    except (Exception, SystemExit) as error:
        raise _unusable(path, f"its import raised {_text(error)}", f"Try: python {path}") from error


def _function(path: Path, module: ModuleType, name: str) -> Callable[..., Any]:
    found = getattr(module, name, None)
    if not callable(found):
        what = f"it has no function {name}" if found is None else f"its {name} is a {type(found).__name__}, no function"
        raise _unusable(path, what, f"It needs {EXAMPLE}.")
    return found  # type: ignore[no-any-return]


def _optional(path: Path, module: ModuleType, name: str) -> Callable[..., Any] | None:
    return None if getattr(module, name, None) is None else _function(path, module, name)


def _after(path: Path, module: ModuleType, seed: int) -> Callable[..., Any]:
    function = _function(path, module, "after")
    try:
        takes = bool(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        takes = True
    if not takes:
        return _model(path, "after", function, seed)
    model = _model(path, "before", _function(path, module, "before"), seed)
    return _model(path, "after", lambda: function(model), seed)


def _model(path: Path, name: str, function: Callable[..., Any], seed: int) -> Callable[..., Any]:
    made = _called(path, f"{name}()", function, seed)
    if not callable(made):
        what = f"{name}() returned a value of type {type(made).__name__}, no model"
        raise _unusable(path, what, "Return a torch.nn.Module.")
    return made  # type: ignore[no-any-return]


def _called(path: Path, name: str, function: Callable[..., Any], seed: int) -> Any:
    reset_rng_state(seed)
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise _unusable(path, f"{name} raised {_text(error)}", f"Try: python -i {path}") from error


def _rename(path: Path, module: ModuleType) -> Rename:
    found: Any = getattr(module, "RENAME", None)
    if found is None:
        return _optional(path, module, "rename")
    if not isinstance(found, dict) or not all(isinstance(word, str) for pair in found.items() for word in pair):
        raise _unusable(path, "its RENAME is no dict of strings", 'Write: RENAME = {"name before": "name after"}.')
    return found


def _stages(path: Path, module: ModuleType) -> Sequence[str] | None:
    found: Any = getattr(module, "STAGES", None)
    if found is None:
        return None
    if not isinstance(found, (list, tuple, set, frozenset)) or not all(isinstance(word, str) for word in found):
        raise _unusable(path, "its STAGES is no tuple of strings", 'Write: STAGES = ("outputs",).')
    return tuple(found)


def _text(error: BaseException) -> str:
    return squeezed(f"{type(error).__name__}: {error}")


def _unusable(path: Path, problem: str, tip: str) -> HashbenchError:
    return HashbenchError(f"cannot check {path}", consequence=problem, tip=tip)
