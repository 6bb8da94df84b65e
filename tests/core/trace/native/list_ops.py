"""Ops on lists of tensors from torch's op database, and three ways in which torch runs them without their data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.utils import _pytree as pytree

from hashbench.core.check.function import FunctionCall
from hashbench.core.trace.digest import digest

Found = Mapping[str, Any]


def begin() -> None:
    """Make the group of one rank over which tensors are distributed."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def calls() -> Iterator[tuple[str, FunctionCall]]:
    """The first sample of every op that takes a list of tensors, with the op's name."""
    from torch.testing._internal import common_methods_invocations as invocations

    foreach = ("unary", "binary", "pointwise", "reduce", "other")
    entries = [(entry, entry.op) for entry in invocations.op_db]
    for kind in foreach:
        entries += [(entry, entry.method_variant) for entry in getattr(invocations, f"foreach_{kind}_op_db")]
        entries += [(entry, entry.inplace_variant) for entry in getattr(invocations, f"foreach_{kind}_op_db")]
    for entry, function in entries:
        if function is None or torch.float32 not in entry.supported_dtypes("cpu"):
            continue
        for sample in entry.sample_inputs("cpu", torch.float32):
            call = FunctionCall(function, (sample.input, *sample.args), dict(sample.kwargs))
            if any(isinstance(value, (list, tuple)) and holds_tensor(value) for value in call.named().values()):
                yield getattr(function, "__name__", entry.name), call
            break


def holds_tensor(value: Any) -> bool:
    """Whether there is a tensor in nested lists."""
    return any(isinstance(item, torch.Tensor) for item in pytree.tree_leaves(value))


def mapped(call: FunctionCall, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """What a call returns of other tensors in place of its own."""
    args, kwargs = pytree.tree_map_only(torch.Tensor, change, (call.args, call.kwargs))
    return call.function(*args, **kwargs)


def fake(call: FunctionCall) -> Found:
    """Dtype, shape and stride of what an op makes of fake tensors."""
    mode = FakeTensorMode()
    args, kwargs = pytree.tree_map_only(
        torch.Tensor, lambda tensor: mode.from_tensor(tensor.detach()), (call.args, call.kwargs)
    )
    with mode:
        found = call.function(*args, **kwargs)
    tensors = [item for item in pytree.tree_leaves(found) if isinstance(item, torch.Tensor)]
    return {str(at): (item.dtype, tuple(item.shape), item.stride()) for at, item in enumerate(tensors)}


def distributed(call: FunctionCall) -> Found:
    """What an op makes of replicated DTensors, with the sharding of no earlier call known."""
    _clear_sharding_prop_cache()
    mesh = init_device_mesh("cpu", (1,))
    found = mapped(call, lambda tensor: distribute_tensor(tensor.detach().clone(), mesh, [Replicate()]))
    items = pytree.tree_leaves(found)
    local = [item.to_local() if isinstance(item, DTensor) else item for item in items]
    return {str(at): digest(item) if isinstance(item, torch.Tensor) else item for at, item in enumerate(local)}


def exported(call: FunctionCall) -> Found:
    """The program that torch.export makes of an op."""

    class Model(torch.nn.Module):
        def forward(self, *tensors: torch.Tensor) -> Any:
            given = iter(tensors)
            return mapped(call, lambda _: next(given))

    leaves = [item.detach().clone() for item in pytree.tree_leaves((call.args, call.kwargs)) if holds_tensor(item)]
    program = torch.export.export(Model(), tuple(leaves), strict=False)
    return {"code": program.graph_module.code}


WAYS: Mapping[str, Callable[[FunctionCall], Found]] = {
    "on fake tensors": fake,
    "on DTensors": distributed,
    "exported": exported,
}
