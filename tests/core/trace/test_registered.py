"""Registered inputs and parameters: which read has which name and digest."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hashbench import HashDebugTrace
from hashbench.core.trace.digest import untraced
from tests.core.trace.mode_helpers import value

pytestmark = pytest.mark.usefixtures("seeded", "each_tracer")


def test_leaf_written_before_its_first_read_has_was() -> None:
    x = torch.rand(4)
    before = value(x)
    trace = HashDebugTrace(inputs=(x,))
    x.numpy()[0] = 5
    with trace:
        x + 1
    (leaf,) = trace.finish().leaves
    assert (leaf.initial, leaf.digest.value) == (before, value(x))


def at_the_address_of(storage: int) -> torch.Tensor:
    """A tensor that no recorded op has seen, at the address that a storage had, if one of many gets it."""
    made: list[torch.Tensor] = []
    with untraced():
        while len(made) < 1000:
            made.append(torch.from_numpy(np.full(4, 7.0)))
            if made[-1].untyped_storage()._cdata == storage:
                break
    return made[-1]


def gone(tensors: list[torch.Tensor]) -> int:
    """The address of the storage of the one tensor of a list, which is let go; ops follow that let go of more."""
    address = int(tensors.pop().untyped_storage()._cdata)
    for _ in range(64):
        torch.zeros(1)
    return address


def inputs_of(trace: HashDebugTrace) -> list[tuple[str, str]]:
    """Name, and content when it was named, of all inputs that were read."""
    return [(leaf.id, leaf.initial or leaf.digest.value) for leaf in trace.finish().leaves if leaf.kind == "input"]


def test_tensor_at_a_dead_inputs_address_is_not_it() -> None:
    inputs = [torch.rand(4)]
    before = value(inputs[0])
    with HashDebugTrace(inputs=inputs) as trace:
        inputs[0].sum()
        at_the_address_of(gone(inputs)).cos()
    assert inputs_of(trace) == [("input/0", before)]


def test_tensor_read_before_registration_is_not_the_input() -> None:
    others = [torch.from_numpy(np.ones(4))]
    with HashDebugTrace() as trace:
        others[0].sum()
        x = at_the_address_of(gone(others))
        trace.register_inputs([x])
        x.cos()
    assert [leaf.kind for leaf in trace.finish().leaves] == ["other", "input"]


def test_reregistered_input_keeps_what_was_read() -> None:
    x = torch.rand(4)
    before = value(x)
    with HashDebugTrace(inputs={"first": x}) as trace:
        x.sum()
        x.numpy()[0] = 5
        trace.register_inputs({"second": x})
        x.sum()
    assert inputs_of(trace) == [("input/first", before)]
