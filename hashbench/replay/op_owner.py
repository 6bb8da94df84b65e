"""Whether an op is torch's own, a custom one, or composed of others."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import torch

TORCH_NAMESPACES = frozenset(
    {
        # Those that `import torch` registers in torch 2.15 and that hold kernels: the first words of
        # torch._C._jit_get_all_schemas(). What a newer torch adds is taken for custom until it is named here; that
        # costs four more arms.
        *("aten", "prim", "prims", "quantized", "_quantized", "quantization", "sparse", "rngprims", "profiler", "cuda"),
        *("mkldnn", "mkldnn_prepacked", "onednn", "mkl", "inductor", "inductor_prims", "_native", "static_runtime"),
        *("c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "symm_mem", "fsdp", "_dtensor"),
    }
)

_TORCH = str(Path(torch.__file__).parent)
_ANYONES = ("library.py", "_library/custom_ops.py")
"""Files of torch in whose name users' kernels are registered: the decorators stand there."""

_COMPUTES = re.compile(
    r"^(?!Meta|Fake|Python|Autograd|Functionalize|Tracer|Autocast|ADInplace)\S+: registered at (?P<file>.*?):\d+"
)


@functools.cache
def is_custom(func: Any) -> bool:
    """Whether code other than torch's own computes this op, and so may read anything in the process.

    That is so where the namespace is not one of torch's, and where somebody registered a kernel of their own for an op
    of torch's, in Python. An op without a schema (a higher-order operator) runs whatever it is given.
    """
    schema = getattr(func, "_schema", None)
    if schema is None or schema.name.partition("::")[0] not in TORCH_NAMESPACES:
        return True
    if schema.name.startswith("prims::"):  # torch registers these through the decorator that users have
        return False
    name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
    kernels = (_COMPUTES.match(line) for line in torch._C._dispatch_dump(name).splitlines())
    return any(match is not None and _is_anyones(match["file"]) for match in kernels)


@functools.cache
def calls_others(func: Any) -> bool:
    """Whether torch composes this op of other ops on every device; it then obeys settings that choose among those. Seen
    in inference mode: elsewhere torch takes such ops apart before anybody sees them."""
    schema = getattr(func, "_schema", None)
    return schema is None or torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _is_anyones(file: str) -> bool:
    if not file.endswith(".py") and not file.startswith("/dev/null"):
        return False  # C++; an extension that replaces a kernel of torch's by one of its own is not told from torch
    inside = file.removeprefix(f"{_TORCH}/")
    return inside == file or inside in _ANYONES
