"""Whose steps are recorded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hashbench.extensions.watch.optimizers import WatchedOptimizers, _is_in_a_step
from hashbench.extensions.watch.tensors import ModelTensors


class Wrapping(torch.optim.SGD):
    """An optimizer around another one of the same parameters, as Lookahead and SAM are."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups[0]["params"], lr=0.1)
        self.base = base

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)


def known(model: torch.nn.Module, *given: torch.optim.Optimizer) -> tuple[WatchedOptimizers, ModelTensors]:
    tensors = ModelTensors({"": model})
    tensors.look_up()
    return WatchedOptimizers(given), tensors


def test_an_optimizer_that_nobody_named_is_met_where_it_steps_the_model() -> None:
    model, other = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    named, own, foreign = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, model, other))
    optimizers, tensors = known(model, named)
    optimizers.expect(tensors)
    assert optimizers.owner(0) is named
    met, changed = optimizers.meet(own, tensors)
    assert met is not None
    assert changed
    assert met.order == [[0, 1]]
    assert optimizers.owner(0) is own
    assert optimizers.meet(own, tensors) == (met, False)
    assert optimizers.meet(foreign, tensors) == (None, False)


def test_groups_are_looked_at_anew() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    optimizers, tensors = known(model)
    assert optimizers.meet(optimizer, tensors)[1]
    optimizer.add_param_group({"params": [model[1].bias]})
    met, changed = optimizers.meet(optimizer, tensors)
    assert met is not None
    assert (met.order, changed) == ([[0, 1], [3]], True)
    optimizer.param_groups[1]["params"][:] = [model[1].weight]
    met, changed = optimizers.meet(optimizer, tensors)
    assert met is not None
    assert (met.order, changed) == ([[0, 1], [2]], True)


@pytest.mark.parametrize(
    ("given", "counted"),
    [((), ["outer"]), (("outer",), ["outer"]), (("inner",), ["inner"]), (("inner", "outer"), ["outer"])],
)
def test_of_nested_steps_one_counts(given: tuple[str, ...], counted: list[str]) -> None:
    model = torch.nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    both = {"inner": inner, "outer": Wrapping(inner)}
    optimizers, _ = known(model, *(both[name] for name in given))
    ended = []
    for name, one in both.items():
        one.register_step_pre_hook(lambda of, *_: (optimizers.begin_step(of), None)[1])
        one.register_step_post_hook(lambda of, *_, name=name: ended.append(name) if optimizers.end_step(of) else None)
    both["outer"].step()
    assert ended == counted


def test_a_step_that_raised_is_over() -> None:
    """Torch calls no hook then. Whether a step is under way is seen on the stack, in a frame of torch's optimizer."""

    class Raising(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:  # noqa: ARG002
            found.append(_is_in_a_step(self))
            raise ZeroDivisionError

    found: list[bool] = []
    parameters = [torch.nn.Parameter(torch.ones(1))]
    failing, optimizer = Raising(parameters, lr=0.1), torch.optim.SGD(parameters, lr=0.1)
    optimizers = WatchedOptimizers([])
    assert optimizers.begin_step(failing)
    with pytest.raises(ZeroDivisionError):
        failing.step()
    assert found == [True]
    assert optimizers.begin_step(optimizer)
    assert optimizers.end_step(optimizer)
