"""Ranks that must hold the same content as this one: DTensors on meshes, and the parameters of DDP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from hashbench import HashDebugTrace
from hashbench.core.records import BESIDE_DTENSORS, Result
from hashbench.core.trace import file
from hashbench.core.trace.placements import ranks_along


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    """The default group of rank 3 of eight, which exchanges nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    yield
    dist.destroy_process_group()


def results_of(made: Callable[[HashDebugTrace], Any], tracer: str = "auto") -> dict[str, tuple[str, tuple[int, ...]]]:
    with HashDebugTrace(tracer=tracer) as trace:
        made(trace)
    read = file.loads(file.dumps(trace.finish()))
    assert read == trace.finish()
    return {result.name: (result.placement, result.replicas) for result in read.results}


MESH = [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


@pytest.mark.parametrize(
    ("shared", "expected"),
    [
        ((True, True, True), (0, 1, 2, 3, 4, 5, 6, 7)),
        ((True, False, False), (3, 7)),
        ((False, True, True), (0, 1, 2, 3)),
        ((True, False, True), (2, 3, 6, 7)),
        ((False, False, False), ()),
    ],
)
def test_ranks_along_the_shared_dimensions(shared: tuple[bool, ...], expected: tuple[int, ...]) -> None:
    assert ranks_along(MESH, (0, 1, 1), shared) == expected


def test_a_rank_outside_the_mesh_has_no_replicas() -> None:
    assert ranks_along([0, 1], None, (True,)) == ()


PLACEMENTS = {
    "replicated": ((8,), [Replicate()], ("(Replicate(),)", (0, 1, 2, 3, 4, 5, 6, 7))),
    "sharded": ((8,), [Shard(0)], ("(Shard(dim=0),)", ())),
    "replicated and sharded": ((4, 2), [Replicate(), Shard(0)], ("(Replicate(), Shard(dim=0))", (1, 3, 5, 7))),
    "sharded and replicated": ((4, 2), [Shard(1), Replicate()], ("(Shard(dim=1), Replicate())", (2, 3))),
    "in three dimensions": (
        (2, 2, 2),
        [Replicate(), Shard(0), Replicate()],
        ("(Replicate(), Shard(dim=0), Replicate())", (2, 3, 6, 7)),
    ),
    "a dimension of one rank": ((8, 1), [Shard(0), Replicate()], ("(Shard(dim=0), Replicate())", ())),
}


@pytest.mark.parametrize("tracer", ["python", "auto"])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_replicas_of_a_dtensor(name: str, tracer: str) -> None:
    shape, placements, expected = PLACEMENTS[name]
    tensor = distribute_tensor(torch.ones(8, 8), init_device_mesh("cpu", shape), placements)
    assert results_of(lambda trace: trace.add_result("x", nn.Parameter(tensor)), tracer) == {"x": expected}


def test_partial_sums_differ_by_design() -> None:
    from torch.distributed.tensor import DTensor

    mesh = init_device_mesh("cpu", (4, 2))
    x = DTensor.from_local(torch.ones(2), mesh, [Partial(), Replicate()])
    ((placement, replicas),) = results_of(lambda trace: trace.add_result("x", x)).values()
    assert replicas == (2, 3)
    assert placement.startswith("(Partial(")


def test_parameters_of_hybrid_sharding_are_replicated_along_one_dimension() -> None:
    model = nn.Linear(8, 8)
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard")))
    found = results_of(lambda trace: [trace.add_result(name, one) for name, one in model.named_parameters()])
    assert found == dict.fromkeys(("weight", "bias"), ("(Replicate(), Shard(dim=0))", (3, 7)))


def test_fully_sharded_parameters_have_no_replicas() -> None:
    model = nn.Linear(8, 8)
    fully_shard(model, mesh=init_device_mesh("cpu", (8,)))
    found = results_of(lambda trace: [trace.add_result(name, one) for name, one in model.named_parameters()])
    assert found == dict.fromkeys(("weight", "bias"), ("(Shard(dim=0),)", ()))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x))


def test_plain_parameters_beside_those_of_parallelize_module_are_replicas_on_the_mesh() -> None:
    """Nothing is known of a module beside."""
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("data", "tensor"))
    split, other = Block(), Block()
    parallelize_module(split, mesh["tensor"], {"linear": ColwiseParallel()})

    def made(trace: HashDebugTrace) -> None:
        split(torch.ones(2, 8))
        other(torch.ones(2, 8))
        for name, model in {"split": split, "other": other}.items():
            for path, parameter in model.named_parameters(prefix=name):
                trace.add_result(path, parameter)

    found = results_of(made)
    assert found["split.norm.weight"] == found["split.norm.bias"] == (BESIDE_DTENSORS, (0, 1, 2, 3))
    assert found["split.linear.weight"] == ("(Shard(dim=0),)", ())
    assert found["other.norm.weight"] == found["other.linear.weight"] == ("", ())


def with_ddp(trace: HashDebugTrace, ddp: DistributedDataParallel, other: nn.Module) -> None:
    ddp(torch.ones(2, 4))
    for name, parameter in [*ddp.module.named_parameters(), *other.named_parameters(prefix="other")]:
        trace.add_result(name, parameter)
    trace.add_result("buffer", ddp.module.extra)
    trace.add_result("number", 1.5)


class Net(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.own = nn.Parameter(torch.ones(4))
        self.register_buffer("extra", torch.ones(4))


@pytest.mark.parametrize("tracer", ["python", "auto"])
def test_parameters_of_ddp_are_replicas_but_for_those_that_it_ignores(tracer: str) -> None:
    net = Net()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["own"])
    ddp = DistributedDataParallel(net, process_group=dist.new_group([1, 3, 5]))
    everything = dict.fromkeys(("own", "other.weight", "other.bias", "buffer", "number"), ("", ()))
    expected = {**everything, "weight": ("DDP", (1, 3, 5)), "bias": ("DDP", (1, 3, 5))}
    assert results_of(lambda trace: with_ddp(trace, ddp, nn.Linear(1, 1)), tracer) == expected


def test_parameters_whose_reduction_ddp_delays_are_replicas_too() -> None:
    net = Net()
    ddp = DistributedDataParallel(
        net, delay_all_reduce_named_params=[("own", net.own)], param_to_hook_all_reduce=net.weight
    )
    assert results_of(lambda trace: with_ddp(trace, ddp, nn.Module()))["own"] == ("DDP", tuple(range(8)))


def test_ddp_in_a_group_of_one_rank_has_no_replicas() -> None:
    ddp = DistributedDataParallel(Net(), process_group=dist.new_group([3]))
    assert {*results_of(lambda trace: with_ddp(trace, ddp, nn.Module())).values()} == {("", ())}


def test_ddp_that_is_built_in_the_trace_is_found_at_the_next_result() -> None:
    def made(trace: HashDebugTrace) -> None:
        net = Net()
        trace.add_result("before", net.weight)
        ddp = DistributedDataParallel(net)
        ddp(torch.ones(2, 4))
        trace.add_result("after", net.weight)

    assert results_of(made) == {"before": ("", ()), "after": ("DDP", tuple(range(8)))}


def test_a_trace_records_nothing_more_for_placements() -> None:
    mesh = init_device_mesh("cpu", (4, 2))
    x = distribute_tensor(torch.ones(8, 8), mesh, [Replicate(), Shard(0)])
    with HashDebugTrace() as trace:
        trace.add_result("x", x)
    assert trace.finish().records == ()
    (result,) = trace.finish().results
    assert isinstance(result, Result)
