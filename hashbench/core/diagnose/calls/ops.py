"""Classify ops (torch's own, custom, composite, unsafe to replay from a file) and find where a custom op is defined."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import runpy
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import torch

from hashbench.core.diagnose.calls.call import compiled_kernel
from hashbench.core.errors import HashbenchError

# Both tables: the first words of torch._C._jit_get_all_schemas() after `import torch`, torch 2.15. What a newer torch
# adds is taken for custom until it is named here; that costs four more experiments.
TENSOR_NAMESPACES = frozenset(
    {
        *("aten", "prims", "quantized", "_quantized", "quantization", "sparse", "rngprims", "static_runtime", "fsdp"),
        *("mkldnn", "mkldnn_prepacked", "onednn", "mkl", "inductor", "inductor_prims", "flex_gemm", "_native", "_test"),
    }
)
"""torch's own namespaces whose ops compute on tensors, except those that :func:`why_refused` rejects."""

_OTHERS = {
    "works with other processes": "c10d c10d_functional _c10d_functional _c10d_functional_autograd symm_mem _dtensor",
    "works with devices and their queues": "cuda streams mempool coor",
    "serves tools of a developer, files among them": "profiler debugprims debug_mode_ops _native_aot _inductor_test",
    "belongs to programs as data": "prim export onnx onnx_symbolic flex_lib",
}
OTHER_NAMESPACES = MappingProxyType({name: what for what, names in _OTHERS.items() for name in names.split()})
"""torch's own namespaces whose ops do something else, and what they do."""

TORCH_NAMESPACES = TENSOR_NAMESPACES | OTHER_NAMESPACES.keys()

MODE_ARGUMENTS = frozenset(
    {
        # Every argument of type `str` of the dispatcher's ops in TENSOR_NAMESPACES, in torch 2.15, but for `filename`
        # and what is printed (`s`).
        *("UPLO", "driver", "equation", "indexing", "interpolation", "mode", "norm", "ord", "p", "side"),
        *("pad_mode", "padding", "padding_side", "rounding_mode", "reduce", "approximate", "activation", "algorithm"),
        *("attr", "binary_attr", "unary_attr", "unary_algorithm", "post_op_name", "post_op_algorithm"),
        *("binary_post_op", "unary_post_op", "unary_post_op_algorithm"),
        *("api_name", "assert_msg"),  # words of the error that the op raises
        *("a", "b"),  # of aten::_test_*
    }
)
"""String arguments of torch's own ops that select a mode of computation."""

_UNCHECKED = {
    "indices": "aten::max_pool2d_with_indices_backward aten::max_pool3d_with_indices_backward"
    " aten::adaptive_max_pool2d_backward aten::adaptive_max_pool3d_backward aten::fractional_max_pool2d_backward"
    " aten::fractional_max_pool3d_backward aten::_embedding_bag_backward aten::_embedding_bag_dense_backward"
    " aten::_embedding_bag_per_sample_weights_backward aten::_convert_indices_from_coo_to_csr"
    " aten::_convert_indices_from_csr_to_coo quantized::embedding_bag_byte_rowwise_offsets"
    " quantized::embedding_bag_4bit_rowwise_offsets",
    "offsets": "aten::_embedding_bag aten::_embedding_bag_forward_only aten::embedding_bag",
    "lengths": "aten::segment_reduce aten::_segment_reduce_backward",
    "targets": "aten::ctc_loss aten::_ctc_loss aten::_ctc_loss_backward",
    "the indices of a sparse tensor": "aten::_sparse_coo_tensor_unsafe aten::_sparse_compressed_tensor_unsafe"
    " aten::_sparse_csr_tensor_unsafe aten::_sparse_csc_tensor_unsafe aten::_sparse_bsr_tensor_unsafe"
    " aten::_sparse_bsc_tensor_unsafe",
    "sizes": "aten::_cholesky_solve_helper aten::_thnn_differentiable_gru_cell_backward aten::_dyn_quant_matmul_4bit"
    " aten::_nnpack_spatial_convolution aten::_sobol_engine_scramble_",
}
UNCHECKED = MappingProxyType({name: what for what, names in _UNCHECKED.items() for name in names.split()})
"""CPU ops of torch 2.14 that access memory out of bounds on malicious input, and the argument that they do not check.
Common ops that trust sizes alone (batch norm, fused optimizers, …: docs/security.md) are not included."""

_OUTSIDE = re.compile(
    r"(?:^|_)(path|file|filename|filepath|fname|dir|directory|dirname|folder|url|uri|host|hostname|addr|address|port"
    r"|socket|endpoint|server|cmd|command|shell|program|executable|script|lib|library|module|env|group|store)(?:s|_|$)",
    re.IGNORECASE,
)
"""Names of string arguments of custom ops that refer to something outside the op's tensors."""

_TEXT, _PATH = re.compile(r"\bstr\b"), re.compile(r"[/\\\0]|^~|^\.\.?$")

_TORCH = f"{Path(torch.__file__).parent}/"
_DECORATORS = ("library.py", "_library/custom_ops.py")
"""torch files that appear as the registration site of users' kernels."""

_REGISTERED = re.compile(r"registered at (?P<file>.+?\.py):\d+")
_COMPUTES = re.compile(
    r"^(?!Meta|Fake|Python|Autograd|Functionalize|Tracer|Autocast|ADInplace)\S+: registered at (?P<file>.*?):\d+"
)


@functools.cache
def is_custom(func: Any) -> bool:
    """Return whether code outside torch computes this op, and so may read anything in the process.

    True if the namespace is not torch's, or if a Python kernel is registered for one of torch's ops (a kernel
    registered by a C++ extension cannot be distinguished from torch's). An op without a schema (a higher-order
    operator) runs arbitrary code. Not so a kernel of torch's compiler.
    """
    schema = getattr(func, "_schema", None)
    if schema is None:
        return compiled_kernel(func) is None
    if schema.name.partition("::")[0] not in TORCH_NAMESPACES:
        return True
    if schema.name.startswith("prims::"):  # torch registers these through the decorator that users have
        return False
    name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
    kernels = (_COMPUTES.match(line) for line in torch._C._dispatch_dump(name).splitlines())
    files = [match["file"] for match in kernels if match is not None]
    python = [file for file in files if file.endswith(".py") or file.startswith("/dev/null")]
    return any(not file.startswith(_TORCH) or _is_decorator(file) for file in python)


def _is_decorator(file: str) -> bool:
    return file.removeprefix(_TORCH) in _DECORATORS


@functools.cache
def why_refused(func: Any) -> str:
    """Return why an op named in a file must not be replayed; empty if it computes on tensors.

    Accepted ops take or return tensors, belong to a namespace of tensor ops (or to a loaded third-party namespace), and
    have no string argument that may name a file, process, host or library. This is decided from the schema: for torch's
    own ops every string argument must be a known mode, for others no string argument may have a name of that kind.
    """
    schema, name = getattr(func, "_schema", None), str(func)
    if schema is None or not torch._C._dispatch_has_kernel(func.name()):
        return f"{name} is not an op that the dispatcher calls"
    namespace = schema.name.partition("::")[0]
    if namespace in OTHER_NAMESPACES:
        return f"{name} {OTHER_NAMESPACES[namespace]}"
    own = namespace in TENSOR_NAMESPACES
    file = "" if own else _defining_file(func)
    if file.startswith(_TORCH) and not _is_decorator(file):
        return f"{name} is of a namespace of torch's that this hashbench does not know"
    texts = [argument.name for argument in schema.arguments if _TEXT.search(str(argument.type))]
    named = next((text for text in texts if (text not in MODE_ARGUMENTS if own else _OUTSIDE.search(text))), "")
    if named:
        return f"{name} takes a text that may name a file, a process or a machine ({named!r})"
    types = (str(each.type) for each in (*schema.arguments, *schema.returns))
    return "" if any("Tensor" in kind for kind in types) else f"{name} neither takes nor returns a tensor"


def why_unchecked(func: Any) -> str:
    """Return why an op must not be replayed with numbers from a file, although it computes on tensors; empty if it may
    be.

    A call captured in this process is replayed regardless: its numbers are the program's own.
    """
    what = UNCHECKED.get(func._schema.name, "")
    return f"{func} does not check its {what}".replace("its the", "the") if what else ""


def path_among(func: Any, values: Iterable[Any]) -> str:
    """Return why a custom op must not be replayed with these arguments: a string looks like a path; else empty."""
    if func._schema.name.partition("::")[0] in TENSOR_NAMESPACES:
        return ""
    path = next((value for value in values if isinstance(value, str) and _PATH.search(value)), None)
    return "" if path is None else f"{func} is given {path[:40]!r}, which reads as the path of a file"


@functools.cache
def calls_others(func: Any) -> bool:
    """Return whether torch decomposes this op into other ops on every device, so that settings that select those apply.

    Visible in inference mode only: otherwise torch decomposes such ops before dispatch modes.
    """
    schema = getattr(func, "_schema", None)
    return schema is None or torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


# ------------------------------------------------------------------------------------------- where one is defined


@dataclass(frozen=True, slots=True)
class Definition:
    """The Python ``file`` that defines an op, or else the ``module`` to import."""

    module: str = ""
    file: Path | None = None

    @property
    def argument(self) -> str:
        """The argument of ``repro.py`` that loads the op: a path or a module name."""
        return str(self.file) if self.file is not None else self.module

    def word(self) -> str:
        """Describe the definition for other machines: names, without paths of this one."""
        named = f"module {self.module}" if self.module else ""
        return ", ".join(part for part in (named, f"file {self.file.name}" if self.file is not None else "") if part)


_MAIN = ("__main__", "__mp_main__")
"""Names of the running program, which no other process can import."""


def needs_definition(func: Any) -> bool:
    """Return whether a process that imports only torch lacks the op, or has another one of that name."""
    return hasattr(func, "_schema") and is_custom(func) and not _defining_file(func).startswith(_TORCH)


def definition_of(func: Any) -> Definition | None:
    """Locate the definition of an op that :func:`needs_definition`; ``None`` for any other op, or if it cannot be
    found.

    If a C++ library registered it, a Python package named like the namespace is assumed to load it.
    """
    if not needs_definition(func):
        return None
    file = _defining_file(func)
    if file and Path(file).is_file():
        loaded = [name for name, module in list(sys.modules.items()) if getattr(module, "__file__", None) == file]
        return Definition(next((name for name in loaded if name not in _MAIN), ""), Path(file).resolve())
    namespace = func._schema.name.partition("::")[0]
    module = sys.modules.get(namespace)
    return Definition(namespace) if isinstance(module, ModuleType) and "." not in namespace else None


def why_undefined(func: Any) -> str:
    """Return why no new process is given the definition of an op that :func:`needs_definition`; empty if one is."""
    if not needs_definition(func):
        return ""
    definition, op = definition_of(func), func._schema.name
    if definition is None:
        return f"no file defines {op}, as in an interactive session; put it into one and give it to repro.py"
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if definition.file is None or main is None or definition.file != Path(main).resolve():
        return ""
    name = definition.file.name
    return f"{name} defines {op}, and is the running program; put it into another file and give it to repro.py"


def _defining_file(func: Any) -> str:
    """Return the file that passed the op to ``torch.library.custom_op``, else the Python file that registered the op or
    a kernel.

    Files outside torch take precedence. Returns an empty string if there is none.
    """
    from torch._library import custom_ops

    made = custom_ops.OPDEFS.get(func._schema.name)
    if made is not None:
        typed = getattr(getattr(made._init_fn, "__code__", None), "co_filename", "")  # a name that is no file's
        if source := inspect.getsourcefile(made._init_fn) or typed:
            return source
    try:
        dump = torch._C._dispatch_dump(func._schema.name)
    except RuntimeError:
        return ""
    files = [match["file"] for match in _REGISTERED.finditer(dump)]
    return next((file for file in files if not file.startswith(_TORCH)), files[0] if files else "")


def load(argument: str) -> None:
    """Define ops by running a Python file, loading a library (``.so``) or importing a module.

    Raises:
        HashbenchError: that failed.
    """
    try:
        if argument.endswith(".py"):
            runpy.run_path(argument)
        elif argument.endswith(".so"):
            torch.ops.load_library(argument)
        else:
            importlib.import_module(argument)
    except Exception as error:  # it is somebody's code
        raise HashbenchError(
            f"cannot import {argument}",
            consequence=f"its ops are not defined ({type(error).__name__}: {error})",
            tip="Give a Python file, a library or the name of a module.",
        ) from error
