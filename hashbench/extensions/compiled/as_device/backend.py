"""The backend of ``torch.compile`` behind ``--as``: dynamo and AOTAutograd see the CPU, Inductor another device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch._guards import detect_fake_mode

from hashbench.core.errors import HashbenchError
from hashbench.extensions.compiled.as_device.codegen import CUDA, generating, moved
from hashbench.extensions.compiled.as_device.devices import NamedDevice, device_of

_UNSEEN = "its kernels are not called from Python, so that nothing can interpret them"
_MEASURES = "it measures kernels on the device, which is not there"
_REFUSED = (
    ("cpp_wrapper", "cpp_wrapper", _UNSEEN),
    ("triton.cudagraphs", "CUDA graphs", _UNSEEN),
    ("max_autotune", "max_autotune", _MEASURES),
    ("max_autotune_gemm", "max_autotune_gemm", _MEASURES),
)
"""Settings of Inductor that cannot be interpreted, what they are called, and why."""


def refuse_settings(backend: str, *, device: str = "cpu") -> None:
    """Raise unless a backend, if it generates code for a device that is not there, can be interpreted as Inductor is
    set.

    Args:
        backend: its name.
        device: that the model runs on.

    Raises:
        HashbenchError: kernels are not called from Python, the model is not on the CPU, or there is no such device.
    """
    wanted = device_of(backend)
    if wanted is None:
        return
    if device != "cpu":
        raise HashbenchError(
            f"--as {wanted} cannot be combined with --device {device}",
            consequence="its kernels are interpreted on the CPU",
            tip="Leave --device out, or --as.",
        )
    for name, words, why in _REFUSED:
        setting: Any = inductor_config
        for part in name.split("."):
            setting = getattr(setting, part)
        if setting:
            raise HashbenchError(
                f"--as {wanted} cannot be combined with {words}",
                consequence=why,
                tip=f"Unset torch._inductor.config.{name} in the model's file and the environment.",
            )


class InductorAs:
    """Compiles as ``inductor`` does, for a device that is not there, and interprets the kernels.

    Args:
        device: that code is generated for.
    """

    compiler_name = "inductor"
    """As dynamo has it."""

    def __init__(self, device: NamedDevice) -> None:
        self._device = device

    def __call__(self, module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """Compile one of dynamo's graphs."""
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(module, inputs, inner_compile=self._inner)

    def _inner(self, module: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        """Compile one of AOTAutograd's graphs for the device."""
        from torch._inductor.compile_fx import compile_fx_inner

        fake = detect_fake_mode(inputs)
        with generating(self._device):
            with fake if fake is not None else torch.no_grad():
                elsewhere = [_elsewhere(value) for value in inputs]
            moved(module)
            return compile_fx_inner(module, elsewhere, **options)


def _elsewhere(value: Any) -> Any:
    """Return a fake tensor like another on the device."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=CUDA)
