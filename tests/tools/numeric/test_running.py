"""The numeric check on pairs of real models: what is compared, what is told, and what is left as it was."""

from __future__ import annotations

import copy
import json
import random
import re
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.fusion import fuse_conv_bn_eval

from hashbench.core.errors import HashbenchError
from hashbench.core.run.rng import preserved_rng, reset_rng_state
from hashbench.core.run.settings import preserved, settings
from hashbench.tools.numeric import (
    MAIN_RANDOM_SEED,
    STAGES,
    NumericRequest,
    as_json,
    as_text,
    clean_memory,
    numeric_check_if_enabled,
    run_model,
    set_deterministic,
)
from hashbench.tools.numeric.report import Report, finding_of
from hashbench.tools.numeric.running import check

X = (torch.linspace(-1, 1, 24).reshape(3, 8),)
IMAGE = (torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)),)


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


def folded() -> torch.nn.Sequential:
    model = conv()
    model[0], model[1] = fuse_conv_bn_eval(model[0], model[1]), torch.nn.Identity()
    return model


def norm(momentum: float) -> torch.nn.BatchNorm1d:
    return torch.nn.BatchNorm1d(8, momentum=momentum)


def wrong(model: torch.nn.Module, name: str) -> torch.nn.Module:
    changed = copy.deepcopy(model)
    with torch.no_grad():
        dict(changed.named_parameters())[name].view(-1)[0] += 1
    return changed


def times(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x * factor


class Calling(torch.nn.Module):
    """A module whose forward is ``function(module, x)``, with these attributes."""

    def __init__(self, function: Callable[..., Any], **attributes: Any) -> None:
        super().__init__()
        self.function = function
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def fails(*_: object) -> Any:
    raise ValueError("not today")


def fails_backward(module: Any, x: torch.Tensor) -> torch.Tensor:
    out = module.inner(x)
    out.register_hook(fails)
    return out


FORWARD, BACKWARD = (Calling(function, inner=mlp()) for function in (fails, fails_backward))


def beyond(report: Report, stage: str) -> set[str]:
    return {tensor.name for tensor in report.of(stage)[0].tensors if not tensor}


# ------------------------------------------------------------------------------------------------ what is compared


def test_equal_models_are_equal_bit_by_bit_in_every_stage_and_iteration() -> None:
    model = mlp().train()
    report = run_model(model, copy.deepcopy(model), X, 3)
    assert report
    assert report.bitwise
    assert [(item.stage, item.iteration) for item in report.comparisons] == [
        (stage, iteration) for iteration in range(3) for stage in STAGES
    ]
    assert report.notes == ()
    assert report.verdict.startswith("equal bit by bit: parameters equal bit by bit (4)")
    assert run_model(mlp(), mlp(), X[0], 1).bitwise  # one tensor in place of a tuple


LEAF = torch.ones(2, 8, requires_grad=True)
BOTH_LEVELS = ("tolerance", "bitwise")
DIFFERENCES = {
    "a wrong weight": (mlp(), wrong(mlp(), "0.weight"), X, "parameters", {"0.weight"}),
    "the output of a wrong weight": (mlp(), wrong(mlp(), "0.weight"), X, "outputs", {"output"}),
    "the step after a wrong weight, and its bias": (
        mlp(),
        wrong(mlp(), "3.weight"),
        X,
        "stepped",
        {"0.weight", "0.bias", "3.weight"},
    ),
    "buffers that are forgotten": (norm(0.1), norm(0.0), X, "buffers", {"running_mean", "running_var"}),
    "outputs beside those buffers": (norm(0.1), norm(0.0), X, "outputs", set()),
    "gradients of inputs": (times(2.0), times(3.0), (LEAF,), "gradients", {"input.0"}),
}


@pytest.mark.parametrize(("before", "after", "inputs", "stage", "names"), DIFFERENCES.values(), ids=DIFFERENCES)
def test_difference_is_seen_in(before: Any, after: Any, inputs: tuple, stage: str, names: set[str]) -> None:
    report = run_model(before, after, inputs, 1)
    assert bool(report) is False
    assert beyond(report, stage) == names
    assert LEAF.grad is None


def test_the_parameters_go_on_from_one_iteration_to_the_next() -> None:
    weights: list[torch.Tensor] = []

    def noted(module: Any, x: torch.Tensor) -> torch.Tensor:
        weights.append(module.linear.weight.detach().clone())
        return module.linear(x)

    model = Calling(noted, linear=torch.nn.Linear(8, 2))
    run_model(model, copy.deepcopy(model), X, 2)
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[2], weights[3])
    assert not torch.equal(weights[0], weights[2])


def test_optimizer_loss_and_stages_are_the_callers() -> None:
    calls = []

    def loss(output: torch.Tensor) -> torch.Tensor:
        calls.append("loss")
        return output.square().mean()

    def make(parameters):
        calls.append("optimizer")
        return torch.optim.Adam(parameters, lr=0.1)

    report = run_model(mlp(), mlp(), X, 2, loss=loss, make_optimizer=make, stages=("stepped",))
    assert calls == ["loss", "loss", "optimizer", "optimizer", "loss", "loss"]  # one optimizer a model
    assert [item.stage for item in report.comparisons] == ["stepped", "stepped"]
    assert not run_model(mlp(), mlp(), X, 1, requires_optimizer=False).of("stepped")


def test_gradients_do_not_add_up_over_iterations() -> None:
    def scaled(factor: float) -> Calling:
        return Calling(lambda module, x: (x + module.bias) * factor, bias=torch.nn.Parameter(torch.zeros(())))

    report = run_model(scaled(1.0), scaled(2.0), (torch.zeros(3),), 2)
    assert [item.tensors[0].max_abs for item in report.of("gradients")] == [3.0, 3.0]


def test_inputs_may_be_named_and_outputs_nested() -> None:
    def named(x: torch.Tensor, *, scale: float) -> dict:
        return {"a": [x * scale, (x,)], "n": 3}

    report = run_model(named, named, {"x": X[0], "scale": 2.0}, 1)
    assert [item.name for item in report.of("outputs")[0].tensors] == ["output.a.0", "output.a.1.0", "output.n"]


def test_model_that_changes_its_inputs_does_not_change_the_callers_nor_the_other_models() -> None:
    x = torch.ones(2)
    assert run_model(lambda x: x.add_(1), lambda x: x + 1, (x,), 3).bitwise
    assert torch.equal(x, torch.ones(2))


# --------------------------------------------------------------------------------------------------- what is told

RAISED = {
    "the forward before": (FORWARD, mlp(), {}, [("before", "outputs")]),
    "the forward after": (mlp(), FORWARD, {}, [("after", "outputs")]),
    "the backward before": (BACKWARD, mlp(), {}, [("before", "gradients")]),
    "the backward after": (mlp(), BACKWARD, {}, [("after", "gradients")]),
    "both forwards": (FORWARD, copy.deepcopy(FORWARD), {}, [("before", "outputs"), ("after", "outputs")]),
    "an optimizer": (mlp(), mlp(), {"make_optimizer": fails}, [("before", "stepped"), ("after", "stepped")]),
}


@pytest.mark.parametrize(("before", "after", "options", "raised"), RAISED.values(), ids=RAISED)
def test_exception_is_reported_with_side_and_stage(before: Any, after: Any, options: dict, raised: list) -> None:
    report = run_model(before, after, X, 2, **options)
    assert not report
    assert [(item.side, item.stage, item.iteration) for item in report.raised] == [(*item, 0) for item in raised]
    assert all(isinstance(item.exception, ValueError) for item in report.raised)
    side, stage = raised[0]
    assert f"the model {side} raised at {stage}, iteration 0: ValueError: not today" in report.verdict
    assert report.of("parameters")


def test_check_if_enabled_returns_what_happened_and_finds_anomalies() -> None:
    assert numeric_check_if_enabled(mlp(), mlp(), X, 2, 1e-4).bitwise
    assert not numeric_check_if_enabled(FORWARD, mlp(), X, 2, 1e-4)

    def root(x: torch.Tensor) -> torch.Tensor:
        return x.sqrt() * 0.0

    report = numeric_check_if_enabled(root, root, (torch.zeros(2, requires_grad=True),), 1, 1e-4)
    assert "returned nan values" in report.verdict
    assert not torch.is_anomaly_enabled()


def pools(x: torch.Tensor) -> torch.Tensor:
    values, places = torch.nn.functional.max_pool2d(x, 2, return_indices=True)
    return torch.nn.functional.max_unpool2d(values, places, 2)


DRAWING = Calling(lambda _module, x: x + np.random.default_rng().random())
NAN = times(float("nan"))
NO_GRADIENT = "no output of either model has a gradient"
NOTES = {
    "no gradient in either": (times(2.0), times(2.0), X, {}, True, NO_GRADIENT),
    "NaN in both": (NAN, NAN, X, {}, True, "NaN in both models"),
    "an op that is not deterministic": (pools, pools, IMAGE, {}, True, "max_unpool.* has no deterministic implement"),
    "a model that does not repeat": (
        torch.nn.Identity(),
        DRAWING,
        X,
        {"training": False},
        False,
        "^the model after does not repeat itself",
    ),
}


@pytest.mark.parametrize(("before", "after", "inputs", "options", "equal", "note"), NOTES.values(), ids=NOTES)
def test_note_is_made_of(before: Any, after: Any, inputs: tuple, options: dict, equal: bool, note: str) -> None:
    report = run_model(before, after, inputs, 1, **options)
    assert bool(report) is equal
    assert [said for said in report.notes if re.search(note, said)]
    assert not [said for said in report.notes if "model before does not repeat" in said]


def test_gradient_that_one_model_alone_has_or_that_was_asked_for_is_a_difference() -> None:
    linear = torch.nn.Linear(8, 8, bias=False)
    report = run_model(linear, lambda x: x @ linear.weight.detach().t(), X, 1)
    assert [(item.side, item.stage) for item in report.raised] == [("after", "gradients")]
    assert not run_model(times(2.0), times(2.0), X, 1, training=True)


def test_nothing_compared_is_not_equal() -> None:
    report = run_model(times(1.0), times(1.0), X, 1, stages=("parameters",))
    assert not report
    assert report.verdict == "different: parameters none to compare"


def test_report_has_numbers_and_is_readable_as_text_and_json() -> None:
    report = run_model(mlp(), wrong(mlp(), "0.weight"), X, 1)
    (weight,) = report.of("parameters")[0].differing
    assert (weight.elements, weight.total, weight.max_abs) == (1, 64, pytest.approx(1.0))
    text, content = as_text(report), json.loads(as_json(report))
    assert text.splitlines()[0] == content["headline"] == "The models are different"
    assert content["verdict"] == report.verdict
    assert "max ULP" in text
    assert content["equal_within_tolerance"] is False
    assert [item["stage"] for item in content["comparisons"]] == list(STAGES)
    lone = finding_of(run_model(mlp(), torch.nn.Identity(), X, 1, training=False), command="hashbench again")
    assert ("only before", "parameters: 0.weight, 0.bias and 2 more") in lone.facts
    assert lone.next == ("hashbench again",)


REFUSED = {
    "no iterations": (mlp(), {"num_iterations": 0}, "num_iterations must be an int >= 1, got 0"),
    "an unknown stage": (mlp(), {"stages": ("output",)}, "unknown stage 'output'"),
    "no stage": (mlp(), {"stages": ()}, "stages is empty"),
    "an unknown name": (mlp(), {"rename": {"7": "8"}}, "rename has '7', which the model before does not have"),
    "what cannot be called": ("model", {}, "the model after is a str"),
}


def test_a_request_holds_the_arguments_of_the_function_and_refuses_what_it_does_not_know() -> None:
    model = mlp()
    request = NumericRequest(model, wrong(model, "0.weight"), X, 1, stages="outputs", requires_optimizer=False)
    assert request.stages == frozenset({"outputs"})
    report = run_model(request.before, request.after, X, 1, stages="outputs", requires_optimizer=False)
    assert not report
    assert check(request).verdict == report.verdict
    with pytest.raises(TypeError, match="iteration_count"):
        run_model(model, model, X, iteration_count=1)


@pytest.mark.parametrize(("after", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_refuses(after: Any, options: dict, message: str) -> None:
    with pytest.raises(HashbenchError, match=message):
        run_model(mlp(), after, X, **options)


# -------------------------------------------------------------------------------------------- left as it was


def assert_left_as_it_was(models: list[torch.nn.Module], run: Callable[[], Report]) -> Report:
    def state() -> list[tuple]:
        return [
            (
                [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())],
                [id(parameter.grad) for parameter in model.parameters()],
                [module.training for module in model.modules()],
            )
            for model in models
        ]

    before = state()
    report = run()
    for one, other in zip(before, state(), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))
        assert one[1:] == other[1:]
    return report


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
    report = assert_left_as_it_was(models, lambda: run_model(*models, X, 2, training=training))
    assert not report.raised
    assert any("ran itself, for it cannot be copied" in note for note in report.notes) == (copied != "copied")


def test_model_that_raises_in_place_is_put_back_too() -> None:
    model = Uncopied(raises=True)
    assert assert_left_as_it_was([model], lambda: run_model(model, mlp(), X, 2, make_optimizer=fails)).raised


def test_one_model_on_both_sides_that_cannot_be_copied_is_refused() -> None:
    model = Uncopied(raises=True)
    with pytest.raises(HashbenchError, match="hold the same parameters, and cannot be copied"):
        run_model(model, model, X)


def drawn() -> tuple[float, float, float]:
    return random.random(), np.random.rand(), float(torch.rand(1))


@pytest.mark.parametrize("after", [FORWARD, mlp()], ids=["fails", "succeeds"])
def test_random_state_settings_and_gradient_mode_are_left_as_they_were(after: torch.nn.Module) -> None:
    before = settings()
    with preserved_rng():
        reset_rng_state(5)
        expected = drawn()
        before_model = mlp()
        reset_rng_state(5)
        run_model(before_model, after, X, 2, trace=True)
        assert drawn() == expected
    assert settings() == before
    with torch.no_grad():
        assert run_model(mlp(), mlp(), X, 1).of("gradients")  # whatever the caller's mode
        assert not torch.is_grad_enabled()


def test_set_deterministic_does_what_it_says_and_clean_memory_does_no_harm() -> None:
    with preserved(), preserved_rng():
        set_deterministic()
        first = drawn()
        reset_rng_state(MAIN_RANDOM_SEED)
        assert drawn() == first
        assert torch.are_deterministic_algorithms_enabled()
    clean_memory()


# ------------------------------------------------------------------------------------------- real transformations


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x * 2

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        return gradient * ctx.factor, None


def doubled(factor: float) -> Calling:
    return Calling(lambda module, x: Double.apply(module.linear(x), factor), linear=mlp()[0])


def weighted(weight: torch.Tensor, factor: float) -> Calling:
    return Calling(lambda module, x: (x @ module.weight) * factor, weight=torch.nn.Parameter(weight))


def headed(first: str, second: str, factor: float) -> Calling:
    """Two layers of these names."""
    layers = {first: mlp()[0], second: mlp()[3]}
    return Calling(lambda module, x: getattr(module, second)(getattr(module, first)(x).relu() * factor), **layers)


SQUARE = torch.arange(9.0).reshape(3, 3)
ROWS = (torch.ones(2, 3),)
FOLD: dict[str, Any] = {"precision": None, "training": False}
RENAMED: dict[str, Any] = {"rename": {"stem": "first", "head": "last"}}
FIRST = {
    "a fold, in the weight that it rewrites": (
        (conv(), folded(), IMAGE, FOLD | {"stages": ("outputs",)}),
        [("bitwise", "parameter", "aten.convolution.default", "0", "parameter/0.weight")],
    ),
    "a fold, and nothing that only one model has": (
        (conv(), folded(), IMAGE, FOLD),
        [("bitwise", "parameter", "aten.convolution.default", "0", "parameter/0.weight")],
    ),
    "a wrong weight after a fold, and not the fold": (
        (conv(), wrong(folded(), "3.weight"), IMAGE, FOLD | {"stages": ("outputs",)}),
        [
            ("tolerance", "parameter", "aten.convolution.default", "3", "parameter/3.weight"),
            ("bitwise", "parameter", "aten.convolution.default", "0", "parameter/0.weight"),
        ],
    ),
    "an op after a weight of other strides": (
        (weighted(SQUARE, 2.0), weighted(SQUARE.t().contiguous().t(), 3.0), ROWS, {}),
        [(level, "op", "aten.mul.Tensor", "", None) for level in BOTH_LEVELS],
    ),
    "an op between renamed modules": (
        (headed("stem", "head", 1.5), headed("first", "last", 1.25), X, RENAMED),
        [(level, "op", "aten.mul.Tensor", "", None) for level in BOTH_LEVELS],
    ),
    "a wrong bias of a renamed module": (
        (headed("stem", "head", 1.5), wrong(headed("first", "last", 1.5), "first.bias"), X, RENAMED),
        [(level, "parameter", "aten.addmm.default", "stem", "parameter/stem.bias") for level in BOTH_LEVELS],
    ),
    "a backward that is wrong": (
        (doubled(2.0), doubled(2.5), X, {}),
        [(level, "op", "aten.mul.Tensor", "", None) for level in BOTH_LEVELS],
    ),
}


@pytest.mark.parametrize(("check", "expected"), FIRST.values(), ids=FIRST)
def test_models_first_differ_at(check: tuple, expected: list[tuple]) -> None:
    found = traced(*check).first_differences
    assert [(item.level, item.kind, item.op, item.module) for item in found] == [item[:4] for item in expected]
    assert all(name in (None, item.name) for item, (*_, name) in zip(found, expected, strict=True))


def traced(before: Any, after: Any, inputs: tuple, options: dict[str, Any]) -> Report:
    return run_model(before, after, inputs, **{"num_iterations": 1, **options}, trace=True)


def test_first_difference_says_how_far_apart_in_which_phase_and_what_only_one_runs() -> None:
    def first(key: str) -> Any:
        return traced(*FIRST[key][0]).first_differences[0]

    assert first("a wrong weight after a fold, and not the fold").numbers.max_abs == pytest.approx(1.0)
    assert first("a fold, in the weight that it rewrites").only_before == 2
    renamed = first("an op between renamed modules")
    assert (renamed.before, renamed.after) == ("aten.mul.Tensor(1.5)", "aten.mul.Tensor(1.25)")
    assert (renamed.only_before, renamed.only_after) == (0, 0)
    backward = first("a backward that is wrong")
    assert (backward.phase, backward.after) == ("backward", "aten.mul.Tensor(2.5)")


def test_fold_is_equal_within_tolerance_and_renamed_parameters_are_compared() -> None:
    report = run_model(conv(), folded(), IMAGE, 1, None, training=False, stages=("outputs",))
    assert report
    assert not report.bitwise
    models = headed("stem", "head", 1.5), headed("first", "last", 1.5)
    assert not run_model(*models, X, 1, stages=("parameters",))
    assert run_model(*models, X, 1, **RENAMED).bitwise


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
def test_quantized_layer_is_named_as_replaced() -> None:
    model = mlp().eval()
    quantized = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {torch.nn.Linear}, dtype=torch.qint8)
    report = run_model(model, quantized, X, 1, None, training=False, stages=("outputs",), trace=True)
    assert not report
    item = report.first_differences[0]
    assert (item.level, item.kind, item.module) == ("tolerance", "replaced", "0")
    assert "quantized.linear_dynamic" in item.after
    assert run_model(model, quantized, X, 1, 0.1, training=False, stages=("outputs",))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_model_is_compared_with_its_parameters_by_their_names(backend: str) -> None:
    model = torch.nn.Sequential(mlp()[0], torch.nn.ReLU(), mlp()[3])
    report = run_model(model, torch.compile(copy.deepcopy(model), backend=backend), X, 1)
    assert report.bitwise, as_text(report)
    assert [item.name for item in report.of("parameters")[0].tensors] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    report = run_model(model, torch.compile(wrong(model, "2.weight"), backend=backend), X, 1, trace=True)
    assert report.first_differences[0].name == "parameter/2.weight"


class Around(torch.nn.Module):
    """A block between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(6, 6), torch.nn.Linear(6, 2)
        self.block = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Softmax(-1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.block(self.a(x)))


def in_double(graph: torch.fx.GraphModule, _inputs: object) -> Any:
    """A backend that computes in double precision and rounds."""

    def run(*inputs: Any) -> Any:  # sizes are among them where dynamo has compiled this for another one
        doubled = [one.double() if isinstance(one, torch.Tensor) else one for one in inputs]
        return [value.float() for value in graph(*doubled)]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("backend", [in_double, "inductor"])
def test_compiled_code_is_blamed_by_the_records_around_it(backend: Any) -> None:
    if backend == "inductor" and shutil.which("c++") is None:
        pytest.skip("inductor needs a C++ compiler")
    torch.manual_seed(0)
    model = Around().eval()
    other = copy.deepcopy(model)
    other.block = torch.compile(other.block, backend=backend)
    x = torch.randn(64, 6)
    report = run_model(model, other, (x,), 1, None, training=False, stages=("outputs",), trace=True)
    assert report, as_text(report)
    if report.bitwise:
        pytest.skip("this backend's kernels leave the same bits here")
    (item,) = report.first_differences
    assert (item.level, item.kind, item.op) == ("bitwise", "between", "")
    assert item.last_before is not None
    assert item.first_after is not None
    first = "block.0" if backend == "inductor" else "a"  # the linear layer inside is a kernel of ATen's, which is seen
    assert [(place.op, place.module) for place in (item.last_before, item.first_after)] == [
        ("aten.addmm.default", first),
        ("aten.addmm.default", "b"),
    ]
    assert item.unmatched_before[-1] == "aten._softmax.default in block.1"
    assert item.unmatched_after[0].startswith("cpp_fused__softmax_0" if backend == "inductor" else "torch.compile")
    assert any("the model after is compiled" in note for note in report.notes)
    what = f"not known at which op: between aten.addmm.default in {first} (forward"
    (part,) = finding_of(report).parts
    assert part.headline.startswith(f"First difference bit by bit: {what}")
    (said,) = json.loads(as_json(report))["first_differences"]
    assert (said["last_before"]["module"], said["first_after"]["module"]) == (first, "b")


@pytest.mark.slow
def test_compiled_code_within_tolerance_is_not_blamed_for_a_wrong_weight_behind_it() -> None:
    torch.manual_seed(0)
    model = Around().eval()
    other = copy.deepcopy(model)
    other.block = torch.compile(other.block, backend=in_double)
    with torch.no_grad():
        other.b.weight[0, 0] += 1
    x = torch.randn(64, 6)
    report = run_model(model, other, (x,), 1, None, training=False, stages=("outputs",), trace=True)
    assert [(item.level, item.kind) for item in report.first_differences] == [
        ("tolerance", "parameter"),
        ("bitwise", "between"),
    ]
    assert report.first_differences[0].name == "parameter/b.weight"


class OutVariants(torch.nn.Module):
    """The layers of another model, by ops with ``out=``, into memory that is used again."""

    def __init__(self, model: torch.nn.Sequential, scale: float = 1.0) -> None:
        super().__init__()
        self.layers, self.scale = torch.nn.ModuleList(model), scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, last = self.layers[0], self.layers[2]
        hidden, output = torch.empty(len(x), first.out_features), torch.empty(len(x), last.out_features)
        torch.addmm(first.bias, x, first.weight.t(), out=hidden)
        torch.mul(torch.tanh(hidden), self.scale, out=hidden)
        return torch.addmm(last.bias, hidden, last.weight.t(), out=output)


def test_out_variants_are_not_blamed_for_what_an_op_between_them_does() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)).eval()
    rename = {"0": "layers.0", "2": "layers.2"}
    options: dict[str, Any] = {"training": False, "stages": ("outputs",), "trace": True, "rename": rename}
    same = run_model(model, OutVariants(copy.deepcopy(model)), (torch.randn(3, 6),), 1, None, **options)
    assert same.bitwise, as_text(same)
    report = run_model(model, OutVariants(copy.deepcopy(model), 1.5), (torch.randn(3, 6),), 1, None, **options)
    assert not report
    assert {(item.kind, item.op) for item in report.first_differences} == {("only after", "aten.mul.out")}
    assert report.first_differences[0].aligned >= 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_other_device_is_a_difference_that_can_be_looked_past() -> None:
    def on(device: str) -> Calling:
        return Calling(lambda module, x: module.inner(x.to(device)), inner=mlp().eval().to(device))

    models = on("cpu"), on("cuda")
    assert {item.kind for item in run_model(*models, X, 1).of("outputs")[0].tensors} == {"device"}
    assert run_model(*models, X, 1, ignore=["device"])
