"""The settings and the random state of a run: put in force, snapshotted, restored.

The settings are those of ``benchmarks/dynamo``'s ``setup_determinism`` and of the accuracy block of its ``run()``. Unlike
there, everything is put back afterwards, on error too, and ``torch.manual_seed`` is not replaced.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_Setter = Callable[[Any], None]


def _attribute(owner: Any, name: str) -> tuple[Callable[[], Any], _Setter]:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


def _deterministic_mode() -> str:
    return {0: "off", 1: "warn", 2: "on"}[torch.get_deterministic_debug_mode()]


def _set_deterministic_mode(value: str) -> None:
    torch.use_deterministic_algorithms(value != "off", warn_only=value == "warn")


def _set_grad_enabled(value: bool) -> None:
    torch._C._set_grad_enabled(value)


def _autocast(device: str) -> tuple[Callable[[], Any], _Setter]:
    return lambda: torch.is_autocast_enabled(device), lambda value: torch.set_autocast_enabled(device, value)


def _known_settings() -> dict[str, tuple[Callable[[], Any], _Setter]]:
    """Every global setting of torch that can change a result, as a getter and a setter by name."""
    cuda, cudnn, mkldnn = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn
    settings: dict[str, tuple[Callable[[], Any], _Setter]] = {
        "deterministic_algorithms": (_deterministic_mode, _set_deterministic_mode),
        "fill_uninitialized_memory": _attribute(torch.utils.deterministic, "fill_uninitialized_memory"),
        "num_threads": (torch.get_num_threads, torch.set_num_threads),
        "default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
        "default_device": (torch.get_default_device, torch.set_default_device),
        "float32_matmul_precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        "grad_enabled": (torch.is_grad_enabled, _set_grad_enabled),
        "inference_mode": (torch.is_inference_mode_enabled, _cannot_set),
        "autocast_cpu": _autocast("cpu"),
        "autocast_cuda": _autocast("cuda"),
        "cudnn.enabled": _attribute(cudnn, "enabled"),
        "cudnn.deterministic": _attribute(cudnn, "deterministic"),
        "cudnn.benchmark": _attribute(cudnn, "benchmark"),
        "cudnn.allow_tf32": _attribute(cudnn, "allow_tf32"),
        "cuda.matmul.allow_tf32": _attribute(cuda.matmul, "allow_tf32"),
        "mkldnn.deterministic": _attribute(mkldnn, "deterministic"),
        "mkldnn.enabled": _attribute(mkldnn, "enabled"),
        "sdp.flash": (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
        "sdp.mem_efficient": (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
        "sdp.math": (cuda.math_sdp_enabled, cuda.enable_math_sdp),
        "sdp.fp16_bf16_reduction": (
            cuda.fp16_bf16_reduction_math_sdp_allowed,
            cuda.allow_fp16_bf16_reduction_math_sdp,
        ),
        "quantized.engine": _attribute(torch.backends.quantized, "engine"),
    }
    return settings


def _cannot_set(_value: Any) -> None:
    """Inference mode is left by leaving its context; it is watched, not restored."""


def settings() -> dict[str, str]:
    """Torch's global settings as text by name. A setting that this build of torch lacks is absent."""
    found = {}
    for name, (get, _) in _known_settings().items():
        try:
            found[name] = str(get())
        except (AttributeError, RuntimeError):
            continue
    found["CUBLAS_WORKSPACE_CONFIG"] = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
    return found


@contextmanager
def preserved() -> Iterator[None]:
    """Put torch's global settings, and the environment variables that hashbench sets, back on leaving."""
    before: dict[str, Any] = {}
    known = _known_settings()
    for name, (get, _) in known.items():
        try:
            before[name] = get()
        except (AttributeError, RuntimeError):
            continue
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    try:
        yield
    finally:
        for name, value in before.items():
            get, put = known[name]
            if get() != value:
                put(value)
        if workspace is None:
            os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
        else:
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = workspace


@contextmanager
def deterministic_settings(deterministic: str, *, threads: int | None = None) -> Iterator[None]:
    """The settings of a dynamo accuracy run, restored afterwards.

    Args:
        deterministic: ``on`` (``use_deterministic_algorithms(True)``: an op without a deterministic implementation
            raises), ``warn`` (it warns) or ``off``. The library flags below are set in all three, as dynamo does.
        threads: ``torch.set_num_threads``; ``None`` leaves it.
    """
    with preserved():
        _set_deterministic_mode(deterministic)
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
        torch.backends.mkldnn.deterministic = True  # type: ignore[assignment]
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(False)
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        if threads is not None:
            torch.set_num_threads(threads)
        yield


def reset_rng_state(seed: int = 1337) -> None:
    """Seed Python's, NumPy's and torch's global generators, the latter on every device (torch does all of them)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Put the global generators of Python, NumPy and torch back on leaving, on every device that is in use."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    backend = getattr(torch, device.type) if device is not None else None
    accelerators = backend.get_rng_state_all() if backend is not None and backend.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if backend is not None and accelerators is not None:
            backend.set_rng_state_all(accelerators)
