"""Check, start and end a suite of PyTorch's ``benchmarks/dynamo``.

Its source is parsed before any of it is executed: an unsupported version is refused before it runs, with the name of
what is missing.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Never

from hashbench.core.errors import HashbenchError
from hashbench.core.io import read_file
from hashbench.core.processes import Child, describe_end
from hashbench.core.records import BATCH_INVARIANCE
from hashbench.integrations.dynamo.session import Session, chosen_model

COMMON_FILE = "common.py"
RUNNER_CLASS = "BenchmarkRunner"
METHODS = ("check_accuracy", "run_n_iterations", "deepcopy_and_maybe_parallelize", "init_optimizer", "pick_grad")
"""Methods called or wrapped. ``pick_grad`` may be defined in the suite alone."""
GLOBALS = ("reset_rng_state", "same", "clone_inputs")
"""Functions that ``check_accuracy`` must look up in its module: ``same`` is replaced there while it runs."""

SITE = Path(__file__).with_name("site")
"""The folder on ``PYTHONPATH`` that makes a Python load our hook."""

_LOOK_SECONDS = 2.0

_GRACE_SECONDS = 20.0
"""Seconds that the harness has to end after Ctrl-C, before it is sent a second one (which changes its exit code, and
which it would not get without us); with torch it takes seconds on a busy machine. The same after SIGTERM."""

_TIP = "Name a suite of benchmarks/dynamo, such as path/to/benchmarks/dynamo/huggingface.py."


def check_harness(script: Path) -> None:
    """Raise unless ``script`` is a suite of a supported harness.

    Raises:
        HashbenchError: the file does not exist, it is not a suite of the harness, or the harness lacks what is needed.
    """
    if not script.is_file():
        raise HashbenchError(f"{script} does not exist", consequence="nothing was run", tip=_TIP)
    common = script.absolute().with_name(COMMON_FILE)
    suite = _tree(script)
    if not common.is_file() or script.name == COMMON_FILE or RUNNER_CLASS not in _names(suite):
        why = f"it does not use {RUNNER_CLASS} of a {COMMON_FILE} beside it; nothing was run"
        raise HashbenchError(f"{script} is not a suite of PyTorch's benchmarks/dynamo", consequence=why, tip=_TIP)
    missing = next(_missing(_tree(common), suite), None)
    if missing is not None:
        raise HashbenchError(
            f"{common} has no {missing}",
            consequence="this version of the harness has moved on and hashbench cannot plug into it; nothing was run",
            tip="`hashbench docs dynamo` lists the versions that were tried; a newer hashbench may know this one.",
        )


def _tree(path: Path) -> ast.Module:
    try:
        return ast.parse(read_file(path))
    except (OSError, SyntaxError, ValueError) as error:
        reason = f"it is not Python that this interpreter reads ({error}); nothing was run"
        raise HashbenchError(f"cannot read {path}", consequence=reason, tip=_TIP) from error


def _missing(common: ast.Module, suite: ast.Module) -> Iterator[str]:
    """Yield what the harness lacks, in words, most important first."""
    classes = [node for node in ast.walk(common) if isinstance(node, ast.ClassDef) and node.name == RUNNER_CLASS]
    if not classes:
        yield f"class {RUNNER_CLASS}"
        return
    methods = {node.name: node for node in ast.walk(classes[0]) if isinstance(node, ast.FunctionDef)}
    in_suite = {node.name for node in ast.walk(suite) if isinstance(node, ast.FunctionDef)}
    yield from (f"{RUNNER_CLASS}.{name}" for name in METHODS if name not in methods.keys() | in_suite)
    check = methods.get("check_accuracy")
    if check is None:
        return
    called = [node.func for node in ast.walk(check) if isinstance(node, ast.Call)]
    functions = [node.id for node in called if isinstance(node, ast.Name)]
    yield from (f"call of {name} in {RUNNER_CLASS}.check_accuracy" for name in GLOBALS if name not in functions)
    if "run_n_iterations" not in [node.attr for node in called if isinstance(node, ast.Attribute)]:
        yield f"call of self.run_n_iterations in {RUNNER_CLASS}.check_accuracy"


def _names(tree: ast.Module) -> set[str]:
    """Return every name that a module imports or uses as attribute."""
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return imported | used


# ------------------------------------------------------------------------------------------------- started and ended


@dataclass(frozen=True, slots=True)
class HarnessFlags:
    """The harness's flags that concern hashbench.

    Attributes:
        csv: absolute path of its CSV; empty if only the harness knows it.
        mode: the mode of our rows.
        begins_anew: it will remove its old CSV.
        accuracy: it checks accuracy, so that every model begun gets a row.
        help: it prints its flags and runs nothing.
    """

    csv: str = ""
    mode: str = "inference"
    begins_anew: bool = False
    accuracy: bool = False
    help: bool = False


def read_flags(arguments: Sequence[str]) -> HarnessFlags:
    """Parse the harness's flags; malformed ones are left for the harness to refuse."""
    parser = _Reader(add_help=False, allow_abbrev=False)
    for flag in ("--output", "--output-directory"):
        parser.add_argument(flag, default="")
    for flag in ("--accuracy", "--training", "--retain-output", "--disable-output", "--batch-invariant"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--help", "-h", action="store_true")
    try:
        theirs, _ = parser.parse_known_args(list(arguments))
    except ValueError:
        return HarnessFlags()
    csv = ""
    if theirs.output and not theirs.disable_output and (theirs.output_directory or Path(theirs.output).is_absolute()):
        csv = str(Path(theirs.output_directory, theirs.output).absolute())
    mode = "training" if theirs.training else "inference"
    if theirs.batch_invariant:
        mode = BATCH_INVARIANCE
    anew = not chosen_model(arguments) and not theirs.retain_output
    return HarnessFlags(csv, mode, begins_anew=anew, accuracy=theirs.accuracy, help=theirs.help)


class _Reader(argparse.ArgumentParser):
    def error(self, message: str) -> Never:
        raise ValueError(message)


class HarnessStoppedError(KeyboardInterrupt):
    """Ctrl-C or SIGTERM ended the harness, with the exit code ``status`` (negative for a signal)."""

    def __init__(self, status: int) -> None:
        super().__init__()
        self.status = status


def run_harness(session: Session, *, meanwhile: Callable[[], object]) -> int:
    """Run the harness to its end and return its exit code, negative for a signal.

    Ctrl-C and SIGTERM end the harness as they do without us, and all that it has started.

    Args:
        session: of this command.
        meanwhile: called every few seconds.

    Raises:
        HarnessStoppedError: after Ctrl-C or SIGTERM.
    """
    path = os.pathsep.join(filter(None, (str(SITE), os.environ.get("PYTHONPATH", ""))))
    environment = {**session.environment(), "PYTHONPATH": path}
    with _term_raising():
        command = [sys.executable, session.script, *session.arguments]
        with Child(command, stdin=None, stdout=None, stderr=None, environment=environment, own_session=False) as child:
            try:
                while (status := child.wait(_LOOK_SECONDS)) is None:
                    meanwhile()
            except _TerminatedError:
                child.interrupt(signal.SIGTERM)  # nobody has told it
                ended = child.wait(_GRACE_SECONDS)
                raise HarnessStoppedError(-signal.SIGTERM if ended is None else ended) from None
            except KeyboardInterrupt:
                ended = child.wait(_GRACE_SECONDS)  # a Ctrl-C has reached it too: a second one would cut its end short
                if ended is None:
                    child.interrupt()
                    ended = child.wait(_GRACE_SECONDS)
                raise HarnessStoppedError(-signal.SIGINT if ended is None else ended) from None
        return status


def how_it_ended(session: Session, code: int) -> str:
    """Describe the end of the process of a model without a row; in a sweep, only the harness has seen it."""
    if chosen_model(session.arguments):
        return describe_end(code)
    return "its process ended without a row; how, the harness has printed"


class _TerminatedError(KeyboardInterrupt):
    """SIGTERM."""


@contextlib.contextmanager
def _term_raising() -> Iterator[None]:
    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise _TerminatedError

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
