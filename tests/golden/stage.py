"""Where golden outputs are made: a copy of ``inputs/`` as working directory, and surroundings that never vary."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

from hashbench.cli import main

HERE = Path(__file__).resolve().parent
INPUTS, EXPECTED = HERE / "inputs", HERE / "expected"

SURROUNDINGS = {"COLUMNS": "100", "LINES": "50", "TZ": "UTC", "LANGUAGE": "C", "NO_COLOR": "1"}
TODAY = time.struct_time((2026, 11, 23, 4, 5, 6, 0, 327, 0))
WRITTEN = 1_795_305_600
"""Seconds, 2026-11-22 in UTC: when all inputs were written."""
_STRFTIME = time.strftime

_VARIES = (
    (re.compile(r"Made on \d{4}-\d\d-\d\d \d\d:\d\d UTC by"), "Made on <now> by"),
    (re.compile(r"hashbench 0\.[0-9.]+(?=\n|$)"), "hashbench <version>"),
    (re.compile(r"\(choose from ([^)]*)\)"), lambda found: found[0].replace("'", "")),
)


def normalised(text: str, folder: Path) -> str:
    """``text`` without what varies from run to run, in this order.

    - the working directory, which is a temporary one: ``<here>``
    - when an HTML page was made: ``<now>``
    - the version of hashbench: ``<version>``
    - quotes around the choices in argparse's messages, which later versions of Python leave out
    """
    text = text.replace(str(folder.resolve()), "<here>").replace(str(folder), "<here>")
    for pattern, replacement in _VARIES:
        text = pattern.sub(replacement, text)
    return text


@contextlib.contextmanager
def stage() -> Iterator[Path]:
    """A temporary copy of ``inputs/`` as working directory; everything is put back at the end."""
    before, variables = Path.cwd(), dict(os.environ)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve() / "inputs"
        shutil.copytree(INPUTS, folder)
        for path in folder.rglob("*"):  # what has no date of its own is as old as its file
            os.utime(path, (WRITTEN, WRITTEN))
        os.environ.pop("FORCE_COLOR", None)
        os.environ.update(SURROUNDINGS)
        time.tzset()
        os.chdir(folder)
        try:
            with mock.patch("time.strftime", lambda form, moment=TODAY: _STRFTIME(form, moment)):
                yield folder
        finally:
            os.chdir(before)
            os.environ.clear()
            os.environ.update(variables)
            time.tzset()


def made(produce: Callable[[], str]) -> str:
    """What a producer gives on a stage of its own, without what varies."""
    with stage() as folder:
        return normalised(produce(), folder)


def cli(*arguments: str) -> tuple[str, str, int]:
    """Standard output, standard error and exit code of ``hashbench …``, run in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(arguments)
        except SystemExit as exited:
            code = int(exited.code or 0)
    return out.getvalue(), err.getvalue(), code


def session(*lines: str) -> str:
    """What a terminal would show of these command lines, each with its exit code."""
    shown = []
    for line in lines:
        out, err, code = cli(*shlex.split(line))
        marked = "".join(f"stderr: {one}\n" for one in err.splitlines())
        shown.append(f"$ hashbench {line}\n{out}{marked}exit {code}\n")
    return "\n".join(shown)
