"""Op plans for the native recorder: generators, ops that are deregistered."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hashbench import HashDebugTrace
from hashbench.core.divergence import find
from hashbench.core.records import Trace
from hashbench.core.trace.native.ops import Ops
from hashbench.core.trace.tracer import native_unavailable
from tests.core.trace.native.tracer_helpers import scaled

pytestmark = [
    pytest.mark.skipif(native_unavailable() is not None, reason="the native tracer cannot be built here"),
    pytest.mark.usefixtures("seeded"),
]


OWN = torch.Generator()


@torch.library.custom_op("hashbench_tests::drawing", mutates_args=())
def drawing(x: torch.Tensor, own: bool) -> torch.Tensor:
    return x + torch.rand(3, generator=OWN if own else None)


@pytest.mark.parametrize("options", [{}, {"hash_inputs": True}], ids=["plain", "hashed inputs"])
@pytest.mark.parametrize("own", [True, False], ids=["of its own", "that was in another state"])
def test_op_with_its_own_generator_is_the_kernel(own: bool, options: dict[str, Any]) -> None:
    def run(seed: int) -> Trace:
        (OWN if own else torch.default_generator).manual_seed(seed)
        x = torch.zeros(3)
        with HashDebugTrace(tracer="native", **options) as trace:
            found = drawing(drawing(x, own), own)
            found = scaled(found)
        trace.add_result("output", found)
        return trace.finish()

    first, second = run(1), run(2)
    drawn = [record.op for record in first.records if record.rng]
    assert drawn == ["aten.rand.generator", "hashbench_tests.drawing.default"] * 2
    verdict = find(first, second).divergence
    assert verdict is not None
    if own:
        assert (verdict.origin, verdict.kernel, verdict.inside) == ("kernel", "hashbench_tests.drawing.default", "")
        assert "aten.rand.generator inside it: RNG state before this op differs" in verdict.detail
    else:
        assert (verdict.origin, verdict.inside) == ("rng", "hashbench_tests.drawing.default")


def test_deregistered_op_leaves_no_plan_at_its_address() -> None:
    """Memory of schemas is used again at once: without a word to the recorder, one of these ends the process."""
    for number in range(20):
        for arguments in ("Tensor x", "Tensor x, Tensor y"):
            library = torch.library.Library(f"hashbench_taken_back_{number}_{len(arguments)}", "DEF")
            library.define(f"op({arguments}) -> Tensor")
            library.impl("op", lambda *given: given[0] + len(given), "CPU")
            with HashDebugTrace(tracer="native") as trace:
                getattr(torch.ops, library.ns).op(*[torch.ones(3)] * arguments.count("Tensor"))
            library._destroy()
            assert f"{library.ns}.op.default" in [record.op for record in trace.finish().records]


# --------------------------------------------------------------------------------------------------- plans of schemas


def described(name: str, overload: str = "") -> dict[str, int]:
    plan = Ops().describe(0, name, overload)
    return {field: int(getattr(plan, field)) for field, *_ in plan._fields_ if getattr(plan, field) not in (0, -1)}


@pytest.mark.parametrize(
    ("name", "overload", "expected"),
    [
        ("aten::add", "Tensor", {"traced", "fresh"}),
        ("aten::add_", "Tensor", {"traced", "written"}),
        ("aten::add", "out", {"traced", "written"}),
        ("aten::t", "", {"traced"}),
        ("aten::empty", "memory_format", {"traced", "fresh", "blank"}),
        ("aten::rand", "", {"traced", "fresh", "seeded"}),
        ("aten::matmul", "", {"traced", "fresh", "decomposes"}),
        ("aten::bernoulli_", "float", {"traced", "written", "seeded"}),
        ("aten::native_batch_norm", "", {"traced", "fresh", "statistics", "training"}),
        ("aten::resize_", "", {"traced", "python", "originals"}),
        ("c10d::allreduce_", "", {"traced", "python", "originals", "written", "open", "fresh", "seeded"}),
        ("hashbench_tests::drawing", "", {"traced", "fresh", "seeded", "open"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_plan_of_a_schema(name: str, overload: str, expected: set[str]) -> None:
    assert set(described(name, overload)) == expected


@pytest.mark.parametrize(
    ("name", "overload", "positions"),
    [
        ("aten::add_", "Tensor", [0]),
        ("aten::add", "out", [3]),
        ("aten::sort", "values", [3, 4]),
        ("aten::_foreach_add_", "List", [0]),
    ],
)
def test_written_arguments_are_bits_by_position(name: str, overload: str, positions: list[int]) -> None:
    assert described(name, overload)["written"] == sum(1 << position for position in positions)


def test_running_statistics_depend_on_the_training_flag() -> None:
    plan = Ops().describe(0, "aten::native_batch_norm", "")
    names = [argument.name for argument in torch.ops.aten.native_batch_norm.default._schema.arguments]
    statistics = [name for at, name in enumerate(names) if plan.statistics >> at & 1]
    assert (statistics, names[plan.training]) == (["running_mean", "running_var"], "training")


def test_ops_are_kept_by_number() -> None:
    ops = Ops()
    ops.describe(3, "aten::cat", "")
    assert ops.by_number[3].plan.name == "aten.cat.default"
    assert ops.by_number[3].places[1 << 8 | 0] == "0.0"  # the first tensor of list argument 0
