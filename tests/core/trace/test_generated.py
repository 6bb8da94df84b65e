"""A generated kernel as a callee: what it writes, which buffers it gets, where in the program it comes from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hashbench.core.diagnose.calls.call import compiled_kernel
from hashbench.core.diagnose.calls.ops import definition_of, is_custom, needs_definition
from hashbench.core.inductor.internals import KernelSite
from hashbench.core.inductor.nodes import BufferFacts, NodeFacts
from hashbench.core.trace.generated import GeneratedKernel, allocation_plan, facts_of_line, graph_plan, kernel_at
from hashbench.core.trace.op_schema import OpPlan, Pattern
from tests.kernel_helpers import FakeKernel, added

TEXT = """\
cpp_fused_0 = async_compile.cpp_pybinding(['float*', 'const float*', 'const int64_t', 'bool*'], '''
 void kernel
''')
def call(args):
    cpp_fused_0(buf0, primals_1, 8, buf1)
    extern_kernels.mm(buf0, primals_1, out=buf2)
    buf3 = torch.ops.aten.sort.default(buf2)
"""
FACTS = BufferFacts(
    {
        "buf0": NodeFacts("aten.gelu.default", "Net.act", "net.py:3 gelu(x)"),
        "buf1": NodeFacts("aten.gt.Scalar"),
        "buf2": NodeFacts("aten.mm.default", "Net.fc", "net.py:4 self.fc(x)"),
        "primals_1": NodeFacts("", "Net.other"),
    }
)
TYPES = ("float*", "const float*", "const int64_t", "bool*")


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "module.py").write_text(TEXT, encoding="utf-8")
    return str(tmp_path / "module.py")


def test_kernel_writes_what_is_not_const_and_has_the_place_of_what_it_writes(path: str) -> None:
    called = []
    kernel = kernel_at(KernelSite(path, "cpp_fused_0", TYPES, lambda *args: called.append(args), FACTS), 5)
    assert kernel.plan.written == (0, 3)
    assert kernel.buffers == ("buf0", "primals_1", "", "buf1")
    assert (kernel.plan.module, kernel.plan.source) == ("Net.act", "net.py:3 gelu(x)")
    assert str(kernel) == kernel.plan.name == "cpp_fused_0"
    kernel(1, 2)
    assert called == [(1, 2)]


ALLOCATED = TEXT.replace("(args):", "(args):\n    buf0 = empty_strided_cpu((8, ), (1, ), torch.float32)")


def test_kernel_fills_memory_that_nothing_wrote_before(path: str) -> None:
    kernel = kernel_at(KernelSite(path, "cpp_fused_0", TYPES, print, FACTS), 5)
    assert kernel.plan.filled == ()  # it is not known what buf0 and buf1 hold
    Path(path).write_text(ALLOCATED, encoding="utf-8")
    again = str(Path(path).rename(Path(path).with_name("allocated.py")))
    assert kernel_at(KernelSite(again, "cpp_fused_0", TYPES, print, FACTS), 6).plan.filled == (0,)


def test_kernel_at_an_unknown_line_has_no_place(path: str) -> None:
    kernel = kernel_at(KernelSite(path, "cpp_fused_0", TYPES, print, FACTS), 99)
    assert (kernel.buffers, kernel.plan.module, kernel.plan.source, kernel.plan.written) == ((), "", "", (0, 3))
    assert kernel_at(KernelSite(path, "cpp_fused_0", TYPES, print), 5).plan.module == ""


def test_facts_of_a_line_are_those_of_the_buffer_that_it_writes(path: str) -> None:
    assert facts_of_line(path, 6, FACTS) == FACTS["buf2"]
    assert facts_of_line(path, 7, FACTS) == facts_of_line(path, 99, FACTS) == NodeFacts()
    assert facts_of_line(path + ".gone", 6, BufferFacts(FACTS)) == NodeFacts()


def test_what_is_known_of_a_line_is_kept_as_long_as_the_module(path: str) -> None:
    facts = BufferFacts(FACTS)
    kernel = kernel_at(KernelSite(path, "cpp_fused_0", TYPES, print, facts), 5)
    assert kernel_at(KernelSite(path, "cpp_fused_0", TYPES, print, facts), 5) is kernel
    assert kernel_at(KernelSite(path, "cpp_fused_0", TYPES, len, facts), 5).plan.call is len
    assert kernel_at(KernelSite(path, "cpp_fused_0", TYPES, print, BufferFacts(FACTS)), 5) is not kernel
    assert facts_of_line(path, 6, facts) is facts_of_line(path + ".gone", 6, facts)


def test_plans_of_memory_and_graphs_compute_nothing() -> None:
    allocation = allocation_plan("empty_strided_cpu", print)
    assert (allocation.name, allocation.blank, allocation.pattern) == (
        "inductor.empty_strided_cpu",
        True,
        Pattern.FRESH,
    )
    graph = graph_plan()
    assert (graph.name, graph.blank, graph.written, graph.call()) == ("inductor.graph", False, (), None)


MODULE = """
async_compile = AsyncCompile()
cpp_fused_add_0 = async_compile.cpp_pybinding(['const float*', 'float*'], r'''
void kernel() {}
''')
def call(args):
    buf0 = empty_strided_cpu((2, ), (1, ), torch.float32)
    cpp_fused_add_0(arg0_1, buf0)
"""


@pytest.fixture
def kernel(tmp_path: Path) -> GeneratedKernel:
    path = tmp_path / "generated.py"
    path.write_text(MODULE)
    plan = OpPlan("cpp_fused_add_0", call=len, written=(1,), writes_arguments=True)
    return GeneratedKernel(plan, str(path), 8, ("arg0_1", "buf0"), ("const float*", "float*"))


def test_source_is_that_of_its_module(kernel: GeneratedKernel) -> None:
    assert kernel.source == "\nvoid kernel() {}\n"


def test_source_of_a_module_that_is_gone_is_empty() -> None:
    plan = OpPlan("cpp_fused_add_0", call=len)
    assert GeneratedKernel(plan, "/nowhere.py", 1, ()).source == ""


@pytest.mark.parametrize(
    ("func", "compiled"),
    [
        (FakeKernel(added), True),
        (torch.ops.aten.add.Tensor, False),
        (torch.add, False),
        (allocation_plan("empty_strided_cpu", len), False),
        (None, False),
    ],
)
def test_only_kernels_with_a_binary_are_compiled(func: Any, compiled: bool) -> None:
    assert (compiled_kernel(func) is func) == compiled or func is None


def test_generated_kernel_is_torchs_and_needs_no_definition(kernel: GeneratedKernel) -> None:
    assert compiled_kernel(kernel) is kernel
    assert not is_custom(kernel)
    assert not needs_definition(kernel)
    assert definition_of(kernel) is None
