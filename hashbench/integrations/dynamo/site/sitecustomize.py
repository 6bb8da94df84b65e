"""Loaded by Python at start-up because ``hashbench dynamo`` put this folder on ``PYTHONPATH``.

It lets a ``sitecustomize`` that was there before run too: this folder leaves the path, and the next one is imported.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent


def _run_the_other_one() -> None:
    this = sys.modules.pop("sitecustomize", None)
    try:
        importlib.import_module("sitecustomize")  # another file by now
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        if this is not None:  # the import system looks for the module that it has just loaded
            sys.modules.setdefault("sitecustomize", this)


def _wait_for_the_harness() -> None:
    package = str(_HERE.parents[3])  # the hashbench that runs the harness, whichever else is installed
    sys.path.insert(0, package)
    try:
        from hashbench.integrations.dynamo import hook
    finally:
        sys.path.remove(package)
    hook.watch_for_harness(hook.attach)


if __name__ == "sitecustomize":
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != _HERE]
    try:
        _wait_for_the_harness()
    except Exception as error:
        print(f"hashbench: cannot plug into this process: {error}", file=sys.stderr)
    _run_the_other_one()
