"""The numeric check on pairs of real models: what is compared, what is told, and what is left as it was."""

from __future__ import annotations

import copy
import json
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.nn.utils.fusion import fuse_conv_bn_eval

from hashbench.errors import HashbenchError
from hashbench.run.settings import settings
from hashbench.tools.numeric import (
    MAIN_RANDOM_SEED,
    as_json,
    as_text,
    clean_memory,
    numeric_check_if_enabled,
    run_model,
    set_deterministic,
)


def mlp() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Dropout(0.5), torch.nn.Linear(8, 4))


def conv() -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3)]
    model = torch.nn.Sequential(*layers)
    with torch.no_grad():
        model[1].running_mean.normal_()
        model[1].running_var.uniform_(0.5, 2)
    return model.eval()


def folded(model: torch.nn.Sequential) -> torch.nn.Sequential:
    made = copy.deepcopy(model)
    made[0], made[1] = fuse_conv_bn_eval(made[0], made[1]), torch.nn.Identity()
    return made


def wrong(model: torch.nn.Module, name: str, by: float = 1.0) -> torch.nn.Module:
    made = copy.deepcopy(model)
    with torch.no_grad():
        dict(made.named_parameters())[name].view(-1)[0] += by
    return made


X = (torch.linspace(-1, 1, 24).reshape(3, 8),)
IMAGE = (torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)),)


class Raises(torch.nn.Module):
    """Fails in one stage."""

    def __init__(self, stage: str) -> None:
        super().__init__()
        self.inner, self.stage = mlp(), stage

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.stage == "outputs":
            raise ValueError("no forward today")
        out = self.inner(x)
        if self.stage == "gradients":
            out.register_hook(self._fail)
        return out

    def _fail(self, _gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("no backward today")


# ------------------------------------------------------------------------------------------------ what is compared


def test_equal_models_are_equal_bit_by_bit_in_every_stage_and_iteration() -> None:
    model = mlp().train()
    report = run_model(model, copy.deepcopy(model), X, 3)
    assert report
    assert report.bitwise
    stages = ["parameters", "outputs", "buffers", "gradients", "stepped"]
    assert [(found.stage, found.iteration) for found in report.comparisons] == [
        (stage, iteration) for iteration in range(3) for stage in stages
    ]
    assert report.notes == ()
    assert report.verdict.startswith("equal bit by bit: parameters equal bit by bit (4)")


def test_the_parameters_go_on_from_one_iteration_to_the_next() -> None:
    seen = []
    model = mlp()
    run_model(lambda x: seen.append(x.clone()) or x * 1.0, model, X, 2)  # a function has no parameters

    class Watched(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights.append(self.weight.detach().clone())
            return super().forward(x)

    weights: list[torch.Tensor] = []
    torch.manual_seed(0)
    watched = Watched(8, 2)
    run_model(watched, copy.deepcopy(watched), X, 2)
    assert torch.equal(seen[0], X[0])
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[2], weights[3])
    assert not torch.equal(weights[0], weights[2])


def test_wrong_weight_is_seen_in_parameters_outputs_gradients_and_after_the_step() -> None:
    report = run_model(mlp(), wrong(mlp(), "0.weight"), X, 1)
    assert not report
    assert {found.stage: [item.name for item in found.differing if not item] for found in report.comparisons} == {
        "parameters": ["0.weight"],
        "outputs": ["output"],
        "buffers": [],
        "gradients": report_names(report, "gradients"),
        "stepped": report_names(report, "stepped"),
    }
    assert "0.weight" in report_names(report, "stepped")
    (weight,) = report.of("parameters")[0].differing
    assert (weight.elements, weight.total, weight.max_abs) == (1, 64, pytest.approx(1.0))


def report_names(report, stage: str) -> list[str]:
    return [item.name for item in report.of(stage)[0].differing if not item]


def test_buffers_that_a_transformation_forgets_to_move_are_seen() -> None:
    before = torch.nn.BatchNorm1d(8)
    after = torch.nn.BatchNorm1d(8)
    after.momentum = 0.0
    report = run_model(before, after, X, 1)
    assert set(report_names(report, "buffers")) == {"running_var", "running_mean"}
    assert report.of("outputs")[0].bitwise


def test_optimizer_loss_and_stages_are_the_callers() -> None:
    seen = []

    def loss(output: torch.Tensor) -> torch.Tensor:
        seen.append("loss")
        return output.square().mean()

    def make(parameters):
        seen.append("optimizer")
        return torch.optim.Adam(parameters, lr=0.1)

    report = run_model(mlp(), mlp(), X, 2, loss=loss, make_optimizer=make, stages=("stepped",))
    assert seen == ["loss", "loss", "optimizer", "optimizer", "loss", "loss"]  # one optimizer a model
    assert [found.stage for found in report.comparisons] == ["stepped", "stepped"]
    assert not run_model(mlp(), mlp(), X, 1, requires_optimizer=False).of("stepped")


def test_gradients_do_not_add_up_over_iterations() -> None:
    class Scaled(torch.nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.bias, self.factor = torch.nn.Parameter(torch.zeros(())), factor

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x + self.bias) * self.factor

    report = run_model(Scaled(1.0), Scaled(2.0), (torch.zeros(3),), 2)
    assert [found.tensors[0].max_abs for found in report.of("gradients")] == [3.0, 3.0]


def test_gradients_of_inputs_are_compared() -> None:
    x = torch.ones(2, 8, requires_grad=True)
    report = run_model(lambda x: x * 2, lambda x: x * 3, (x,), 1, stages=("gradients",))
    assert report_names(report, "gradients") == ["input.0"]
    assert x.grad is None


def test_inputs_may_be_named_or_one_tensor_and_outputs_nested() -> None:
    class Named(torch.nn.Module):
        def forward(self, x: torch.Tensor, *, scale: float) -> dict:
            return {"a": [x * scale, (x,)], "n": 3}

    report = run_model(Named(), Named(), {"x": X[0], "scale": 2.0}, 1)
    assert [item.name for item in report.of("outputs")[0].tensors] == ["output.a.0", "output.a.1.0", "output.n"]
    assert run_model(mlp(), mlp(), X[0], 1).bitwise


def test_model_that_changes_its_inputs_does_not_change_the_callers_nor_the_other_models() -> None:
    x = torch.ones(2)
    report = run_model(lambda x: x.add_(1), lambda x: x + 1, (x,), 3)
    assert report.bitwise
    assert torch.equal(x, torch.ones(2))


# --------------------------------------------------------------------------------------------------- what is told


@pytest.mark.parametrize("stage", ["outputs", "gradients"])
@pytest.mark.parametrize("side", ["before", "after"])
def test_model_that_raises_is_reported_with_its_side_and_stage(stage: str, side: str) -> None:
    models = [Raises(stage), Raises("")] if side == "before" else [Raises(""), Raises(stage)]
    report = run_model(*models, X, 2)
    assert not report
    (raised,) = report.raised
    assert (raised.side, raised.stage, raised.iteration) == (side, stage, 0)
    assert isinstance(raised.exception, ValueError)
    assert f"the model {side} raised at {stage}, iteration 0: ValueError: no" in report.verdict
    assert report.of("parameters")


def test_both_models_that_raise_are_reported() -> None:
    report = run_model(Raises("outputs"), Raises("outputs"), X, 1, stages=("outputs",))
    assert [raised.side for raised in report.raised] == ["before", "after"]
    assert not report


def test_step_that_raises_is_reported() -> None:
    def make(_parameters):
        raise RuntimeError("no optimizer")

    report = run_model(mlp(), mlp(), X, 1, make_optimizer=make)
    assert [(raised.side, raised.stage) for raised in report.raised] == [("before", "stepped"), ("after", "stepped")]


def test_check_if_enabled_returns_what_happened_and_finds_anomalies() -> None:
    assert numeric_check_if_enabled(mlp(), mlp(), X, 2, 1e-4).bitwise
    assert not numeric_check_if_enabled(Raises("outputs"), mlp(), X, 2, 1e-4)

    def root(x: torch.Tensor) -> torch.Tensor:
        return x.sqrt() * 0.0

    zero = torch.zeros(2, requires_grad=True)
    report = numeric_check_if_enabled(root, root, (zero,), 1, 1e-4)
    assert "returned nan values" in report.verdict
    assert not torch.is_anomaly_enabled()


def test_models_without_gradient_say_so_and_one_alone_is_a_difference() -> None:
    def plain(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    report = run_model(plain, plain, X, 1)
    assert report
    assert any("no output of either model has a gradient" in note for note in report.notes)
    with_gradient = torch.nn.Linear(8, 8, bias=False)
    report = run_model(with_gradient, lambda x: x @ with_gradient.weight.detach().t(), X, 1)
    assert [(raised.side, raised.stage) for raised in report.raised] == [("after", "gradients")]
    assert not run_model(plain, plain, X, 1, training=True)


def test_nothing_compared_is_not_equal() -> None:
    report = run_model(lambda x: x, lambda x: x, X, 1, stages=("parameters",))
    assert not report
    assert report.verdict == "different: parameters none to compare"


def test_nan_in_both_models_is_said() -> None:
    report = run_model(lambda x: x * float("nan"), lambda x: x * float("nan"), X, 1)
    assert report
    assert any("NaN in both models" in note for note in report.notes)


class Draws(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng()

    def __deepcopy__(self, memo: dict) -> Draws:
        return Draws()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.generator.random()


def test_model_that_does_not_even_repeat_itself_is_named() -> None:
    report = run_model(torch.nn.Identity(), Draws(), X, 1, training=False)
    assert not report
    assert [note.partition(":")[0] for note in report.notes] == ["the model after does not repeat itself"]


def test_op_without_deterministic_implementation_is_run_with_warnings_and_named() -> None:
    class Pools(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            values, places = torch.nn.functional.max_pool2d(x, 2, return_indices=True)
            return torch.nn.functional.max_unpool2d(values, places, 2)

    report = run_model(Pools(), Pools(), (IMAGE[0],), 1)
    assert report
    assert "max_unpool" in report.notes[0]
    assert "no deterministic implementation" in report.notes[0]


def test_report_is_readable_as_text_and_json() -> None:
    report = run_model(mlp(), wrong(mlp(), "0.weight"), X, 1)
    text, content = as_text(report), json.loads(as_json(report))
    assert text.splitlines()[-1] == report.verdict == content["verdict"]
    assert "max ULP" in text
    assert content["equal_within_tolerance"] is False
    assert {found["stage"] for found in content["comparisons"]} == {
        *("parameters", "outputs"),
        *("buffers", "stepped"),
        "gradients",
    }
    lone = as_text(run_model(mlp(), torch.nn.Identity(), X, 1, training=False))
    assert "parameters only before: 0.weight, 0.bias, 3.weight, 3.bias" in lone


REFUSED = {
    "no iterations": ({"num_iterations": 0}, "num_iterations=0 is no number of iterations"),
    "an unknown stage": ({"stages": ("output",)}, "'output' is no stage"),
    "no stage": ({"stages": ()}, "no stage was asked for"),
    "a name that is not there": ({"rename": {"7": "8"}}, "rename has '7', which the model before does not have"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_refuses(options: dict, message: str) -> None:
    with pytest.raises(HashbenchError, match=message):
        run_model(mlp(), mlp(), X, **options)


def test_refuses_what_cannot_be_called() -> None:
    with pytest.raises(HashbenchError, match="the model after is a str"):
        run_model(mlp(), "model", X)


# -------------------------------------------------------------------------------------------- left as it was


def state_of(model: torch.nn.Module) -> list:
    tensors = [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]
    gradients = [parameter.grad for parameter in model.parameters()]
    return [tensors, gradients, [module.training for module in model.modules()]]


def same(one: list, other: list) -> bool:
    return (
        all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))
        and all(a is b for a, b in zip(one[1], other[1], strict=True))
        and one[2] == other[2]
    )


class Uncopied(torch.nn.Module):
    """Has a batch norm, and cannot be copied, or copies itself wrongly."""

    def __init__(self, *, raises: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.linear, self.raises = torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2), raises
        self.register_buffer("calls", torch.zeros(()))

    def __deepcopy__(self, memo: dict) -> Uncopied:
        if self.raises:
            raise TypeError("cannot pickle this")
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return self.linear(self.norm(x))


@pytest.mark.parametrize("training", [True, False, None])
@pytest.mark.parametrize("copied", ["copied", "raises", "shares"])
def test_models_are_left_as_they_were(copied: str, training: bool | None) -> None:
    models = [torch.nn.Sequential(torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)) for _ in range(2)]
    if copied != "copied":
        models = [Uncopied(raises=copied == "raises") for _ in range(2)]
    models[0].train(training is False)
    for model in models:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
    before = [state_of(model) for model in models]
    report = run_model(*models, X, 2, training=training)
    assert not report.raised
    assert all(same(state_of(model), state) for model, state in zip(models, before, strict=True))
    assert any("ran itself, for it cannot be copied" in note for note in report.notes) == (copied != "copied")


def test_model_that_raises_in_place_is_put_back_too() -> None:
    model = Uncopied(raises=True)
    state = state_of(model)
    run_model(model, mlp(), X, 2, make_optimizer=lambda _parameters: 1 / 0)
    assert same(state_of(model), state)


def test_one_model_on_both_sides_that_cannot_be_copied_is_refused() -> None:
    model = Uncopied(raises=True)
    with pytest.raises(HashbenchError, match="hold the same parameters, and cannot be copied"):
        run_model(model, model, X)


@pytest.mark.parametrize("fails", [False, True])
def test_random_state_settings_and_gradient_mode_are_left_as_they_were(fails: bool) -> None:
    models = mlp(), Raises("outputs" if fails else "")
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    before = settings()
    expected = random.random(), np.random.rand(), torch.rand(1)
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    run_model(*models, X, 2, trace=True)
    assert (random.random(), np.random.rand(), torch.rand(1)) == expected
    assert settings() == before
    with torch.no_grad():
        assert run_model(mlp(), mlp(), X, 1).of("gradients")  # whatever the caller's mode
        assert not torch.is_grad_enabled()


def test_set_deterministic_does_what_it_says_and_clean_memory_does_no_harm() -> None:
    from hashbench.run.rng import preserved_rng
    from hashbench.run.settings import preserved

    with preserved(), preserved_rng():
        set_deterministic()
        first = random.random(), np.random.rand(), torch.rand(1)
        random.seed(MAIN_RANDOM_SEED), np.random.seed(MAIN_RANDOM_SEED), torch.manual_seed(MAIN_RANDOM_SEED)
        assert (random.random(), np.random.rand(), torch.rand(1)) == first
        assert torch.are_deterministic_algorithms_enabled()
    clean_memory()


# ------------------------------------------------------------------------------------------- real transformations


def test_folded_batch_norm_is_equal_within_tolerance_and_the_trace_names_the_rewritten_weight() -> None:
    report = run_model(conv(), folded(conv()), IMAGE, 1, None, training=False, stages=("outputs",), trace=True)
    assert report
    assert not report.bitwise
    (parting,) = report.partings
    assert (parting.level, parting.kind, parting.name) == ("bitwise", "parameter", "parameter/0.weight")
    assert (parting.op, parting.module, parting.only_before) == ("aten.convolution.default", "0", 2)


def test_what_only_one_model_has_is_no_place_at_which_they_part() -> None:
    report = run_model(conv(), folded(conv()), IMAGE, 1, None, training=False, trace=True)
    assert not report.of("buffers")[0]
    assert [(parting.level, parting.kind) for parting in report.partings] == [("bitwise", "parameter")]


def test_weight_of_other_strides_is_not_blamed() -> None:
    class Scaled(torch.nn.Module):
        def __init__(self, weight: torch.Tensor, factor: float) -> None:
            super().__init__()
            self.weight, self.factor = torch.nn.Parameter(weight), factor

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.weight) * self.factor

    weight = torch.arange(9.0).reshape(3, 3)
    report = run_model(
        Scaled(weight, 2.0), Scaled(weight.t().contiguous().t(), 3.0), (torch.ones(2, 3),), 1, trace=True
    )
    assert report.of("parameters")[0].bitwise
    assert {parting.op for parting in report.partings} == {"aten.mul.Tensor"}


def test_wrong_weight_after_a_fold_is_named_and_not_the_fold() -> None:
    after = wrong(folded(conv()), "3.weight")
    report = run_model(conv(), after, IMAGE, 1, None, training=False, stages=("outputs",), trace=True)
    tolerance, bitwise = report.partings
    assert (tolerance.level, tolerance.name, tolerance.module) == ("tolerance", "parameter/3.weight", "3")
    assert (bitwise.level, bitwise.name) == ("bitwise", "parameter/0.weight")
    assert tolerance.numbers is not None
    assert tolerance.numbers.max_abs == pytest.approx(1.0)


def test_renamed_modules_correspond_in_the_comparison_and_in_the_trace() -> None:
    class Named(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = mlp()[0], mlp()[3]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.stem(x).relu() * 1.5)

    class Other(Named):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = self.stem, self.head
            del self.stem, self.head

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.first(x).relu() * 1.25)

    assert not run_model(Named(), Other(), X, 1, stages=("parameters",))
    report = run_model(Named(), Other(), X, 1, rename={"stem": "first", "head": "last"}, trace=True)
    assert report.of("parameters")[0].bitwise
    assert {parting.op for parting in report.partings} == {"aten.mul.Tensor"}
    parting = report.partings[0]
    assert (parting.before, parting.after) == ("aten.mul.Tensor(1.5)", "aten.mul.Tensor(1.25)")
    assert (parting.only_before, parting.only_after) == (0, 0)
    report = run_model(
        Named(), wrong(Other(), "first.bias"), X, 1, rename={"stem": "first", "head": "last"}, trace=True
    )
    assert (report.partings[0].name, report.partings[0].module) == ("parameter/stem.bias", "stem")


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
def test_quantized_layer_is_named_as_replaced() -> None:
    model = mlp().eval()
    quantized = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {torch.nn.Linear}, dtype=torch.qint8)
    report = run_model(model, quantized, X, 1, None, training=False, stages=("outputs",), trace=True)
    assert not report
    parting = report.partings[0]
    assert (parting.level, parting.kind, parting.module) == ("tolerance", "replaced", "0")
    assert "quantized.linear_dynamic" in parting.after
    loose = run_model(model, quantized, X, 1, 0.1, training=False, stages=("outputs",))
    assert loose


def test_gradient_that_is_wrong_is_traced_to_its_backward() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: torch.Tensor, factor: float) -> torch.Tensor:
            ctx.factor = factor
            return x * 2

        @staticmethod
        def backward(ctx, gradient: torch.Tensor) -> tuple:
            return gradient * ctx.factor, None

    class Doubled(torch.nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.linear, self.factor = mlp()[0], factor

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Double.apply(self.linear(x), self.factor)

    report = run_model(Doubled(2.0), Doubled(2.5), X, 1, trace=True)
    assert report.of("outputs")[0].bitwise
    assert not report.of("gradients")[0]
    parting = report.partings[0]
    assert (parting.phase, parting.op, parting.after) == ("backward", "aten.mul.Tensor", "aten.mul.Tensor(2.5)")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_model_is_compared_with_its_parameters_by_their_names(backend: str) -> None:
    model = torch.nn.Sequential(mlp()[0], torch.nn.ReLU(), mlp()[3])
    report = run_model(model, torch.compile(copy.deepcopy(model), backend=backend), X, 1)
    assert report.bitwise, as_text(report)
    assert [item.name for item in report.of("parameters")[0].tensors] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    report = run_model(model, torch.compile(wrong(model, "2.weight"), backend=backend), X, 1, trace=True)
    assert report.partings[0].name == "parameter/2.weight"
    assert any("the model after is compiled" in note for note in report.notes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_other_device_is_a_difference_that_can_be_looked_past() -> None:
    class OnDevice(torch.nn.Module):
        def __init__(self, device: str) -> None:
            super().__init__()
            self.inner = mlp().eval().to(device)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x.to(self.inner[0].weight.device))

    models = OnDevice("cpu"), OnDevice("cuda")
    assert {item.kind for item in run_model(*models, X, 1).of("outputs")[0].tensors} == {"device"}
    assert run_model(*models, X, 1, ignore=["device"])


def test_importing_the_tool_imports_no_other() -> None:
    code = "import sys, hashbench.tools.numeric\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = [name for name in done.stdout.split() if name.startswith("hashbench.tools.")]
    assert "hashbench.tools.numeric.running" in names
    assert [name for name in names if not name.startswith("hashbench.tools.numeric")] == []
    assert "torch._inductor" not in done.stdout.split()
