"""Read torch's global settings, and what else decides how kernels compute: threads, instructions, variables."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from hashbench.core.devices.visibility import WORKSPACE_VARIABLE

Setter = Callable[[Any], object]


def _attribute(owner: Any, name: str) -> tuple[Callable[[], Any], Setter]:
    return lambda: getattr(owner, name), lambda value: set_flag(owner, name, value)


def set_flag(owner: Any, name: str, value: Any) -> None:
    """Set a flag of torch.backends, even if torch's own test helpers were imported, which freeze them all."""
    with getattr(torch.backends, "__allow_nonbracketed_mutation", nullcontext)():
        setattr(owner, name, value)


def _deterministic_mode() -> str:
    return {0: "off", 1: "warn", 2: "on"}[torch.get_deterministic_debug_mode()]


def set_deterministic_mode(value: str) -> None:
    """Set ``torch.use_deterministic_algorithms`` without importing the compiler (1.3 s of CPU).

    torch would import it only to set its flag; it is set here if the compiler is already loaded.
    """
    if "torch._inductor.config" in sys.modules:
        torch.use_deterministic_algorithms(value != "off", warn_only=value == "warn")
    else:
        torch._C._set_deterministic_algorithms(value != "off", warn_only=value == "warn")


def _default_device() -> torch.device | None:
    """Return the default device; ``None`` if unset: setting even ``cpu`` would add a mode to every later call."""
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


PRECISIONS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "fp32_precision": ("generic", "all"),
        "cudnn.fp32_precision": ("cuda", "all"),
        "mkldnn.fp32_precision": ("mkldnn", "all"),
        "cuda.matmul.fp32_precision": ("cuda", "matmul"),
        "cudnn.conv.fp32_precision": ("cuda", "conv"),
        "cudnn.rnn.fp32_precision": ("cuda", "rnn"),
        "mkldnn.matmul.fp32_precision": ("mkldnn", "matmul"),
        "mkldnn.conv.fp32_precision": ("mkldnn", "conv"),
        "mkldnn.rnn.fp32_precision": ("mkldnn", "rnn"),
    }
)
"""The newer names of the TF32 settings in ``torch.backends`` (torch 2.9 and later), and torch's internal ones. The
others inherit from the first three while they are ``none``. They are set by the internal names: in torch 2.15, setting
``mkldnn.fp32_precision`` sets that of every backend."""


def precision(inner: tuple[str, str]) -> tuple[Callable[[], Any], Setter]:
    return (
        lambda: torch._C._get_fp32_precision_getter(*inner),
        lambda value: torch._C._set_fp32_precision_setter(*inner, value),
    )


def flushes_denormal() -> bool:
    """Return True if this thread's processor takes the smallest numbers for zero."""
    return sys.float_info.min / 2 == 0.0


def known_settings() -> dict[str, tuple[Callable[[], Any], Setter]]:
    """Return getter and setter of every global torch setting that can change a result, by name."""
    cuda, cudnn, mkldnn = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn
    settings: dict[str, tuple[Callable[[], Any], Setter]] = {
        "deterministic_algorithms": (_deterministic_mode, set_deterministic_mode),
        "fill_uninitialized_memory": _attribute(torch.utils.deterministic, "fill_uninitialized_memory"),
        "num_threads": (torch.get_num_threads, torch.set_num_threads),
        "default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
        "default_device": (_default_device, torch.set_default_device),
        # torch cannot say, but Python's floats obey the same flag of this thread's processor.
        "flush_denormal": (flushes_denormal, torch.set_flush_denormal),
        "float32_matmul_precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        "grad_enabled": (torch.is_grad_enabled, torch._C._set_grad_enabled),
        "inference_mode": (torch.is_inference_mode_enabled, lambda _: None),  # left with its context: watched only
        "cudnn.enabled": _attribute(cudnn, "enabled"),
        "cudnn.deterministic": _attribute(cudnn, "deterministic"),
        "cudnn.benchmark": _attribute(cudnn, "benchmark"),
        "cudnn.allow_tf32": _attribute(cudnn, "allow_tf32"),
        "cuda.matmul.allow_tf32": _attribute(cuda.matmul, "allow_tf32"),
        "mkldnn.allow_tf32": _attribute(mkldnn, "allow_tf32"),
        "mkldnn.deterministic": _attribute(mkldnn, "deterministic"),
        "mkldnn.enabled": _attribute(mkldnn, "enabled"),
        "cuda.matmul.fp16_reduction": _attribute(cuda.matmul, "allow_fp16_reduced_precision_reduction"),
        "cuda.matmul.bf16_reduction": _attribute(cuda.matmul, "allow_bf16_reduced_precision_reduction"),
        "sdp.cudnn": (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
        "sdp.flash": (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
        "sdp.mem_efficient": (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
        "sdp.math": (cuda.math_sdp_enabled, cuda.enable_math_sdp),
        "sdp.fp16_bf16_reduction": (
            cuda.fp16_bf16_reduction_math_sdp_allowed,
            cuda.allow_fp16_bf16_reduction_math_sdp,
        ),
        "quantized.engine": _attribute(torch.backends.quantized, "engine"),
        "opt_einsum.enabled": _attribute(torch.backends.opt_einsum, "enabled"),
        "opt_einsum.strategy": _attribute(torch.backends.opt_einsum, "strategy"),
    }
    for device in ("cpu", "cuda"):
        settings[f"autocast_{device}"] = (
            partial(torch.is_autocast_enabled, device),
            partial(torch.set_autocast_enabled, device),
        )
        settings[f"autocast_{device}_dtype"] = (
            partial(torch.get_autocast_dtype, device),
            partial(torch.set_autocast_dtype, device),
        )
    return settings | {name: precision(inner) for name, inner in PRECISIONS.items()}


def values() -> dict[str, Any]:
    """Return the current value of every setting by name, without those that this build of torch lacks."""
    values = {}
    for name, (get, _) in known_settings().items():
        with suppress(AttributeError, RuntimeError):
            values[name] = get()
    return values


def settings() -> dict[str, str]:
    """Return torch's global settings as text by name, without those that this build of torch lacks."""
    texts = {name: str(value) for name, value in values().items()}
    return texts | {WORKSPACE_VARIABLE: os.environ.get(WORKSPACE_VARIABLE, "")}


def machine() -> dict[str, str]:
    """Return what else decides how a kernel computes, and stays as it is while a process runs, as text by name."""
    return {
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "interop_threads": str(torch.get_num_interop_threads()),
    }


_VARIABLES = re.compile(
    r"^(OMP|KMP|GOMP|MKL|OPENBLAS|DNNL|ONEDNN|ATEN|NPY|CUBLAS|CUDNN|MIOPEN)_|^NVIDIA_TF32_OVERRIDE$"
)
_OF_NO_RESULT = re.compile(
    r"_WAIT_POLICY$|VERBOSE|DISPLAY|LOG|BLOCKTIME|SPINCOUNT|_(DIR|PATH|HOME|ROOT)$|WARNINGS|_ITT_"
)
"""How threads wait, what libraries print, where files lie. By their names alone: one of these may yet matter."""


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that decide how libraries compute."""
    return {
        name: environment[name]
        for name in sorted(environment)
        if _VARIABLES.search(name) and not _OF_NO_RESULT.search(name)
    }


def in_force() -> dict[str, str]:
    """Return :func:`settings`, :func:`machine` and :func:`variables` of this process together."""
    return {**variables(os.environ), **settings(), **machine()}


def glance() -> tuple[Any, ...]:
    """Return what a program changes most likely while it runs, in 2 µs, where :func:`settings` takes 200."""
    return (
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cpu"),
        torch.get_autocast_dtype("cuda"),
        torch.is_grad_enabled(),
        torch._C._get_deterministic_algorithms(),
        torch._C._get_deterministic_algorithms_warn_only(),
        torch._C._get_cudnn_deterministic(),
        torch._C._get_cudnn_benchmark(),
        torch._C._get_mkldnn_deterministic(),
        torch._C._get_mkldnn_enabled(),
        *(torch._C._get_fp32_precision_getter(*inner) for inner in _GLANCED),
        flushes_denormal(),
    )


_GLANCED = (("cuda", "matmul"), ("cuda", "conv"), ("mkldnn", "matmul"), ("mkldnn", "conv"))
