"""Nodes in Python: numbers of records and leaves, names of tensors, and marks of one trace alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hashbench.core.trace.module_paths import ModulePaths
from hashbench.core.trace.nodes import UNNAMED, UNNAMED_PARAMETER, CallPlace, PythonNodes, own_mark
from hashbench.core.trace.storage_writers import set_mark


def test_records_count_up_and_leaves_down() -> None:
    nodes = PythonNodes(ModulePaths())
    told: list[tuple[int, Any]] = []

    def describe(number: int, views: Any) -> Any:
        told.append((number, views))
        return "other", "", None, 0, None

    assert [nodes.next_record() for _ in range(3)] == [0, 1, 2]
    first = nodes.add_leaf(torch.ones(1), None, whole=False, describe=describe)
    second = nodes.append_leaf(("input", "0", (torch.float32, (1,), None, 7), 0, None))
    third = nodes.add_leaf(torch.ones(1), {}, whole=False, describe=describe)
    assert ((first, second, third), told) == ((-1, -2, -3), [(-1, None), (-3, {})])
    assert (nodes.leaf_count(), nodes.record_count()) == (3, 0)  # a call that raised leaves no record


def test_marks_of_another_trace_are_unknown() -> None:
    nodes, others = PythonNodes(ModulePaths()), PythonNodes(ModulePaths())
    tensor = torch.ones(2)
    set_mark(tensor, (nodes.token, 3, None))
    assert own_mark(tensor.view(2, 1), nodes.token) == (nodes.token, 3, None)
    assert (nodes.is_known(tensor), others.is_known(tensor)) == (True, False)
    assert own_mark(tensor, others.token) is None


def test_state_of_a_model_has_numbers_while_it_is_its_state() -> None:
    modules, model = ModulePaths(), nn.BatchNorm1d(2)
    nodes, weight = PythonNodes(modules), model.weight
    assert nodes.state_of(weight) == UNNAMED_PARAMETER
    nodes.name(modules.register(model))
    assert [modules.state(nodes.state_of(tensor))[2] for tensor in (weight, model.running_mean)] == [
        "weight",
        "running_mean",
    ]
    model.weight = nn.Parameter(torch.ones(2))
    assert [nodes.state_of(tensor) for tensor in (weight, torch.ones(2))] == [UNNAMED_PARAMETER, UNNAMED]


def test_place_of_a_call_follows_modules_and_iterations() -> None:
    modules = ModulePaths()
    nodes = PythonNodes(modules)
    assert nodes.place() == CallPlace("", None, optimizing=False)
    modules.begin(3)
    assert nodes.place() == CallPlace("", 3, optimizing=False)
