"""Which custom ops do what their schema or their fake implementation does not say?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hashbench.extensions.compiled.ladder import climb
from hashbench.extensions.compiled.mutations import EffectKind, undeclared_effects, wrong_fakes
from tests.extensions.compiled.steps import Norms, ZeroGradient, made, step_of

SPACE = "hashbench_test_effects"


def _bump(x: torch.Tensor) -> torch.Tensor:
    x.add_(1.0)
    return x.sum()


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def _transposed(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).t().contiguous().t()


@pytest.fixture(scope="module", autouse=True)
def _ops() -> Iterator[None]:
    library = torch.library.Library(SPACE, "DEF")
    kernels: dict[str, tuple[str, Any, Any]] = {
        "bump_undeclared": ("(Tensor x) -> Tensor", _bump, lambda x: x.new_empty(())),
        "bump_declared": ("(Tensor(a!) x) -> Tensor", _bump, lambda x: x.new_empty(())),
        "same_undeclared": ("(Tensor x) -> Tensor", _same, torch.empty_like),
        "same_declared": ("(Tensor(a) x) -> Tensor(a)", _same, lambda x: x.view(x.shape)),
        "fresh": ("(Tensor x, Tensor[] others) -> Tensor", lambda x, _: x.clone(), lambda x, _: x.clone()),
        "strides_wrong": ("(Tensor x) -> Tensor", _transposed, torch.empty_like),
        "strides_right": ("(Tensor x) -> Tensor", _transposed, lambda x: x.new_empty(x.shape[::-1]).t()),
        "dtype_wrong": ("(Tensor x) -> Tensor", lambda x: x.double() * 2, lambda x: x.new_empty(x.shape)),
        "shape_wrong": ("(Tensor x) -> Tensor", lambda x: x[:1].clone(), lambda x: x.new_empty(x.shape)),
    }
    for name, (schema, kernel, fake) in kernels.items():
        library.define(f"{name}{schema}")
        library.impl(name, kernel, "CPU")
        library.impl(name, fake, "Meta")
    yield
    library._destroy()
    torch._dynamo.reset()


def op(name: str) -> Any:
    return getattr(getattr(torch.ops, SPACE), name)


class Calls(torch.nn.Module):
    """Calls an op on an intermediate result, in a module called ``calls``."""

    def __init__(self, name: str, *, uses: bool = False, more: bool = False) -> None:
        super().__init__()
        self.calls = _Called(name, uses=uses, more=more)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.calls(x * 2) * 3


class _Called(torch.nn.Module):
    def __init__(self, name: str, *, uses: bool, more: bool) -> None:
        super().__init__()
        self.name, self.uses, self.more = name, uses, more

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        result = op(self.name)(y, [y, y]) if self.more else op(self.name)(y)
        return y + result if self.uses else y + 1


def inference(model: torch.nn.Module, *shape: int) -> Any:
    return step_of(model, [torch.rand(shape or (2, 3))], training=False)


@pytest.mark.slow
def test_an_undeclared_mutation_is_found() -> None:
    """AOTAutograd drops the op, whose result nothing reads, and with it what it writes."""
    ladder = climb(inference(Calls("bump_undeclared")))
    assert (ladder.stage, [rung.error == 0 for rung in ladder.rungs]) == ("aot_autograd", [True, False])
    (found,) = undeclared_effects(inference(Calls("bump_undeclared"))).wrong
    assert (found.op, found.argument, found.effect) == (f"{SPACE}.bump_undeclared.default", "x", EffectKind.WRITES)
    assert (found.facts.module, found.backward) == ("calls", False)
    assert "test_mutations.py" in found.facts.source
    assert "op(self.name)(y)" in found.facts.source


@pytest.mark.slow
def test_a_declared_mutation_is_right() -> None:
    ladder = climb(inference(Calls("bump_declared")))
    assert (ladder.stage, [rung.error for rung in ladder.rungs]) == ("", [0.0, 0.0, 0.0])
    effects = undeclared_effects(inference(Calls("bump_declared")))
    assert (effects.wrong, effects.calls, effects.raised) == ((), 2, ())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "found"),
    [
        pytest.param("same_undeclared", [("x", EffectKind.RETURNS)], id="undeclared"),
        pytest.param("same_declared", [], id="declared"),
    ],
)
def test_an_alias(name: str, found: list[tuple[str, EffectKind]]) -> None:
    effects = undeclared_effects(inference(Calls(name, uses=True)))
    assert [(effect.argument, effect.effect) for effect in effects.wrong] == found
    assert effects.raised == ()


@pytest.mark.slow
def test_lists_of_tensors_are_read_only() -> None:
    effects = undeclared_effects(inference(Calls("fresh", uses=True, more=True)))
    assert (effects.wrong, effects.calls) == ((), 2)


@pytest.mark.slow
def test_a_backward_pass_is_seen() -> None:
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return x * 2

        @staticmethod
        def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            mine = gradient * 2
            op("bump_undeclared")(mine)
            return mine

    class Model(Norms):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(Scale.apply(self.norm(self.inner(x))[:, :8]))

    effects = undeclared_effects(step_of(made(Model), [torch.randn(2, 8)]))
    (found,) = effects.wrong
    assert (found.op, found.backward) == (f"{SPACE}.bump_undeclared.default", True)
    assert "test_mutations.py" in found.facts.source


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "what"),
    [
        pytest.param("strides_wrong", ["stride"], id="strides"),
        pytest.param("strides_right", [], id="right strides"),
        pytest.param("dtype_wrong", ["dtype"], id="dtype"),
        pytest.param("shape_wrong", ["shape"], id="shape"),
    ],
)
def test_a_wrong_fake_implementation(name: str, what: list[str]) -> None:
    fakes = wrong_fakes(inference(Calls(name, uses=True), 3, 4))
    custom = [fake for fake in fakes.wrong if fake.custom]
    assert [(fake.op, fake.what) for fake in custom] == [(f"{SPACE}.{name}.default", one) for one in what]
    for fake in custom:
        assert fake.fake != fake.real
        assert fake.facts.module == "calls"


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "shape"), [(Norms, (6, 8)), (ZeroGradient, (2, 3, 8, 8))])
def test_a_right_model_is_blamed_for_nothing(kind: Any, shape: tuple[int, ...]) -> None:
    step = step_of(made(kind), [torch.randn(shape)])
    fakes = wrong_fakes(step)
    assert (fakes.wrong, fakes.raised) == ((), ())
    assert fakes.calls >= 9
    effects = undeclared_effects(step)
    assert (effects.wrong, effects.raised, effects.calls) == ((), (), 0)


@pytest.mark.slow
def test_a_run_that_ends_early_keeps_what_it_saw() -> None:
    def run(backend: Any, dtype: torch.dtype | None) -> Any:
        inference(Calls("strides_wrong", uses=True), 3, 4)(backend, dtype)
        raise RuntimeError("later")

    fakes = wrong_fakes(run)
    assert [fake.what for fake in fakes.wrong if fake.custom] == ["stride"]
    assert [raised.exception for raised in fakes.raised] == ["RuntimeError: later"]
