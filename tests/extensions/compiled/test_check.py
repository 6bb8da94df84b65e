"""The check of a compiled model: a clean one and a planted fault as they are swept, what fails, what is left behind."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config

from hashbench.core.catalog import Status
from hashbench.core.check.model import BenchmarkRunner
from hashbench.core.inductor.graphs import CompiledGraph
from hashbench.core.inductor.internals import dynamo_counters
from hashbench.core.records import ModelSpec, Row, RunOptions
from hashbench.core.run.workload import Workload
from hashbench.core.suites import registry
from hashbench.core.suites.csv_file import data_folder
from hashbench.core.suites.python_suites import import_file
from hashbench.extensions.compiled import compiled_kernels
from hashbench.extensions.compiled.check import (
    Judged,
    _only_rounding,
    _seen,
    _unseen,
    op_of_kernel,
)
from hashbench.extensions.compiled.judge import JudgedBuffer, KernelJudgement
from tests.core.inductor.wrappers import CPP
from tests.flat_rows import flat
from tests.runner_helpers import FunctionRunner

INFERENCE = RunOptions(mode="inference", backend="inductor", threads=2, diagnose_budget=0.0)
TRAINING = replace(INFERENCE, mode="training")


# ------------------------------------------------------------------------------------------------------- decisions


def buffer(kernel: str, ratio: float) -> JudgedBuffer:
    return JudgedBuffer("", kernel, "", "", "", "", "forward", ratio, own_ratio=0.123456)


def test_columns_of_a_judgement() -> None:
    judgement = KernelJudgement((buffer("a", 0.25), buffer("b", 123.456)), unchecked={"random": 1})
    assert _seen(Judged(7, judgement)) == {
        "kernels": 7,
        "checked": 0.6667,
        "beyond_rounding": 123.5,
        "eager_rounding": 0.1235,
    }
    assert _seen(Judged(0, KernelJudgement(()))) == {
        "kernels": 0,
        "checked": 0.0,
        "beyond_rounding": None,
        "eager_rounding": None,
    }


def captured(*paths: Path) -> dict[str, CompiledGraph]:
    nothing = torch.fx.GraphModule({}, torch.fx.Graph())
    return {str(path): CompiledGraph(str(path), nothing, {}) for path in paths}


def test_kernels_that_are_not_seen_are_told_with_what_hides_them(tmp_path: Path) -> None:
    plain, hidden = tmp_path / "plain.py", tmp_path / "hidden.py"
    plain.write_text(CPP, encoding="utf-8")
    hidden.write_text("multi_kernel_0 = async_compile.multi_kernel('multi_kernel_0', [a, b])", encoding="utf-8")
    graphs, seen = captured(plain, hidden), Judged(7, KernelJudgement(()), shown=frozenset([str(plain)]))
    assert _unseen(captured(plain), seen) == _unseen({}, None) == ""
    assert _unseen(captured(plain), None) == "kernels are not seen"
    assert _unseen(graphs, seen) == "the kernels of 1 graph are not seen: multi_kernel makes the calls of some"
    with torch._inductor.config.patch(cpp_wrapper=True):
        assert _unseen(captured(plain), seen) == ""
        assert _unseen(captured(plain), None) == (
            "kernels are not seen: Inductor's cpp_wrapper calls them from C++ (cpp_wrapper)"
        )


def test_a_kernel_that_is_right_in_float64_is_told() -> None:
    case: Any = SimpleNamespace(judgement=KernelJudgement((buffer("a", 0.25), buffer("b", 123.456))))
    assert _only_rounding(case) == "b is 123 times beyond what rounding explains, and right in float64"
    assert _only_rounding(SimpleNamespace(judgement=None)) == ""  # type: ignore[arg-type]


def test_op_of_a_kernel(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(CPP, encoding="utf-8")
    graph = torch.fx.Graph()
    node = graph.call_function(torch.ops.aten.relu.default, (graph.placeholder("x"),))
    graph.output(node)
    graphs = {str(path): CompiledGraph(str(path), torch.fx.GraphModule({}, graph), {"buf1": node})}
    assert op_of_kernel("cpp_fused_relu_0", graphs) == "aten.relu.default"
    assert op_of_kernel("cpp_fused_cat_1", graphs) == ""
    assert op_of_kernel("cpp_fused_tanh_9", graphs) == ""


# -------------------------------------------------------------------------------------------------- what is swept


class Mlp(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.norm, self.narrow = torch.nn.Linear(6, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.narrow(torch.relu(self.norm(self.wide(x))))
        return result


class Apart(Mlp):
    """What dynamo does not compile."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def swept(build: Callable[[], torch.nn.Module], options: RunOptions = TRAINING) -> Row:
    runner = FunctionRunner(options)
    runner.build = lambda: Workload(build(), (torch.randn(4, 6),))
    return runner.run_model(ModelSpec("here", "net"))


def state() -> tuple[Any, ...]:
    """Return what compilation could leave changed."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.graph import GraphLowering
    from torch._inductor.output_code import CompiledFxGraph
    from torch.fx.passes.graph_transform_observer import GraphTransformObserver

    watched = GraphTransformObserver.apply_graph_pass, GraphTransformObserver.apply_gm_pass
    hooks = GraphLowering.compile_to_module, CompiledFxGraph.__call__, PyCodeCache.load_by_key_path, *watched
    settings = config.save_config_portable(), functorch_config.save_config_portable()
    return hooks, settings, dynamo_counters(), torch.get_rng_state().tolist(), torch.is_grad_enabled()


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """A training row of a right model, and what it leaves."""
    output, parameters = tmp_path_factory.mktemp("clean"), []

    def build() -> Mlp:
        model = Mlp()
        parameters.append(weakref.ref(model.wide.weight))
        return model

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    before = state()
    row = swept(build, replace(TRAINING, output=str(output)))
    gc.collect()
    return SimpleNamespace(row=row, output=output, before=before, after=state(), parameters=parameters)


@pytest.mark.slow
def test_a_right_model_passes_with_all_that_was_seen(clean: SimpleNamespace) -> None:
    row = clean.row
    assert (row.accuracy, row.error, flat(row).stage, row.detail) == (Status.PASS, "", "", "")
    assert (row.backend, flat(row).graphs, flat(row).graph_breaks) == ("inductor", 1, 0)
    assert flat(row).kernels >= 5
    assert flat(row).checked >= 0.8
    assert flat(row).beyond_rounding < 16
    assert flat(row).compile_seconds > 0


@pytest.mark.slow
def test_kernels_are_written_beside_the_rows(clean: SimpleNamespace) -> None:
    path = compiled_kernels.path_in(clean.output, suite="here", name="net", mode="training")
    program = compiled_kernels.read(path)
    assert (program.name, program.backend, program.left_out) == ("net", "inductor", 0)
    assert {one.phase for one in program.kernels} == {"forward", "backward"}
    generated = [one for one in program.kernels if one.name.startswith("cpp_fused")]
    assert all(one.source and one.writes and one.ops for one in generated)
    assert {one.module for one in generated} & {"norm", "Mlp.norm"}


@pytest.mark.slow
def test_nothing_is_left_behind(clean: SimpleNamespace) -> None:
    assert clean.after == clean.before
    assert [one() for one in clean.parameters] == [None] * len(clean.parameters)


def failing(_: torch.fx.GraphModule, __: Any) -> Any:
    raise ValueError("this backend compiles nothing")


FAILS: dict[str, tuple[Callable[[], torch.nn.Module], str, str, str]] = {
    "no such backend": (Mlp, "indctor", Status.REFERENCE_FAIL, "indctor"),
    "a compilation that fails": (Mlp, "fails_here", Status.REFERENCE_FAIL, "this backend compiles nothing"),
    "nothing to compile": (Apart, "eager", Status.SKIPPED, "nothing was compiled"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", FAILS)
def test_what_fails_is_a_row(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.backends import registry as known

    for table in ("_BACKENDS", "_COMPILER_FNS"):
        monkeypatch.setattr(known, table, {**getattr(known, table)})
    known.register_backend(failing, name="fails_here")
    build, backend, accuracy, error = FAILS[case]
    before = state()
    row = swept(build, replace(INFERENCE, backend=backend))
    assert (row.accuracy, error in row.error) == (accuracy, True), row.error
    assert state()[:2] == before[:2]


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Row, Path]]:
    """The row of a specimen whose ``relu`` is printed as wrong C++."""
    output = tmp_path_factory.mktemp("planted")
    planting = import_file(data_folder() / "compiled" / "_planted.py")  # before the model's file imports another one
    spec = next(one for one in registry.catalog("compiled") if one.name == "relu_injected")
    try:
        row = BenchmarkRunner(replace(INFERENCE, output=str(output), diagnose_budget=120.0)).run_model(spec)
        yield row, output
    finally:
        assert planting.is_planted()
        planting.undo()


@pytest.mark.slow
def test_a_planted_fault_is_named_proven_and_reproduced(planted: tuple[Row, Path]) -> None:
    row, output = planted
    assert row.accuracy == Status.FAIL_ACCURACY
    assert (flat(row).stage, flat(row).op, row.module) == ("codegen", "aten.relu.default", "Perceptron")
    assert row.kernel.startswith("cpp_fused_")
    assert (flat(row).semantic, row.confidence, row.phase) == ("yes", "proven", "forward")
    assert flat(row).beyond_rounding is not None
    assert flat(row).beyond_rounding > 1000
    assert "relu" in row.source
    assert flat(row).cured_by
    assert row.repro
    assert {one.name for one in (output / row.repro).iterdir()} >= {"repro.py", "kernel.cpp", "tensors.pt"}
    assert "x the rounding bound" in row.reproduced


@pytest.mark.slow
def test_sweeps_of_eager_mode_do_not_import_the_compiler() -> None:
    code = "import sys, hashbench.core.check.model; print([n for n in sys.modules if n.startswith('torch._inductor')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
