"""The Python file that ``hashbench numeric FILE.py`` takes: two models and their inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hashbench.core.run.rng import preserved_rng, reset_rng_state
from hashbench.core.suites.user_file import UserFile, takes_an_argument

EXAMPLE = "before() and inputs(), and after(model) or after()"


def load_file(file: UserFile, *, seed: int) -> dict[str, Any]:
    """Read the arguments of :func:`~hashbench.tools.numeric.run_model` from a file with functions ``before``,
    ``after`` and ``inputs`` and, if they are there, ``loss``, ``make_optimizer``, ``RENAME`` (or a function ``rename``)
    and ``STAGES``. Each function is run in the random state that ``seed`` gives.

    ``after`` gets, if it takes an argument, a model that ``before`` builds anew, so it may change that in place.

    Raises:
        HashbenchError: the file lacks a function, or something in it fails or returns no model.
    """
    make_before, make_after, make_inputs = (file.function(name) for name in ("before", "after", "inputs"))

    def built(name: str, make: Callable[..., Any], *models: Any) -> Any:
        reset_rng_state(seed)
        return file.model(name, make, *models)

    with preserved_rng():
        before = built("before", make_before)
        models = [built("before", make_before)] if takes_an_argument(make_after) else []
        after = built("after", make_after, *models)
        reset_rng_state(seed)
        inputs = file.inputs("inputs", make_inputs)
    names = file.names
    arguments = {"model_base": before, "model_control": after, "model_input": inputs}
    for name in ("loss", "make_optimizer", "rename"):
        if names.get(name) is not None:
            arguments[name] = file.function(name)
    renames, stages = names.get("RENAME"), names.get("STAGES")
    if renames is not None and not (isinstance(renames, dict) and _are_texts([*renames, *renames.values()])):
        raise file.unusable("its RENAME is not a dict of strings", 'Write: RENAME = {"name before": "name after"}.')
    if stages is not None and not (isinstance(stages, (list, tuple, set, frozenset)) and _are_texts(stages)):
        raise file.unusable("its STAGES is not a tuple of strings", 'Write: STAGES = ("outputs",).')
    given = {"rename": renames, "stages": stages}
    return arguments | {name: value for name, value in given.items() if value is not None}


def _are_texts(words: Any) -> bool:
    return all(isinstance(word, str) for word in words)
