"""Functions of NVIDIA's ``libdevice``, computed by torch on the CPU, element by element.

An error of an ulp or so is that of torch's own functions: the judge allows it for any function that rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

_PREFIX = "__nv_"


def _trunc_integer(value: torch.Tensor) -> torch.Tensor:
    return value.round().to(torch.int64)


def _fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return (a.double() * b.double() + c.double()).to(a.dtype)


INSTRUCTIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {"fma.rn.f32": _fma, "rcp.approx.ftz.f32": torch.reciprocal}
)
"""Instructions in PTX that Inductor writes into its kernels."""

_AS_IN_TORCH = (
    *("acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "ceil", "copysign", "cos", "cosh", "erf", "erfc"),
    *("erfinv", "exp", "exp2", "expm1", "floor", "fmod", "hypot", "ldexp", "lgamma", "log", "log10", "log1p", "log2"),
    *("nextafter", "pow", "rsqrt", "sin", "sinh", "sqrt", "tan", "tanh", "trunc"),
)

FUNCTIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        **{name: getattr(torch, name) for name in _AS_IN_TORCH},
        "fabs": torch.abs,
        "abs": torch.abs,
        "finite": torch.isfinite,
        "isfinited": torch.isfinite,
        "isinf": torch.isinf,
        "isnan": torch.isnan,
        "signbit": torch.signbit,
        "nearbyint": torch.round,
        "rint": torch.round,
        "llrint": _trunc_integer,
        "powi": torch.pow,
        "fmax": torch.fmax,
        "fmin": torch.fmin,
        "fast_tanh": torch.tanh,
        "fast_exp": torch.exp,
        "fast_log": torch.log,
        "fast_sin": torch.sin,
        "fast_cos": torch.cos,
        "ilogb": lambda value: (torch.frexp(value).exponent - 1).to(torch.int32),
        "fma": _fma,
        "cyl_bessel_i0": torch.special.i0,
        "cyl_bessel_i1": torch.special.i1,
        "j0": torch.special.bessel_j0,
        "j1": torch.special.bessel_j1,
        "y0": torch.special.bessel_y0,
        "y1": torch.special.bessel_y1,
        "erfcx": torch.special.erfcx,
        "tgamma": lambda value: torch.lgamma(value).exp(),
    }
)
"""By name, without the suffix of float32."""


def computed(symbol: str, operands: Sequence[Any]) -> Any:
    """Return what a function gives for NumPy arrays.

    Args:
        symbol: as Triton has it: ``__nv_erf`` of float64, ``__nv_erff`` of float32.
        operands: arrays of one shape.

    Raises:
        NotImplementedError: it is not known here.
    """
    name = symbol.removeprefix(_PREFIX)
    short = name[:-1] if name.endswith(("f", "d")) else name
    function = FUNCTIONS.get(name) or FUNCTIONS.get(short)
    if function is None:
        raise NotImplementedError(f"libdevice.{name}")
    return _applied(function, operands)


def instructed(asm: str, operands: Sequence[Any]) -> Any:
    """Return what one instruction in PTX gives for NumPy arrays: ``fma.rn.f32 $0, $1, $2, $3;``.

    Raises:
        NotImplementedError: it is not known here.
    """
    name, _, order = asm.strip().removesuffix(";").partition(" ")
    in_order = ", ".join(f"${at}" for at in range(len(operands) + 1))
    if name not in INSTRUCTIONS or order != in_order:
        raise NotImplementedError(f"inline assembly {asm.strip()!r}")
    return _applied(INSTRUCTIONS[name], operands)


def _applied(function: Callable[..., Any], operands: Sequence[Any]) -> Any:
    tensors = [torch.from_numpy(np.ascontiguousarray(operand)) for operand in operands]
    return function(*tensors).numpy().reshape(np.shape(operands[0]))
