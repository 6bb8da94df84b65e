"""Let Inductor generate code for a CUDA device that is not there. Every internal that this rests on is here.

Within :func:`generating` torch, dynamo and Triton answer for a :class:`NamedDevice`; all is as before afterwards, also
what was cached of the answers.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

from hashbench.core.inductor.internals import nodes_of
from hashbench.extensions.compiled.as_device.devices import NamedDevice
from hashbench.extensions.compiled.as_device.interpreter import InterpreterDriver
from hashbench.extensions.compiled.as_device.kernels import InterpretedKernel, kernel_of
from hashbench.extensions.compiled.as_device.substitute import AtenSubstitute

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")

_CACHED = (
    ("torch.utils._triton", "has_triton"),
    ("torch.utils._triton", "has_triton_tma"),
    ("torch.utils._triton", "has_triton_tma_device"),
    ("torch.utils._triton", "has_triton_tensor_descriptor_host_tma"),
    ("torch.utils._triton", "_device_supports_tensor_descriptor"),
    ("torch._inductor.runtime.hints", "DeviceProperties.create"),
    ("torch._inductor.utils", "get_gpu_type"),
    ("torch._inductor.utils", "get_max_num_sms"),
    ("torch._inductor.codecache", "CacheBase.get_system"),
)
"""Functions that keep what they were told of the device; those that this torch lacks are left out."""


@contextlib.contextmanager
def generating(device: NamedDevice) -> Iterator[None]:
    """Let Inductor generate code for a device; kernels of modules that it loads are interpreted."""
    with contextlib.ExitStack() as stack:
        _forget()
        stack.callback(_forget)
        for holder, name, value in _answers(device):
            stack.enter_context(patch.object(holder, name, value, create=isinstance(holder, ModuleType)))
        yield


def _answers(device: NamedDevice) -> Iterator[tuple[Any, str, Any]]:
    """Yield what is replaced: its holder, its name, and what stands there."""
    interface = importlib.import_module("torch._dynamo.device_interface").CudaInterface
    properties = _answering(device)
    yield from (
        (torch.cuda, name, value)
        for name, value in {
            "is_available": _answering(True),
            "device_count": _answering(1),
            "current_device": _answering(0),
            "get_device_properties": properties,
            "get_device_capability": _answering((device.major, device.minor)),
            "get_device_name": _answering(device.name),
            "get_rng_state": lambda *_, **__: torch.zeros(16, dtype=torch.uint8),
            "set_rng_state": _answering(None),
            "synchronize": _answering(None),
            "_lazy_init": _answering(None),
            "_exchange_device": _answering(0),
            "_maybe_exchange_device": _answering(0),
        }.items()
    )
    for holder in (interface, interface.Worker):
        yield holder, "get_device_properties", staticmethod(properties)
        yield holder, "current_device", staticmethod(_answering(0))
    yield interface, "device_count", staticmethod(_answering(1))
    yield interface, "synchronize", staticmethod(_answering(None))
    yield interface, "get_compute_capability", staticmethod(_answering(device.capability))
    yield importlib.import_module("triton").runtime.driver, "_active", InterpreterDriver(device)
    lowering = importlib.import_module("torch._inductor.graph").GraphLowering
    yield lowering, "constant_name", lambda _, name, __: name  # constants stay on the CPU
    yield (
        importlib.import_module("torch._inductor.async_compile").AsyncCompile,
        "triton",
        functools.partialmethod(_compiled, device),
    )
    cache = importlib.import_module("torch._inductor.codecache").PyCodeCache
    yield cache, "load_by_key_path", functools.partial(_loaded, cache.load_by_key_path)
    yield torch._C, "_cuda_getCurrentRawStream", _answering(0)
    guards: Any = torch._C._dynamo.guards
    yield guards, "_empty_strided_cuda", guards._empty_strided_cpu


def _answering(value: Any) -> Any:
    return lambda *_, **__: value


def _forget() -> None:
    """Forget what functions were told of a device."""
    for module, name in _CACHED:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is not None:
            getattr(found, "__func__", found).cache_clear()
    for name in ("caching_worker_device_properties", "caching_worker_current_devices"):
        getattr(importlib.import_module("torch._dynamo.device_interface"), name, {}).pop("cuda", None)


# -------------------------------------------------------------------------------------------- generated modules


def _compiled(_: Any, device: NamedDevice, kernel_name: str, source_code: str, device_str: str = "cuda") -> Any:  # noqa: ARG001
    """Stand for ``AsyncCompile.triton``."""
    from torch._inductor.codecache import PyCodeCache

    return kernel_of(source_code, PyCodeCache.write(source_code)[1], kernel_name, device)


def _loaded(load: Any, *args: Any, **kwargs: Any) -> Any:
    """Load a generated module, whose names of devices mean the CPU."""
    from torch._inductor.virtualized import V

    module = load(*args, **kwargs)
    values = vars(module)
    if "torch" in values and "recursively_apply_fns" in values:
        graph: Any = V.graph
        for value in values.values():
            if isinstance(value, InterpretedKernel):
                value.substitute = AtenSubstitute(graph.module, nodes_of(graph), module.__file__)
        values.update(torch=_TorchOfDevice(), device=_answering(CPU))
    return module


class _TorchOfDevice(ModuleType):
    """``torch`` in a generated module: as it is, without CUDA."""

    def __init__(self) -> None:
        super().__init__(torch.__name__)
        self.cuda = _Cuda()
        self.device = _answering(CPU)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _Cuda:
    """``torch.cuda`` in a generated module."""

    def __init__(self) -> None:
        self._DeviceGuard = self.device = _no_guard
        self.set_device = self.synchronize = _answering(None)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


def _no_guard(*_: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


# ------------------------------------------------------------------------------------------------------- graphs


def moved(module: torch.fx.GraphModule) -> None:
    """Let the nodes of a graph make their tensors on the device instead of the CPU; constants are copied there."""
    lifts = (torch.ops.aten.lift_fresh_copy.default, torch.ops.aten.lift_fresh.default)
    for node in list(module.graph.nodes):
        node.args, node.kwargs = (torch.fx.node.map_aggregate(each, _moved) for each in (node.args, node.kwargs))
        if node.op == "call_function" and node.target in lifts:
            with module.graph.inserting_after(node):
                copied = module.graph.call_function(torch.ops.prims.device_put.default, (node, CUDA))
                node.replace_all_uses_with(copied, delete_user_cb=lambda user, copied=copied: user is not copied)
                copied.meta = dict(node.meta)
    module.recompile()


def _moved(value: Any) -> Any:
    return CUDA if isinstance(value, torch.device) and value.type == "cpu" else value
