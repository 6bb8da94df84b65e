"""A workload under a backend and in a dtype; what dynamo counted; what compiles as the harness does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hashbench.core.check.model import BenchmarkRunner
from hashbench.core.records import Failure, RunOptions
from hashbench.core.run.outcome import Run
from hashbench.core.run.workload import Workload
from hashbench.extensions.compiled import program
from hashbench.extensions.compiled.accuracy import Tolerance
from hashbench.extensions.compiled.program import Compilation, CompiledModel, runs_under

COUNTED: dict[str, tuple[dict[str, dict[str, int]], Compilation]] = {
    "nothing": ({}, Compilation(0, 0, 0, ())),
    "one graph": (
        {"stats": {"unique_graphs": 1, "calls_captured": 9}, "frames": {"total": 1, "ok": 1}},
        Compilation(1, 0, 0, ()),
    ),
    "breaks": (
        {
            "stats": {"unique_graphs": 3},
            "frames": {"total": 4, "ok": 3},
            "graph_break": {"print\n  Explanation: <function f at 0x7f8c>": 2, "a data-dependent branch": 1},
            "unimplemented": {"print": 2, "skipped by its file": 1},
        },
        Compilation(3, 3, 1, ("print", "a data-dependent branch", "skipped by its file")),
    ),
}


@pytest.mark.parametrize("case", COUNTED)
def test_what_dynamo_counted(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counted, expected = COUNTED[case]
    monkeypatch.setattr(program, "dynamo_counters", lambda: counted)
    assert Compilation.so_far() == expected


class Net(torch.nn.Module):
    """Returns what it was given, scaled, and the dtype of its parameter as a number of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.full((3,), 0.1))

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = (x * self.scale)[places]
        return result


def run(*, mode: str = "inference", given: Any = None, **how: Any) -> Run:
    x = torch.ones(3, requires_grad=mode == "training")
    workload = Workload(Net(), (x, torch.tensor([0, 2])), iterations=1)
    made = runs_under(BenchmarkRunner(RunOptions(mode=mode)), workload, **how)(given, traced=False)
    assert isinstance(made, Run), made
    return made


def test_in_eager_mode_it_is_the_model() -> None:
    assert torch.equal(run().results["output.0"], torch.full((2,), 0.1))


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_in_another_dtype_all_that_is_floating_point_is_cast(mode: str) -> None:
    results = run(mode=mode, dtype=torch.float64).results
    tensors = {name: value for name, value in results.items() if isinstance(value, torch.Tensor)}
    assert tensors["output.0"].dtype == torch.float64
    assert torch.equal(tensors["output.0"], torch.full((2,), 0.1).double())
    if mode == "training":
        gradients = [value for name, value in tensors.items() if "grad" in name]
        assert len(gradients) == 2  # of the parameter, and of the input that asks for one
        assert {value.dtype for value in gradients} == {torch.float64}


def test_inputs_of_a_run_may_be_given() -> None:
    given = lambda _, inputs: (inputs[0] * 3, inputs[1])  # noqa: E731
    assert torch.equal(run(given=given).results["output.0"], torch.full((2,), 0.1) * 3)


def test_the_backend_gets_graphs_and_every_run_is_of_one_compilation() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    workload = Workload(Net(), (torch.ones(3), torch.tensor([0, 2])), iterations=2)
    model = runs_under(BenchmarkRunner(RunOptions(mode="inference")), workload, backend=backend)
    try:
        first, second = (model(traced=False) for _ in range(2))
    finally:
        torch._dynamo.reset()
    assert isinstance(first, Run)
    assert isinstance(second, Run)
    assert len(graphs) == 1
    assert torch.equal(first.results["output.1"], second.results["output.1"])


def test_what_a_backend_raises_is_a_failure() -> None:
    def backend(_: Any, __: Any) -> Any:
        raise ValueError("not on this machine")

    torch._dynamo.reset()
    workload = Workload(Net(), (torch.ones(3), torch.tensor([0, 2])), iterations=1)
    made = runs_under(BenchmarkRunner(RunOptions(mode="inference")), workload, backend=backend)(traced=False)
    torch._dynamo.reset()
    assert isinstance(made, Failure)
    assert "not on this machine" in made.error


@pytest.mark.slow
@pytest.mark.parametrize("graph_caches", [False, True])
def test_settings_hold_while_it_compiles_and_dynamo_is_reset(graph_caches: bool) -> None:
    from torch._dynamo.utils import counters
    from torch._functorch import config as functorch_config
    from torch._inductor import config

    def settings() -> tuple[Any, ...]:
        return (
            config.fallback_random,
            config.max_autotune,
            config.fx_graph_cache,
            functorch_config.enable_autograd_cache,
        )

    before = settings()
    counters["frames"]["total"] = 7
    with program.compiling({"max_autotune": True}, graph_caches=graph_caches):
        assert settings() == (True, True, *(before[2:] if graph_caches else (False, False)))
        assert not counters
        counters["frames"]["total"] = 8
    assert settings() == before
    assert not counters
    with pytest.raises(KeyError, match="stops"), program.compiling():
        raise KeyError("stops")
    assert settings() == before


# --------------------------------------------------------------------------------------------------------- a model

RESULTS = {
    name: torch.empty(0)
    for name in (
        *("output.0", "output.0[1]", "output.1", "output.1.logits", "loss.0", "loss.1", "input_grad.0.x"),
        *("input_grad.1.x", "grad.fc.weight", "buffer.norm.running_mean", "output.10"),
    )
}
KEPT: dict[str, tuple[str, bool, list[str]]] = {
    "inference": ("1", False, ["output.1", "output.1.logits", "loss.1", "input_grad.1.x"]),
    "training, of which outputs are not compared": ("1", True, ["loss.1", "input_grad.1.x"]),
    "the only iteration": ("0", False, ["output.0", "output.0[1]", "loss.0", "input_grad.0.x"]),
    "the eleventh": ("10", False, ["output.10"]),
}


@pytest.mark.parametrize("case", KEPT)
def test_results_that_the_harness_compares(case: str) -> None:
    last, training, of_step = KEPT[case]
    kept = program._harness_results(Run(None, RESULTS), last=last, training=training)
    assert list(kept) == [name for name in RESULTS if name in (*of_step, "grad.fc.weight", "buffer.norm.running_mean")]


@pytest.mark.parametrize(("mode", "iterations", "kept"), [("inference", 2, "output.1"), ("training", 1, "loss.0")])
def test_a_model_is_as_the_runner_runs_it(mode: str, iterations: int, kept: str) -> None:
    options = RunOptions(mode=mode, backend="inductor")
    workload = Workload(torch.nn.Linear(2, 2), (torch.ones(1, 2),), iterations=iterations)
    model = CompiledModel.of(BenchmarkRunner(options), workload, options, suite="timm")
    assert (model.root, model.tolerance) == ("Linear", Tolerance(1e-2 if mode == "training" else 1e-3))
    steps = {name: value for name, value in RESULTS.items() if name.startswith(("output", "loss"))}
    assert kept in model.results(Run(None, steps))
