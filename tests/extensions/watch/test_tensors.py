"""Tensors of a model are looked up anew where it holds others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn.utils import prune

from hashbench.extensions.watch.tensors import ModelTensors


def model() -> torch.nn.Sequential:
    made = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    made.register_buffer("mean", torch.zeros(2))
    return made


def _tie(of: torch.nn.Sequential) -> None:
    of[1].bias = of[0].bias


def _prune(of: torch.nn.Sequential) -> None:
    prune.l1_unstructured(of[0], "weight", amount=1)


NAMES = ["0.weight", "0.bias", "1.weight", "1.bias"]

CHANGES: dict[str, tuple[Callable[[torch.nn.Sequential], object], set[str], set[str]]] = {
    "a buffer is assigned": (lambda of: setattr(of, "mean", torch.ones(2)), set(), set()),
    "a parameter is replaced": (lambda of: setattr(of[0], "bias", torch.nn.Parameter(torch.ones(2))), set(), set()),
    "all are": (lambda of: of.load_state_dict(model().state_dict(), assign=True), set(), set()),
    "a module is added": (lambda of: of.append(torch.nn.Linear(1, 1)), {"2.weight", "2.bias"}, set()),
    "a module is removed": (lambda of: of.pop(1), set(), {"1.weight", "1.bias"}),
    "a parameter is removed": (lambda of: delattr(of[0], "bias"), set(), {"0.bias"}),
    "a parameter is tied": (_tie, set(), {"1.bias"}),
    "a parameter is pruned": (_prune, {"0.weight_orig"}, {"0.weight"}),
    "a table of a module is": (
        lambda of: of[0].__dict__.update(_parameters={"new": of[0].weight}),
        {"0.new"},
        {"0.weight", "0.bias"},
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_name_keeps_its_number(change: str) -> None:
    made = model()
    tensors = ModelTensors({"": made})
    assert tensors.look_up()
    assert not tensors.look_up()
    assert tensors.parameters.names == NAMES
    change_it, joined, gone = CHANGES[change]
    change_it(made)
    assert tensors.look_up()
    assert tensors.parameters.names[:4] == NAMES
    assert set(tensors.parameters.names[4:]) == joined
    held = dict(made.named_parameters())
    assert dict(tensors.parameters.present()).keys() == {*NAMES, *joined} - gone
    assert all(held[name] is tensor for name, tensor in tensors.parameters.present())
    assert all(dict(made.named_buffers())[name] is tensor for name, tensor in tensors.buffers.present())
    assert not tensors.look_up()


def test_what_gets_its_size_later_is_looked_up_again() -> None:
    made = torch.nn.Sequential(torch.nn.LazyLinear(3))
    tensors = ModelTensors({"": made})
    assert tensors.look_up()
    assert dict(tensors.parameters.sizes()) == {"0.weight": 0, "0.bias": 0}
    made(torch.ones(1, 2))
    assert tensors.look_up()
    assert dict(tensors.parameters.sizes()) == {"0.weight": 24, "0.bias": 12}
    assert not tensors.look_up()


def test_parameters_that_a_call_puts_there_are_told_from_the_models_own() -> None:
    made = model()
    tensors = ModelTensors({"": made})
    found = []
    made[0].register_forward_pre_hook(lambda *_: found.append((tensors.look_up(), tensors.are_swapped)))
    fast = {name: tensor * 2 for name, tensor in made.named_parameters()}
    torch.func.functional_call(made, fast, (torch.ones(1, 2),))
    made(torch.ones(1, 2))
    assert found == [(True, True), (True, False)]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_scripted_model_is_listed_each_time() -> None:
    tensors = ModelTensors({"": torch.jit.script(torch.nn.Sequential(torch.nn.Linear(2, 1)))})
    assert tensors.look_up()
    index = tensors.index
    assert tensors.look_up()
    assert (tensors.parameters.names, tensors.index) == (["0.weight", "0.bias"], index)
