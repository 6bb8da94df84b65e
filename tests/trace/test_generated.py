"""A generated kernel as a callee: its C++, its types, and which callees count as compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_helpers import FakeKernel, added

from hashbench.calls.call import compiled_kernel
from hashbench.calls.ops import definition_of, is_custom, needs_definition
from hashbench.trace.generated import GeneratedKernel, allocation_plan
from hashbench.trace.op_schema import OpPlan

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
