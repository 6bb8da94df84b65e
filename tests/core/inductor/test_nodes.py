"""What a node of a graph stands for: the op, module and line of the user's program."""

from __future__ import annotations

import functools
import operator
from pathlib import Path
from typing import Any

import pytest
import torch

from hashbench.core.inductor.nodes import NodeFacts, common, facts_of, module_path, source_line

LAYER = torch.nn.Linear
STACKS: dict[str, tuple[dict[str, tuple[str, Any]], str]] = {
    "no module": ({}, ""),
    "the root alone": ({"L['self']": ("L['self']", LAYER)}, "Linear"),
    "below the root": (
        {"L['self']": ("L['self']", LAYER), "L['self'].a": ("L['self'].a", LAYER)},
        "Linear.a",
    ),
    "the root is not in it": ({"L['self'].a": ("L['self'].a", LAYER)}, "a"),
    "the class as text": ({"L['self']": ("L['self']", "zoo.nets.Net")}, "Net"),
    "in a list": (
        {"L['self']": ("L['self']", LAYER), "x": ("L['self']._modules['layers']._modules['0']", LAYER)},
        "Linear.layers.0",
    ),
    "a global": ({"G['model']": ("G['model']", LAYER), "y": ("G['model'].b", LAYER)}, "Linear.b"),
}


@pytest.mark.parametrize("name", STACKS)
def test_path_of(name: str) -> None:
    stack, expected = STACKS[name]
    assert module_path(stack) == expected


FRAME = '  File "{file}", line {line}, in forward\n    {code}\n'


def test_line_is_the_last_one_outside_of_torch() -> None:
    mine = FRAME.format(file="/home/me/net.py", line=7, code="return self.fc(x)")
    torchs = FRAME.format(file="/v/site-packages/torch/nn/modules/linear.py", line=125, code="return F.linear(x)")
    assert source_line(mine + torchs) == "/home/me/net.py:7 return self.fc(x)"
    assert source_line(torchs) == source_line("") == source_line("no frame") == ""
    assert source_line('File "a.py", line 3, in f') == "a.py:3"


def test_pythons_own_library_is_no_line_of_the_program() -> None:
    mine = FRAME.format(file="/home/me/net.py", line=7, code="return reduce(f, xs)")
    for library in (functools.__file__, "<frozen importlib._bootstrap>"):
        assert (
            source_line(mine + FRAME.format(file=library, line=3, code="it(x)"))
            == "/home/me/net.py:7 return reduce(f, xs)"
        )
    installed = str(Path(functools.__file__).parent / "site-packages" / "net" / "zoo.py")
    assert source_line(FRAME.format(file=installed, line=3, code="it(x)")) == f"{installed}:3 it(x)"


def test_names_have_no_address() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    targets = {
        torch.full: "torch.full",
        operator.mul: "operator.mul",
        torch.nn.functional.elu: "torch.nn.functional.elu",
    }
    for target, name in targets.items():
        assert facts_of(graph.call_function(target, (x, x))).op == name


def test_facts_of_a_node_prefer_the_op_of_the_program() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(torch.ops.aten.mul.Tensor, (x, x))
    assert facts_of(x) == NodeFacts()
    assert facts_of(node) == NodeFacts(op="aten.mul.Tensor")
    node.meta["original_aten"] = torch.ops.aten.gelu.default
    node.meta["fwd_nn_module_stack"] = {"L['self']": ("L['self']", LAYER)}  # a backward node has no stack of its own
    assert facts_of(node) == NodeFacts(op="aten.gelu.default", module="Linear")


def test_common_facts_are_those_of_the_last_node_with_a_module() -> None:
    first, second, third = NodeFacts("a", "m"), NodeFacts("b", "n"), NodeFacts("c")
    assert common([first, second, third]) == second
    assert common([third]) == third
    assert common([]) == NodeFacts()
