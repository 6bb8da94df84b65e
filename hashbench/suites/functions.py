"""Functions that build models: the decorator :func:`model`, the dict ``MODELS``, and what such a function returns.

Nothing here imports torch before :func:`build`, so that ``@hashbench.model`` costs a package nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack, cast, overload

from hashbench.errors import HashbenchError
from hashbench.records import DETERMINISTIC

if TYPE_CHECKING:
    from hashbench.run.workload import Workload

EXAMPLE = 'MODELS = {"my_model": lambda: (module, example_inputs)}'
"""The shortest suite, for error messages."""

_MARK = "__hashbench_model__"
_LOWEST = {"batch_size": 1, "iterations": 1, "runs": 2}
_Function = TypeVar("_Function", bound=Callable[..., Any])


class Facts(TypedDict, total=False):
    """What is known of a model before it is built; fields as in :class:`~hashbench.records.ModelSpec`."""

    name: str
    task: str
    family: str
    batch_size: int | None
    default: bool
    skip_training: str
    skip_inference: str
    deterministic: str
    optimizer: str
    iterations: int | None
    runs: int | None
    note: str


class UnusableError(HashbenchError):
    """A module or object offers no models, or offers them wrongly. ``what`` is the problem alone."""


@overload
def model(function: _Function, /) -> _Function: ...
@overload
def model(**facts: Unpack[Facts]) -> Callable[[_Function], _Function]: ...
def model(function: Any = None, /, **facts: Any) -> Any:
    """Mark a function that builds a model, so that a suite is swept without a dict ``MODELS``.

    The function returns ``(module, example_inputs)`` or a :class:`hashbench.Workload`, and is not changed.

    Args:
        function: the function, where the decorator is used without parentheses.
        name: the model's name; by default the function's.
        task, family, note: shown by ``hashbench list``.
        batch_size: given to the function as ``batch_size=``, as is what ``--batch-size`` says in its place.
            ``None``: the function takes no argument and decides for itself.
        default: whether a sweep runs it without ``--models all`` (default: it does).
        skip_training, skip_inference: why it cannot run in that mode; its row then says ``pass_due_to_skip`` and this.
        deterministic: ``on``, ``warn`` or ``off``, where the command line does not say; see ``--deterministic``.
        optimizer: ``adam`` or ``sgd``; default Adam.
        iterations, runs: steps of one run, and runs that are compared, where the command line does not say.

    Raises:
        TypeError: an unknown argument, or one of another type.
        ValueError: a value that is out of range.

    >>> @model(task="toy", skip_training="has no parameters")
    ... def doubled():
    ...     return torch.nn.Identity(), (torch.ones(2),)
    """
    if function is not None:
        return model()(function)
    _check(facts)

    def mark(marked: _Function) -> _Function:
        if not callable(marked) or not (facts.get("name") or hasattr(marked, "__name__")):
            kind = type(marked).__name__
            raise TypeError(f"@hashbench.model marks a function, not a {kind}: write @hashbench.model(name=…) above it")
        setattr(marked, _MARK, {**facts, "name": facts.get("name") or marked.__name__})
        return marked

    return mark


def _check(facts: Mapping[str, Any]) -> None:
    for field, value in facts.items():
        if field not in Facts.__annotations__:
            known = ", ".join(Facts.__annotations__)
            raise TypeError(f"@hashbench.model got an unexpected keyword argument {field!r}; it takes {known}")
        if field in _LOWEST:
            if value is not None and (type(value) is not int or value < _LOWEST[field]):
                raise ValueError(f"{field}={value!r} is not an integer from {_LOWEST[field]}")
        elif field != "default" and not isinstance(value, str):
            raise TypeError(f"{field}={value!r} is not a string")
    if facts.get("deterministic", "") not in ("", *DETERMINISTIC):
        raise ValueError(f"deterministic={facts['deterministic']!r} is not one of {', '.join(DETERMINISTIC)}")


def facts_of(function: Any) -> Facts:
    """What :func:`model` was told of a function; nothing for one that is not marked."""
    facts = getattr(function, _MARK, None)
    return cast(Facts, facts) if isinstance(facts, dict) else Facts()


def offered(holder: Any) -> list[dict[str, Any]]:
    """What a module or an object with ``MODELS`` offers: fields of a ``ModelSpec`` for every model."""
    return [{"default": True, **facts_of(function), "name": name} for name, function in functions_in(holder).items()]


def functions_in(holder: Any) -> dict[str, Callable[..., Any]]:
    """The functions of ``holder`` by the names of their models: those in its dict ``MODELS`` and those that are marked.

    Args:
        holder: a module, an object with ``MODELS``, or such a dict itself.

    Raises:
        UnusableError: there are none, or something among them is not a function, or two have one name.
    """
    functions = dict(_dictionary(holder))
    for function in list(getattr(holder, "__dict__", {}).values()):
        name = facts_of(function).get("name")
        if not name or any(function is other for other in functions.values()):
            continue
        if name in functions:
            raise UnusableError(f"it has two models named {name!r}", tip="Give one another: @hashbench.model(name=…).")
        functions[name] = function
    if not functions:
        empty = "its MODELS is empty" if hasattr(holder, "MODELS") else "it has no MODELS and no @hashbench.model"
        raise UnusableError(empty, tip=f"Add: {EXAMPLE}.")
    return functions


def _dictionary(holder: Any) -> Mapping[str, Callable[..., Any]]:
    models = holder if isinstance(holder, dict) else getattr(holder, "MODELS", {})
    if not isinstance(models, dict):
        raise UnusableError(f"its MODELS is a {type(models).__name__}, not a dict", tip=f"Write: {EXAMPLE}.")
    for name, function in models.items():
        if not isinstance(name, str) or not name.strip():
            raise UnusableError(f"its MODELS has the name {name!r}", tip="A name is a string that is not empty.")
        if not callable(function):
            kind = type(function).__name__
            raise UnusableError(f"its MODELS[{name!r}] is a {kind}, not a function", tip=f"Write: {EXAMPLE}.")
    return models


def build(function: Callable[..., Any], *, batch_size: int | None, what: str) -> Workload:
    """Call a function that builds a model, with ``batch_size`` where it was marked as taking one.

    Raises:
        HashbenchError: it returned neither a pair nor a ``Workload``; the message names it as ``what``.
        Exception: whatever the function raises.
    """
    from torch import nn

    from hashbench.run.workload import Workload

    made = function() if facts_of(function).get("batch_size") is None else function(batch_size=batch_size)
    if isinstance(made, Workload):
        return made
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module):
        return Workload(module=made[0], inputs=made[1])
    raise HashbenchError(
        f"{what} returned a {type(made).__name__}",
        consequence="there is no model to run",
        tip="Return (module, example_inputs) or a hashbench.Workload.",
    )
