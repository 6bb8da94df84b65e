"""Observing one run and checking another against it, with real models, optimizers and backward passes."""

from __future__ import annotations

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

from hashbench.core.errors import HashbenchError
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
from hashbench.tools.observer import observer as observer_module

ENTROPY = torch.Generator()


def noise_like(tensor: torch.Tensor) -> torch.Tensor:
    """Another one in every run: its generator is never put back."""
    return torch.rand(tensor.shape, generator=ENTROPY)


class Pair:
    """A reference run and checks against it, in one folder. Each starts from the same seed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "reference.json"
        self.checks = 0
        self.results: list[Any] = []

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

    def of(self, run: Callable[[], Any], again: Callable[[], Any] | None = None, *, mode: bool = False) -> Observer:
        """The observer of a check of ``again`` (of ``run`` itself) against ``run``; with ``mode`` all ops are
        observed. What both returned is in ``results``."""
        self.results = []
        for region, function in ((self.reference(), run), (self.check(), again or run)):
            with region as observer:
                if mode:
                    observer.enable_mode()
                self.results.append(function())
        return observer


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


IMAGES = torch.ones(2, 3, 8, 8)


def observed(folder: Path, images: torch.Tensor = IMAGES, *, mode: bool = False) -> dict[str, str]:
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
    first, second, other = observed(tmp_path), observed(tmp_path), observed(tmp_path, IMAGES + 1)
    names = ["input_1", "conv_weight_1", "conv_output_1", "after_dropout_1", "after_noise_1", "output_1"]
    assert list(first) == names
    assert [name for name in names if first[name] != second[name]] == ["after_noise_1", "output_1"]
    assert [name for name in names if first[name] == other[name]] == ["conv_weight_1"]


def test_under_the_mode_every_op_is_observed_by_name_and_number(tmp_path: Path) -> None:
    names = list(observed(tmp_path, mode=True))
    assert names[:3] == ["input_1", "conv_weight_1", "__torch_dispatch__convolution.default_1"]
    assert names[names.index("conv_output_1") - 1].startswith("__torch_dispatch__")
    assert "__torch_dispatch__bernoulli_.float_1" in names
    assert names[-2:] == ["__torch_dispatch__addmm.default_1", "output_1"]


def test_a_check_puts_back_what_was_marked_and_matches(pair: Pair) -> None:
    observer = pair.of(lambda: Net()(IMAGES))
    assert observer.mismatches == {}
    assert torch.equal(*pair.results)
    put_back = [(value.name, value.differed) for value in observer.put_back]
    assert put_back == [("after_dropout_1", False), ("after_noise_1", True)]
    assert not torch.equal(pair.results[0], Net()(IMAGES))


def test_gradients_are_observed(pair: Pair) -> None:
    def run(scale: float = 1.0) -> None:
        layer = nn.Linear(3, 2)
        observe_grad("weight", layer.weight)
        layer(torch.ones(1, 3) * scale).sum().backward()

    same, other = pair.of(run), pair.of(run, lambda: run(1.5))
    assert same.mismatches == {}
    assert [(one.name, one.record.phase) for one in same.observations] == [("weight_grad_1", "backward")]
    assert kinds(other) == ["changed weight_grad_1"]
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

    observer = pair.of(run)
    assert [one.name for one in observer.observations] == ["inside_1", "q_grad_1", "weight_grad_1"]
    assert observer.mismatches == {}
    assert torch.equal(*pair.results)
    assert kinds(pair.of(run, lambda: run(mark=False))) == ["missing q_grad_1", "changed weight_grad_1"]


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
    assert kinds(pair.of(step(optimizer, **options), mode=True)) == []
    found = pair.of(step(optimizer, **options), step(optimizer, **{**options, "lr": 0.2}), mode=True).mismatches
    assert next(iter(found.values())).phase == "optimizer"
    assert "loss_2" in found
    assert "loss_1" not in found


def test_one_more_op_is_one_mismatch(pair: Pair) -> None:
    def run(*, extra: bool = False) -> None:
        x = torch.ones(3).sin().sin()
        if extra:
            x.cos()
        observe("x", x.sin().sin())

    longer = pair.of(run, lambda: run(extra=True), mode=True)
    assert kinds(longer) == ["inserted __torch_dispatch__cos.default_1"]
    [mismatch] = longer.mismatches.values()
    assert mismatch.op == "aten.cos.default"
    assert mismatch.source.startswith("test_observer.py:")
    shorter = pair.of(lambda: run(extra=True), run, mode=True)
    assert kinds(shorter) == ["missing __torch_dispatch__cos.default_1"]


def test_the_place_of_a_mismatch_is_its_module_and_line(pair: Pair) -> None:
    x = torch.ones(3, 3)
    assert kinds(pair.of(lambda: x[0], lambda: x[1], mode=True)) == ["changed __torch_dispatch__select.int_1"]

    def run(bias: float) -> None:
        model = nn.Sequential(nn.Identity(), nn.Sequential(nn.ReLU(), nn.Softplus(beta=bias)))
        model(torch.ones(2))

    [mismatch] = pair.of(lambda: run(1.0), lambda: run(2.0), mode=True).mismatches.values()
    assert (mismatch.kind, mismatch.op, mismatch.module) == (Kind.CHANGED, "aten.softplus.default", "Sequential.1.1")
    assert "its arguments were (1.0, 20.0), are (2.0, 20.0)" in mismatch.detail
    assert mismatch.current != mismatch.reference


# -------------------------------------------------------------------------------------------------- putting back


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

    assert pair.of(run).mismatches == {}
    (value, view, _), (value_again, view_again, gradient) = pair.results
    assert torch.equal(value, value_again)
    assert torch.equal(view, view_again)
    assert gradient.count_nonzero() == 3


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

    observer = pair.of(lambda: run(lambda x: x * noise_like(torch.ones(2, 3))), lambda: run(overlapping), mode=True)
    assert kinds(observer) == expected
    (first, _), (second, gradient) = pair.results
    assert torch.equal(first, second)
    assert gradient.count_nonzero() == 3


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
        observer = pair.of(lambda: observe_non_deterministic("x", make()))
    assert observer.mismatches == {}
    assert len(observer.put_back) == 1
    assert len(set(map(repr, pair.results))) == 1


MISFITS: dict[str, tuple[Callable[[], Any], str]] = {
    "shape": (lambda: torch.rand(2, 3), "the reference saved float32[3, 2], here is float32[2, 3]"),
    "dtype": (lambda: torch.rand(3, 2).double(), "the reference saved float32[3, 2], here is float64[3, 2]"),
    "another number": (
        lambda: [torch.rand(3, 2)] * 2, "the reference saved float32[3, 2], here is float32[3, 2], float32[3, 2]"),
    "none": (lambda: 3, "this run has no tensor here, the reference saved some"),
}  # fmt: skip


@pytest.mark.parametrize(("now", "detail"), MISFITS.values(), ids=MISFITS)
def test_what_does_not_fit_is_said_and_left_alone(pair: Pair, now: Callable[[], Any], detail: str) -> None:
    def again() -> None:
        value = now()
        before = repr(value)
        assert repr(observe_non_deterministic("x", value)) == before
        observe_non_deterministic("never saved", torch.ones(2))

    observer = pair.of(lambda: observe_non_deterministic("x", torch.rand(3, 2)), again)
    assert kinds(observer) == ["not put back x_1", "not put back never saved_1"]
    details = [mismatch.detail for mismatch in observer.mismatches.values()]
    assert details == [detail, "the reference saved no value for it"]
    assert observer.put_back == []


@dataclass
class Output:
    boxes: torch.Tensor
    count: int


@pytest.mark.parametrize(
    ("look", "said"),
    [
        (lambda: observe_non_deterministic("x", Output(torch.ones(2), 3)), "cannot observe x: a tensor in it cannot"),
        (lambda: observe("x", {"model": object()}), "cannot observe x_1: its bits cannot be compared"),
    ],
)
def test_what_cannot_be_observed_is_refused_not_passed_over(pair: Pair, look: Callable[[], Any], said: str) -> None:
    with pair.reference(), pytest.raises(HashbenchError, match=said):
        look()


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
    observer = pair.of(run, mode=True)
    assert observer.mismatches == {}
    assert all(map(torch.equal, *pair.results))
    assert any(value.differed for value in observer.put_back)
    if run is in_place:
        names = [value.name.split("/")[-1] for value in observer.put_back]
        assert names == ["aten.uniform_.default#0", "aten._foreach_add_.List#0"]


def test_a_region_ends_and_an_op_more_before_it_moves_no_value_to_another_op(pair: Pair) -> None:
    def run(*, extra: bool = False) -> torch.Tensor:
        if extra:
            torch.ones(5).cos()
        with marking_non_deterministic():
            put_back = noise_like(torch.ones(3))
        noise_like(torch.ones(3))
        return put_back

    assert kinds(pair.of(run, mode=True)) == ["changed __torch_dispatch__rand.generator_2"]
    observer = pair.of(run, lambda: run(extra=True), mode=True)
    ops = {mismatch.op for mismatch in observer.mismatches.values()}
    assert ops == {"aten.ones.default", "aten.cos.default", "aten.rand.generator"}
    assert torch.equal(*pair.results)


def test_a_region_without_the_mode_says_that_it_does_nothing(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    with pair.reference(), marking_non_deterministic():
        torch.ones(2) + 1
    assert "no op was marked as nondeterministic" in caplog.text


# ------------------------------------------------------------------------------------------------ values of any kind


def test_any_nesting_of_tensors_and_plain_values_is_observed(pair: Pair) -> None:
    def run(*, count: int = 3, key: str = "out") -> None:
        nested = [Output(torch.ones(2), count), None, "text", 0.1, ()]
        observe("x", {key: nested, "mask": torch.eye(2).to_sparse()})

    assert pair.of(run).mismatches == {}
    assert kinds(pair.of(run, lambda: run(count=4))) == ["changed x_1"]
    renamed = pair.of(run, lambda: run(key="outputs"))
    assert "its parts were (out.0.boxes" in renamed.mismatches["x_1"].detail


# ------------------------------------------------------------------------------------------- references that do not do


def test_a_missing_reference_stops_the_check_before_it_starts(tmp_path: Path) -> None:
    context = ObserverContext(tmp_path, "check", tmp_path / "absent.json")
    with pytest.raises(HashbenchError, match="nothing was compared"), context:
        pytest.fail("the region ran")
    assert current_observer() is None
    assert list(tmp_path.iterdir()) == []


def observe_both() -> None:
    observe("x", torch.ones(1))
    observe("y", torch.ones(1))


def test_a_check_that_observes_nothing_is_no_match(pair: Pair) -> None:
    observer = pair.of(observe_both, lambda: None)
    assert kinds(observer) == ["missing x_1", "missing y_1"]
    assert list(observer.mismatches) == ["reference:x_1", "reference:y_1"]


def test_a_check_does_not_write_over_its_reference(pair: Pair) -> None:
    with pair.reference():
        observe_both()
    before = pair.path.read_bytes()
    context = ObserverContext(pair.folder, "reference", pair.folder / "." / "reference.json")
    with pytest.raises(HashbenchError, match="written over its own reference"), context:
        pass
    assert pair.path.read_bytes() == before


def test_raise_on_mismatch_raises_where_it_happens(pair: Pair) -> None:
    with pair.reference():
        observe_both()
    with pair.check(raise_on_mismatch=True) as observer:
        assert observer.mismatches == {}  # nothing is missing yet
        with pytest.raises(RuntimeError, match=r"x_1 changed .*different content") as caught:
            observe("x", torch.zeros(1))
        assert isinstance(caught.value, MismatchError)
        with pytest.raises(MismatchError, match="z_1 inserted"):
            observe("z", torch.ones(1))
        observer.raise_on_mismatch = False
    missing = pair.check(raise_on_mismatch=True)
    with pytest.raises(MismatchError, match="y_1 missing"), missing:
        observe("x", torch.ones(1))
    with pair.check(raise_on_mismatch=True):
        observe_both()


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


@pytest.mark.parametrize("recorded", ["native", None])
def test_a_reference_of_another_tracer_is_refused(
    pair: Pair, recorded: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = observer_module.collect

    def collected(device: str, *, tracer: str) -> dict[str, Any]:
        environment = told(device, tracer=tracer)
        del environment["tracer"]
        return environment if recorded is None else {**environment, "tracer": recorded}

    with monkeypatch.context() as patch:
        patch.setattr(observer_module, "collect", collected)
        with pair.reference():
            observe("x", torch.ones(1))
    named = recorded or "unknown"
    with pytest.raises(HashbenchError, match=rf"different tracers: the reference reference is {named}.* is python"):
        pair.check().__enter__()


def test_the_report_names_the_environment_that_changed(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    threads = torch.get_num_threads()

    try:
        with caplog.at_level(logging.INFO), pair.reference() as reference:
            observe("x", torch.ones(1))
            reference.report_mismatches()
        torch.set_num_threads(threads + 1)
        with pair.check() as observer:
            observe("x", torch.zeros(1))
    finally:
        torch.set_num_threads(threads)
    assert reference.mismatches == {}
    assert "reference was not compared with any reference" in caplog.text
    changed = {change.key for change in observer.environment_changes}
    assert changed == {"settings.num_threads", "threads.intra_op"}
    assert observer.report_mismatches() is False
    assert "1 mismatch in 1 observations" in caplog.text
    assert f"threads.intra_op: {threads} in the reference, {threads + 1} now" in caplog.text


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
    incomplete = pair.folder / "reference.incomplete.json"
    assert json.loads(incomplete.read_bytes())["error"] == "ValueError: stop"
    with pytest.raises(HashbenchError, match="ended with an error"):
        ObserverContext(pair.folder, "check", incomplete).__enter__()


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
            with pytest.raises(HashbenchError, match="cannot nest traces"):
                inner.enable_mode()
            outer.disable_mode()
            inner.enable_mode()
            torch.ones(1).cos()
    assert [one.record.op for one in outer.observations] == ["aten.ones.default", "aten.sin.default"]
    assert [one.record.op for one in inner.observations] == ["aten.ones.default", "aten.cos.default"]


def test_other_threads_have_no_observer_but_those_of_autograd_do(pair: Pair) -> None:
    seen: dict[int, Observer | None] = {}

    class Nested(torch.autograd.Function):
        """Its backward runs another: torch moves such a chain to a thread of its own after 60 of them."""

        @staticmethod
        def forward(context: Any, x: torch.Tensor, below: int) -> torch.Tensor:
            context.below = below
            return x.clone()

        @staticmethod
        def backward(context: Any, *grads: torch.Tensor) -> Any:
            seen[threading.get_ident()] = current_observer()
            if context.below:
                run(context.below - 1)
            return grads[0], None

    def run(below: int) -> None:
        with torch.enable_grad():
            Nested.apply(torch.ones(1, requires_grad=True), below).backward()

    other: list[Observer | None] = []
    with pair.reference() as observer:
        run(100)
        thread = threading.Thread(target=lambda: other.append(current_observer()))
        thread.start()
        thread.join()
    assert other == [None]
    assert len(seen) > 1, "torch ran the whole chain in this thread: the test shows nothing"
    assert set(seen.values()) == {observer}


def test_torch_keeps_the_observer_of_the_innermost_context_and_none_after_the_last(tmp_path: Path) -> None:
    key = "hashbench_observer"
    with ObserverContext(tmp_path, "outer") as outer:
        assert torch._C._get_obj_in_tls(key) is outer
        with ObserverContext(tmp_path, "inner") as inner:
            assert torch._C._get_obj_in_tls(key) is inner
        assert torch._C._get_obj_in_tls(key) is outer
    assert torch._C._get_obj_in_tls(key) is None
