"""Suites of Python code: files of users, and entry points of the group ``hashbench.suites`` of installed packages.

Either has functions that build models, in a dict ``MODELS`` or marked with ``@hashbench.model``. To list them the code
is imported in a child process: code that crashes, prints or hangs costs one error message. To build one it is imported
in the calling process, which is a worker. Nothing here imports torch before :func:`build`, so that the decorator costs
a package nothing.
"""

from __future__ import annotations

import importlib.util
import json
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import TYPE_CHECKING, Any, Never, TypedDict, TypeVar, Unpack, cast, overload

from hashbench.core.errors import HashbenchError, last_line
from hashbench.core.io import read_file, read_json, replace_file
from hashbench.core.processes import Child, exit_at_once, python_calling
from hashbench.core.records import DETERMINISTIC, ModelSpec

if TYPE_CHECKING:
    from hashbench.core.run.workload import Workload

GROUP = "hashbench.suites"

LISTING_SECONDS = 120.0
"""Time limit for importing code to list its models; an import of torch and transformers takes about 20 s."""

EXAMPLE = 'MODELS = {"my_model": lambda: (module, example_inputs)}'
"""The shortest suite, for error messages."""

_MISSING = "the file does not exist"
_MARK = "__hashbench_model__"
_IMPORTED: ContextVar[dict[Path, ModuleType] | None] = ContextVar("hashbench_imported_zoo_files", default=None)
_LOWEST = {"batch_size": 1, "iterations": 1, "runs": 2, "world_size": 1}
_Function = TypeVar("_Function", bound=Callable[..., Any])


class Facts(TypedDict, total=False):
    """What is known of a model before it is built; fields as in :class:`~hashbench.core.records.ModelSpec`."""

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
    world_size: int | None
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
        world_size: ranks that run the model together: the function is called in each, with a process group that is up.

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
    """Return the facts that :func:`model` attached to a function; empty if it is not marked."""
    facts = getattr(function, _MARK, None)
    return cast(Facts, facts) if isinstance(facts, dict) else Facts()


def functions_in(holder: Any) -> dict[str, Callable[..., Any]]:
    """Collect the functions of ``holder`` by model name: those in its dict ``MODELS`` and the marked ones.

    Args:
        holder: a module, an object with ``MODELS``, or such a dict itself.

    Raises:
        UnusableError: there are none, an entry is not a function, or two have one name.
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

    from hashbench.core.run.workload import Workload

    made = function() if facts_of(function).get("batch_size") is None else function(batch_size=batch_size)
    if isinstance(made, Workload):
        return made
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module):
        return Workload(module=made[0], inputs=made[1])
    raise HashbenchError(
        f"{what} returned a {type(made).__name__}",
        consequence="no model can be run",
        tip="Return (module, example_inputs) or a hashbench.Workload.",
    )


# ---------------------------------------------------------------------------------------------------- suites


@dataclass(frozen=True, slots=True)
class FileSuite:
    """The models of the Python file ``path``; a :class:`~hashbench.core.suites.registry.Suite`. Its name is the file's
    without ``.py``, so that sweeps of two checkouts can be compared."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.stem

    def refuse_missing(self) -> None:
        """Raise :class:`HashbenchError` where there is no such file, which a child says only after its imports."""
        if not self.path.is_file():
            raise _unusable(str(self.path), _MISSING, tip="Check the path.")

    def catalog(self) -> tuple[ModelSpec, ...]:
        """List the models, sorted by name; ``source`` is the file's path.

        Raises:
            HashbenchError: the file does not exist, is not a Python file, fails on import, hangs, or offers no usable
                models.
        """
        self.refuse_missing()
        path = str(self.path)
        models = offered(f"{__name__}:offered_by_file", path, path, hint=f"Try: python {path}")
        return _specs(models, suite=self.name, source=path)

    def load(self, spec: ModelSpec, *, batch_size: int | None, mode: str) -> Workload:  # noqa: ARG002 - a Suite's
        """See :func:`build_from`."""
        return build_from([self.path], spec.name, batch_size=batch_size)


@dataclass(frozen=True, slots=True)
class PackageSuite:
    """The suite ``name`` of an installed package; a :class:`~hashbench.core.suites.registry.Suite`."""

    name: str

    def catalog(self) -> tuple[ModelSpec, ...]:
        """List the models, sorted by name.

        Raises:
            HashbenchError: two packages bring it, or it fails on import, hangs, or offers no usable models.
        """
        point = _entry_point(self.name)
        hint = f"Try: python -c 'import {point.module}'"
        models = offered(f"{__name__}:offered_by_package", self.name, _described(point), hint=hint)
        return _specs(models, suite=self.name)

    def load(self, spec: ModelSpec, *, batch_size: int | None, mode: str) -> Workload:  # noqa: ARG002 - a Suite's
        """Import the package here and build one model; errors as of :func:`build_from`."""
        point = _entry_point(self.name)
        models = functions_in(point.load())
        if spec.name not in models:
            raise _no_model(spec.name, _described(point), tip=f"hashbench list --suite {self.name}")
        return build(models[spec.name], batch_size=batch_size, what=f"the function of {spec.name!r} in {point.value}")


def _specs(models: Iterable[Mapping[str, Any]], *, suite: str, source: str = "") -> tuple[ModelSpec, ...]:
    specs = (ModelSpec(suite=suite, source=source, **facts) for facts in models)
    return tuple(sorted(specs, key=lambda spec: spec.name))


# ---------------------------------------------------------------------------------------------- entry points


def package_suites() -> tuple[str, ...]:
    """List the names of the suites of installed packages, sorted, without importing these packages."""
    return tuple(sorted({point.name for point in entry_points(group=GROUP)}))


def _entry_point(suite: str) -> EntryPoint:
    points = list({point.value: point for point in entry_points(group=GROUP, name=suite)}.values())
    if len(points) == 1:
        return points[0]
    if not points:
        raise HashbenchError(f"no installed package brings the suite {suite!r}", tip="Install it again.")
    raise HashbenchError(
        f"{len(points)} installed packages bring a suite {suite!r}",
        consequence=", ".join(sorted(_package(point) for point in points)),
        tip="Uninstall all but one.",
    )


def _described(point: EntryPoint) -> str:
    return f"{point.name} of the package {_package(point)}"


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.module


# ----------------------------------------------------------------------------------------------------- files


def build_from(paths: Sequence[Path], name: str, *, batch_size: int | None = None) -> Workload:
    """Import these zoo files here, one after the other, up to the first that has ``name``, and call its function.

    Raises:
        HashbenchError: no file has such a model, or its function returned neither a pair nor a ``Workload``.
        Exception: whatever a file or the function raises.
    """
    for path in paths:
        try:
            models = functions_in(import_file(path))
        except UnusableError as error:
            raise _unusable(str(path), error.what, tip=error.tip) from error
        if name in models:
            return build(models[name], batch_size=batch_size, what=f"the function of {name!r} in {path}")
    raise _no_model(name, ", ".join(map(str, paths)), tip="hashbench list")


def _no_model(name: str, where: str, *, tip: str) -> HashbenchError:
    return HashbenchError(
        f"no model is named {name!r}", consequence=f"looked in {where}", tip=f"See the names with: {tip}"
    )


@contextmanager
def imported_once() -> Iterator[None]:
    """Run each zoo file only once inside: models that are built again find the state that earlier ones have left."""
    token = _IMPORTED.set({})
    try:
        yield
    finally:
        _IMPORTED.reset(token)


def import_file(path: Path, *, example: str = EXAMPLE) -> ModuleType:
    """Run a Python file as a module of its own, with its folder first on ``sys.path`` as ``python path`` would have it.

    Inside :func:`imported_once`, the second time returns the module of the first. Bytecode files are neither read nor
    written: Python takes one for current after an edit within a second that keeps the size.

    Raises:
        UnusableError: the file does not exist, or is not a Python file; one has what ``example`` says.
        BaseException: whatever the file raises.
    """
    if not path.is_file():
        raise UnusableError(_MISSING, tip="Check the path.")
    if path.suffix != ".py":
        raise UnusableError("it is not a Python file (.py)", tip=f"Give a Python file with {example}.")
    folder = str(path.absolute().parent)
    if sys.path[:1] != [folder]:
        sys.path.insert(0, folder)
    imported = _IMPORTED.get()
    if imported is not None and path.absolute() in imported:
        return imported[path.absolute()]
    name = _module_name(path.absolute())
    spec = importlib.util.spec_from_file_location(name, path.absolute())
    assert spec is not None
    assert isinstance(spec.loader, SourceFileLoader)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and deep copies of its classes look it up there
    exec(spec.loader.source_to_code(path.read_bytes(), str(path.absolute())), vars(module))
    if imported is not None:
        imported[path.absolute()] = module
    return module


def _module_name(path: Path) -> str:
    """Return the module name by which child processes with this ``sys.path`` can import the file: a data loader's
    worker unpickles its dataset by the name of its class. Return another one if that name is taken."""
    stem, module = path.stem, sys.modules.get(path.stem)
    shadowed = "." in stem or stem in sys.stdlib_module_names or (path.with_suffix("") / "__init__.py").exists()
    other = module is not None and getattr(module, "__file__", None) != str(path)
    return f"hashbench_zoo_{stem}" if shadowed or other else stem


# -------------------------------------------------------------------------------------------- the child process


def offered_by_file(path: str) -> list[dict[str, Any]]:
    """Import the file at ``path`` here and return the fields of a ``ModelSpec`` for each of its models."""
    return _offer_of(import_file(Path(path)))


def offered_by_package(suite: str) -> list[dict[str, Any]]:
    """Import a package's suite here and return the fields of a ``ModelSpec`` for each of its models."""
    return _offer_of(_entry_point(suite).load())


def _offer_of(holder: Any) -> list[dict[str, Any]]:
    return [{"default": True, **facts_of(function), "name": name} for name, function in functions_in(holder).items()]


def offered(target: str, argument: str, suite: str, *, hint: str) -> list[dict[str, Any]]:
    """Call ``target(argument)``, a ``module:function``, in a child process with a limit of :data:`LISTING_SECONDS`.

    Error messages call the suite ``suite``, and give ``hint`` if the child died.

    Raises:
        HashbenchError: the code fails on import, hangs, ends its process, or offers nothing usable.
    """
    with tempfile.TemporaryDirectory(prefix="hashbench-") as folder:
        answer, printed = Path(folder, "offer.json"), Path(folder, "printed")
        command = python_calling(f"{__name__}:write_offer", target, argument, str(answer))
        with printed.open("wb") as sink, Child(command, stdout=sink, stderr=sink, guarded=True) as child:
            status = child.wait(LISTING_SECONDS)
        if not answer.exists():
            raise _unusable(suite, _how_it_ended(status, printed), tip=hint)
        offer = read_json(answer)
    if "problem" in offer:
        raise _unusable(suite, offer["problem"], tip=offer["tip"] or hint)
    models: list[dict[str, Any]] = offer["models"]
    return models


def write_offer(target: str, argument: str, answer: str) -> Never:
    """Run in the child: write the models, or the problem in words, to the file ``answer``, and exit."""
    sys.argv[:] = [argument]
    try:
        offer: dict[str, Any] = {"models": resolve_name(target)(argument)}
    except UnusableError as error:
        offer = {"problem": error.what, "tip": error.tip}
    except HashbenchError as error:
        offer = {"problem": error.consequence or error.what, "tip": error.tip}
    except BaseException as error:
        text = last_line(str(error)) or "no message"
        offer = {"problem": f"its import raised {type(error).__name__}: {text}", "tip": ""}
    replace_file(Path(answer), json.dumps(offer))
    exit_at_once()  # whatever the code has started must not keep the answer waiting


def _unusable(suite: str, problem: str, *, tip: str) -> HashbenchError:
    return HashbenchError(f"cannot use {suite} as a suite", consequence=problem, tip=tip)


def _how_it_ended(status: int | None, printed: Path) -> str:
    if status is None:
        return f"its import took longer than {LISTING_SECONDS:g} seconds"
    if status < 0:
        return f"its import was ended by {signal.Signals(-status).name}"
    last = last_line(read_file(printed).decode("utf-8", "replace"))
    return f"its import ended the process with status {status}{f' ({last})' if last else ''}"
