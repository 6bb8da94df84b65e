"""Whose steps are recorded."""

from __future__ import annotations

import torch

from hashbench.extensions.watch.optimizers import WatchedOptimizers
from hashbench.extensions.watch.tensors import ModelTensors


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


def test_an_optimizer_that_the_program_named_precedes_one_around_it() -> None:
    model = torch.nn.Linear(2, 1)
    named, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    optimizers, _ = known(model, named)
    assert optimizers.precedes(named, other)
    assert not optimizers.precedes(other, named)
    assert not optimizers.precedes(named, named)
