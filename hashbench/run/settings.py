"""Apply, snapshot and restore torch's global settings."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from hashbench.devices.visibility import WORKSPACE_VARIABLE, workspace_config, workspace_conflict

log = logging.getLogger(__name__)

_Setter = Callable[[Any], object]


def _attribute(owner: Any, name: str) -> tuple[Callable[[], Any], _Setter]:
    return lambda: getattr(owner, name), lambda value: _set(owner, name, value)


def _set(owner: Any, name: str, value: Any) -> None:
    """Set a flag of torch.backends, even if torch's own test helpers were imported, which freeze them all."""
    with getattr(torch.backends, "__allow_nonbracketed_mutation", nullcontext)():
        setattr(owner, name, value)


def _deterministic_mode() -> str:
    return {0: "off", 1: "warn", 2: "on"}[torch.get_deterministic_debug_mode()]


def _set_deterministic_mode(value: str) -> None:
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


_PRECISIONS: Mapping[str, tuple[str, str]] = MappingProxyType(
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

_FULL = ("none", "ieee")
"""Precisions that use all bits of a float32; any other is faster and gives other bits."""


def _precision(inner: tuple[str, str]) -> tuple[Callable[[], Any], _Setter]:
    return (
        lambda: torch._C._get_fp32_precision_getter(*inner),
        lambda value: torch._C._set_fp32_precision_setter(*inner, value),
    )


def _own_precisions() -> dict[tuple[str, str], str]:
    """Return every precision as it was set itself; reading one that is ``none`` returns the inherited one."""
    own: dict[tuple[str, str], str] = {}
    try:
        for inner in _PRECISIONS.values():
            get, put = _precision(inner)
            own[inner] = get()
            if inner[1] == "all":
                put("none")  # those below it then show their own
    except (AttributeError, RuntimeError):
        pass  # a torch without these names, or without one of them
    for inner, value in own.items():
        _precision(inner)[1](value)
    return own


def _known_settings() -> dict[str, tuple[Callable[[], Any], _Setter]]:
    """Return getter and setter of every global torch setting that can change a result, by name."""
    cuda, cudnn, mkldnn = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn
    settings: dict[str, tuple[Callable[[], Any], _Setter]] = {
        "deterministic_algorithms": (_deterministic_mode, _set_deterministic_mode),
        "fill_uninitialized_memory": _attribute(torch.utils.deterministic, "fill_uninitialized_memory"),
        "num_threads": (torch.get_num_threads, torch.set_num_threads),
        "default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
        "default_device": (_default_device, torch.set_default_device),
        # torch cannot say, but Python's floats obey the same flag of this thread's processor.
        "flush_denormal": (lambda: sys.float_info.min / 2 == 0.0, torch.set_flush_denormal),
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
    return settings | {name: _precision(inner) for name, inner in _PRECISIONS.items()}


def _values() -> dict[str, Any]:
    """Return the current value of every setting by name, without those that this build of torch lacks."""
    values = {}
    for name, (get, _) in _known_settings().items():
        with suppress(AttributeError, RuntimeError):
            values[name] = get()
    return values


def settings() -> dict[str, str]:
    """Return torch's global settings as text by name, without those that this build of torch lacks."""
    texts = {name: str(value) for name, value in _values().items()}
    return texts | {WORKSPACE_VARIABLE: os.environ.get(WORKSPACE_VARIABLE, "")}


def _from_text(text: str, current: Any) -> Any:
    """Convert text from ``settings`` back to a value of the type of ``current``."""
    if text == "None":
        return None
    if isinstance(current, torch.dtype):
        return getattr(torch, text.removeprefix("torch."))
    if isinstance(current, bool):
        return text == "True"
    return type(current)(text) if isinstance(current, (int, float)) else text


@contextmanager
def applied(wanted: Mapping[str, str]) -> Iterator[None]:
    """Apply settings, as text by name (see :func:`settings`); restore all of them on exit.

    A setting that this build of torch lacks, or that cannot be set (``inference_mode``), is skipped.
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
        if WORKSPACE_VARIABLE in wanted:
            os.environ[WORKSPACE_VARIABLE] = wanted[WORKSPACE_VARIABLE]
        yield


def _restore_setting(get: Callable[[], Any], put: _Setter, value: Any) -> None:
    """Restore a setting that has changed.

    If older and newer names for matmul precision were mixed, reading raises until all are restored; that must not
    prevent the restoration of other settings.
    """
    try:
        if get() == value:
            return
    except (AttributeError, RuntimeError):
        pass
    with suppress(AttributeError, RuntimeError):
        put(value)


@contextmanager
def preserved() -> Iterator[None]:
    """Restore torch's global settings, and the environment variables that hashbench sets, on exit."""
    known, before, precisions = _known_settings(), _values(), _own_precisions()
    workspace = os.environ.get(WORKSPACE_VARIABLE)
    try:
        yield
    finally:
        for _ in range(2):  # some setters of torch also change what another one set
            for name, value in before.items():
                _restore_setting(*known[name], value)
        for inner, value in precisions.items():
            _precision(inner)[1](value)
        if workspace is None:
            os.environ.pop(WORKSPACE_VARIABLE, None)
        else:
            os.environ[WORKSPACE_VARIABLE] = workspace


@contextmanager
def deterministic_settings(deterministic: str, *, threads: int | None = None) -> Iterator[None]:
    """Apply the settings of a dynamo accuracy run; restore them on exit.

    They are those of ``setup_determinism`` and the accuracy block of ``run()`` in ``benchmarks/dynamo``, with TF32 also
    disabled by torch's newer names.

    Args:
        deterministic: ``on`` (``use_deterministic_algorithms(True)``: an op without a deterministic implementation
            raises), ``warn`` (it warns) or ``off``. Library flags are set in all three, as in dynamo.
        threads: ``torch.set_num_threads``; ``None`` keeps the current number.
    """
    with preserved():
        _set_deterministic_mode(deterministic)
        _set(torch.backends.cudnn, "deterministic", True)
        _set(torch.backends.cudnn, "benchmark", False)
        _set(torch.backends.mkldnn, "deterministic", True)
        _require_full_precision()
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(False)
        os.environ[WORKSPACE_VARIABLE] = workspace_config(os.environ.get(WORKSPACE_VARIABLE))
        if threads is not None:
            torch.set_num_threads(threads)
        yield


def _require_full_precision() -> None:
    """Disable TF32, and BF16 inside float32, by torch's older and newer names.

    The older names are set first, since they set newer ones too. A newer one that is ``none`` and inherits nothing is
    kept: it means full float32. Reading the older names raises if the two sets disagree; here they agree.
    """
    _set(torch.backends.cudnn, "allow_tf32", False)
    torch.backends.cuda.matmul.allow_tf32 = False  # and float32_matmul_precision is "highest"
    if getattr(torch.backends.mkldnn, "allow_tf32", None):  # builds without Intel GPUs warn when it is set
        _set(torch.backends.mkldnn, "allow_tf32", False)
    for inner in _PRECISIONS.values():
        get, put = _precision(inner)
        with suppress(AttributeError, RuntimeError):
            if inner[1] != "all" and get() not in _FULL:
                put("ieee")


def lower_precisions() -> list[str]:
    """Return the settings that currently reduce the precision of float32, by their names in :func:`settings`."""
    texts = settings()
    names = [name for name in texts if name.endswith("allow_tf32") and texts[name] == "True"]
    names += [name for name, (_, op) in _PRECISIONS.items() if op != "all" and texts.get(name, "none") not in _FULL]
    name = "float32_matmul_precision"  # absent where older and newer names are mixed, so that torch cannot say
    return names if texts.get(name) == "highest" else [*names, name]


def claim_workspace(device: str) -> None:
    """Set ``CUBLAS_WORKSPACE_CONFIG`` for the rest of this process on a CUDA device, unless its value is one torch
    accepts.

    cuBLAS reads it on initialisation, so it must be set before CUDA is, and restoring it would have no effect. A
    warning is logged if another value is replaced, and if CUDA is already initialised, which may be too late.
    """
    given = os.environ.get(WORKSPACE_VARIABLE)
    wanted = workspace_config(given)
    if torch.device(device).type != "cuda" or given == wanted:
        return
    if given is not None:
        log.warning(workspace_conflict(given))
    if torch.cuda.is_initialized():
        log.warning(
            "CUDA runs already in this process: %s=%s may have no effect. Set it before the first use of CUDA.",
            WORKSPACE_VARIABLE,
            wanted,
        )
    os.environ[WORKSPACE_VARIABLE] = wanted
