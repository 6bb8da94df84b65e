"""The harness's model as it compiles it: which backend, its own pieces, dynamo's counters; a whole row at the end."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo.utils
import torch._inductor.config

from hashbench.core.inductor.internals import without_graph_caches
from hashbench.core.records import Failure, RunOptions
from hashbench.core.run.rng import preserved_rng
from hashbench.extensions.compiled.accuracy import Tolerance
from hashbench.integrations.dynamo import compiled_runs
from hashbench.integrations.dynamo.compiled_runs import HarnessPieces, backend_of, preserved_counters
from tests.flat_rows import flat
from tests.integrations.dynamo.dynamo_helpers import Standin
from tests.integrations.dynamo.standin_helpers import with_us

FLAGS = {
    "inductor": ({"inductor": True, "backend": None}, "inductor"),
    "another": ({"inductor": False, "backend": "aot_eager"}, "aot_eager"),
    "none": ({"inductor": False, "backend": None}, ""),
    "exported": ({"inductor": True, "export": True}, ""),
    "no Python wrapper": ({"inductor": True, "cpp_wrapper": True}, ""),
    "not compiled": ({"backend": "eager", "nothing": True}, ""),
}


@pytest.mark.parametrize(("flags", "backend"), FLAGS.values(), ids=FLAGS)
def test_backend_that_the_flags_choose(flags: dict[str, Any], backend: str) -> None:
    assert backend_of(SimpleNamespace(**flags)) == backend


def test_tolerance_is_that_of_the_harness() -> None:
    compared = {"tol": 0.02, "equal_nan": False, "cos_similarity": True, "use_larger_multiplier_for_smaller_tensor": 1}
    options = {"equal_nan": False, "use_larger_multiplier_for_smaller_tensor": 1}
    assert compiled_runs._tolerance(compared) == Tolerance(0.02, True, options)
    assert compiled_runs._tolerance({}).tolerance == 1e-4


def test_counters_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = torch._dynamo.utils.counters
    monkeypatch.setattr(torch._dynamo.utils, "op_count", 3)
    before = {name: Counter(value) for name, value in counters.items()}
    try:
        counters["stats"]["a"] = 2
        with preserved_counters():
            torch._dynamo.utils.increment_op_count(4)
            counters.clear()
            counters["stats"]["a"] = 7
            counters["others"]["b"] = 1
        assert counters["stats"]["a"] == 2
        assert "others" not in counters
        assert torch._dynamo.utils.op_count == 3
        counters["new"]["c"] += 1  # it is still a table of counters
    finally:
        counters.clear()
        counters.update(before)


@pytest.mark.slow
@pytest.mark.parametrize("year", ["2024", "2026"])
def test_the_step_of_the_harness_is_compiled(standin: Standin, monkeypatch: pytest.MonkeyPatch, year: str) -> None:
    """Harnesses before 2025 compile all iterations as one function."""
    harness = Standin(standin.folder, monkeypatch, year=year)
    runner = harness.zoo.ZooRunner()
    runner.args = SimpleNamespace(iterations=2, training=False, batch_invariant=False, float32=False)
    runner.model_iter_fn = runner.forward_pass
    graphs: list[torch.fx.GraphModule] = []

    def counting(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    with preserved_rng():
        torch.manual_seed(0)
        model, inputs = harness.zoo.MODELS["compiled"](), [torch.randn(2, 4)]
    names = vars(harness.common)
    pieces = HarnessPieces(
        runner, names, model, inputs, torch.compile, RunOptions(mode="inference", backend="inductor")
    )
    torch._dynamo.reset()
    with torch.no_grad():
        runs = [
            pieces.program(backend=backend, dtype=dtype)(traced=False)
            for backend, dtype in ((None, None), (counting, None), (None, torch.float64), (counting, torch.float64))
        ]
    assert not any(isinstance(run, Failure) for run in runs)
    eager, compiled, reference, wide = (run.results["result"] for run in runs if not isinstance(run, Failure))
    assert torch.equal(eager, compiled)
    assert torch.equal(reference, wide)
    assert (eager.dtype, reference.dtype) == (torch.float32, torch.float64)
    assert len(graphs) == 2
    assert model.first.weight.dtype == torch.float32


@pytest.mark.slow
def test_inaccurate_model_has_stage_kernel_op_and_module(standin: Standin) -> None:
    volatile = {"compilation_latency": ""}
    injected = torch._inductor.config.patch({"cpp.inject_relu_bug_TESTING_ONLY": "accuracy"})
    with injected, without_graph_caches():  # of which dynamo counts hits and misses
        alone = standin.run("compiled", "--backend=inductor").theirs
        counted = {name: dict(value) for name, value in torch._dynamo.utils.counters.items() if name != "inductor"}
        found = with_us(standin, "compiled", "--backend=inductor", budget=20.0)
    assert found.theirs | volatile == alone | volatile
    left = {name: dict(value) for name, value in torch._dynamo.utils.counters.items() if name != "inductor"}
    assert left == counted
    row = found.row
    assert row.accuracy == row.harness_accuracy == found.theirs["accuracy"] == "fail_accuracy"
    assert (row.backend, flat(row).stage, flat(row).op, row.module) == (
        "inductor",
        "codegen",
        "aten.relu.default",
        "Compiled.relu",
    )
    assert row.kernel.startswith("cpp_fused_")
    assert flat(row).semantic == "yes"
    assert flat(row).beyond_rounding > 1000
    assert row.differing_results.startswith("result")
    assert row.error == ""


@pytest.mark.slow
def test_cause_is_not_looked_for_without_time(standin: Standin) -> None:
    with torch._inductor.config.patch({"cpp.inject_relu_bug_TESTING_ONLY": "accuracy"}):
        unasked = with_us(standin, "compiled", "--backend=inductor", budget=0.0).row
        late = with_us(standin, "compiled", "--backend=inductor", "--timeout=1", budget=20.0).row
    assert unasked.accuracy == late.accuracy == "fail_accuracy"
    assert (unasked.backend, flat(unasked).stage) == ("inductor", "")
    assert unasked.error == "no cause was looked for: no experiments were asked for"
    assert late.error == "no cause was looked for: the harness's --timeout is too near"


@pytest.mark.slow
def test_word_of_a_harness_that_is_not_followed_is_ours(standin: Standin, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = Standin(standin.folder, monkeypatch, changed="unknown")
    with torch._inductor.config.patch({"cpp.inject_relu_bug_TESTING_ONLY": "accuracy"}):
        row = with_us(changed, "compiled", "--backend=inductor", budget=20.0).row
    assert row.accuracy == row.harness_accuracy == "fail_accuracy"
    assert "cannot follow this harness" in row.error
