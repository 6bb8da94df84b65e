"""The import rule: which package may import which, and which modules may import torch.

Read off the source, so that a test names the line to change; and confirmed by importing each module in a process that
refuses torch.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

import hashbench

PACKAGE = Path(hashbench.__file__).parent

NO_MODULE, EVERY_MODULE = frozenset[str](), frozenset({"*"})

PACKAGES: tuple[tuple[str, frozenset[str]], ...] = (
    # A package imports from the rows above it and from itself. Beside it: its modules that import torch when they load.
    ("catalog", NO_MODULE),
    ("records", NO_MODULE),
    ("errors text", NO_MODULE),
    ("io", NO_MODULE),
    ("processes imports", NO_MODULE),
    ("workers extensions", NO_MODULE),
    ("native", frozenset({"build", "library"})),
    ("devices", frozenset({"ledger", "reference", "triton_kernel"})),
    (
        "inductor",
        frozenset({"aot", "fallbacks", "graphs", "indices", "internals", "lowered", "tensor_ops"} | {"toolchain"}),
    ),
    (
        "trace",
        frozenset({"api", "arguments", "build", "callbacks", "calls", "collectives", "compiled", "compiled_records"})
        | {"digest", "mode", "module_paths", "native", "nodes", "op_schema", "raw", "reads", "registered"}
        | {"generated", "groups", "placements", "segments", "settings", "stepped", "storage_writers", "threads"},
    ),
    ("compare", NO_MODULE),
    ("divergence", NO_MODULE),
    ("run", frozenset({"leaves", "outcome", "outputs", "rng", "settings", "workload"})),
    (
        "training",
        frozenset({"calls", "lines", "optimizers", "parts", "recorder", "samples", "schedulers", "steps", "tensors"})
        | {"tracing"},
    ),
    ("results", NO_MODULE),
    ("causes", NO_MODULE),
    ("calls", frozenset({"call", "capture", "live", "ops"})),
    ("replay", EVERY_MODULE),
    ("repro", EVERY_MODULE),
    ("fingerprint", frozenset({"calls", "checking", "library", "measure", "values"})),
    ("diagnose", frozenset({"driver", "pairs"})),
    ("batch", frozenset({"call_pair", "experiments", "item_call", "locate", "neighbours", "repro", "rows"})),
    ("suites", frozenset({"huggingface", "torchvision"})),
    (
        "compiled",
        frozenset({"amplification", "aot_graphs", "decompositions", "dynamo_graphs", "evaluate", "judge"})
        | {
            "kernel_list",
            "ladder",
            "memory",
            "mutations",
            "names",
            "observed",
            "passes",
            "repro",
            "rounding",
            "roundings",
            "split",
        }
        | {"units"},
    ),
    ("ranks", frozenset({"capture", "contributions", "record"})),
    (
        "check",
        frozenset(
            {
                "batch_items",
                "builds",
                "compilations",
                "compiled",
                "compiled_cause",
                "compiled_function",
                "compiled_reference",
                "fingerprint",
                "function",
                "invariance",
                "invariance_cause",
                "invariance_function",
                "model",
                "pair",
                "perturbed",
                "program",
                "rank_diagnosis",
                "rank_function",
                "rank_runs",
                "ranks",
                "row",
                "stress",
                "subject",
                "variants",
            }
        ),
    ),
    ("sweep", NO_MODULE),
    ("report", NO_MODULE),
    (
        "integrations",
        frozenset({"debug_mode", "dynamo.compiled_runs", "dynamo.eager_runs", "dynamo.model_check"})
        | {"lightning", "transformers"},
    ),
    (
        "tools",
        frozenset({"bitwise", "numeric", "observer"})
        | {f"audit.{name}" for name in ("axis", "cases", "invariance", "kernel", "rows")}
        | {f"pipeline.{name}" for name in ("loading", "recording", "running")},
    ),
    ("nightly", NO_MODULE),
    ("cli", NO_MODULE),
    ("__main__", NO_MODULE),
)

EXTENSIONS: Mapping[str, str] = MappingProxyType(
    {
        "compiled": "compiled check.compilations check.compiled check.compiled_cause check.compiled_function "
        "check.compiled_reference check.program inductor report.compiled report.kernels results.compiled_kernels",
        "debugmode": "compare.debug_log divergence.debug_log divergence.debug_log_text trace.debug_log",
        "fingerprint": "fingerprint check.fingerprint sweep.fingerprints",
        "invariance": "batch check.batch_items check.invariance check.invariance_cause "
        "check.invariance_function check.variants",
        "ranks": "ranks check.rank_diagnosis check.rank_function check.rank_runs check.ranks divergence.held_alike "
        "divergence.rank_choice divergence.rank_messages divergence.rank_order divergence.rank_path "
        "divergence.rank_verdict divergence.rank_walk divergence.ranks divergence.ranks_text divergence.replicas "
        "divergence.whole_steps trace.stepped",
        "ray": "sweep.executors.phase_board sweep.executors.ray sweep.executors.ray_client sweep.executors.remote",
        "report": "report nightly",
        "stress": "check.perturbed check.stress check.stress_facts check.stress_text",
        "watch": "training integrations.lightning integrations.transformers report.training_loop",
    }
)
"""One capability beside the core, and its modules; where two names fit a module, the longer one holds."""

CORE = (
    "calls catalog causes check compare devices diagnose divergence errors extensions imports io native processes "
    "records replay repro results run suites sweep text trace workers report.compare report.table report.text "
    "inductor.failures inductor.graphs inductor.internals inductor.nodes inductor.openmp inductor.wrapper"
)
"""What every sweep needs. It imports none of the rest."""

TOOLS = "tools results.audit_table results.invariance_table"
USE = "integrations cli __main__"
"""What users call."""

BETWEEN = frozenset({("compiled", "fingerprint"), ("report", "compiled"), ("watch", "report")})
"""Extensions that import another one."""

BY_NAME = {"__main__"}
"""Run on import."""

NEVER_TORCH = (
    "report",
    "results",
    "sweep.run",
    "sweep.executors.local",
    "sweep.executors.ray",
    "sweep.executors.ray_client",
    "compare",
    "divergence",
    "ranks.folder",
    "trace.file",
    "training.file",
    "training.lacking",
    "training.compare",
    "training.traced",
    "training.text",
    "training.resume",
    "training.rerun",
    "tools.pipeline.comparing",
    "workers",
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


def row_of(module: str) -> int:
    return ROW_OF[module.partition(".")[0]]


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
    package, _, inside = module.partition(".")
    allowed = PACKAGES[ROW_OF[package]][1]
    return allowed == EVERY_MODULE or any(inside == name or inside.startswith(f"{name}.") for name in allowed)


def test_every_package_has_its_row() -> None:
    assert {module.partition(".")[0] for module in SOURCES} == set(ROW_OF), (
        "PACKAGES says where a package stands: add yours"
    )


@pytest.mark.parametrize("package", sorted(ROW_OF))
def test_arrows_point_upwards_from(package: str) -> None:
    modules = [module for module in SOURCES if module.partition(".")[0] == package]
    downwards = [
        f"{module} imports {other}"
        for module in modules
        for other in sorted(imported_modules(module, lazy=True))
        if other.partition(".")[0] != package and row_of(other) >= row_of(module)
    ]
    assert not downwards


ROOMS: Mapping[str, tuple[str, str]] = MappingProxyType(
    dict.fromkeys(CORE.split(), ("core", ""))
    | dict.fromkeys(TOOLS.split(), ("tools", ""))
    | dict.fromkeys(USE.split(), ("use", ""))
    | {name: ("extensions", room) for room, names in EXTENSIONS.items() for name in names.split()}
)


def room_of(module: str) -> tuple[str, str]:
    """Return the layer of a module and, of an extension, its name."""
    name = module
    while name not in ROOMS:
        assert "." in name, f"{module} is in no layer: CORE, EXTENSIONS, TOOLS and USE say where a module belongs"
        name = name.rpartition(".")[0]
    return ROOMS[name]


def test_every_layer_names_modules_that_exist() -> None:
    assert {name for name in ROOMS if name not in SOURCES} <= {"cli"} - SOURCES.keys()


def test_the_core_imports_nothing_else() -> None:
    assert not {
        f"{module} imports {other}"
        for module in SOURCES
        if room_of(module)[0] == "core"
        for other in imported_modules(module, lazy=True)
        if room_of(other)[0] != "core"
    }


def test_extensions_import_no_other_extension() -> None:
    rooms = {(room_of(module), room_of(other)) for module in SOURCES for other in imported_modules(module, lazy=True)}
    between = {(one, other) for (a, one), (b, other) in rooms if a == b == "extensions" and one != other}
    assert between == BETWEEN


def test_extensions_import_no_tool_and_nothing_that_users_call() -> None:
    assert not {
        f"{module} imports {other}"
        for module in SOURCES
        if room_of(module)[0] in {"extensions", "tools"}
        for other in imported_modules(module, lazy=True)
        if room_of(other)[0] == "use" or (room_of(other)[0] == "tools" != room_of(module)[0])
    }


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
        name for name in SOURCES if any(other.partition(".")[0] == "cli" for other in imported_modules(name, lazy=True))
    }
    assert {name.partition(".")[0] for name in users} == {"__main__", "cli"}


def test_only_the_command_line_exits_with_a_code_of_its_own() -> None:
    exiting = {name for name, path in SOURCES.items() if "EXIT_" in path.read_text(encoding="utf-8")}
    assert {name.partition(".")[0] for name in exiting} == {"cli"}


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
