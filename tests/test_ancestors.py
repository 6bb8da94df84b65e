"""Every line of docs/ancestors.md runs, and the examples that the ancestors' documentation shows do what it says."""

from __future__ import annotations

import random
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hashbench import HashDebugTrace, cli
from hashbench.run.rng import preserved_rng
from hashbench.run.settings import preserved
from hashbench.tools.bitwise import BitwiseEquivalenceMode
from hashbench.tools.numeric import numeric_check_if_enabled
from hashbench.tools.observer import ObserverContext, observe, observe_grad, observe_non_deterministic, read_recording

PAGE = (Path(__file__).parents[1] / "docs" / "ancestors.md").read_text(encoding="utf-8")
LINES = re.findall(r"\| `([^`]+)` \|$", PAGE, re.MULTILINE)
COMMANDS = [line for line in LINES if line.startswith("hashbench ")]
PYTHON = [line for line in LINES if not line.startswith("hashbench ")]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    with preserved(), preserved_rng():
        yield


def test_every_row_has_a_line() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("|") and not line.startswith(("|---", "| there"))]
    assert len(rows) == len(LINES) > 35


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_parses(command: str) -> None:
    assert callable(cli._parser().parse_args(shlex.split(command)[1:]).command)


def test_every_line_of_python_runs() -> None:
    block = re.search(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert block is not None
    names: dict[str, Any] = {}
    exec(compile(block[1], "docs/ancestors.md", "exec"), names)
    for line in PYTHON:
        exec(compile(line, line, "exec"), names)


# ------------------------------------------------------------------------------------------ what their pages show


class Noisy(torch.autograd.Function):
    """Adds noise in both directions, as the custom op in the observer's own tests does."""

    @staticmethod
    def forward(_ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value + torch.rand_like(value) * 0.01

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient + torch.rand_like(gradient) * 0.005


class Observed(nn.Module):
    """Convolution, dropout and noise, observed at each place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1)
        self.fc = nn.Linear(4 * 8 * 8, 10)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        observe("conv1_weight", self.conv1.weight)
        value = self.conv1(value).relu()
        observe("conv1_output", value)
        value = observe_non_deterministic("after_dropout", nn.functional.dropout(value, 0.2))
        value = observe_non_deterministic("after_custom_op", Noisy.apply(value))
        value = self.fc(value.flatten(1))
        observe("output", value)
        return value


def test_observer_names_what_was_observed_and_tells_inputs_apart() -> None:
    torch.manual_seed(42)
    model, first, second = Observed(), torch.randn(2, 3, 8, 8), torch.randn(2, 3, 8, 8)
    found = []
    for inputs in (first, second):
        with ObserverContext(dump_dir="run", name="test_run") as observer:
            observe("input", inputs)
            model(inputs)
        found.append({one.name: one.value for one in observer.observations})
    assert {"input_1", "conv1_weight_1", "conv1_output_1", "output_1"} <= set(found[0])
    assert found[0]["conv1_weight_1"] == found[1]["conv1_weight_1"]
    assert found[0]["input_1"] != found[1]["input_1"]
    assert found[0]["output_1"] != found[1]["output_1"]


def test_without_an_observer_the_model_runs_and_differs() -> None:
    model, inputs = Observed(), torch.randn(2, 3, 8, 8)
    assert not torch.equal(model(inputs), model(inputs))


def test_what_is_marked_is_put_back_so_that_the_rest_matches() -> None:
    model, inputs = Observed(), torch.randn(2, 3, 8, 8)
    with ObserverContext(dump_dir="demo", name="reference_run"):
        observe("input", inputs)
        expected = model(inputs)
    with ObserverContext("demo", "verification_run", reference_hash_file="demo/reference_run.json") as observer:
        observe("input", inputs)
        output = model(inputs)
        assert len(observer.mismatches) == 0
    assert torch.equal(output, expected)


def test_hash_mode_observes_every_op_between_the_named_ones() -> None:
    with ObserverContext(dump_dir="hash_demo", name="hash_run") as observer:
        observer.enable_mode()
        nn.Linear(10, 5)(torch.randn(3, 10))
        observer.disable_mode()
    names = [one.name for one in read_recording(Path("hash_demo/hash_run.json")).observations]
    assert "__torch_dispatch__addmm.default_1" in names


def test_gradients_of_other_inputs_are_others() -> None:
    model, inputs = nn.Linear(10, 5), torch.randn(2, 10)
    found = []
    for scale in (1.0, 1.1):
        with ObserverContext(dump_dir="grad", name="grad_test") as observer:
            observe_grad("linear_weight_grad", model.weight)
            model(inputs * scale).sum().backward()
        found.append({one.name: one.value for one in observer.observations})
    assert list(found[0]) == list(found[1]) == ["linear_weight_grad_grad_1"]
    assert found[0] != found[1]


def test_bitwise_mode_counts_no_mismatch_in_a_linear_layer() -> None:
    model, inputs = nn.Linear(10, 5), torch.randn(3, 10, requires_grad=True)
    with BitwiseEquivalenceMode(raise_on_mismatch=False) as mode:
        model(inputs).sum().backward()
    assert len(mode.get_mismatches()) == 0
    assert mode.checked


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("deterministic", [True, False])
def test_bitwise_mode_names_the_backward_of_memory_efficient_attention(deterministic: bool) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def heads(length: int) -> torch.Tensor:
        made = torch.randn(1, length, 8, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        return made.transpose(1, 2)

    torch.use_deterministic_algorithms(deterministic)
    query, key, value = heads(128), heads(1024), heads(1024)
    with BitwiseEquivalenceMode() as mode, sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION]):
        nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=0.1).sum().backward()
    named = {found.op for found in mode.get_mismatches()}
    assert any("efficient_attention_backward" in name for name in named) is not deterministic


def test_numeric_check_runs_as_torchs_own_is_called() -> None:
    before = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    after = torch.fx.GraphModule(before, before.graph)
    assert numeric_check_if_enabled(before, after, [torch.randn(2, 4)], 2, 1e-4)
    with torch.no_grad():
        next(before.parameters()).add_(random.Random(0).uniform(1, 2))
        changed = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    assert not numeric_check_if_enabled(before, changed, [torch.randn(2, 4)], 1, 1e-4)


def test_the_scripts_demo_of_a_trace_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with HashDebugTrace(verbose=True, log_path="nn_trace.log", max_ops_logged=5, include_timestamp=False) as trace:
        model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5), nn.Softmax(dim=1))
        loss = nn.CrossEntropyLoss()(model(torch.randn(4, 10)), torch.randint(0, 5, (4,)))
        loss.backward()
    assert len(capsys.readouterr().out.splitlines()) == 5
    trace.print_summary(to_file=False)
    assert f"{len(trace.finish().records)} ops" in capsys.readouterr().out
    trace.export_to_json("nn_trace_export.json")
    read = next(entry for entry in trace.stack_log if entry["arg_tensors"])["arg_tensors"][0]
    assert trace.find_tensor_by_hash(read["hash"]) or read["hash"] == "blank"
    assert [entry for entry in trace.get_tensor_flow_graph() if "addmm" in entry["operation"].lower()]
