"""Run a pipeline in a fresh process, rerun it in another, and compare the two. Imports no torch.

The pipeline is a Python file with functions found by name or decorator, or a YAML file that names functions and gives
values; loading it executes user code, so it is loaded in the child process.

Where the runs differ and the user did not fix ``PYTHONHASHSEED``, two more runs test whether Python's hash seed (which
orders sets) is the cause: one with the first run's hash seed and one with the second's.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hashbench.core.errors import HashbenchError, first_line
from hashbench.core.io import open_file, read_file, read_json
from hashbench.core.processes import Child, describe_end, python_calling, tell_phase
from hashbench.core.suites.python_suites import import_file
from hashbench.tools.pipeline import MARK, observed
from hashbench.tools.pipeline.comparing import PipelineVerdict, compare
from hashbench.tools.pipeline.observed import REPEAT_FOLDER, CheckRecord, RepeatResult
from hashbench.tools.pipeline.stages import EQUAL, STAGES

ANSWER_FILE, LOG_FILE = "answer.json", "output.log"
_PHASES: Mapping[str, str] = MappingProxyType({"": "first run", REPEAT_FOLDER: "second run"})


def check(
    config: Path, output: Path, *, timeout: float, repeat: bool = True, tracer: str = "auto"
) -> PipelineVerdict | None:
    """Run the pipeline of ``config``, rerun it, and write the folder ``output``, which appears only when it is
    complete.

    Args:
        config: a Python or YAML file.
        output: a folder that does not exist yet, or is empty.
        timeout: seconds for each run.
        repeat: whether to run it a second time.
        tracer: which tracer records the first steps, as for :class:`~hashbench.core.trace.api.HashDebugTrace`.

    Returns:
        The verdict on the two runs; ``None`` without ``repeat``.

    Raises:
        HashbenchError: the configuration or ``output`` cannot be used, or a run failed.
    """
    check_path(config)
    tip = "Choose another folder with --output-dir."
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        consequence = "nothing was run, so that nothing is lost"
        raise HashbenchError(f"{output} already exists", consequence=consequence, tip=tip)
    partial = output.with_name(f".{output.name}.{os.getpid()}.partial")
    log = output.with_name(f"{output.name}.log")
    given = os.environ.get("PYTHONHASHSEED", "")
    is_fixed = given.isdigit()
    hash_seeds = (given, given) if is_fixed else _two_hash_seeds()

    def run(name: str, number: int) -> CheckRecord:
        """Run once with hash seed ``number`` and read it back from the folder ``name``; the folder of an experiment is
        deleted."""
        tell_phase(f"running {config.name}: {_PHASES.get(name, 'rerun with the hash seed of an earlier run')}")
        folder = partial / name
        folder.mkdir(exist_ok=True)
        by = "user" if is_fixed else "hashbench"
        asked = {"hash_seed": hash_seeds[number], "hash_seed_by": by, "tracer": tracer}
        run_once(config, folder, asked, timeout=timeout, log=log)
        observed.seal(folder, None)
        check = observed.read(folder)
        if name not in ("", REPEAT_FOLDER):
            shutil.rmtree(folder)
        return check

    try:
        partial.mkdir(parents=True)
        log.unlink(missing_ok=True)
        first = run("", 0)
        verdict, repetition = _repeated(run, first, is_fixed=is_fixed) if repeat else (None, None)
        observed.seal(partial, repetition)
        log.replace(partial / LOG_FILE)
        with contextlib.suppress(FileNotFoundError):
            output.rmdir()
        partial.rename(output)
    except OSError as error:
        consequence = str(error.strerror or error)
        raise HashbenchError(f"cannot write the check {output}", consequence=consequence, tip=tip) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return verdict


def _two_hash_seeds() -> tuple[str, str]:
    first = secrets.randbelow(2**31) + 1
    return str(first), str(first + 1 + secrets.randbelow(2**31))


def _repeated(
    run: Callable[[str, int], CheckRecord], first: CheckRecord, *, is_fixed: bool
) -> tuple[PipelineVerdict, RepeatResult]:
    second = run(REPEAT_FOLDER, 1)
    verdict = compare(first, second, hash_order=dict.fromkeys(STAGES, False) if is_fixed else None)
    hash_order: Mapping[str, bool | None] = {}
    runs = 2
    if not verdict.repeats and not is_fixed:  # which stages agree in runs with the same hash seed?
        differing = [finding.stage for finding in verdict.findings]
        agrees, runs = _agreeing(first, run("experiment0", 0), differing), 3
        again: Mapping[str, bool] = {}
        if any(agrees.values()):
            again, runs = _agreeing(second, run("experiment1", 1), differing), 4
        hash_order = {stage: (again.get(stage, False) or None) if agrees[stage] else False for stage in differing}
        verdict = compare(first, second, hash_order=hash_order)
    return verdict, RepeatResult(verdict.repeats, verdict.first, hash_order.get(verdict.first), runs)


def _agreeing(check: CheckRecord, other: CheckRecord, stages: Sequence[str]) -> dict[str, bool]:
    """Return for each stage whether it and all stages up to the first of these agree in two checks."""
    verdict = compare(check, other)
    equal = {stage.name for stage in verdict.stages if stage.status == EQUAL}
    early = bool(verdict.first) and STAGES.index(verdict.first) < STAGES.index(stages[0])
    return {stage: stage in equal and not early for stage in stages}


def run_once(config: Path, folder: Path, asked: Mapping[str, str], *, timeout: float, log: Path) -> None:
    """Run the pipeline once in a new interpreter and write its files into ``folder``.

    ``asked`` are arguments of :func:`~hashbench.tools.pipeline.running.observe`. Output of the run is appended to
    ``log``. The run and its workers are killed on timeout, on Ctrl-C, and when this process dies.

    Raises:
        HashbenchError: the run failed, died or took more than ``timeout`` seconds.
    """
    task = {"config": str(config.resolve()), "folder": str(folder), "path": sys.path, "asked": dict(asked)}
    command = python_calling("hashbench.tools.pipeline.running:main", dies_with_us=True)
    variables = {"PYTHONHASHSEED": asked["hash_seed"]}
    text = json.dumps(task) + "\n"
    with (
        os.fdopen(open_file(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as printed,
        Child(command, task=text, stdout=printed, stderr=printed, environment=variables) as child,
    ):
        status = child.wait(timeout)
    tip = f"What it printed is in {log}."
    if status is None:
        raise _unfinished(config, f"it took more than {timeout:g} s", f"Give it more with --timeout. {tip}")
    try:
        error = read_json(folder / ANSWER_FILE)["error"]
    except (OSError, ValueError):
        raise _unfinished(config, describe_end(status), tip) from None
    (folder / ANSWER_FILE).unlink()
    if error is not None:
        raise HashbenchError(error["what"], consequence=error["consequence"], tip=error["tip"] or tip)


def _unfinished(config: Path, reason: str, tip: str) -> HashbenchError:
    return HashbenchError(f"the pipeline {config} did not end", consequence=f"{reason}; nothing was compared", tip=tip)


# ------------------------------------------------------------------------------------------- the configuration

EXAMPLE = "def make_loader(seed): return torch.utils.data.DataLoader(...)"
NAMES = ("make_loader", "make_model", "make_optimizer", "loss", "forward", "set_seed")
"""Names under which a file's functions are found; only ``make_loader`` is required."""

_VALUES: Mapping[str, tuple[int, int, int]] = MappingProxyType({"seed": (1337, 0, 2**32 - 1), "steps": (3, 1, 10_000)})
"""Values that a configuration may set: default, minimum, maximum."""


@dataclass(frozen=True, slots=True)
class Config:
    """The parts of one pipeline.

    Attributes:
        functions: those of :data:`NAMES` that the file defines.
        seed: passed to ``set_seed`` and ``make_loader``.
        steps: number of batches that are recorded and trained on.
    """

    functions: Mapping[str, Callable[..., Any]]
    seed: int
    steps: int


def check_path(path: Path) -> None:
    """Raise :class:`HashbenchError` unless ``path`` is a file of a kind that :func:`load_config` reads."""
    if not path.is_file():
        raise _unusable(path, "it does not exist", tip="Check the path.")
    if path.suffix not in (".py", ".yaml", ".yml"):
        raise _unusable(path, "it is neither a Python file (.py) nor YAML (.yaml)", tip=f"Write one with `{EXAMPLE}`.")


def load_config(path: Path) -> Config:
    """Read a configuration; a Python file is executed here, with its folder first on ``sys.path``.

    Raises:
        HashbenchError: no such file, no loader in it, a value of the wrong type, or a name that cannot be resolved.
        Exception: anything that the file raises.
    """
    check_path(path)
    functions, content = _of_python(path) if path.suffix == ".py" else _of_yaml(path)
    if "make_loader" not in functions:
        raise _unusable(path, "it has no loader", tip=f"Add `{EXAMPLE}`, or mark a function with @pipeline.loader.")
    values = {}
    for name, (default, least, most) in _VALUES.items():
        value = values[name] = content.get(name, default)
        if type(value) is not int or not least <= value <= most:
            raise _unusable(path, f"{name} = {value!r} is not a whole number from {least} to {most}", tip="Correct it.")
    return Config(functions, **values)


def _of_python(path: Path) -> tuple[dict[str, Any], Mapping[Any, Any]]:
    module = vars(import_file(path.resolve()))
    functions = {name: module[name] for name in NAMES if callable(module.get(name))}
    for value in list(module.values()):
        part = getattr(value, MARK, "") if callable(value) else ""
        if isinstance(part, str) and part and functions.setdefault(part, value) is not value:
            raise _unusable(path, f"two functions are its {part}", tip="Mark or name only one of them.")
    return functions, module


def _of_yaml(path: Path) -> tuple[dict[str, Any], Mapping[Any, Any]]:
    try:
        import yaml
    except ImportError:
        raise _unusable(path, "reading YAML needs PyYAML", tip="pip install 'hashbench[pipeline]'") from None
    try:
        content = yaml.safe_load(read_file(path).decode("utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        first = first_line(error) or type(error).__name__
        raise _unusable(path, f"it is not YAML ({first})", tip="Check it with any YAML tool.") from error
    if not isinstance(content, Mapping):
        raise _unusable(path, "it is not a list of entries", tip="Begin with `loader: module:function`.")
    known = {*NAMES, *_VALUES, "loader", "model", "optimizer"}
    unknown = sorted(str(key) for key in content if key not in known)
    if unknown:
        tip = f"Known are {', '.join(sorted(known))}."
        raise _unusable(path, f"it has an unknown entry {unknown[0]!r}", tip=tip)
    sys.path.insert(0, str(path.resolve().parent))
    entries = {name: content.get(name, content.get(name.removeprefix("make_"))) for name in NAMES}
    return {name: _named(path, name, entry) for name, entry in entries.items() if entry is not None}, content


def _named(path: Path, part: str, entry: Any) -> Callable[..., Any]:
    """Resolve ``module:function`` or ``file.py:function``, or ``{call: …, arguments: {…}}``, to a callable."""
    arguments: Any = {}
    if isinstance(entry, Mapping):
        entry, arguments = entry.get("call"), entry.get("arguments", {})
    tip = "Write `module:function`, `file.py:function`, or `{call: …, arguments: {…}}`."
    if not isinstance(entry, str) or entry.count(":") != 1 or not isinstance(arguments, Mapping):
        raise _unusable(path, f"{part} names no function", tip=tip)
    where, _, name = entry.partition(":")
    if where.endswith(".py"):
        file = path.resolve().parent / where
        check_path(file)
        module = import_file(file)
    else:
        module = importlib.import_module(where)
    function = getattr(module, name, None)
    if not callable(function):
        raise _unusable(path, f"{where} has no function {name!r}", tip=tip)
    return functools.partial(function, **{str(key): value for key, value in arguments.items()})


def _unusable(path: Path, what: str, *, tip: str) -> HashbenchError:
    return HashbenchError(f"cannot use the pipeline {path}: {what}", consequence="nothing was run", tip=tip)
