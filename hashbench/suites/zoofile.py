"""A suite from Python files: each has ``MODELS``, a dict from name to a function that builds one model.

Such a file runs when it is imported, so its names are listed in a child process: one that crashes, prints or hangs
costs one error message and nothing more. Building a model imports the file in the calling process, which is a worker.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hashbench.records import HashbenchError

if TYPE_CHECKING:
    from hashbench.workload import Workload

LISTING_SECONDS = 120.0
"""Time limit for importing a zoo file to list its names; an import of torch and transformers takes about 20 s."""

_EXAMPLE = 'MODELS = {"my_model": lambda: (module, example_inputs)}'
_LISTER = """
import os, sys
package, path, answer = sys.argv[1:]
sys.argv[:] = [path]
sys.path.append(package)
from hashbench.suites.zoofile import write_names
write_names(path, answer=answer)
os._exit(0)  # whatever the file has started must not keep the answer waiting
"""


def names(path: Path, *, seconds: float = LISTING_SECONDS) -> tuple[str, ...]:
    """The names in a zoo file's ``MODELS``, sorted, found in a child process that may run for ``seconds``.

    Raises:
        HashbenchError: the file is missing, is no Python file, fails on import, hangs, or has no usable ``MODELS``.
    """
    _check_path(path)
    with tempfile.TemporaryDirectory(prefix="hashbench-") as folder:
        answer, printed = Path(folder, "names.json"), Path(folder, "printed")
        status = _list_in_child(path, answer=answer, printed=printed, seconds=seconds)
        if not answer.exists():
            raise _unusable(path, _how_it_ended(status, printed, seconds=seconds), tip=f"Try: python {path}")
        found = json.loads(answer.read_text(encoding="utf-8"))
    if "problem" in found:
        raise _unusable(path, found["problem"], tip=found["tip"])
    return tuple(sorted(found["names"]))


def build(paths: Sequence[Path], name: str) -> Workload:
    """Import these zoo files here, one after the other, up to the first that has ``name``, and call its function.

    Raises:
        HashbenchError: no file has such a model, or its function returned neither a pair nor a ``Workload``.
        Exception: whatever a file or the function raises.
    """
    for path in paths:
        models = _models(path)
        if name in models:
            return _as_workload(models[name](), what=f"MODELS[{name!r}] of {path}")
    raise HashbenchError(
        f"no MODELS has {name!r}",
        consequence=f"looked in {', '.join(map(str, paths)) or 'no file'}",
        tip="See the names with: hashbench list",
    )


def write_names(path: str, *, answer: str) -> None:
    """What the child does: the names, or the problem in words, into ``answer``, by a rename so that it is whole."""
    try:
        found: dict[str, Any] = {"names": list(_models(Path(path)))}
    except HashbenchError as error:
        found = {"problem": error.consequence or error.what, "tip": error.tip}
    except BaseException as error:
        text = (str(error).strip() or "no message").splitlines()[-1]
        found = {"problem": f"its import raised {type(error).__name__}: {text}", "tip": f"Try: python {path}"}
    partial = Path(f"{answer}.partial")
    partial.write_text(json.dumps(found), encoding="utf-8")
    partial.rename(answer)


def _check_path(path: Path) -> None:
    if not path.is_file():
        raise _unusable(path, "there is no such file", tip="Check the path.")
    if path.suffix != ".py":
        raise _unusable(path, "it is not a Python file (.py)", tip=f"A zoo file is a Python file with {_EXAMPLE}.")


def _unusable(path: Path, problem: str, *, tip: str) -> HashbenchError:
    return HashbenchError(f"cannot use {path} as a suite", consequence=problem, tip=tip)


def _list_in_child(path: Path, *, answer: Path, printed: Path, seconds: float) -> int | None:
    """Exit status of the child, or ``None`` when its time ran out. Files, not pipes: no reader to be kept waiting."""
    package_parent = str(Path(__file__).resolve().parents[2])
    command = [sys.executable, "-P", "-c", _LISTER, package_parent, str(path), str(answer)]
    with printed.open("wb") as sink:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True)
        try:
            return child.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end_session(child)


def _end_session(child: subprocess.Popen[bytes]) -> None:
    """End the child and whatever it has started and left behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _how_it_ended(status: int | None, printed: Path, *, seconds: float) -> str:
    if status is None:
        return f"its import took longer than {seconds:g} seconds"
    if status < 0:
        return f"its import was ended by {signal.Signals(-status).name}"
    lines = printed.read_text(encoding="utf-8", errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"its import ended the process with status {status}{f' ({last})' if last else ''}"


def _import(path: Path) -> ModuleType:
    """Run the file as a module of its own, with its folder first on ``sys.path`` as ``python path`` would have it."""
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    name = f"hashbench_zoo_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise _unusable(path, "Python cannot import it", tip="A zoo file's name ends in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and deep copies of its classes look it up there
    spec.loader.exec_module(module)
    return module


def _models(path: Path) -> dict[str, Callable[[], Any]]:
    models = getattr(_import(path), "MODELS", None)
    if models is None:
        raise _unusable(path, "it has no MODELS", tip=f"Add: {_EXAMPLE}.")
    if not isinstance(models, dict):
        raise _unusable(path, f"its MODELS is a {type(models).__name__}, not a dict", tip=f"Write: {_EXAMPLE}.")
    if not models:
        raise _unusable(path, "its MODELS is empty", tip=f"Add a model: {_EXAMPLE}.")
    for name, function in models.items():
        if not isinstance(name, str) or not name.strip():
            raise _unusable(path, f"its MODELS has the name {name!r}", tip="A name is a string that is not empty.")
        if not callable(function):
            kind = type(function).__name__
            raise _unusable(path, f"its MODELS[{name!r}] is a {kind}, not a function", tip=f"Write: {_EXAMPLE}.")
    return models


def _as_workload(made: Any, *, what: str) -> Workload:
    from torch import nn

    from hashbench.workload import Workload

    if isinstance(made, Workload):
        return made
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module):
        return Workload(module=made[0], inputs=made[1])
    raise HashbenchError(
        f"{what} returned a {type(made).__name__}",
        consequence="there is no model to run",
        tip="Return (module, example_inputs) or a hashbench.Workload.",
    )
