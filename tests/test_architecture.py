"""The import rule: who may know whom, and who may import torch.

Read off the source, so that a test names the line to change; and confirmed by importing each module in a process that
refuses torch.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hashbench

PACKAGE = Path(hashbench.__file__).parent

LAYERS = (
    # Each line may import from the lines above it, and within its own line as the arrows that are there say.
    {"records", "files", "words"},
    {"arguments", "alignment", "coverage", "formulas", "workload", "interrupts", "postmortem", "report.csvtext"},
    {"divergence", "tracefile", "digest", "executors", "report.csvfile", "report.environments"},
    {"determinism", "inspection", "marks", "results", "report.load", "report.tracediff", "results_folder", "worker"},
    {"modulepaths", "opplan", "executors.local", "report.compare"},
    {"building", "report.render", "sweep"},
    {"tracing", "progress", "inputs", "outcome"},
    {"rows"},
    {"suites.data", "suites.zoofile", "suites.selection"},
    {"suites"},
    {"suites.torchvision"},
    {"runner", "environment"},
    {"preload"},
    {"cli"},
    {"__main__"},
)

NEEDS_TORCH = {
    "building",
    "determinism",
    "digest",
    "inputs",
    "inspection",
    "marks",
    "modulepaths",
    "opplan",
    "outcome",
    "results",
    "rows",
    "runner",
    "suites.torchvision",
    "tracing",
    "workload",
}
BY_NAME = {"preload", "__main__"}
"""Import what they need by name, or run on import."""


def sources() -> dict[str, Path]:
    """Every module of the package by its name in it; the zoo inside an installed package is data."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[0] != "models":
            found[".".join(parts).removesuffix(".__init__")] = path
    del found["__init__"]  # re-exports lazily
    return found


SOURCES = sources()
TORCH_FREE = sorted(set(SOURCES) - NEEDS_TORCH - BY_NAME)


def imports(path: Path, *, lazy: bool) -> Iterator[str]:
    """Full names of what a file imports: at import time, or also inside functions; never for type checkers alone."""
    waiting: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
            continue
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) and not lazy:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        waiting += ast.iter_child_nodes(node)


def package_modules(names: Iterator[str]) -> set[str]:
    """The modules of this package among imported names (``hashbench.suites.data.read_suite`` is ``suites.data``)."""
    found = set()
    for name in names:
        inside = name.removeprefix("hashbench.")
        while inside != name and inside and inside not in SOURCES:
            inside = inside.rpartition(".")[0]
        if inside != name and inside:
            found.add(inside)
    return found


def layer(module: str) -> int:
    return next(number for number, names in enumerate(LAYERS) if module in names)


def reached(module: str, *, lazy: bool) -> set[str]:
    """The modules that importing ``module`` imports, with the packages that hold them."""
    found: set[str] = set()
    waiting = {module}
    while waiting:
        name = waiting.pop()
        found.add(name)
        waiting |= {name.rpartition(".")[0]} - {""}
        waiting |= package_modules(imports(SOURCES[name], lazy=lazy))
        waiting -= found
    return found


def test_every_module_has_its_layer() -> None:
    named = [module for names in LAYERS for module in names]
    assert sorted(named) == sorted(set(SOURCES) - {"report"}), "LAYERS above says where a module stands: add yours"


@pytest.mark.parametrize("module", sorted(set(SOURCES) - {"report"}))
def test_arrows_point_one_way_from(module: str) -> None:
    known = package_modules(imports(SOURCES[module], lazy=True))
    upwards = {name for name in known - {module, "report"} if layer(name) > layer(module)}
    assert not upwards, f"{module} must not know {upwards}"


def test_no_two_modules_import_each_other() -> None:
    arrows = {module: package_modules(imports(path, lazy=True)) - {module} for module, path in SOURCES.items()}
    mutual = {(one, other) for one, names in arrows.items() for other in names if one in arrows[other]}
    assert not mutual


@pytest.mark.parametrize("part", ["report", "sweep", "executors", "divergence", "tracefile"])
def test_what_only_reads_and_runs_never_knows_torch_even_lazily(part: str) -> None:
    modules = [name for name in SOURCES if name == part or name.startswith(f"{part}.")]
    assert modules
    for module in modules:
        for other in reached(module, lazy=True):
            roots = {name.partition(".")[0] for name in imports(SOURCES[other], lazy=True)}
            assert not roots & {"torch", "torchvision"}, f"{module} reaches {other}, which imports torch"


@pytest.mark.parametrize("module", [name for name in SOURCES if name != "__main__"])
def test_nothing_imports_the_command_line(module: str) -> None:
    assert "cli" not in package_modules(imports(SOURCES[module], lazy=True)) - {module}


def test_only_the_command_line_exits_with_a_code_of_its_own() -> None:
    exiting = {name for name, path in SOURCES.items() if "EXIT_" in path.read_text(encoding="utf-8")}
    assert exiting == {"cli"}


def test_modules_without_torch_load_without_it() -> None:
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(f'hashbench.{name}')\n"
        "    assert not {'torch', 'torchvision'} & set(sys.modules), f'{name} imports torch'\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *TORCH_FREE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_module_is_thought_to_need_torch_that_does_not() -> None:
    with_torch = {
        module
        for module in SOURCES
        if any(
            name.partition(".")[0] in ("torch", "torchvision")
            for other in reached(module, lazy=False)
            for name in imports(SOURCES[other], lazy=False)
        )
    }
    assert with_torch - BY_NAME == NEEDS_TORCH


def test_package_itself_loads_nothing() -> None:
    code = "import hashbench, sys; print([n for n in sys.modules if n.startswith('hashbench.') or n == 'torch'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
