"""A suite from Python files: each has functions that build models, in a dict ``MODELS`` or marked with
``@hashbench.model``.

The file is imported in a child process to list its models. Building a model imports it in the calling process, which is
a worker.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hashbench.errors import HashbenchError
from hashbench.records import ModelSpec
from hashbench.suites import functions, listing

if TYPE_CHECKING:
    from hashbench.run.workload import Workload


@dataclass(frozen=True, slots=True)
class FileSuite:
    """The models of the Python file ``path``; a :class:`~hashbench.suites.catalog.Suite`. Importing it may take
    ``seconds``."""

    path: Path
    seconds: float = listing.LISTING_SECONDS

    @property
    def name(self) -> str:
        """That of the file without ``.py``, so that sweeps of two checkouts can be compared."""
        return self.path.stem

    def catalog(self) -> tuple[ModelSpec, ...]:
        """The models, sorted by name; ``source`` is the file's path.

        Raises:
            HashbenchError: the file is missing, is not a Python file, fails on import, hangs, or offers no usable
                models.
        """
        _check_path(self.path)
        path = str(self.path)
        models = listing.offered("zoo_file", path, suite=path, hint=f"Try: python {path}", seconds=self.seconds)
        specs = (ModelSpec(suite=self.name, source=path, **facts) for facts in models)
        return tuple(sorted(specs, key=lambda spec: spec.name))

    def load(self, spec: ModelSpec, *, batch_size: int | None, mode: str) -> Workload:  # noqa: ARG002 - a Suite's
        """See :func:`build`."""
        return build([self.path], spec.name, batch_size=batch_size)


def offered(path: str) -> list[dict[str, Any]]:
    """What the file at ``path`` offers; imports it here."""
    return functions.offered(import_file(Path(path)))


def build(paths: Sequence[Path], name: str, *, batch_size: int | None = None) -> Workload:
    """Import these zoo files here, one after the other, up to the first that has ``name``, and call its function.

    Raises:
        HashbenchError: no file has such a model, or its function returned neither a pair nor a ``Workload``.
        Exception: whatever a file or the function raises.
    """
    for path in paths:
        models = _models(path)
        if name in models:
            return functions.build(models[name], batch_size=batch_size, what=f"the function of {name!r} in {path}")
    raise HashbenchError(
        f"no model is named {name!r}",
        consequence=f"looked in {', '.join(map(str, paths)) or 'no file'}",
        tip="See the names with: hashbench list",
    )


def _models(path: Path) -> dict[str, Callable[..., Any]]:
    _check_path(path)
    try:
        return functions.functions_in(import_file(path))
    except functions.UnusableError as error:
        raise listing.unusable(str(path), error.what, tip=error.tip) from error


def _check_path(path: Path) -> None:
    if not path.is_file():
        raise listing.unusable(str(path), "there is no such file", tip="Check the path.")
    if path.suffix != ".py":
        tip = f"A zoo file is a Python file with {functions.EXAMPLE}."
        raise listing.unusable(str(path), "it is not a Python file (.py)", tip=tip)


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
        raise listing.unusable(str(path), "Python cannot import it", tip="A zoo file's name ends in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and deep copies of its classes look it up there
    spec.loader.exec_module(module)
    return module
