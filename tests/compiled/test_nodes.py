"""Facts of FX nodes: op, module, source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hashbench.compiled.nodes import NodeFacts, facts_of, module_path, source_line

aten = torch.ops.aten
IN_TORCH = Path(torch.__file__).parent / "nn" / "modules" / "linear.py"


def node(**meta: Any) -> torch.fx.Node:
    graph = torch.fx.Graph()
    made = graph.call_function(aten.mul.Tensor, (graph.placeholder("x"), 2))
    made.meta.update(meta)
    return made


STACK = """  File "/home/me/model.py", line 12, in forward
    return self.a(x)
           ^^^^^^^^^
  File "/home/me/parts.py", line 7, in forward
    y = gelu(x)
        ^^^^^^^
"""


def test_a_node_without_meta_has_its_target():
    assert facts_of(node()) == NodeFacts(op="aten.mul.Tensor")


def test_a_node_of_a_decomposition_has_the_op_the_module_and_the_line_of_the_user():
    made = node(
        original_aten=aten.gelu.default,
        nn_module_stack={"1": ("L['self'].layers", torch.nn.Sequential), "2": ("L['self'].layers[0]", torch.nn.Linear)},
        stack_trace=STACK,
    )
    assert facts_of(made) == NodeFacts("aten.gelu.default", "layers.0", "/home/me/parts.py:7 y = gelu(x)")


def test_a_node_of_a_backward_graph_has_the_module_of_its_forward():
    assert facts_of(node(fwd_nn_module_stack={"1": ("L['self'].norm", torch.nn.LayerNorm)})).module == "norm"


def test_a_copy_that_the_compiler_added_has_the_facts_of_what_it_copies():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    value = graph.call_function(aten.add.Tensor, (x, 1))
    value.meta.update(original_aten=aten.add_.Tensor, stack_trace=STACK)
    copy = graph.call_function(aten.copy_.default, (x, value))
    assert facts_of(copy) == NodeFacts("aten.add_.Tensor", source="/home/me/parts.py:7 y = gelu(x)")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        pytest.param("L['self']", "", id="root"),
        pytest.param("", "", id="unknown"),
        pytest.param("L['self'].layer1.0.bn1", "layer1.0.bn1", id="attributes"),
        pytest.param("L['s'].ls.0", "ls.0", id="self has another name"),
        pytest.param("L['self'].layers[0].a", "layers.0.a", id="an item of a list"),
        pytest.param("L['self'].parts['key']", "parts.key", id="an item of a dict"),
        pytest.param("L['self']._modules['a']._modules['0']", "a.0", id="by _modules"),
        pytest.param("getattr(L['self'].layers, '0').norm", "layers.0.norm", id="by getattr"),
        pytest.param("layers.0", "layers.0", id="of torch.export"),
    ],
)
def test_names_of_modules_are_those_of_named_modules(path: str, expected: str):
    assert module_path(path) == expected


def test_the_line_is_the_innermost_outside_of_torch():
    inner = f'{STACK}  File "{IN_TORCH}", line 134, in forward\n    return F.linear(input)\n'
    assert source_line(inner) == "/home/me/parts.py:7 y = gelu(x)"


def test_a_stack_inside_torch_alone_has_its_innermost_line():
    assert source_line(f'  File "{IN_TORCH}", line 134, in forward\n    return F.linear(x)\n') == (
        f"{IN_TORCH}:134 return F.linear(x)"
    )


@pytest.mark.parametrize(
    ("trace", "expected"),
    [
        pytest.param("", "", id="none"),
        pytest.param("no frame", "", id="no frame"),
        pytest.param('  File "a.py", line 3, in f\n', "a.py:3", id="without code"),
        pytest.param('  File "a.py", line 3, in f\n  File "b.py", line 4, in g\n    y\n', "b.py:4 y", id="one without"),
    ],
)
def test_odd_stack_traces(trace: str, expected: str):
    assert source_line(trace) == expected
