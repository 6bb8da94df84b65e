"""Calls of a module are reported, and nothing hangs on it."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from typing import Any

import pytest
import torch

from hashbench.extensions.watch.calls import SeenCalls


class Plain(torch.nn.Module):
    def forward(self, x: torch.Tensor, *, times: float = 1.0) -> torch.Tensor:
        return x * times


class Calling(Plain):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs) + 1


class Heir(Calling):
    pass


@pytest.mark.parametrize(("kind", "result"), [(Plain, 2.0), (Calling, 3.0), (Heir, 3.0)])
def test_calls_are_reported_and_the_class_is_as_it_was_afterwards(kind: type[Plain], result: float) -> None:
    before = {one: vars(one).get("__call__") for one in kind.__mro__}
    told: list[Any] = []
    module = kind()
    seen = SeenCalls(module, lambda *given: told.append(given))
    x = torch.ones(1)
    assert module(x, times=2.0).item() == result
    assert [one[1:] for one in told] == [((x,), {"times": 2.0})]
    kind()(x)
    assert len(told) == 1
    seen.remove()
    module(x)
    assert len(told) == 1
    assert {one: vars(one).get("__call__") for one in kind.__mro__} == before


def test_a_signature_is_what_it_was() -> None:
    module = Calling()
    before = inspect.signature(module)
    seen = SeenCalls(module, lambda *_: None)
    assert inspect.signature(module) == before
    seen.remove()


@pytest.mark.parametrize("first", [0, 1])
def test_several_listen_and_end_in_any_order(first: int) -> None:
    told: list[int] = []
    module = Plain()
    seen = [SeenCalls(module, lambda *_, number=number: told.append(number)) for number in range(2)]
    module(torch.ones(1))
    seen[first].remove()
    module(torch.ones(1))
    seen[1 - first].remove()
    module(torch.ones(1))
    assert told == [0, 1, 1 - first]
    assert "__call__" not in vars(Plain)


def test_a_function_that_the_program_put_there_stays() -> None:
    told: list[int] = []
    module = Calling()
    own = vars(Calling)["__call__"]
    seen = SeenCalls(module, lambda *_: told.append(1))
    ours = vars(Calling)["__call__"]
    try:
        Calling.__call__ = lambda self, x: ours(self, x)  # type: ignore[method-assign]
        seen.remove()
        assert module(torch.ones(1)).item() == 2
        assert not told
    finally:
        Calling.__call__ = own  # type: ignore[method-assign]


COPIES = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "its dict": lambda module: _with_dict_of(module),
}


def _with_dict_of(module: torch.nn.Module) -> torch.nn.Module:
    made = type(module).__new__(type(module))
    made.__dict__ = module.__dict__.copy()
    return made


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_is_not_listened_to(way: str) -> None:
    told: list[int] = []
    module = torch.nn.Sequential(torch.nn.Linear(2, 1))
    before = pickle.dumps(module)
    seen = SeenCalls(module, lambda *_: told.append(1))
    assert pickle.dumps(module) == before
    COPIES[way](module)(torch.ones(1, 2))
    assert not told
    seen.remove()


def test_whom_to_call_is_not_pickled_with_a_class_of_a_script() -> None:
    """``cloudpickle`` pickles such a class with the functions in it, and what these refer to."""
    module = Plain()
    seen = SeenCalls(module, lambda *_: pytest.fail("a copy is reported"))
    (listeners,) = (cell.cell_contents for cell in vars(Plain)["__call__"].__closure__ if _tells(cell.cell_contents))
    seen.remove()
    pickle.loads(pickle.dumps(listeners)).call(module, (), {})


def _tells(value: object) -> bool:
    return hasattr(value, "call")


def test_a_module_that_is_traced_to_a_graph_is_left_alone() -> None:
    """To check its graph, ``torch.jit.trace`` calls the module as well, without gradients."""
    told: list[bool] = []
    module = torch.nn.Sequential(torch.nn.Linear(2, 1))
    seen = SeenCalls(module, lambda *_: told.append(torch.is_grad_enabled()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("error", torch.jit.TracerWarning)
        torch.jit.trace(module, torch.ones(1, 2))
    inside = torch.fx.symbolic_trace(torch.nn.Sequential(module))
    assert [node.op for node in inside.graph.nodes] == ["placeholder", "call_module", "output"]
    seen.remove()
    assert not any(told)
