"""Each change of the compiler shows in the generated code of a small program, and is gone afterwards."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from unittest.mock import patch

import pytest
import torch
from torch._inductor import config, decomposition, lowering
from torch._inductor.codegen.cpp import CppScheduling
from torch.fx.passes.graph_transform_observer import GraphTransformObserver

from hashbench.core.errors import HashbenchError
from hashbench.extensions.compiled.fallbacks import (
    CHANGES,
    CHANGES_BY_NAME,
    CompilerChange,
    applied,
    op_overloads,
    supported,
)
from tests.extensions.compiled.lowering import lower


@dataclass(frozen=True, slots=True)
class Program:
    """A program, what its change is told, and whether a generated module has the change."""

    function: Callable[[torch.Tensor], torch.Tensor]
    x: torch.Tensor
    has_it: Callable[[str], bool]
    told: dict[str, str] = field(default_factory=dict)

    def code(self) -> str:
        """Return the generated module, without the number of the compilation."""
        made = lower(self.function, (self.x,), interpret=False).code
        return re.sub(r"AOT ID: \['\d+", "", made)


def _products(x: torch.Tensor) -> torch.Tensor:
    a = x @ x
    return (a @ x) @ x


def _kernels(code: str) -> set[str]:
    return set(re.findall(r"cpp_fused\w+", code))


PROGRAMS = {
    "eager_op": Program(
        lambda x: x.rsqrt() + 1,
        torch.rand(8),
        lambda code: "torch.ops.aten.rsqrt.default" in code,
        {"op": "aten.rsqrt.default"},
    ),
    "no_decomposition": Program(
        lambda x: torch.nn.functional.elu(x) + 1,
        torch.rand(8),
        lambda code: "torch.ops.aten.elu.default" in code,
        {"op": "aten.elu"},
    ),
    "no_pass": Program(
        lambda x: torch.ones(8) * x.sin(),
        torch.rand(8),
        lambda code: any("ones" in kernel for kernel in _kernels(code)),
        {"pass_name": "constant_fold_uniform_value"},
    ),
    "scalar_code": Program(torch.exp, torch.rand(64), lambda code: "at::vec::Vectorized" not in code),
    "no_fusion": Program(lambda x: x.softmax(-1), torch.rand(8, 8), lambda code: len(_kernels(code)) == 4),
    "no_buffer_reuse": Program(_products, torch.rand(8, 8), lambda code: "# reuse" not in code),
    "no_inplace_buffers": Program(lambda x: (x @ x).sin(), torch.rand(8, 8), lambda code: "in_out_ptr" not in code),
    "one_thread": Program(torch.exp, torch.rand(1 << 17), lambda code: "num_threads(2)" not in code),
    "precision_casts": Program(
        lambda x: (x + 1) * 3, torch.rand(64).bfloat16(), lambda code: code.count("convert<at::BFloat16") > 1
    ),
}


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    with config.patch({"cpp.threads": 2}):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.name)
def test_a_change_shows_in_the_generated_code_and_is_gone_afterwards(change: CompilerChange) -> None:
    program = PROGRAMS[change.name]
    before = program.code()
    with applied(change, **program.told):
        changed = program.code()
    assert program.has_it(changed)
    assert not program.has_it(before)
    assert program.code() == before


@pytest.mark.slow
def test_an_op_that_a_pass_makes_in_place_runs_eagerly_too() -> None:
    index, values = torch.tensor([0, 2]), torch.ones(2)

    def put(x: torch.Tensor) -> torch.Tensor:
        return (x + 1).index_put((index,), values)

    with applied(CHANGES_BY_NAME["eager_op"], op="aten.index_put.default"):
        code = lower(put, (torch.rand(4),), interpret=False).code
    assert re.search(r"aten\.index_put_?\.default\(|aten\.index_put_?\(", code)


def _state() -> tuple[object, ...]:
    tables = (decomposition.decompositions, decomposition.fast_random_decomps(), lowering.lowerings)
    sets = (lowering.fallbacks, lowering.needs_realized_inputs, lowering._maybe_layout_constraints)
    hooks = (GraphTransformObserver._check_disable_pass, CppScheduling.ready_to_flush)
    return *({key: id(value) for key, value in table.items()} for table in tables), *map(set, sets), hooks


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.name)
def test_an_exception_leaves_everything_as_it_was(change: CompilerChange) -> None:
    before, settings = _state(), config.save_config_portable()

    def interrupted() -> None:
        with applied(change, op="aten.elu", pass_name="some_pass"):
            assert (_state(), config.save_config_portable()) != (before, settings)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (_state(), config.save_config_portable()) == (before, settings)


@pytest.mark.parametrize(
    ("passname", "subsystem", "asked", "disabled"),
    [
        ("pass_pattern_1", "joint_graph_passes", "", True),
        ("pass_pattern_1", "joint_graph_passes", "joint_graph_passes", True),
        ("pass_pattern_1", "post_grad_passes", "joint_graph_passes", False),
        ("pass_pattern_10", "joint_graph_passes", "", False),
        ("pass", "joint_graph_passes", "", False),
    ],
)
def test_exactly_the_named_pass_is_disabled(passname: str, subsystem: str, asked: str, disabled: bool) -> None:
    module = torch.fx.symbolic_trace(lambda x: x + 1)
    ran: list[object] = []
    with applied(CHANGES_BY_NAME["no_pass"], pass_name="pass_pattern_1", subsystem=asked):
        GraphTransformObserver(module, passname, subsystem).apply_graph_pass(ran.append)
    assert bool(ran) is not disabled


def test_overloads_of_an_op() -> None:
    assert op_overloads("aten.gelu.default") == (torch.ops.aten.gelu.default,)
    assert torch.ops.aten.add.Tensor in op_overloads("aten.add")
    assert op_overloads("torch.ops.prims.convert_element_type.default") == (
        torch.ops.prims.convert_element_type.default,
    )


@pytest.mark.parametrize(
    "op", ["", "aten", "aten.no_such_op", "aten.gelu.no_such_overload", "no_such_space.op.default"]
)
def test_an_unknown_op_is_an_error_of_the_user(op: str) -> None:
    with pytest.raises(HashbenchError, match=r"has no op"), applied(CHANGES_BY_NAME["eager_op"], op=op):
        pass


def test_a_pass_must_be_named() -> None:
    with pytest.raises(HashbenchError, match="no pass is named"), applied(CHANGES_BY_NAME["no_pass"]):
        pass


def test_a_setting_that_this_torch_lacks_is_an_error_of_the_user() -> None:
    change = CompilerChange("new", "newly", settings={"no_such_setting": 1})
    assert not supported(change)
    with pytest.raises(HashbenchError, match="no setting no_such_setting"), applied(change):
        pass


def test_this_torch_has_every_internal_that_is_used() -> None:
    assert all(supported(change) for change in CHANGES)
    for owner, name in (
        (decomposition, "decompositions"),
        (decomposition, "fast_random_decomps"),
        (lowering, "lowerings"),
        (lowering, "fallbacks"),
        (lowering, "needs_realized_inputs"),
        (lowering, "_maybe_layout_constraints"),
        (lowering, "constrain_to_fx_strides"),
        (lowering, "fallback_handler"),
        (CppScheduling, "ready_to_flush"),
        (GraphTransformObserver, "_check_disable_pass"),
    ):
        with patch.object(owner, name):
            pass
