"""Specimens whose elementwise ops are printed as wrong Triton code."""

from __future__ import annotations

import re
from typing import Any

import torch
from _planted import Patches, plant_if
from _triton import printed_as, source_as
from torch import nn
from torch.nn import functional

Example = tuple[nn.Module, tuple[torch.Tensor, ...]]


def _rounded_constants(patches: Patches, digits: str) -> None:
    """Print constants with a format that keeps few digits."""

    def wrong(right: Any) -> Any:
        def constant(value: Any, dtype: torch.dtype, shape: Any) -> str:
            return right(float(format(value, digits)) if isinstance(value, float) else value, dtype, shape)

        return constant

    printed_as(patches, "_shaped_constant", wrong)


def three_digits(patches: Patches) -> None:
    """Print three digits of every constant: ``0.707`` for the square root of one half."""
    _rounded_constants(patches, ".3g")


def fixed_point(patches: Patches) -> None:
    """Print four places of every constant: an epsilon of 1e-5 is ``0.0``."""
    _rounded_constants(patches, ".4f")


def rational_tanh(patches: Patches) -> None:
    """Print ``tanh`` as the quotient of two polynomials, which is good near zero."""
    printed_as(patches, "tanh", lambda _: lambda x: f"({x} * (27.0 + {x} * {x}) / (27.0 + 9.0 * {x} * {x}))")


def narrow_sigmoid(patches: Patches) -> None:
    """Print ``sigmoid`` with a cast to bfloat16, which nobody asked for."""
    printed_as(patches, "sigmoid", lambda right: lambda x: f"{right(x)}.to(tl.bfloat16).to({x}.dtype)")


def truncated_division(patches: Patches) -> None:
    """Print the division of integers that rounds down as the one that rounds to zero."""
    printed_as(patches, "floordiv", lambda _: lambda a, b: f"{a} // {b}")


def signed_bytes(patches: Patches) -> None:
    """Take unsigned bytes for signed ones where they are cast to floating point."""

    def wrong(right: Any) -> Any:
        def to_dtype(x: Any, dtype: torch.dtype, src_dtype: torch.dtype | None = None, **how: Any) -> Any:
            if dtype.is_floating_point and torch.uint8 in (src_dtype, getattr(x, "dtype", None)):
                x = f"{x}.to(tl.int8, bitcast=True)"
            return right(x, dtype, src_dtype, **how)

        return to_dtype

    printed_as(patches, "to_dtype", wrong)


def maximum_without_nan(patches: Patches) -> None:
    """Print ``maximum`` so that it leaves out NaN."""
    printed_as(patches, "maximum", lambda _: lambda a, b: f"tl.maximum({a}, {b})")


def last_not_stored(patches: Patches) -> None:
    """Leave the last element of a buffer that is updated in place as it was."""

    def change(source: str) -> str:
        return re.sub(r"(tl\.store\(in_out_ptr\d.*), xmask\)", r"\1, xmask & (xindex < xnumel - 1))", source)

    source_as(patches, change)


class Perceptron(nn.Module):
    """Two linear layers with an activation between them."""

    def __init__(self, features: int, activation: Any) -> None:
        super().__init__()
        self.widen = nn.Linear(features, features + 3)
        self.narrow = nn.Linear(features + 3, 4)
        self.activation = activation

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.narrow(self.activation(self.widen(rows)))


class Small(nn.Module):
    """A layer norm of features whose variance is as small as its epsilon."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(features)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.norm(rows * 1e-3)


class Buckets(nn.Module):
    """Numbers of the buckets of three in which signed positions lie."""

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        return torch.div(positions, 3, rounding_mode="floor") + 100


class Pixels(nn.Module):
    """Bytes of an image, normalised."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.rand(channels, 1, 1))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return image.float() / 255 - self.mean


class MissingValues(nn.Module):
    """The larger of two readings; where one is missing (NaN), a learnt default."""

    def __init__(self, sensors: int) -> None:
        super().__init__()
        self.default = nn.Parameter(torch.randn(sensors))

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        larger = torch.maximum(first, second)
        return torch.where(torch.isnan(larger), self.default, larger)


def triton_gelu_constant(*, wrong: bool) -> Example:
    plant_if(wrong, three_digits)
    return Perceptron(16, functional.gelu), (torch.randn(12, 16),)


def triton_tanh(*, wrong: bool) -> Example:
    plant_if(wrong, rational_tanh)
    return Perceptron(16, torch.tanh), (torch.randn(12, 16) * 3,)


def triton_narrow_sigmoid(*, wrong: bool) -> Example:
    plant_if(wrong, narrow_sigmoid)
    return Perceptron(16, torch.sigmoid), (torch.randn(12, 16),)


def triton_epsilon(*, wrong: bool) -> Example:
    plant_if(wrong, fixed_point)
    return Small(24), (torch.randn(12, 24),)


def triton_floor_division(*, wrong: bool) -> Example:
    plant_if(wrong, truncated_division)
    return Buckets(), (torch.arange(-40, 40),)


def triton_signed_bytes(*, wrong: bool) -> Example:
    plant_if(wrong, signed_bytes)
    return Pixels(3), (torch.arange(3 * 6 * 14, dtype=torch.uint8).view(3, 6, 14),)


def triton_nan_lost(*, wrong: bool) -> Example:
    plant_if(wrong, maximum_without_nan)
    first, second = torch.randn(12, 19), torch.randn(12, 19)
    return MissingValues(19), (first.masked_fill(first > 1, torch.nan), second)


def triton_store_mask(*, wrong: bool) -> Example:
    plant_if(wrong, last_not_stored)
    return Perceptron(16, torch.relu), (torch.randn(11, 16),)


MODELS = {
    "triton_gelu_constant": lambda: triton_gelu_constant(wrong=True),
    "triton_gelu_constant_twin": lambda: triton_gelu_constant(wrong=False),
    "triton_tanh": lambda: triton_tanh(wrong=True),
    "triton_tanh_twin": lambda: triton_tanh(wrong=False),
    "triton_narrow_sigmoid": lambda: triton_narrow_sigmoid(wrong=True),
    "triton_narrow_sigmoid_twin": lambda: triton_narrow_sigmoid(wrong=False),
    "triton_epsilon": lambda: triton_epsilon(wrong=True),
    "triton_epsilon_twin": lambda: triton_epsilon(wrong=False),
    "triton_floor_division": lambda: triton_floor_division(wrong=True),
    "triton_floor_division_twin": lambda: triton_floor_division(wrong=False),
    "triton_signed_bytes": lambda: triton_signed_bytes(wrong=True),
    "triton_signed_bytes_twin": lambda: triton_signed_bytes(wrong=False),
    "triton_nan_lost": lambda: triton_nan_lost(wrong=True),
    "triton_nan_lost_twin": lambda: triton_nan_lost(wrong=False),
    "triton_store_mask": lambda: triton_store_mask(wrong=True),
    "triton_store_mask_twin": lambda: triton_store_mask(wrong=False),
}
