"""Where golden outputs are made: a copy of ``inputs/`` as working directory, and surroundings that never vary."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import io
import os
import re
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from unittest import mock

import hashbench
from hashbench.cli import main

HERE = Path(__file__).resolve().parent
INPUTS, EXPECTED = HERE / "inputs", HERE / "expected"

SURROUNDINGS = {"COLUMNS": "100", "LINES": "50", "TZ": "UTC", "LANGUAGE": "C", "NO_COLOR": "1"}
TODAY = time.struct_time((2026, 11, 23, 4, 5, 6, 0, 327, 0))
WRITTEN = 1_795_305_600
"""Seconds, 2026-11-22 in UTC: when all inputs were written."""
_STRFTIME = time.strftime

_VARIES = (
    (re.compile(r"hashbench 0\.[0-9.]+(?=\n|$)"), "hashbench <version>"),
    (re.compile(r"\(choose from ([^)]*)\)"), lambda found: found[0].replace("'", "")),
    (re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d(?:\+00:00)?| UTC)"), lambda found: _unless_now(found[0])),
    (re.compile(r'("(?:tensors_)?sha256": ")[0-9a-f]{64}'), r"\1<sha256>"),
    (re.compile(r"^(setting\t0\tstart\t).*", re.MULTILINE), r"\1<settings>"),
    (re.compile(r'("label": "start", "settings": )\[\[.*?\]\]'), r'\1"<settings>"'),
    (re.compile(r"(\tstart\t<settings>\n(?:(?!end\t).*\n)*end\t\d+\t)\w+"), r"\1<checksum>"),
)


def _unless_now(text: str) -> str:
    moment = datetime.fromisoformat(text.removesuffix(" UTC").removesuffix("+00:00")).replace(tzinfo=UTC)
    return "<now>" if abs(datetime.now(UTC) - moment) < timedelta(minutes=30) else text


def normalised(text: str, folder: Path) -> str:
    """``text`` without what varies from run to run, in this order.

    - the working directory, which is a temporary one: ``<here>``
    - the version of hashbench: ``<version>``
    - quotes around the choices in argparse's messages, which later versions of Python leave out
    - a time of day of the last half an hour: ``<now>``
    - checksums over what ``torch.save`` wrote, which differs from version to version: ``<sha256>``
    - torch's global settings at the start of a trace, whose names depend on its version: ``<settings>``; and the
      checksum of such a trace: ``<checksum>``
    """
    text = text.replace(str(folder.resolve()), "<here>").replace(str(folder), "<here>")
    for pattern, replacement in _VARIES:
        text = pattern.sub(replacement, text)
    return text


@functools.cache
def _copies() -> Path:
    """A copy of ``inputs/`` of which all is as old as it says, on any checkout."""
    folder = Path(tempfile.mkdtemp(prefix="hashbench_golden_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    shutil.copytree(INPUTS, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    for path in folder.rglob("*"):  # what has no date of its own is as old as its file
        os.utime(path, (WRITTEN, WRITTEN))
    return folder


@contextlib.contextmanager
def stage() -> Iterator[Path]:
    """A temporary copy of ``inputs/`` as working directory; everything is put back at the end."""
    before, variables = Path.cwd(), dict(os.environ)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve() / "inputs"
        shutil.copytree(_copies(), folder, copy_function=os.link)  # files are replaced, never changed in place
        os.environ.pop("FORCE_COLOR", None)
        os.environ.update(SURROUNDINGS)
        # Child processes shall run this hashbench, also where another one is installed.
        paths = [str(Path(hashbench.__file__).parents[1]), variables.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
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
    gc.freeze()  # sweeps and tools collect garbage; they need not look at all of torch each time
    try:
        with stage() as folder:
            return normalised(produce(), folder)
    finally:
        gc.unfreeze()


def cli(*arguments: str) -> tuple[str, str, int]:
    """Standard output, standard error and exit code of ``hashbench …``, run in this process."""
    out, err = io.StringIO(), io.StringIO()
    words = ["hashbench", *arguments]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), mock.patch("sys.argv", words):
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
