"""Run an unchanged script or module as ``python`` does, in this process. No torch."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from hashbench.core.errors import HashbenchError

TIP = "Give the script after `--`, a module after `-- -m`."


def refuse_missing(script: str, *, module: bool, tip: str = TIP) -> None:
    """Refuse a script, or with ``module`` a module, that is not there, before anything is run.

    Of a module within a package the package alone is looked for: the module itself is found by running code of it.

    Raises:
        HashbenchError: there is none.
    """
    if not module and not Path(script).exists():
        raise HashbenchError(f"cannot run {script}", consequence="there is no such file", tip=tip)
    if module and not _is_there(script.partition(".")[0]):
        raise HashbenchError(f"cannot run the module {script}", consequence="there is none of that name", tip=tip)


def _is_there(module: str) -> bool:
    before = list(sys.path)
    sys.path.insert(0, str(Path.cwd()))
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False
    finally:
        sys.path[:] = before


def run_as_main(script: str, arguments: Sequence[str], *, module: bool) -> None:
    """Run a script as ``python script arguments`` does, or with ``module`` a module as ``python -m`` does.

    ``sys.argv`` and ``sys.path`` are restored. Whatever the script raises passes, ``SystemExit`` included.
    """
    before = sys.argv, list(sys.path)
    sys.argv = [script, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = str(Path.cwd()) if module else str(Path(script).resolve().parent)
    try:
        if module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before
