"""The wall: which layer, which package may import which, and which modules may import torch.

Read off the source, so that a test names the line to change; and confirmed by importing each module in a process that
refuses torch.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hashbench

PACKAGE = Path(hashbench.__file__).parent

PACKAGES: tuple[tuple[str, str], ...] = (
    # A package imports from the rows above it and from itself; the longest name that fits a module holds. Beside it
    # are its modules that import torch when they load (*: all, a dot: the package itself).
    ("core.catalog", ""),
    ("core.records", ""),
    ("core.errors", ""),
    ("core.text", ""),
    ("core.io", ""),
    ("core.commands", ""),
    ("core.finding", ""),
    ("core.sealed", ""),
    ("core.imports core.owners", ""),
    ("core.processes", ""),
    ("core.workers core.extensions", ""),
    ("core.native", "build library"),
    ("core.devices", "ledger reference triton_kernel"),
    ("core.inductor", "graphs internals"),
    (
        "core.trace",
        "api arguments build callbacks calls collectives compiled compiled_records digest generated groups mode "
        "module_paths native native.decode native.forwarded native.kernels native.nodes native.ops native.threads "
        "native.tracer nodes op_schema placements raw reads registered segments settings stepped steps storage_writers "
        "threads",
    ),
    ("core.divergence", ""),
    (
        "core.run",
        "distance leaves outcome outputs recorder rng rounding rounding_judge rounding_noise "
        "rounding_reference settings wide workload",
    ),
    ("core.results", ""),
    ("core.diagnose.causes", ""),
    ("core.diagnose.calls", "call capture live ops"),
    ("core.diagnose.replay", "*"),
    ("core.diagnose.repro", "*"),
    ("core.diagnose", "driver named_call pairs"),
    ("core.suites", "huggingface torchvision"),
    ("core.check", "builds function model pair row subject"),
    ("core.sweep", ""),
    ("core.report", ""),
    ("core extensions", ""),
    ("extensions.debugmode", "random_ops"),
    ("extensions.implementations", "state"),
    (
        "extensions.implementations.pair",
        "check file moments partial parts places record rounded run_files running settled shards sides stand_ins",
    ),
    (
        "extensions.kernels",
        "calls check conditions displaced example excuses float32 given gradients hygiene inputs judged kind "
        "lines lost misses pair smallest trials variations where",
    ),
    ("extensions.fingerprint", "calls check checking library measure values"),
    (
        "extensions.compiled",
        "amplification aot aot_graphs as_device.backend as_device.codegen as_device.interpreter as_device.kernels "
        "as_device.libdevice as_device.substitute cause "
        "check compilations decompositions dynamo_graphs evaluate fallbacks "
        "function indices judge kernel_list ladder lowered memory mutations names observed passes program "
        "reference repro roundings split tensor_ops toolchain units",
    ),
    (
        "extensions.invariance",
        "batch_items call_pair check driver experiments function invariance_cause item_call locate neighbours ops.axis "
        "ops.kernel ops.measure repro rows variants",
    ),
    ("extensions.ranks", "capture check contributions diagnosis function record runs"),
    ("extensions.ray", ""),
    ("extensions.stress", "perturbed stage"),
    ("extensions.report", ""),
    (
        "extensions.watch",
        "calls lines optimizers parts program.capture program.observer recorder samples schedulers steps tensors "
        "tracing",
    ),
    (
        "tools",
        "audit.cases audit.rows bitwise bitwise.findings bitwise.mode "
        "bitwise.repeating numeric numeric.compare numeric.counterparts numeric.first_difference numeric.report "
        "numeric.running numeric.user_file observer observer.files observer.observer observer.recording "
        "pipeline.loading pipeline.recording pipeline.running",
    ),
    ("testing", ""),
    ("integrations", "dynamo.compiled_runs dynamo.eager_runs dynamo.model_check lightning transformers"),
    ("cli", ""),
    ("extensions.watch.program.cli", ""),
    (
        "extensions.compiled.cli extensions.fingerprint.cli extensions.implementations.cli extensions.invariance.cli "
        "extensions.kernels.cli extensions.ranks.cli extensions.ray.cli extensions.report.cli extensions.stress.cli "
        "extensions.watch.cli",
        "",
    ),
    ("__main__", ""),
)

BETWEEN = frozenset[tuple[str, str]]()
"""Extensions that import another one."""

BY_NAME = {"__main__"}
"""Run on import."""

NEVER_TORCH = (
    "core.report",
    "core.results",
    "core.sweep.run",
    "core.sweep.executors.local",
    "core.divergence",
    "core.trace.file",
    "core.workers",
    "extensions.debugmode.find",
    "extensions.debugmode.log",
    "extensions.ranks.find",
    "extensions.ranks.folder",
    "extensions.ranks.replicas",
    "extensions.ranks.text",
    "extensions.ray.client",
    "extensions.ray.executor",
    "extensions.report.page",
    "extensions.watch.compare",
    "extensions.watch.file",
    "extensions.watch.lacking",
    "extensions.watch.page",
    "extensions.watch.program.compare",
    "extensions.watch.program.launch",
    "extensions.watch.program.looks",
    "extensions.watch.program.text",
    "extensions.watch.rerun",
    "extensions.watch.resume",
    "extensions.watch.text",
    "extensions.watch.traced",
    "tools.pipeline.comparing",
)
"""What only reads and runs: it never imports torch, not even inside a function."""


def sources() -> dict[str, Path]:
    """Every module of the package by its name in it; the zoo inside an installed package is data."""
    modules = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[0] != "models":
            modules[".".join(parts).removesuffix(".__init__")] = path
    del modules["__init__"]  # re-exports lazily
    return modules


SOURCES = sources()
ROW_OF = {name: number for number, (names, _) in enumerate(PACKAGES) for name in names.split()}


def name_of_row(module: str) -> str:
    """The longest name in the table that fits a module."""
    name = module
    while name not in ROW_OF:
        assert name, f"{module} is in no row: PACKAGES says where a package stands, add yours"
        name = name.rpartition(".")[0]
    return name


def row_of(module: str) -> int:
    return ROW_OF[name_of_row(module)]


@functools.cache
def imports(module: str, *, lazy: bool) -> frozenset[str]:
    """Full names of what a module imports: when it loads, or also inside functions; never for type checkers alone."""
    return frozenset(_imports(SOURCES[module], lazy=lazy))


def _imports(path: Path, *, lazy: bool) -> Iterator[str]:
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


@functools.cache
def imported_modules(module: str, *, lazy: bool) -> frozenset[str]:
    """The modules of this package that a module imports (``hashbench.core.run.workload.call`` is ``run.workload``)."""
    inside = (name.removeprefix("hashbench.") for name in imports(module, lazy=lazy) if name.startswith("hashbench."))
    return frozenset(filter(None, map(_module_of, inside)))


def _module_of(name: str) -> str:
    while name and name not in SOURCES:
        name = name.rpartition(".")[0]
    return name


@functools.cache
def reached(module: str, *, lazy: bool) -> frozenset[str]:
    """The modules that importing ``module`` imports, with the packages that hold them."""
    seen: set[str] = set()
    waiting = {module}
    while waiting:
        name = waiting.pop()
        seen.add(name)
        waiting |= {name.rpartition(".")[0]} & SOURCES.keys()
        waiting |= imported_modules(name, lazy=lazy)
        waiting -= seen
    return frozenset(seen)


def reaches_torch(module: str, *, lazy: bool) -> bool:
    roots = {name.partition(".")[0] for other in reached(module, lazy=lazy) for name in imports(other, lazy=lazy)}
    return not roots.isdisjoint({"torch", "torchvision"})


def may_import_torch(module: str) -> bool:
    name = name_of_row(module)
    allowed = PACKAGES[ROW_OF[name]][1].split()
    return allowed == ["*"] or (module.removeprefix(name).removeprefix(".") or ".") in allowed


def test_every_module_has_its_row() -> None:
    assert {name_of_row(module) for module in SOURCES} <= ROW_OF.keys()
    assert {name for name in ROW_OF if name not in SOURCES and name != "cli"} == set()


@pytest.mark.parametrize("package", sorted(ROW_OF))
def test_arrows_point_upwards_from(package: str) -> None:
    modules = [module for module in SOURCES if name_of_row(module) == package]
    downwards = [
        f"{module} imports {other}"
        for module in modules
        for other in sorted(imported_modules(module, lazy=True))
        if name_of_row(other) != package and row_of(other) >= row_of(module)
    ]
    assert not downwards


LAYERS = ("core", "extensions", "tools", "testing", "integrations", "cli")
"""The folders of the package."""


def layer_of(module: str) -> str:
    """Return the layer of a module. The command line of an extension is used by no other module, as ``cli`` is."""
    layer, _, inside = module.partition(".")
    return "cli" if (layer == "extensions" and inside.endswith(".cli")) or layer == "__main__" else layer


def extension_of(module: str) -> str:
    """Return the name of the extension that has a module; empty if none has."""
    layer, name = (*module.split("."), "")[:2]
    return name if layer == "extensions" else ""


def crossing(layer: str, *others: str) -> list[str]:
    """Imports of the modules of a layer from modules of other layers, lazy ones included."""
    return [
        f"{module} imports {other}"
        for module in SOURCES
        if layer_of(module) == layer
        for other in sorted(imported_modules(module, lazy=True))
        if layer_of(other) in others
    ]


def test_every_folder_is_a_layer() -> None:
    assert {path.name for path in PACKAGE.iterdir() if any(path.glob("**/*.py"))} - {"models", "docs"} == set(LAYERS)


@pytest.mark.parametrize(
    ("layer", "others"),
    [
        ("core", ("extensions", "tools", "testing", "integrations", "cli")),
        ("extensions", ("tools", "testing", "integrations", "cli")),
        ("tools", ("extensions", "testing", "integrations", "cli")),
        ("testing", ("tools", "integrations", "cli")),
        ("integrations", ("cli",)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_layers_import_only_what_is_below_them(layer: str, others: tuple[str, ...]) -> None:
    assert crossing(layer, *others) == []


def test_extensions_import_no_other_extension() -> None:
    between = {
        (one, other)
        for module in SOURCES
        for imported in imported_modules(module, lazy=True)
        if (one := extension_of(module)) and (other := extension_of(imported)) and one != other
    }
    assert between == BETWEEN


@pytest.mark.slow
def test_no_modules_import_each_other_in_a_circle() -> None:
    arrows = {module: imported_modules(module, lazy=False) - {module} for module in SOURCES}
    list(graphlib.TopologicalSorter(arrows).static_order())  # raises CycleError, which names the circle


def test_no_two_modules_import_each_other() -> None:
    arrows = {module: imported_modules(module, lazy=True) - {module} for module in SOURCES}
    assert not {(one, other) for one, names in arrows.items() for other in names if one in arrows[other]}


@pytest.mark.parametrize("part", NEVER_TORCH)
def test_what_only_reads_and_runs_never_knows_torch_even_lazily(part: str) -> None:
    modules = [name for name in SOURCES if name == part or name.startswith(f"{part}.")]
    assert modules
    assert not [module for module in modules if reaches_torch(module, lazy=True)]


def test_no_tool_imports_another_nor_the_compiler() -> None:
    tools = {module: module.split(".")[1] for module in SOURCES if module.startswith("tools.")}
    assert not {
        f"{module} imports {other}"
        for module, tool in tools.items()
        for other in reached(module, lazy=True) & tools.keys()
        if tools[other] != tool
    }
    assert not [name for module in tools for name in imports(module, lazy=True) if name.startswith("torch._inductor")]


def test_nothing_imports_the_command_line() -> None:
    users = {
        name
        for name in SOURCES
        if any(layer_of(other) == "cli" for other in imported_modules(name, lazy=True)) and layer_of(name) != "cli"
    }
    assert not users


def test_only_the_command_line_exits_with_a_code_of_its_own() -> None:
    exiting = {name for name, path in SOURCES.items() if "EXIT_" in path.read_text(encoding="utf-8")}
    assert {layer_of(name) for name in exiting} == {"cli"}


@pytest.mark.slow
def test_modules_without_torch_load_without_it() -> None:
    torch_free = sorted(name for name in set(SOURCES) - BY_NAME if not may_import_torch(name))
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(f'hashbench.{name}')\n"
        "    assert not {'torch', 'torchvision'} & set(sys.modules), f'{name} imports torch'\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *torch_free], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_module_is_thought_to_need_torch_that_does_not() -> None:
    allowed = {module for module in SOURCES if may_import_torch(module)}
    assert {module for module in SOURCES if reaches_torch(module, lazy=False)} - BY_NAME == allowed


def test_package_itself_loads_nothing() -> None:
    code = "import hashbench, sys; print([n for n in sys.modules if n.startswith('hashbench.') or n == 'torch'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.slow
def test_the_help_loads_no_library() -> None:
    code = (
        "import sys, hashbench.cli\n"
        "try: hashbench.cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(*(name for name in sys.modules if '.' not in name))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.splitlines()[-1].split()
    assert not {"torch", "pandas", "numpy", "tabulate", "jinja2", "xxhash", "email"} & set(loaded)
