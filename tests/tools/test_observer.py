"""Observing one run and checking another against it, with real models, optimizers and backward passes."""

from __future__ import annotations

import contextvars
import json
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from hashbench.errors import HashbenchError
from hashbench.tools.observer import (
    Kind,
    MismatchError,
    Observer,
    ObserverContext,
    current_observer,
    disable_hash_mode,
    enable_hash_mode,
    marking_non_deterministic,
    observe,
    observe_grad,
    observe_non_deterministic,
    observe_non_deterministic_grad,
    read_recording,
)

ENTROPY = torch.Generator()


def noise_like(tensor: torch.Tensor) -> torch.Tensor:
    """Another one in every run: its generator is never put back."""
    return torch.rand(tensor.shape, generator=ENTROPY)


class Pair:
    """A reference run and checks against it, in one folder. Each starts from the same seed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "reference.json"
        self.checks = 0

    @contextmanager
    def _run(self, name: str, reference: Path | None, **options: Any) -> Iterator[Observer]:
        torch.manual_seed(7)
        with ObserverContext(self.folder, name, reference, **options) as observer:
            yield observer

    def reference(self) -> Any:
        return self._run("reference", None)

    def check(self, **options: Any) -> Any:
        self.checks += 1
        return self._run(f"check{self.checks}", self.path, **options)

    def of(self, run: Callable[[], Any], again: Callable[[], Any] | None = None) -> Observer:
        """The observer of a check of ``again`` (of ``run`` itself) against ``run``, all ops observed."""
        observers = []
        for region, function in ((self.reference(), run), (self.check(), again or run)):
            with region as observer:
                observer.enable_mode()
                function()
            observers.append(observer)
        return observers[-1]


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def kinds(observer: Observer) -> list[str]:
    return [f"{one.kind} {one.name}" for one in observer.mismatches.values()]


# ------------------------------------------------------------------------------------- what an earlier tool promises


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.dropout = nn.Dropout(0.2)
        self.fc = nn.Linear(4 * 8 * 8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        observe("conv_weight", self.conv.weight)
        x = F.relu(self.conv(x))
        observe("conv_output", x)
        x = self.dropout(x)
        observe_non_deterministic("after_dropout", x)
        x = x + noise_like(x)
        observe_non_deterministic("after_noise", x)
        x = self.fc(x.flatten(1))
        observe("output", x)
        return x


def observed(folder: Path, images: torch.Tensor, *, mode: bool = False) -> dict[str, str]:
    torch.manual_seed(7)
    model = Net()
    with ObserverContext(folder, "run") as observer:
        if mode:
            enable_hash_mode()
        observe("input", images)
        model(images)
        disable_hash_mode()
        assert not observer.hash_mode.enabled
    return {one.name: one.value for one in read_recording(folder / "run.json").observations}


def test_two_runs_observe_the_same_until_something_differs(tmp_path: Path) -> None:
    images = torch.ones(2, 3, 8, 8)
    first, second, other = (observed(tmp_path, inputs) for inputs in (images, images, images + 1))
    names = ["input_1", "conv_weight_1", "conv_output_1", "after_dropout_1", "after_noise_1", "output_1"]
    assert list(first) == names
    assert [name for name in names if first[name] != second[name]] == ["after_noise_1", "output_1"]
    assert [name for name in names if first[name] == other[name]] == ["conv_weight_1"]


def test_under_the_mode_every_op_is_observed_by_name_and_number(tmp_path: Path) -> None:
    names = list(observed(tmp_path, torch.ones(2, 3, 8, 8), mode=True))
    assert names[:3] == ["input_1", "conv_weight_1", "__torch_dispatch__convolution.default_1"]
    assert names[names.index("conv_output_1") - 1].startswith("__torch_dispatch__")
    assert "__torch_dispatch__bernoulli_.float_1" in names
    assert names[-2:] == ["__torch_dispatch__addmm.default_1", "output_1"]


def test_a_check_puts_back_what_was_marked_and_matches(pair: Pair) -> None:
    images = torch.ones(2, 3, 8, 8)
    with pair.reference():
        first = Net()(images)
    with pair.check() as observer:
        second = Net()(images)
        assert observer.mismatches == {}
    assert observer.mismatches == {}
    assert torch.equal(first, second)
    assert [(one.name, one.differed) for one in observer.put_back] == [
        ("after_dropout_1", False),
        ("after_noise_1", True),
    ]
    assert not torch.equal(first, Net()(images))


def test_gradients_are_observed(pair: Pair) -> None:
    def run(scale: float) -> None:
        layer = nn.Linear(3, 2)
        observe_grad("weight", layer.weight)
        layer(torch.ones(1, 3) * scale).sum().backward()

    with pair.reference() as reference:
        run(1.0)
    with pair.check() as same:
        run(1.0)
    with pair.check() as other:
        run(1.5)
    assert [one.name for one in reference.observations] == ["weight_grad_1"]
    assert reference.observations[0].record.phase == "backward"
    assert same.mismatches == {}
    assert kinds(other) == ["changed weight_grad_1"]
    assert "in run" not in other.mismatches["weight_grad_1"].source
    assert other.mismatches["weight_grad_1"].source.endswith(" run")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_gradient_that_was_marked_is_put_back(pair: Pair, device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")

    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(_context: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(_context: Any, *grads: torch.Tensor) -> Any:
            observe("inside", torch.ones(1))  # in a thread of autograd's on a GPU
            return grads[0] + noise_like(grads[0]).to(grads[0].device)

    def run(*, mark: bool = True) -> torch.Tensor:
        weight = torch.ones(3, requires_grad=True, device=device)
        q = weight * 2
        if mark:
            assert observe_non_deterministic_grad("q", q) == "q_grad"
        observe_grad("weight", weight)
        Noisy.apply(q).sum().backward()
        assert weight.grad is not None
        return weight.grad

    with pair.reference():
        first = run()
    with pair.check() as observer:
        second = run()
    with pair.check() as unmarked:
        run(mark=False)
    assert [one.name for one in observer.observations] == ["inside_1", "q_grad_1", "weight_grad_1"]
    assert observer.mismatches == {}
    assert torch.equal(first, second)
    assert kinds(unmarked) == ["missing q_grad_1", "changed weight_grad_1"]


# --------------------------------------------------------------------------------------------------- training steps


def step(optimizer: Callable[..., torch.optim.Optimizer], **options: Any) -> Callable[[], None]:
    def run() -> None:
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
        chosen = optimizer(model.parameters(), **options)
        for _ in range(2):
            chosen.zero_grad()
            loss = model(torch.rand(5, 4)).sum()
            loss.backward()
            chosen.step()
            observe("loss", loss.item())

    return run


OPTIMIZERS = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": True}),
    (torch.optim.Adam, {"lr": 0.1}),
    (torch.optim.AdamW, {"lr": 0.1, "fused": True}),
]


@pytest.mark.parametrize(("optimizer", "options"), OPTIMIZERS, ids=["SGD foreach", "Adam", "AdamW fused"])
def test_training_steps_match_and_another_rate_is_seen_in_the_optimizer(
    pair: Pair, optimizer: Callable[..., torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    assert kinds(pair.of(step(optimizer, **options))) == []
    found = pair.of(step(optimizer, **options), step(optimizer, **{**options, "lr": 0.2})).mismatches
    assert next(iter(found.values())).phase == "optimizer"
    assert "loss_2" in found
    assert "loss_1" not in found


def test_one_more_op_is_one_mismatch(pair: Pair) -> None:
    def run(*, extra: bool = False) -> None:
        x = torch.ones(3)
        for _ in range(4):
            x = x.sin()
            if extra and x.numel():
                x.cos()
                extra = False
        observe("x", x)

    longer = pair.of(run, lambda: run(extra=True))
    assert kinds(longer) == ["inserted __torch_dispatch__cos.default_1"]
    [one] = longer.mismatches.values()
    assert one.op == "aten.cos.default"
    assert one.source.startswith("test_observer.py:")
    assert kinds(pair.of(lambda: run(extra=True), run)) == ["missing __torch_dispatch__cos.default_1"]


def test_the_place_of_a_mismatch_is_its_module_and_line(pair: Pair) -> None:
    x = torch.ones(3, 3)
    assert kinds(pair.of(lambda: x[0], lambda: x[1])) == ["changed __torch_dispatch__select.int_1"]

    def run(bias: float) -> None:
        model = nn.Sequential(nn.Identity(), nn.Sequential(nn.ReLU(), nn.Softplus(beta=bias)))
        model(torch.ones(2))

    [one] = pair.of(lambda: run(1.0), lambda: run(2.0)).mismatches.values()
    assert (one.kind, one.op, one.module) == (Kind.CHANGED, "aten.softplus.default", "Sequential.1.1")
    assert "its arguments were (1.0, 20.0), are (2.0, 20.0)" in one.detail
    assert one.current != one.reference


# -------------------------------------------------------------------------------------------------- putting back


def put_back_in(pair: Pair, run: Callable[[], Any]) -> tuple[Any, Any, Observer]:
    with pair.reference():
        first = run()
    with pair.check() as observer:
        second = run()
    return first, second, observer


def test_what_shares_the_memory_has_the_value_too_and_gradients_flow(pair: Pair) -> None:
    def run() -> tuple[torch.Tensor, ...]:
        weight = torch.ones(3, requires_grad=True)
        x = torch.sigmoid(weight * noise_like(weight))  # whose backward reads its result
        view = x[:2]
        assert observe_non_deterministic("x", x) is x
        observe("view", view)
        x.sum().backward()
        assert weight.grad is not None
        left = x.detach().clone(), view.detach().clone(), weight.grad
        x.detach().zero_()  # what is saved is the value at that point
        return left

    first, second, observer = put_back_in(pair, run)
    assert observer.mismatches == {}
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert second[2].count_nonzero() == 3


OVERLAPPING = {
    "expanded": (lambda x: x.expand(2, 3), []),
    "unfolded": (lambda x: torch.cat([x, x[:1]]).unfold(0, 3, 1), ["changed x_1"]),  # it has another stride
}


@pytest.mark.parametrize(("overlapping", "expected"), OVERLAPPING.values(), ids=OVERLAPPING)
def test_where_elements_share_memory_as_they_did_not_the_tensor_is_replaced(
    pair: Pair, overlapping: Callable[[torch.Tensor], torch.Tensor], expected: list[str]
) -> None:
    def run(form: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.utils._python_dispatch._disable_current_modes():
            weight = torch.ones(3, requires_grad=True)
            x = form(weight * 2)
        kept = observe_non_deterministic("x", x)  # adds no op of its own
        with torch.utils._python_dispatch._disable_current_modes():
            kept.sum().backward()
        assert weight.grad is not None
        return kept.detach(), weight.grad

    results = []
    observer = pair.of(
        lambda: results.append(run(lambda x: x * noise_like(torch.ones(2, 3)))),
        lambda: results.append(run(overlapping)),
    )
    assert kinds(observer) == expected
    assert torch.equal(results[0][0], results[1][0])
    assert results[1][1].count_nonzero() == 3


FORMS: dict[str, Callable[[], Any]] = {
    "transposed": lambda: noise_like(torch.ones(4, 3)).t(),
    "strided": lambda: noise_like(torch.ones(4, 3))[:, ::2],
    "expanded": lambda: noise_like(torch.ones(3)).expand(2, 3),
    "unfolded": lambda: noise_like(torch.ones(3)).unfold(0, 2, 1),
    "empty": lambda: noise_like(torch.ones(0, 3)),
    "scalar": lambda: noise_like(torch.ones(())),
    "conjugated": lambda: noise_like(torch.ones(3)).to(torch.complex128).conj(),
    "parameter": lambda: nn.Parameter(noise_like(torch.ones(3))),
    "float8": lambda: noise_like(torch.ones(3)).to(torch.float8_e4m3fn),
    "nested": lambda: {"a": [noise_like(torch.ones(2)), None], "b": (noise_like(torch.ones(2, 2)), 3)},
    "of inference mode": torch.inference_mode()(lambda: noise_like(torch.ones(3))),
}


@pytest.mark.parametrize("around", [nullcontext, torch.inference_mode])
@pytest.mark.parametrize("make", FORMS.values(), ids=FORMS)
def test_every_form_of_a_tensor_is_put_back(pair: Pair, make: Callable[[], Any], around: Callable[[], Any]) -> None:
    with around():
        first, second, observer = put_back_in(pair, lambda: observe_non_deterministic("x", make()))
    assert observer.mismatches == {}
    assert len(observer.put_back) == 1
    assert repr(first) == repr(second)


MISFITS: dict[str, tuple[Callable[[], Any], str]] = {
    "shape": (lambda: torch.rand(2, 3), "the reference saved float32[3, 2], here is float32[2, 3]"),
    "dtype": (lambda: torch.rand(3, 2).double(), "the reference saved float32[3, 2], here is float64[3, 2]"),
    "another number": (
        lambda: [torch.rand(3, 2)] * 2, "the reference saved float32[3, 2], here is float32[3, 2], float32[3, 2]"),
    "none": (lambda: 3, "this run has no tensor here, the reference saved some"),
}  # fmt: skip


@pytest.mark.parametrize(("now", "detail"), MISFITS.values(), ids=MISFITS)
def test_what_does_not_fit_is_said_and_left_alone(pair: Pair, now: Callable[[], Any], detail: str) -> None:
    with pair.reference():
        observe_non_deterministic("x", torch.rand(3, 2))
    value = now()
    before = repr(value)
    with pair.check() as observer:
        assert repr(observe_non_deterministic("x", value)) == before
        observe_non_deterministic("never saved", torch.ones(2))
    first, other = observer.mismatches.values()
    assert (first.kind, first.name, first.detail) == (Kind.NOT_PUT_BACK, "x_1", detail)
    assert (other.kind, other.detail) == (Kind.NOT_PUT_BACK, "the reference saved no value for it")
    assert observer.put_back == []


def test_a_tensor_inside_an_object_is_refused_not_passed_over(pair: Pair) -> None:
    @dataclass
    class Output:
        scores: torch.Tensor

    with pair.reference(), pytest.raises(HashbenchError, match="cannot observe x"):
        observe_non_deterministic("x", Output(torch.ones(2)))


# ------------------------------------------------------------------------------------------------------- regions


def several_ops() -> list[torch.Tensor]:
    x = torch.zeros(2, 3)
    with marking_non_deterministic():
        x = noise_like(x).add_(1).t()[1:]
        values, _ = x.sort()
        torch._foreach_add_([values], [noise_like(values)])
    return [values * 2]


def in_place() -> list[torch.Tensor]:
    outside, several = torch.zeros(3), [torch.zeros(2), torch.zeros(2)]
    with torch.utils._python_dispatch._disable_current_modes():
        noise = [noise_like(one) for one in several]
    with marking_non_deterministic():
        outside.uniform_(generator=ENTROPY)
        torch._foreach_add_(several, noise)
        torch.empty(3).view(3, 1)  # blank memory and a view: nothing to put back
    return [outside, *several]


def backward() -> list[torch.Tensor]:
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: grad * noise_like(grad))
    with marking_non_deterministic():
        y.sum().backward()
    assert x.grad is not None
    return [x.grad]


@pytest.mark.parametrize("run", [several_ops, in_place, backward])
def test_in_a_region_what_every_op_writes_is_put_back(pair: Pair, run: Callable[[], list[torch.Tensor]]) -> None:
    results: list[list[torch.Tensor]] = []
    observer = pair.of(lambda: results.append(run()))
    assert observer.mismatches == {}
    assert all(map(torch.equal, *results))
    assert any(one.differed for one in observer.put_back)
    if run is in_place:
        names = [one.name.split("/")[-1] for one in observer.put_back]
        assert names == ["aten.uniform_.default#0", "aten._foreach_add_.List#0"]


def test_outside_the_region_nothing_is_put_back(pair: Pair) -> None:
    def run() -> None:
        with marking_non_deterministic():
            torch.ones(1) + 1
        noise_like(torch.ones(3))

    assert kinds(pair.of(run)) == ["changed __torch_dispatch__rand.generator_1"]


def test_an_op_more_before_the_region_moves_no_value_to_another_op(pair: Pair) -> None:
    def run(*, extra: bool) -> torch.Tensor:
        if extra:
            torch.ones(5).cos()
        with marking_non_deterministic():
            return noise_like(torch.ones(3))

    results: list[torch.Tensor] = []
    observer = pair.of(lambda: results.append(run(extra=False)), lambda: results.append(run(extra=True)))
    assert {one.op for one in observer.mismatches.values()} == {"aten.ones.default", "aten.cos.default"}
    assert torch.equal(*results)


def test_a_region_without_the_mode_says_that_it_does_nothing(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    with pair.reference(), marking_non_deterministic():
        torch.ones(2) + 1
    assert "no op was marked as nondeterministic" in caplog.text


# ------------------------------------------------------------------------------------------------ values of any kind


def test_any_nesting_of_tensors_and_plain_values_is_observed(pair: Pair) -> None:
    @dataclass
    class Output:
        boxes: torch.Tensor
        count: int

    value = {"out": [Output(torch.ones(2), 3), None, "text", 0.1, ()], "mask": torch.eye(2).to_sparse()}
    with pair.reference():
        observe("x", value)
    with pair.check() as same:
        observe("x", value)
    value["out"][0].count = 4
    with pair.check() as other:
        observe("x", value)
    with pair.check() as renamed:
        observe("x", {"outputs" if name == "out" else name: part for name, part in value.items()})
    assert same.mismatches == {}
    assert kinds(other) == kinds(renamed) == ["changed x_1"]
    assert "its parts were (out.0.boxes" in renamed.mismatches["x_1"].detail


def test_a_value_without_bits_is_refused(pair: Pair) -> None:
    with pair.reference(), pytest.raises(HashbenchError, match="cannot observe x_1: its bits cannot be compared"):
        observe("x", {"model": object()})


# ------------------------------------------------------------------------------------------- references that do not do


def test_a_missing_reference_stops_the_check_before_it_starts(tmp_path: Path) -> None:
    context = ObserverContext(tmp_path, "check", tmp_path / "absent.json")
    with pytest.raises(HashbenchError, match="nothing was compared"), context:
        pytest.fail("the region ran")
    assert current_observer() is None
    assert list(tmp_path.iterdir()) == []


def test_a_check_that_observes_nothing_is_no_match(pair: Pair) -> None:
    with pair.reference():
        observe("x", torch.ones(1))
        observe("y", torch.ones(1))
    with pair.check() as observer:
        assert observer.mismatches == {}  # nothing is missing yet
    assert kinds(observer) == ["missing x_1", "missing y_1"]
    assert list(observer.mismatches) == ["reference:x_1", "reference:y_1"]


def test_a_check_does_not_write_over_its_reference(pair: Pair) -> None:
    with pair.reference():
        observe("x", torch.ones(1))
    before = pair.path.read_bytes()
    with (
        pytest.raises(HashbenchError, match="written over its own reference"),
        ObserverContext(pair.folder, "reference", pair.folder / "." / "reference.json"),
    ):
        pass
    assert pair.path.read_bytes() == before


def test_raise_on_mismatch_raises_where_it_happens(pair: Pair) -> None:
    with pair.reference():
        observe("x", torch.ones(1))
        observe("y", torch.ones(1))
    with pair.check(raise_on_mismatch=True) as observer:
        with pytest.raises(RuntimeError, match=r"x_1 changed .*another content") as caught:
            observe("x", torch.zeros(1))
        assert isinstance(caught.value, MismatchError)
        with pytest.raises(MismatchError, match="z_1 inserted"):
            observe("z", torch.ones(1))
        observer.raise_on_mismatch = False
    missing = pair.check(raise_on_mismatch=True)
    with pytest.raises(MismatchError, match="y_1 missing"), missing:
        observe("x", torch.ones(1))
    with pair.check(raise_on_mismatch=True):
        observe("x", torch.ones(1))
        observe("y", torch.ones(1))


def test_raise_on_mismatch_raises_from_an_op_and_from_backward(pair: Pair) -> None:
    def run(exponent: int) -> None:
        x = torch.full((2,), 3.0, requires_grad=True)
        observe_grad("x", x)
        x.pow(exponent).sum().backward()

    def one_op(observer: Observer, op: Callable[[torch.Tensor], torch.Tensor]) -> None:
        observer.enable_mode()
        op(torch.ones(2))

    with pair.reference():
        run(2)
    with pytest.raises(MismatchError, match="x_grad_1 changed"), pair.check(raise_on_mismatch=True):
        run(3)
    with pair.reference() as observer:
        one_op(observer, torch.sin)
    inserted = pytest.raises(MismatchError, match=r"__torch_dispatch__cos.default_1 inserted")
    with inserted, pair.check(raise_on_mismatch=True) as observer:
        one_op(observer, torch.cos)
    assert torch.ones(2).cos().shape == (2,)


def test_the_report_names_the_environment_that_changed(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    with pair.reference():
        observe("x", torch.ones(1))
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        with caplog.at_level(logging.INFO), pair.check() as observer:
            observe("x", torch.zeros(1))
    finally:
        torch.set_num_threads(threads)
    changed = {change.key for change in observer.environment_changes}
    assert changed == {"settings.num_threads", "threads.intra_op"}
    assert observer.report_mismatches() is False
    assert "1 mismatch in 1 observations" in caplog.text
    assert f"threads.intra_op: {threads} in the reference, {threads + 1} now" in caplog.text


def test_a_report_without_a_reference_says_that_nothing_was_compared(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    with pair.reference() as observer:
        observe("x", torch.ones(1))
        assert observer.mismatches == {}
        observer.report_mismatches()
    assert "was not compared with any reference" in caplog.text


# ------------------------------------------------------------------------------------------ what is left behind


def test_an_error_in_the_region_leaves_no_reference_and_nothing_switched_on(pair: Pair) -> None:
    with pair.reference():
        observe("x", torch.ones(1))
    before = pair.path.read_bytes()
    weight = torch.ones(1, requires_grad=True)

    def fail(observer: Observer) -> None:
        observer.enable_mode()
        observe_grad("w", weight)
        observe_non_deterministic("noise", torch.ones(1))
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"), pair.reference() as observer:
        fail(observer)
    (weight * 2).sum().backward()
    assert pair.path.read_bytes() == before
    assert "w_grad_1" not in [one.name for one in observer.observations]
    assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == []
    assert current_observer() is None
    incomplete = json.loads((pair.folder / "reference.incomplete.json").read_bytes())
    assert incomplete["error"] == "ValueError: stop"
    with pytest.raises(HashbenchError, match="ended with an error"):
        ObserverContext(pair.folder, "check", pair.folder / "reference.incomplete.json").__enter__()


def test_an_error_where_nothing_can_be_written_is_still_the_regions_own(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(HashbenchError, match="the observations of this run are lost"),
        ObserverContext(tmp_path / "file", "run"),
    ):
        observe("x", torch.ones(1))
    with pytest.raises(ValueError, match="mine"), ObserverContext(tmp_path / "file", "run"):
        raise ValueError("mine")


def test_observing_changes_no_result_and_draws_no_random_numbers(pair: Pair) -> None:
    def run() -> torch.Tensor:
        x = torch.rand(3, requires_grad=True)
        observe("x", x)
        observe_grad("x", x)
        observe_non_deterministic("y", x * 2)
        F.dropout(x).sum().backward()
        assert x.grad is not None
        return torch.cat([x.detach(), x.grad, torch.rand(2)])

    torch.manual_seed(7)
    plain = run()
    for region in (pair.reference(), pair.check()):
        with region as observer:
            observer.enable_mode()
            assert torch.equal(run(), plain)


def test_without_an_observer_nothing_happens(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.ones(2, requires_grad=True)
    observe("x", object())
    observe_grad("x", x)
    assert observe_non_deterministic("x", x) is x
    assert observe_non_deterministic_grad("x", x) == "x_grad"
    with marking_non_deterministic():
        pass
    enable_hash_mode()
    disable_hash_mode()
    assert "the hash mode stays off" in caplog.text
    assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == []


def test_a_tensor_that_needs_no_gradient_is_said(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    with pair.reference():
        observe_grad("x", torch.ones(2))
        assert observe_non_deterministic_grad("y", torch.ones(2)) == "y_grad"
    assert "x needs no gradient" in caplog.text
    assert "y needs no gradient" in caplog.text


def test_of_nested_contexts_the_innermost_observes_and_each_is_entered_once(tmp_path: Path) -> None:
    context = ObserverContext(tmp_path, "outer")
    with context as outer:
        observe("a", torch.ones(1))
        with ObserverContext(tmp_path, "inner") as inner:
            observe("b", torch.ones(1))
            outer.observe("c", torch.ones(1))
        observe("d", torch.ones(1))
    assert [one.name for one in outer.observations] == ["a_1", "c_1", "d_1"]
    assert [one.name for one in inner.observations] == ["b_1"]
    with pytest.raises(HashbenchError, match="twice"):
        context.__enter__()


def test_two_hash_modes_at_once_are_refused_and_each_is_its_observers_own(tmp_path: Path) -> None:
    with ObserverContext(tmp_path, "outer") as outer:
        outer.enable_mode()
        with ObserverContext(tmp_path, "inner") as inner:
            torch.ones(1).sin()
            with pytest.raises(HashbenchError, match="cannot enter a trace inside another"):
                inner.enable_mode()
            outer.disable_mode()
            inner.enable_mode()
            torch.ones(1).cos()
    assert [one.record.op for one in outer.observations] == ["aten.ones.default", "aten.sin.default"]
    assert [one.record.op for one in inner.observations] == ["aten.ones.default", "aten.cos.default"]


def test_other_threads_have_no_observer_but_those_of_autograd_do(pair: Pair) -> None:
    seen: list[Observer | None] = []

    def other(*, context: contextvars.Context | None) -> None:
        if context is not None:  # as torch does for the threads that run the backward of a GPU
            torch._C._stash_obj_in_tls("context", context)
        seen.append(current_observer())
        if context is not None:
            torch._C._remove_obj_from_tls("context")

    with pair.reference() as observer:
        for context in (None, contextvars.copy_context()):
            thread = threading.Thread(target=other, kwargs={"context": context})
            thread.start()
            thread.join()
    assert seen == [None, observer]
