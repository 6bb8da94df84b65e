"""Apply and restore torch's global settings."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch

from hashbench.core.devices.visibility import WORKSPACE_VARIABLE, workspace_config, workspace_conflict
from hashbench.core.trace.settings import (
    PRECISIONS,
    Setter,
    known_settings,
    precision,
    set_deterministic_mode,
    set_flag,
    settings,
    values,
)

__all__ = ["applied", "claim_workspace", "deterministic_settings", "lower_precisions", "preserved", "settings"]

log = logging.getLogger(__name__)

_FULL = ("none", "ieee")
"""Precisions that use all bits of a float32; any other is faster and gives other bits."""


def _own_precisions() -> dict[tuple[str, str], str]:
    """Return every precision as it was set itself; reading one that is ``none`` returns the inherited one."""
    own: dict[tuple[str, str], str] = {}
    try:
        for inner in PRECISIONS.values():
            get, put = precision(inner)
            own[inner] = get()
            if inner[1] == "all":
                put("none")  # those below it then show their own
    except (AttributeError, RuntimeError):
        pass  # a torch without these names, or without one of them
    for inner, value in own.items():
        precision(inner)[1](value)
    return own


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
    known = known_settings()
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


def _restore_setting(get: Callable[[], Any], put: Setter, value: Any) -> None:
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
    known, before, precisions = known_settings(), values(), _own_precisions()
    workspace = os.environ.get(WORKSPACE_VARIABLE)
    try:
        yield
    finally:
        for _ in range(2):  # some setters of torch also change what another one set
            for name, value in before.items():
                _restore_setting(*known[name], value)
        for inner, value in precisions.items():
            precision(inner)[1](value)
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
        set_deterministic_mode(deterministic)
        set_flag(torch.backends.cudnn, "deterministic", True)
        set_flag(torch.backends.cudnn, "benchmark", False)
        set_flag(torch.backends.mkldnn, "deterministic", True)
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
    set_flag(torch.backends.cudnn, "allow_tf32", False)
    torch.backends.cuda.matmul.allow_tf32 = False  # and float32_matmul_precision is "highest"
    if getattr(torch.backends.mkldnn, "allow_tf32", None):  # builds without Intel GPUs warn when it is set
        set_flag(torch.backends.mkldnn, "allow_tf32", False)
    for inner in PRECISIONS.values():
        get, put = precision(inner)
        with suppress(AttributeError, RuntimeError):
            if inner[1] != "all" and get() not in _FULL:
                put("ieee")


def lower_precisions() -> list[str]:
    """Return the settings that currently reduce the precision of float32, by their names in :func:`settings`."""
    texts = settings()
    names = [name for name in texts if name.endswith("allow_tf32") and texts[name] == "True"]
    names += [name for name, (_, op) in PRECISIONS.items() if op != "all" and texts.get(name, "none") not in _FULL]
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
