"""Specimens whose reductions and scans are printed as wrong Triton code."""

from __future__ import annotations

import re
from typing import Any
from unittest.mock import patch

import torch
from _planted import Patches, plant_if
from _triton import method_as, printed_as, source_as
from torch import nn

Example = tuple[nn.Module, tuple[torch.Tensor, ...]]

LOOPED = 4097
"""A row of so many elements is reduced block by block, and the last block of any size that Inductor takes has one."""


def rough_rsqrt(patches: Patches) -> None:
    """Print ``rsqrt`` of an argument that was rounded to eleven bits."""
    printed_as(patches, "rsqrt", lambda right: lambda x: f"{right(x)}.to(tl.float16).to({x}.dtype)")


def zeros_behind_the_end(patches: Patches) -> None:
    """Fill what lies behind the end of a row with zeros where its maximum is looked for."""

    def wrong(right: Any) -> Any:
        def reduction(self: Any, dtype: Any, src_dtype: Any, reduction_type: str, value: Any) -> Any:
            from torch._inductor import ir

            default = ir.Reduction.default_value

            def zero(kind: str, of: Any) -> Any:
                return 0 if kind in ("max", "amax") else default(kind, of)

            with patch.object(ir.Reduction, "default_value", staticmethod(zero)):
                return right(self, dtype, src_dtype, reduction_type, value)

        return reduction

    method_as(patches, "reduction", wrong)


def short_loop(patches: Patches) -> None:
    """End the loop over a row one element early: a block of one is left out."""

    def change(source: str) -> str:
        return re.sub(r"(for r0_offset in (?:tl\.)?range\(0), r0_numel,", r"\1, r0_numel - 1,", source)

    source_as(patches, change)


def count_of_masked(patches: Patches) -> None:
    """Count what lies behind the end of a row where its variance is accumulated."""

    def wrong(right: Any) -> Any:
        def welford_reduce(self: Any, result: Any, kind: Any, value: Any, where: Any, *others: Any) -> Any:
            def masked(new: str, old: Any) -> str:
                return new if "weight" in new else where(new, old)

            return right(self, result, kind, value, masked, *others)

        return welford_reduce

    method_as(patches, "welford_reduce", wrong)


def last_of_equals(patches: Patches) -> None:
    """Take the last of equal elements for the first in ``argmax``."""

    def change(source: str) -> str:
        found = r"( *)(\w+), (\w+) = triton_helpers\.max_with_(?:first_)?index\((.+), (.+), (\d)\)"
        return re.sub(found, r"\1\2, \3 = triton_helpers.max_with_index(\4, -(\5), \6)\n\1\3 = -\3", source)

    source_as(patches, change)


def no_carry(patches: Patches) -> None:
    """Begin every block of a scan anew."""

    def change(source: str) -> str:
        return re.sub(r"= tl\.where\(roffset > 0, (\w+), (\w+)\)", r"= \2", source)

    source_as(patches, change)


def no_maximum(patches: Patches) -> None:
    """Leave out the subtraction of the maximum in ``softmax``."""

    def wrong(right: Any) -> Any:
        def fallback(self: Any, dtype: Any, value: Any) -> Any:
            largest, _ = right(self, dtype, value)
            none = self.cse.generate(self.compute, f"{largest} * 0", dtype=largest.dtype, shape=largest.shape)
            exponential = self.cse.generate(self.compute, f"tl_math.exp({value})", dtype=value.dtype, shape=value.shape)
            return none, self.reduction(dtype, dtype, "sum", exponential)

        return fallback

    method_as(patches, "prepare_softmax_twopass_fallback", wrong)


def last_row_left_out(patches: Patches) -> None:
    """Leave out the last row of a sum over rows, as that for the gradient of a bias."""

    def change(source: str) -> str:
        if "ReductionHint.OUTER" not in source and "ReductionHint.DEFAULT" not in source:
            return source
        return source.replace("r0_mask = r0_index < r0_numel\n", "r0_mask = r0_index < r0_numel - 1\n")

    source_as(patches, change)


class RootMeanSquare(nn.Module):
    """Rows divided by their root mean square."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(features))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-6) * self.scale


class Largest(nn.Module):
    """The largest of each row of log probabilities, none of which is positive."""

    def forward(self, logarithms: torch.Tensor) -> torch.Tensor:
        return logarithms.amax(-1) * 2


class Total(nn.Module):
    """Sums of long rows."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(rows).sum(-1) / 16


class Spread(nn.Module):
    """Variances of long rows."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.var(-1)


class Winner(nn.Module):
    """The first of the largest scores, which are small integers."""

    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        return scores.argmax(-1)


class Running(nn.Module):
    """Running sums of long rows."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.cumsum(-1)


class Attention(nn.Module):
    """Probabilities of large logits."""

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.softmax(logits, -1)


class Shifted(nn.Module):
    """Rows to which a learnt row is added."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(features))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.tanh(rows + self.shift) * 3


def triton_rsqrt(*, wrong: bool) -> Example:
    plant_if(wrong, rough_rsqrt)
    return RootMeanSquare(24), (torch.randn(12, 24),)


def triton_masked_maximum(*, wrong: bool) -> Example:
    plant_if(wrong, zeros_behind_the_end)
    return Largest(), (-torch.rand(12, 41) - 1,)


def triton_sum_tail(*, wrong: bool) -> Example:
    plant_if(wrong, short_loop)
    return Total(), (torch.randn(16, LOOPED),)


def triton_welford_count(*, wrong: bool) -> Example:
    plant_if(wrong, count_of_masked)
    return Spread(), (torch.randn(2, 3000) + torch.linspace(0, 5, 3000),)


def triton_argmax_ties(*, wrong: bool) -> Example:
    plant_if(wrong, last_of_equals)
    return Winner(), (torch.randint(4, (12, 41)),)


def triton_scan_carry(*, wrong: bool) -> Example:
    plant_if(wrong, no_carry)
    return Running(), (torch.randn(2, LOOPED),)


def triton_softmax_overflow(*, wrong: bool) -> Example:
    plant_if(wrong, no_maximum)
    return Attention(), (torch.randn(12, 41) * 1000,)


def triton_bias_gradient(*, wrong: bool) -> Example:
    plant_if(wrong, last_row_left_out)
    return Shifted(24), (torch.randn(13, 24),)


MODELS = {
    "triton_rsqrt": lambda: triton_rsqrt(wrong=True),
    "triton_rsqrt_twin": lambda: triton_rsqrt(wrong=False),
    "triton_masked_maximum": lambda: triton_masked_maximum(wrong=True),
    "triton_masked_maximum_twin": lambda: triton_masked_maximum(wrong=False),
    "triton_sum_tail": lambda: triton_sum_tail(wrong=True),
    "triton_sum_tail_twin": lambda: triton_sum_tail(wrong=False),
    "triton_welford_count": lambda: triton_welford_count(wrong=True),
    "triton_welford_count_twin": lambda: triton_welford_count(wrong=False),
    "triton_argmax_ties": lambda: triton_argmax_ties(wrong=True),
    "triton_argmax_ties_twin": lambda: triton_argmax_ties(wrong=False),
    "triton_scan_carry": lambda: triton_scan_carry(wrong=True),
    "triton_scan_carry_twin": lambda: triton_scan_carry(wrong=False),
    "triton_softmax_overflow": lambda: triton_softmax_overflow(wrong=True),
    "triton_softmax_overflow_twin": lambda: triton_softmax_overflow(wrong=False),
    "triton_bias_gradient": lambda: triton_bias_gradient(wrong=True),
    "triton_bias_gradient_twin": lambda: triton_bias_gradient(wrong=False),
}
