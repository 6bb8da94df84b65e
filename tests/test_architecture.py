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


def sources() -> dict[str, Path]:
    """Every module of the package by its name in it; the zoo inside an installed package is data."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[0] != "models":
            found[".".join(parts).removesuffix(".__init__")] = path
    del found["__init__"]  # re-exports lazily
    return found


LAYERS = (
    # Each line may import from the lines above it, and within its own line as the arrows that are there say.
    {"records", "files", "variables", "words", "budget", "machine"},
    {
        "accelerators",
        "arguments",
        "alignment",
        "coverage",
        "questions",
        "formulas",
        "outofmemory",
        "workload",
        "interrupts",
        "postmortem",
        "report.csvtext",
        "chances",
        "events",
        "manifest",
        "retries",
        "schedule",
    },
    {
        "devices.formula",
        "devices.memory",
        "devices.reference",
        "devices.triton_kernel",
        "devices.kinds",
        "devices.ledger",
    },
    {"devices"},
    {"divergence", "tracefile", "digest", "executors", "executors.placement", "report.csvfile", "report.environments"},
    {"report.auditfile"},
    {"causes.readings", "causes.remedies", "causes.outside", "causes.kernel", "diagnosis", "diagnosis.rates"},
    {"causes", "diagnosis.freshrun"},
    {"determinism", "devicememory", "inspection", "marks", "results", "report.load", "report.tracediff"},
    {"environment", "results_folder", "worker"},
    {
        "modulepaths",
        "opplan",
        "executors.local",
        "executors.raycluster",
        "report.mixed",
        "report.compare",
        "report.auditcompare",
        "report.audittables",
        "report.nightfolders",
        "report.nightrows",
        "watching",
        "earlier",
        "merge",
    },
    {"world.references", "world.clocks", "world.entropy", "world.generators", "world.pools", "world.poison"},
    {"world"},
    {"building", "suspicions", "report.render", "report.history", "sweep", "executors.ray", "diagnosis.patching"},
    {"report.expectations", "report.expectedfile"},
    {"report.assessment", "report.markdown", "report.junit", "report.annotations"},
    {"report.told", "report.evidence", "report.html_words"},
    {"report.excerpts", "report.html_changes", "report.html_totals", "report.html_payload", "report.html_models"},
    {"report.html"},
    {"tracing", "progress", "inputs", "outcome"},
    {"replay.opowner", "replay.randomstate", "replay.calls", "replay.capture", "replay.callfacts"},
    {"replay.arms", "replay.poisonarm", "replay.tally", "replay.laboratory", "replay.specialarms"},
    {"replay"},
    {
        "repro.parts",
        "repro.torchdocs",
        "repro.report",
        "repro.opdefinition",
        "repro.callvalues",
        "repro.devicehere",
        "repro.callfile",
    },
    {"repro.script"},
    {"repro", "repro.rerun", "diagnosis.pairs"},
    {"diagnosis.conductor"},
    {"rows"},
    {"suites.data", "suites.selection", "suites.functions", "suites.bundled"},
    {"suites.listing"},
    {"suites.zoofile", "suites.plugins", "suites.torchbench"},
    {"suites"},
    {"node", "suites.torchvision", "suites.timm", "suites.huggingface_inputs"},
    {"suites.huggingface"},
    {"runner"},
    {"preload"},
    {"integrations", "integrations.functioncopy", "integrations.pytest_message"},
    {"integrations.functionrunner"},
    {"integrations.pytest_plugin"},
    {"integrations.dynamo"},
    {"integrations.dynamo.session", "integrations.dynamo.check"},
    {"integrations.dynamo.table", "integrations.dynamo.launch", "integrations.dynamo.phases"},
    {"integrations.dynamo.subject"},
    {"integrations.dynamo.hook"},
    {"integrations.dynamo.fresh", "integrations.dynamo.site", "integrations.dynamo.site.sitecustomize"},
    {"nightly"},
    {"tools"},
    {"tools.bitwise.choosing", "tools.bitwise.findings"},
    {"tools.bitwise.places", "tools.bitwise.repeating", "tools.bitwise.gathering"},
    {"tools.bitwise.comparing"},
    {"tools.bitwise.mode"},
    {"tools.bitwise"},
    {"tools.observer.recording"},
    {"tools.observer.document", "tools.observer.table", "tools.observer.mode"},
    {"tools.observer.files"},
    {"tools.observer.observer"},
    {"tools.observer.context"},
    {"tools.observer"},
    {"tools.numeric.findings"},
    {"tools.numeric.parting", "tools.numeric.measuring", "tools.numeric.showing"},
    {"tools.numeric.running", "tools.numeric.userfile"},
    {"tools.numeric.traced"},
    {"tools.numeric.checking"},
    {"tools.numeric"},
    {"tools.pipeline.parts", "tools.pipeline.observed", "tools.pipeline.reasons"},
    {"tools.pipeline"},
    {"tools.pipeline.config", "tools.pipeline.contents", "tools.pipeline.stages", "tools.pipeline.checkfolder"},
    {"tools.pipeline.anatomy", "tools.pipeline.launching", "tools.pipeline.training", "tools.pipeline.comparing"},
    {"tools.pipeline.recording", "tools.pipeline.checking", "tools.pipeline.text"},
    {"tools.pipeline.loading"},
    {"tools.pipeline.running"},
    {"tools.audit", "tools.audit.verdict", "tools.audit.choice"},
    {"tools.audit.fromsweeps", "tools.audit.stress"},
    {"tools.audit.cases"},
    {"tools.audit.measuring"},
    {"tools.audit.explaining"},
    {"tools.audit.rows"},
    {"tools.audit.task"},
    {"tools.audit.conducting"},
    {"cli.flags"},
    {"cli.listing", "cli.cluster", "cli.placing"},
    {"cli.sweep", "cli.reading", "cli.merge", "cli.pipeline", "cli.numeric", "cli.audit"},
    {"cli.report"},
    {"cli.dynamo"},
    {"cli"},
    {"__main__"},
)

NEEDS_TORCH = {
    "building",
    "determinism",
    "devicememory",
    "diagnosis.conductor",
    "diagnosis.pairs",
    "diagnosis.patching",
    "digest",
    "inputs",
    "inspection",
    "integrations.functioncopy",
    "integrations.functionrunner",
    "integrations.dynamo.fresh",
    "integrations.dynamo.phases",
    "integrations.dynamo.subject",
    "marks",
    "modulepaths",
    "opplan",
    "outcome",
    "results",
    "rows",
    "runner",
    "suspicions",
    "suites.huggingface",
    "suites.huggingface_inputs",
    "suites.timm",
    "suites.torchvision",
    "tracing",
    "watching",
    "workload",
}
PACKAGES_THAT_NEED_TORCH = ("devices", "replay", "repro", "world")
"""Importing any module of a package imports the package itself."""
NEEDS_TORCH |= {name for name in sources() if name.startswith(("tools.numeric", "tools.bitwise", "tools.observer"))}
IN_THE_PIPELINES_PROCESS = ("anatomy", "contents", "loading", "recording", "running", "training")
NEEDS_TORCH |= {f"tools.pipeline.{name}" for name in IN_THE_PIPELINES_PROCESS}
NEEDS_TORCH |= {name for name in sources() if name.partition(".")[0] in PACKAGES_THAT_NEED_TORCH}
IN_THE_AUDITS_WORKERS = ("cases", "explaining", "measuring", "rows", "stress")
NEEDS_TORCH |= {f"tools.audit.{name}" for name in IN_THE_AUDITS_WORKERS}
BY_NAME = {"preload", "__main__"}
"""Import what they need by name, or run on import."""


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


@pytest.mark.parametrize(
    "part",
    ["report", "sweep", "executors", "divergence", "tracefile", "tools.pipeline.comparing", "tools.pipeline.text"],
)
def test_what_only_reads_and_runs_never_knows_torch_even_lazily(part: str) -> None:
    modules = [name for name in SOURCES if name == part or name.startswith(f"{part}.")]
    assert modules
    for module in modules:
        for other in reached(module, lazy=True):
            roots = {name.partition(".")[0] for name in imports(SOURCES[other], lazy=True)}
            assert not roots & {"torch", "torchvision"}, f"{module} reaches {other}, which imports torch"


@pytest.mark.parametrize("module", [name for name in SOURCES if name.partition(".")[0] not in ("__main__", "cli")])
def test_nothing_imports_the_command_line(module: str) -> None:
    known = {name.partition(".")[0] for name in package_modules(imports(SOURCES[module], lazy=True))}
    assert "cli" not in known


def test_only_the_command_line_exits_with_a_code_of_its_own() -> None:
    exiting = {name for name, path in SOURCES.items() if "EXIT_" in path.read_text(encoding="utf-8")}
    assert {name.partition(".")[0] for name in exiting} == {"cli"}


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
