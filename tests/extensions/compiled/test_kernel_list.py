"""The kernel calls of a step as data."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hashbench.core.inductor import wrapper
from hashbench.core.inductor.graphs import BufferRead, BufferWrite, CompiledGraph, KernelCall
from hashbench.extensions.compiled.compiled_kernels import DIGITS
from hashbench.extensions.compiled.kernel_list import AnyGraph, KernelList
from hashbench.extensions.compiled.sources import source_digest
from tests.core.inductor.wrappers import CPP
from tests.extensions.compiled.steps import show

NOTHING = torch.empty(0)
LONG = "0123456789abcdef"
RELU = KernelCall(
    "0",
    "cpp_fused_relu_0",
    launch="XBLOCK 64, 1 warp, 1 stage",
    reads=(BufferRead("x", LONG), BufferRead("", LONG[::-1])),
    writes=(BufferWrite("buf0", NOTHING, LONG), BufferWrite("buf1", NOTHING, LONG), BufferWrite("", NOTHING, LONG)),
)
MM = KernelCall("1", "aten.mm.out", generated=False, writes=(BufferWrite("buf2", NOTHING, "a"),))


def graph(path: Path, *, backward: bool = False) -> CompiledGraph:
    path.write_text(CPP, encoding="utf-8")
    made = torch.fx.Graph()
    x = made.placeholder("x")
    nodes = {}
    for name, op in (("buf0", "relu"), ("buf1", "sin"), ("buf3", "sin")):
        nodes[name] = made.call_function(getattr(torch.ops.aten, op).default, (x,))
    nodes["buf0"].meta["nn_module_stack"] = {"a": ("L['self']", "zoo.Net"), "b": ("L['self'].act", "zoo.Act")}
    made.output(x)
    return CompiledGraph(str(path), torch.fx.GraphModule({}, made), nodes, backward=backward)


def test_calls_are_listed_with_source_contents_ops_and_module(tmp_path: Path) -> None:
    kernels = KernelList()
    show(kernels, graph(tmp_path / "a.py"), [], RELU, MM)
    relu, mm = kernels.result()
    assert relu.name == "cpp_fused_relu_0"
    assert relu.source == source_digest(wrapper.kernels(CPP)[0]) != ""
    assert relu.reads == (LONG[:DIGITS], LONG[::-1][:DIGITS])
    assert relu.writes == (LONG[:DIGITS],) * 3
    assert relu.ops == ("aten.relu.default", "aten.sin.default")
    assert (relu.module, relu.phase, relu.graph) == ("Net.act", "forward", 0)
    assert (relu.launch, mm.launch) == ("XBLOCK 64, 1 warp, 1 stage", "")
    assert (mm.name, mm.source, mm.reads, mm.writes, mm.ops) == ("aten.mm.out", "", (), ("a",), ())


def test_only_the_first_call_of_each_graph_is_listed(tmp_path: Path) -> None:
    forward, backward = graph(tmp_path / "a.py"), graph(tmp_path / "b.py", backward=True)
    kernels = KernelList()
    for one in (forward, backward, forward, backward):
        show(kernels, one, [], RELU)
    assert [(one.phase, one.graph) for one in kernels.result()] == [("forward", 0), ("backward", 1)]


@pytest.mark.parametrize("gone", [False, True], ids=["another kernel", "no file"])
def test_a_kernel_whose_source_is_unknown_has_none(gone: bool, tmp_path: Path) -> None:
    made = graph(tmp_path / "a.py")
    if gone:
        (tmp_path / "a.py").unlink()
    kernels = KernelList()
    show(kernels, made, [], KernelCall("0", "cpp_fused_other_9"))
    assert [one.source for one in kernels.result()] == [""]


def test_a_graph_out_of_a_cache_is_an_empty_one(tmp_path: Path) -> None:
    known = graph(tmp_path / "a.py")
    graphs = AnyGraph({known.path: known})
    assert graphs[known.path] is known
    other = graphs.get("cached.py")
    assert other is not None
    assert (other.path, dict(other.nodes)) == ("cached.py", {})
    assert "cached.py" in graphs
    assert "" not in graphs
    assert (len(graphs), list(graphs)) == (1, [known.path])
