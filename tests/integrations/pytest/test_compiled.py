"""``assert_compiled_equals_eager`` in a test of this suite."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config

from hashbench.core.run.rng import preserved_rng
from hashbench.extensions.compiled import toolchain


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(16, 32)
        self.relu = torch.nn.ReLU()
        self.last = torch.nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.relu(self.first(x))
        return self.last(hidden)  # type: ignore[no-any-return]


@pytest.fixture
def net() -> Iterator[tuple[Net, tuple[torch.Tensor]]]:
    with preserved_rng():
        torch.manual_seed(0)
        yield Net(), (torch.randn(8, 16),)


def failed(check: Any, *arguments: Any, **options: Any) -> str:
    """The message of a failure, with single spaces between its words."""
    with pytest.raises(pytest.fail.Exception) as failure:
        check(*arguments, **options)
    return " ".join(str(failure.value).split())


@pytest.mark.slow
def test_wrong_code_is_named(assert_compiled_equals_eager: Any, net: Any) -> None:
    model, inputs = net
    weight = model.first.weight.clone()
    with torch._inductor.config.patch({"cpp.inject_relu_bug_TESTING_ONLY": "accuracy"}):
        said = failed(assert_compiled_equals_eager, model, inputs, seed=0)
    expected = (
        r"Net: what inductor made of it is not what eager mode computes \(beyond the tolerance: ",
        r" stage: codegen: kernel cpp_fused_.*relu.*in Net\.relu, at \S*test_compiled\.py",
        r" why: .*x the rounding bound.*in float64, too",
        r" evidence: .* to do: report the code generated for aten\.relu\.default",
    )
    assert re.match(".*".join(expected), said), said
    assert torch.equal(model.first.weight, weight)
    assert model.first.weight.grad is None


@pytest.mark.slow
def test_right_code_passes(assert_compiled_equals_eager: Any, net: Any) -> None:
    assert_compiled_equals_eager(*net)


@pytest.mark.slow
def test_backend_without_kernels_passes(assert_compiled_equals_eager: Any, net: Any) -> None:
    model, inputs = net
    mode = [module.training for module in model.modules()]
    assert_compiled_equals_eager(torch.compile(model), inputs, backend="aot_eager")
    assert_compiled_equals_eager(lambda x, y: (x * y).relu(), {"x": inputs[0], "y": inputs[0]}, backend="eager")
    assert [module.training for module in model.modules()] == mode


@pytest.mark.slow
def test_what_is_not_compiled_does_not_pass(assert_compiled_equals_eager: Any) -> None:
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def apart(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    said = failed(assert_compiled_equals_eager, apart, torch.ones(3), backend="eager")
    assert "pass_due_to_skip with backend eager: nothing was compiled: " in said


def clipped(x: torch.Tensor) -> torch.Tensor:
    return x.relu()


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no such backend": (clipped, {"backend": "indctor"}, "clipped: unknown backend 'indctor': nothing was compiled"),
    "no model": (3, {}, "assert_compiled_equals_eager needs a model to call, not a int."),
    "no such option": (clipped, {"runs": 3}, "assert_compiled_equals_eager has no option runs; it has backend"),
    "no tolerance": (clipped, {"tolerance": -1.0}, "tolerance must be a number >= 0, got -1.0"),
}


@pytest.mark.parametrize(("model", "options", "said"), REFUSED.values(), ids=REFUSED)
def test_refused(
    assert_compiled_equals_eager: Any,
    model: Any,
    options: dict[str, Any],
    said: str,
) -> None:
    assert failed(assert_compiled_equals_eager, model, torch.ones(2), **options).startswith(said)


def test_no_compiler(assert_compiled_equals_eager: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "missing_compiler", lambda: "none of g++")
    said = failed(assert_compiled_equals_eager, clipped, torch.ones(2))
    assert said.startswith("clipped: no C++ compiler: inductor cannot compile for the CPU (none of g++)")


@pytest.mark.exhaustive
def test_wrong_code_within_the_tolerance_does_not_pass(assert_compiled_equals_eager: Any, net: Any) -> None:
    model, inputs = net
    with torch._inductor.config.patch({"cpp.inject_relu_bug_TESTING_ONLY": "accuracy"}):
        said = failed(assert_compiled_equals_eager, model.eval(), inputs, tolerance=10.0)
    accepted = "Net: torch's rule accepts it, and what inductor made of it computes something else stage: "
    assert said.startswith(accepted)
    assert "in Net.relu" in said
