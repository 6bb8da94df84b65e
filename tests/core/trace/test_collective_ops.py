"""The table of what collectives exchange, held against every schema of the installed torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives
import torch.distributed._symmetric_memory
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.distributed.tensor._collective_utils

from hashbench import HashDebugTrace
from hashbench.core.trace.collective_ops import COLLECTIVE_OPS, KINDS, LOCAL, NAMESPACES, UNKNOWN, WAIT, CollectivePlan
from hashbench.core.trace.op_schema import Pattern, plan_of

SCHEMAS: Mapping[str, Any] = {
    schema.name: schema
    for schema in torch._C._jit_get_all_schemas()
    if schema.name.partition("::")[0] in NAMESPACES and not schema.overload_name
}


def func_of(name: str) -> Any:
    namespace, _, short = name.partition("::")
    return getattr(getattr(torch.ops, namespace), short).default


def test_every_schema_has_a_line() -> None:
    assert {name.partition("::")[0] for name in SCHEMAS} == NAMESPACES
    assert sorted(SCHEMAS.keys() - COLLECTIVE_OPS.keys()) == []


def test_lines_are_sorted_and_of_known_kinds() -> None:
    assert list(COLLECTIVE_OPS) == sorted(COLLECTIVE_OPS)
    assert {line.kind for line in COLLECTIVE_OPS.values()} == {*KINDS}


def arguments_of(line: Any) -> Iterator[tuple[str, str]]:
    for column in ("contributed", "written", "returned", "group"):
        yield from ((column, name) for name in getattr(line, column))
    yield from ((column, getattr(line, column)) for column in ("root", "peer", "tag") if getattr(line, column))


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_arguments_of_a_line_are_those_of_the_schema(name: str) -> None:
    kinds = {argument.name: str(argument.type) for argument in SCHEMAS[name].arguments}
    for column, argument in arguments_of(COLLECTIVE_OPS[name]):
        expected = {"root": "int", "peer": "int", "tag": "int"}.get(column, "")
        assert argument in kinds, f"{name} has no {argument}"
        if expected:
            assert kinds[argument] == expected
        elif column != "group":
            assert "Tensor" in kinds[argument]


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_whatever_names_a_group_or_a_rank_is_in_the_line(name: str) -> None:
    """So that a new argument of a known op is met here, and not in the field."""
    line = COLLECTIVE_OPS[name]
    names = [argument.name for argument in SCHEMAS[name].arguments]
    group = tuple(one for one in names if one in ("process_group", "group_name", "ranks"))
    assert (line.group[-1:] or ()) == group
    if line.kind not in (UNKNOWN, LOCAL):
        assert {"root_rank", "root"}.isdisjoint(names) or line.root in ("root_rank", "root")
        assert {"dst", "peer"}.isdisjoint(names) or (line.kind == "send" and line.peer)
        assert "src" not in names or "src" in (line.root, line.peer)
        assert (line.kind in ("send", "receive")) == bool(line.tag)


@pytest.mark.parametrize("name", sorted(name for name in SCHEMAS if name.startswith("c10d::")))
def test_a_collective_of_c10d_writes_what_it_receives_into(name: str) -> None:
    """Its schema declares no write."""
    plan, line = plan_of(func_of(name)), COLLECTIVE_OPS[name]
    gives_only = line.kind in ("barrier", "send", LOCAL)
    assert bool(plan.written) != gives_only
    assert (plan.collective is None) == (line.kind == LOCAL)
    assert plan.pattern is Pattern.GENERAL
    assert plan.receives_once == (name in ("c10d::recv_", "c10d::recv_any_source_"))


def test_an_op_that_waits_returns_its_argument() -> None:
    waits = [name for name in SCHEMAS if COLLECTIVE_OPS[name].kind == WAIT]
    plans = [plan_of(func_of(name)) for name in waits]
    assert {"_c10d_functional::wait_tensor", "c10d_functional::wait_tensor"} <= {*waits}
    assert all(plan.waits and not plan.fresh and plan.collective is None for plan in plans)


GIVEN = {
    "c10d::allreduce_": ((["x", "y"], "group", "op", None), {}, True, ["0.0", "0.1"]),
    "c10d::broadcast_": ((["x"], "group", 1, 0), {}, False, []),
    "c10d::reduce_": ((["x"], "group", "op", 1, 0), {}, False, ["0.0"]),
    "c10d::scatter_": ((["x"], [["y", "z"]], "group", 0), {}, True, ["1.0.0", "1.0.1"]),
    "c10d::gather_": (([["x", "y"]], ["z"], "group", 0), {}, True, ["1.0"]),
    "c10d::recv_": ((["x"], "group", 1, 7), {}, True, []),
    "c10d::barrier": (("x", "group", []), {}, True, []),
    "_c10d_functional::reduce_scatter_tensor_out": (("x", "sum", 2, "group"), {"out": "y"}, True, ["0"]),
}


@pytest.mark.parametrize("name", GIVEN)
def test_what_a_call_gives(name: str) -> None:
    args, kwargs, is_root, expected = GIVEN[name]
    plan = CollectivePlan(COLLECTIVE_OPS[name], SCHEMAS[name])
    found = [
        path
        for argument, value in plan.contributed(args, kwargs, is_root=is_root)
        for path in paths_in(value, argument)
    ]
    assert found == expected
    assert plan.group(args, kwargs) == ("group",)


def paths_in(value: Any, path: str) -> Iterator[str]:
    if not isinstance(value, list):
        yield path
        return
    for at, item in enumerate(value):
        yield from paths_in(item, f"{path}.{at}")


def test_rank_arguments_may_be_passed_by_name_or_left_out() -> None:
    plan = CollectivePlan(COLLECTIVE_OPS["c10d::recv_"], SCHEMAS["c10d::recv_"])
    assert (plan.peer((["x"], "group", 1, 7), {}), plan.tag((["x"], "group", 1, 7), {})) == (1, 7)
    assert (plan.peer((["x"], "group"), {"src": 2, "tag": 3}), plan.root((), {})) == (2, None)
    reduce = CollectivePlan(COLLECTIVE_OPS["symm_mem::tile_reduce"], SCHEMAS["symm_mem::tile_reduce"])
    assert (reduce.root(("x", "y", 1, "group"), {}), reduce.tag((), {})) == (1, 0)


@pytest.mark.parametrize("tracer", ["python", "auto"])
def test_an_op_without_a_line_is_recorded_as_unknown(tracer: str) -> None:
    with torch.library._scoped_library("collective_ops_test", "DEF") as library:
        library.define("exchange(Tensor x, str group_name) -> Tensor")
        library.impl("exchange", lambda x, _: x + 1, "CPU")
        with HashDebugTrace(tracer=tracer) as trace:
            torch.ops.collective_ops_test.exchange(torch.ones(2), "0")
    (record,) = (record for record in trace.finish().records if record.collective is not None)
    assert record.collective is not None
    assert (record.collective.kind, record.collective.contributed, record.collective.process_group) == (UNKNOWN, (), ())
