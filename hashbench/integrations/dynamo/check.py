"""Checks from its source that a file is a suite of PyTorch's ``benchmarks/dynamo`` that hashbench can plug into.

Nothing of it is executed: a harness that has moved on is refused before it runs, with the name of what is missing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hashbench.errors import HashbenchError

COMMON_FILE = "common.py"
RUNNER_CLASS = "BenchmarkRunner"
METHODS = ("check_accuracy", "run_n_iterations", "deepcopy_and_maybe_parallelize", "init_optimizer", "pick_grad")
"""Methods that are called or wrapped. ``pick_grad`` may be defined in the suite alone."""
GLOBALS = ("reset_rng_state", "same", "clone_inputs")
"""Names that ``check_accuracy`` must look up in its module: they are replaced there while it runs."""
RESETS = 3
"""The random state is reset before each of two eager runs and before the compiled one: so the phases are told."""

_TIP = "Name a suite of benchmarks/dynamo, such as path/to/benchmarks/dynamo/huggingface.py."


@dataclass(frozen=True, slots=True)
class Harness:
    """A suite of the harness: its file, and the file with ``class BenchmarkRunner``."""

    script: Path
    common: Path


def check_harness(script: Path) -> Harness:
    """The harness that ``script`` belongs to.

    Raises:
        HashbenchError: there is no such file, it is not a suite of the harness, or the harness lacks what is needed.
    """
    if not script.is_file():
        raise HashbenchError(f"there is no file {script}", consequence="nothing was run", tip=_TIP)
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
            tip="docs/dynamo.md lists the versions that were tried; a newer hashbench may know this one.",
        )
    return Harness(script.absolute(), common)


def _tree(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        reason = f"it is no Python that this interpreter reads ({error}); nothing was run"
        raise HashbenchError(f"cannot read {path}", consequence=reason, tip=_TIP) from error


def _missing(common: ast.Module, suite: ast.Module) -> Iterator[str]:
    """What the harness lacks, in words, most important first."""
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
    if functions.count("reset_rng_state") < RESETS:
        yield f"third call of reset_rng_state in {RUNNER_CLASS}.check_accuracy"
    if "run_n_iterations" not in [node.attr for node in called if isinstance(node, ast.Attribute)]:
        yield f"call of self.run_n_iterations in {RUNNER_CLASS}.check_accuracy"


def _names(tree: ast.Module) -> set[str]:
    """Everything that a module imports by name, or names."""
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return imported | used
