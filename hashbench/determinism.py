"""The settings and the random state of a run: put in force, snapshotted, restored.

The settings are those of ``benchmarks/dynamo``'s ``setup_determinism`` and of the accuracy block of its ``run()``.
Unlike there, everything is put back afterwards, on error too, and ``torch.manual_seed`` is not replaced.
"""

from __future__ import annotations

import operator
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import numpy as np
import torch

_Setter = Callable[[Any], object]


def _attribute(owner: Any, name: str) -> tuple[Callable[[], Any], _Setter]:
    return lambda: getattr(owner, name), lambda value: _set(owner, name, value)


def _set(owner: Any, name: str, value: Any) -> None:
    """Set a flag of torch.backends, also where somebody imported torch's own test helpers, which freeze them all."""
    with getattr(torch.backends, "__allow_nonbracketed_mutation", nullcontext)():
        setattr(owner, name, value)


def _deterministic_mode() -> str:
    return {0: "off", 1: "warn", 2: "on"}[torch.get_deterministic_debug_mode()]


def _set_deterministic_mode(value: str) -> None:
    torch.use_deterministic_algorithms(value != "off", warn_only=value == "warn")


def _set_grad_enabled(value: bool) -> None:
    torch._C._set_grad_enabled(value)


def _autocast(device: str) -> tuple[Callable[[], Any], _Setter]:
    return lambda: torch.is_autocast_enabled(device), lambda value: torch.set_autocast_enabled(device, value)


def _autocast_dtype(device: str) -> tuple[Callable[[], Any], _Setter]:
    return lambda: torch.get_autocast_dtype(device), lambda value: torch.set_autocast_dtype(device, value)


def _default_device() -> torch.device | None:
    """``None`` where nobody has set one: to set even ``cpu`` would put a mode around every later call."""
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


def _flushes_denormals() -> bool:
    """torch cannot say, but Python's floats obey the same flag of this thread's processor."""
    return sys.float_info.min / 2 == 0.0


_PRECISIONS = (
    "cuda.matmul",
    "cudnn",
    "cudnn.conv",
    "cudnn.rnn",
    "mkldnn",
    "mkldnn.matmul",
    "mkldnn.conv",
    "mkldnn.rnn",
)
"""Where ``torch.backends`` has the newer name of the TF32 settings (torch 2.9 on)."""


def _precision(path: str) -> tuple[Callable[[], Any], _Setter]:
    get_owner = operator.attrgetter(path)
    return (
        lambda: get_owner(torch.backends).fp32_precision,
        lambda value: _set(get_owner(torch.backends), "fp32_precision", value),
    )


def _known_settings() -> dict[str, tuple[Callable[[], Any], _Setter]]:
    """Every global setting of torch that can change a result, as a getter and a setter by name."""
    cuda, cudnn, mkldnn = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn
    settings: dict[str, tuple[Callable[[], Any], _Setter]] = {
        "deterministic_algorithms": (_deterministic_mode, _set_deterministic_mode),
        "fill_uninitialized_memory": _attribute(torch.utils.deterministic, "fill_uninitialized_memory"),
        "num_threads": (torch.get_num_threads, torch.set_num_threads),
        "default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
        "default_device": (_default_device, torch.set_default_device),
        "flush_denormal": (_flushes_denormals, torch.set_flush_denormal),
        "float32_matmul_precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        "grad_enabled": (torch.is_grad_enabled, _set_grad_enabled),
        "inference_mode": (torch.is_inference_mode_enabled, _cannot_set),
        "autocast_cpu": _autocast("cpu"),
        "autocast_cuda": _autocast("cuda"),
        "autocast_cpu_dtype": _autocast_dtype("cpu"),
        "autocast_cuda_dtype": _autocast_dtype("cuda"),
        "cudnn.enabled": _attribute(cudnn, "enabled"),
        "cudnn.deterministic": _attribute(cudnn, "deterministic"),
        "cudnn.benchmark": _attribute(cudnn, "benchmark"),
        "cudnn.allow_tf32": _attribute(cudnn, "allow_tf32"),
        "cuda.matmul.allow_tf32": _attribute(cuda.matmul, "allow_tf32"),
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
    return settings | {f"{path}.fp32_precision": _precision(path) for path in _PRECISIONS}


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


def _from_text(text: str, current: Any) -> Any:
    """The value that ``settings`` wrote as ``text``, of the type that the setting has now."""
    if text == "None":
        return None
    if isinstance(current, torch.dtype):
        return getattr(torch, text.removeprefix("torch."))
    if isinstance(current, bool):
        return text == "True"
    return type(current)(text) if isinstance(current, (int, float)) else text


@contextmanager
def applied(wanted: Mapping[str, str]) -> Iterator[None]:
    """Put settings, given as text by name as :func:`settings` gives them, in force; all are put back on leaving.

    A setting that this build of torch lacks, or that cannot be set (``inference_mode``), is passed over.
    """
    known = _known_settings()
    with preserved():
        for _ in range(2):  # some setters of torch also change what another one set
            for name, (get, put) in known.items():
                if name not in wanted:
                    continue
                with suppress(AttributeError, RuntimeError):
                    current = get()
                    if str(current) != wanted[name]:
                        put(_from_text(wanted[name], current))
        if "CUBLAS_WORKSPACE_CONFIG" in wanted:
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = wanted["CUBLAS_WORKSPACE_CONFIG"]
        yield


def _put_back(get: Callable[[], Any], put: _Setter, value: Any) -> None:
    """Set what is not as it was. Where a body mixed torch's older and newer names for the precision of matmuls, reading
    raises until all are put back; nothing of that may keep the other settings from it."""
    try:
        if get() == value:
            return
    except (AttributeError, RuntimeError):
        pass
    with suppress(AttributeError, RuntimeError):
        put(value)


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
        for _ in range(2):  # some setters of torch also change what another one set
            for name, value in before.items():
                _put_back(*known[name], value)
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
        _set(torch.backends.cudnn, "deterministic", True)
        _set(torch.backends.cudnn, "benchmark", False)
        _set(torch.backends.mkldnn, "deterministic", True)
        _set(torch.backends.cudnn, "allow_tf32", False)
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
