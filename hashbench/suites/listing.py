"""What a suite of Python code offers, found out in a child process.

Such code runs when it is imported: in a child, code that crashes, prints or hangs costs one error message and nothing
more.
"""

from __future__ import annotations

import importlib
import json
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any, Never

from hashbench.errors import HashbenchError
from hashbench.io import replace_file
from hashbench.processes import Child, exit_at_once, python_calling
from hashbench.suites.functions import UnusableError

LISTING_SECONDS = 120.0
"""Time limit for importing code to list its models; an import of torch and transformers takes about 20 s."""


def offered(
    lister: str, argument: str, *, suite: str, hint: str, seconds: float = LISTING_SECONDS
) -> list[dict[str, Any]]:
    """``hashbench.suites.<lister>.offered(argument)``, called in a child process that may run for ``seconds``.

    Args:
        lister: a module of this package.
        argument: what its ``offered`` takes.
        suite: how error messages call the suite.
        hint: what to do where the child dies.
        seconds: the time limit.

    Raises:
        HashbenchError: the code fails on import, hangs, ends its process, or offers nothing usable.
    """
    with tempfile.TemporaryDirectory(prefix="hashbench-") as folder:
        answer, printed = Path(folder, "offer.json"), Path(folder, "printed")
        command = python_calling("hashbench.suites.listing:write_offer", lister, argument, str(answer))
        with printed.open("wb") as sink, Child(command, stdout=sink, stderr=sink) as child:
            status = child.wait(seconds)
        if not answer.exists():
            raise unusable(suite, _how_it_ended(status, printed, seconds=seconds), tip=hint)
        offer = json.loads(answer.read_text(encoding="utf-8"))
    if "problem" in offer:
        raise unusable(suite, offer["problem"], tip=offer["tip"] or hint)
    models: list[dict[str, Any]] = offer["models"]
    return models


def unusable(suite: str, problem: str, *, tip: str) -> HashbenchError:
    """The error for a suite that cannot be listed or built."""
    return HashbenchError(f"cannot use {suite} as a suite", consequence=problem, tip=tip)


def write_offer(lister: str, argument: str, answer: str) -> Never:
    """What the child does: write the models, or the problem in words, to the file ``answer``, and end."""
    sys.argv[:] = [argument]
    try:
        offer: dict[str, Any] = {"models": importlib.import_module(f"hashbench.suites.{lister}").offered(argument)}
    except UnusableError as error:
        offer = {"problem": error.what, "tip": error.tip}
    except HashbenchError as error:
        offer = {"problem": error.consequence or error.what, "tip": error.tip}
    except BaseException as error:
        text = (str(error).strip() or "no message").splitlines()[-1]
        offer = {"problem": f"its import raised {type(error).__name__}: {text}", "tip": ""}
    replace_file(Path(answer), json.dumps(offer))
    exit_at_once()  # whatever the code has started must not keep the answer waiting


def _how_it_ended(status: int | None, printed: Path, *, seconds: float) -> str:
    if status is None:
        return f"its import took longer than {seconds:g} seconds"
    if status < 0:
        return f"its import was ended by {signal.Signals(-status).name}"
    lines = printed.read_text(encoding="utf-8", errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"its import ended the process with status {status}{f' ({last})' if last else ''}"
