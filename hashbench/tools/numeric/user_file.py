"""The Python file that ``hashbench numeric FILE.py`` takes: two models and their inputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hashbench.core.errors import HashbenchError
from hashbench.core.run.rng import preserved_rng, reset_rng_state
from hashbench.core.suites.python_suites import UnusableError, import_file
from hashbench.tools.numeric.running import in_words

EXAMPLE = "before() and inputs(), and after(model) or after()"


def load_file(path: Path, *, seed: int) -> dict[str, Any]:
    """Read the arguments of :func:`~hashbench.tools.numeric.run_model` from a Python file with functions ``before``,
    ``after`` and ``inputs`` and, if they are there, ``loss``, ``make_optimizer``, ``RENAME`` (or a function ``rename``)
    and ``STAGES``. The file is the user's own code; it and its functions are run in this process, each function in the
    random state that ``seed`` gives.

    ``after`` gets, if it takes an argument, a model that ``before`` builds anew, so it may change that in place.

    Raises:
        HashbenchError: there is no such file, it lacks a function, or something in it fails or returns no model.
    """
    names = _names_in(path)
    make_before, make_after, make_inputs = (_function(path, names, name) for name in ("before", "after", "inputs"))
    with preserved_rng():
        before = _called(path, "before", make_before, seed)
        models = [_called(path, "before", make_before, seed)] if _takes_an_argument(make_after) else []
        after = _called(path, "after", lambda: make_after(*models), seed)
        inputs = _called(path, "inputs", make_inputs, seed)
    for name, model in (("before", before), ("after", after)):
        if not callable(model):
            what = f"{name}() returned a value of type {type(model).__name__}, which is not a model"
            raise _unusable(path, what, "Return a torch.nn.Module.")
    if inputs is None:
        raise _unusable(path, "inputs() returned None", "Return a tuple, a dict or a tensor.")
    arguments = {"model_base": before, "model_control": after, "model_input": inputs}
    for name in ("loss", "make_optimizer", "rename"):
        if names.get(name) is not None:
            arguments[name] = _function(path, names, name)
    renames, stages = names.get("RENAME"), names.get("STAGES")
    if renames is not None and not (isinstance(renames, dict) and _are_texts([*renames, *renames.values()])):
        raise _unusable(path, "its RENAME is not a dict of strings", 'Write: RENAME = {"name before": "name after"}.')
    if stages is not None and not (isinstance(stages, (list, tuple, set, frozenset)) and _are_texts(stages)):
        raise _unusable(path, "its STAGES is not a tuple of strings", 'Write: STAGES = ("outputs",).')
    given = {"rename": renames, "stages": stages}
    return arguments | {name: value for name, value in given.items() if value is not None}


def _names_in(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        raise _unusable(path, "it does not exist", "Check the path.")
    try:
        return vars(import_file(path, example=EXAMPLE))
    except UnusableError as error:
        raise _unusable(path, error.what, error.tip) from error
    except (Exception, SystemExit) as error:
        raise _unusable(path, f"its import raised {in_words(error)}", f"Try: python {path}") from error


def _function(path: Path, names: Mapping[str, Any], name: str) -> Callable[..., Any]:
    value = names.get(name)
    if callable(value):
        return value  # type: ignore[no-any-return]
    what = f"it has no function {name}" if value is None else f"its {name} is a {type(value).__name__}, not a function"
    raise _unusable(path, what, f"It needs {EXAMPLE}.")


def _called(path: Path, name: str, function: Callable[[], Any], seed: int) -> Any:
    reset_rng_state(seed)
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise _unusable(path, f"{name}() raised {in_words(error)}", f"Try: python -i {path}") from error


def _takes_an_argument(function: Callable[..., Any]) -> bool:
    try:
        return bool(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return True


def _are_texts(words: Any) -> bool:
    return all(isinstance(word, str) for word in words)


def _unusable(path: Path, problem: str, tip: str) -> HashbenchError:
    return HashbenchError(f"cannot check {path}", consequence=problem, tip=tip)
