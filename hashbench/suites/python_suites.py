"""Suites of Python code: files of users, and entry points of the group ``hashbench.suites`` of installed packages.

Either has functions that build models, in a dict ``MODELS`` or marked with ``@hashbench.model``. To list them the code
is imported in a child process: code that crashes, prints or hangs costs one error message. To build one it is imported
in the calling process, which is a worker.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Never

from hashbench.errors import HashbenchError
from hashbench.io import replace_file
from hashbench.processes import Child, exit_at_once, python_calling
from hashbench.records import ModelSpec
from hashbench.suites import functions
from hashbench.suites.functions import UnusableError

if TYPE_CHECKING:
    from hashbench.run.workload import Workload

GROUP = "hashbench.suites"

LISTING_SECONDS = 120.0
"""Time limit for importing code to list its models; an import of torch and transformers takes about 20 s."""


@dataclass(frozen=True, slots=True)
class FileSuite:
    """The models of the Python file ``path``; a :class:`~hashbench.suites.registry.Suite`. Its name is the file's
    without ``.py``, so that sweeps of two checkouts can be compared."""

    path: Path
    seconds: float = LISTING_SECONDS

    @property
    def name(self) -> str:
        return self.path.stem

    def catalog(self) -> tuple[ModelSpec, ...]:
        """The models, sorted by name; ``source`` is the file's path.

        Raises:
            HashbenchError: the file does not exist, is not a Python file, fails on import, hangs, or offers no usable
                models.
        """
        _check_path(self.path)
        path = str(self.path)
        models = offered(f"{__name__}:offered_by_file", path, path, hint=f"Try: python {path}", seconds=self.seconds)
        return _specs(models, suite=self.name, source=path)

    def load(self, spec: ModelSpec, *, batch_size: int | None, mode: str) -> Workload:  # noqa: ARG002 - a Suite's
        """See :func:`build_from`."""
        return build_from([self.path], spec.name, batch_size=batch_size)


@dataclass(frozen=True, slots=True)
class PackageSuite:
    """The suite ``name`` of an installed package; a :class:`~hashbench.suites.registry.Suite`."""

    name: str

    def catalog(self) -> tuple[ModelSpec, ...]:
        """The models, sorted by name.

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
        models = functions.functions_in(point.load())
        if spec.name not in models:
            raise _no_model(spec.name, _described(point), tip=f"hashbench list --suite {self.name}")
        what = f"the function of {spec.name!r} in {point.value}"
        return functions.build(models[spec.name], batch_size=batch_size, what=what)


def _specs(models: Iterable[Mapping[str, Any]], *, suite: str, source: str = "") -> tuple[ModelSpec, ...]:
    specs = (ModelSpec(suite=suite, source=source, **facts) for facts in models)
    return tuple(sorted(specs, key=lambda spec: spec.name))


# ---------------------------------------------------------------------------------------------- entry points


def package_suites() -> tuple[str, ...]:
    """Names of all suites that installed packages bring, sorted. Imports none of these packages."""
    return tuple(sorted({point.name for point in entry_points(group=GROUP)}))


def offered_by_package(suite: str) -> list[dict[str, Any]]:
    """What a package's suite offers; imports the package here."""
    return functions.offered(_entry_point(suite).load())


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


def offered_by_file(path: str) -> list[dict[str, Any]]:
    """What the file at ``path`` offers; imports it here."""
    return functions.offered(import_file(Path(path)))


def build_from(paths: Sequence[Path], name: str, *, batch_size: int | None = None) -> Workload:
    """Import these zoo files here, one after the other, up to the first that has ``name``, and call its function.

    Raises:
        HashbenchError: no file has such a model, or its function returned neither a pair nor a ``Workload``.
        Exception: whatever a file or the function raises.
    """
    for path in paths:
        models = _functions_of(path)
        if name in models:
            return functions.build(models[name], batch_size=batch_size, what=f"the function of {name!r} in {path}")
    raise _no_model(name, ", ".join(map(str, paths)), tip="hashbench list")


def _no_model(name: str, where: str, *, tip: str) -> HashbenchError:
    return HashbenchError(
        f"no model is named {name!r}", consequence=f"looked in {where}", tip=f"See the names with: {tip}"
    )


def _functions_of(path: Path) -> dict[str, Callable[..., Any]]:
    _check_path(path)
    try:
        return functions.functions_in(import_file(path))
    except UnusableError as error:
        raise _unusable(str(path), error.what, tip=error.tip) from error


def _check_path(path: Path) -> None:
    if not path.is_file():
        raise _unusable(str(path), "the file does not exist", tip="Check the path.")
    if path.suffix != ".py":
        tip = f"A zoo file is a Python file with {functions.EXAMPLE}."
        raise _unusable(str(path), "it is not a Python file (.py)", tip=tip)


def import_file(path: Path) -> ModuleType:
    """Run a Python file as a module of its own, with its folder first on ``sys.path`` as ``python path`` would have it.

    Raises:
        HashbenchError: Python cannot import such a file.
        BaseException: whatever the file raises.
    """
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    name = f"hashbench_zoo_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise _unusable(str(path), "Python cannot import it", tip="A zoo file's name ends in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and deep copies of its classes look it up there
    spec.loader.exec_module(module)
    return module


# -------------------------------------------------------------------------------------------- the child process


def offered(
    target: str, argument: str, suite: str, *, hint: str, seconds: float = LISTING_SECONDS
) -> list[dict[str, Any]]:
    """``target(argument)``, a ``module:function``, called in a child process that may run for ``seconds``.

    Error messages call the suite ``suite``, and say ``hint`` where the child died.

    Raises:
        HashbenchError: the code fails on import, hangs, ends its process, or offers nothing usable.
    """
    with tempfile.TemporaryDirectory(prefix="hashbench-") as folder:
        answer, printed = Path(folder, "offer.json"), Path(folder, "printed")
        command = python_calling(f"{__name__}:write_offer", target, argument, str(answer))
        with printed.open("wb") as sink, Child(command, stdout=sink, stderr=sink) as child:
            status = child.wait(seconds)
        if not answer.exists():
            raise _unusable(suite, _how_it_ended(status, printed, seconds=seconds), tip=hint)
        offer = json.loads(answer.read_text(encoding="utf-8"))
    if "problem" in offer:
        raise _unusable(suite, offer["problem"], tip=offer["tip"] or hint)
    models: list[dict[str, Any]] = offer["models"]
    return models


def write_offer(target: str, argument: str, answer: str) -> Never:
    """What the child does: write the models, or the problem in words, to the file ``answer``, and end."""
    sys.argv[:] = [argument]
    module, _, function = target.partition(":")
    try:
        offer: dict[str, Any] = {"models": getattr(importlib.import_module(module), function)(argument)}
    except UnusableError as error:
        offer = {"problem": error.what, "tip": error.tip}
    except HashbenchError as error:
        offer = {"problem": error.consequence or error.what, "tip": error.tip}
    except BaseException as error:
        text = (str(error).strip() or "no message").splitlines()[-1]
        offer = {"problem": f"its import raised {type(error).__name__}: {text}", "tip": ""}
    replace_file(Path(answer), json.dumps(offer))
    exit_at_once()  # whatever the code has started must not keep the answer waiting


def _unusable(suite: str, problem: str, *, tip: str) -> HashbenchError:
    return HashbenchError(f"cannot use {suite} as a suite", consequence=problem, tip=tip)


def _how_it_ended(status: int | None, printed: Path, *, seconds: float) -> str:
    if status is None:
        return f"its import took longer than {seconds:g} seconds"
    if status < 0:
        return f"its import was ended by {signal.Signals(-status).name}"
    lines = [line.strip() for line in printed.read_text(encoding="utf-8", errors="replace").split("\n")]
    last = next(filter(None, reversed(lines)), "")
    return f"its import ended the process with status {status}{f' ({last})' if last else ''}"
