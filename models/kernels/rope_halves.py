"""Rotary embedding of queries, halves rotated, angles computed inside from positions."""

import torch
from _kernels import blocks, drawn, whole

BASE, POSITIONS = 10000.0, 32


def reference(x, positions):
    half = x.shape[-1] // 2
    frequencies = BASE ** (-torch.arange(half, dtype=torch.float32) / half)
    angles = positions.float()[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    a, b = x[..., :half].float(), x[..., half:].float()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def inputs():
    return drawn(26, 2, 4, 70, 32), whole(27, 500, 70)


def make_kernel(fault=""):
    def kernel(x, positions):
        if x.shape[-1] % 2:
            raise ValueError(f"the last dimension must be even, not {x.shape[-1]}")
        half = x.shape[-1] // 2
        exponent = torch.arange(half, dtype=torch.float32) / (half - 1 if fault == "spacing" else half)
        frequencies = (1000.0 if fault == "base" else BASE) ** (-exponent)
        out = x.clone() if fault == "tail_not_rotated" else torch.empty_like(x)
        length = x.shape[-2]
        end = length - length % POSITIONS if fault == "tail_not_rotated" else length
        for block in blocks(end, POSITIONS):
            position = positions[block].float()
            if fault == "position_of_next":
                position = position + 1
            if fault == "positions_in_dtype":
                position = position.to(x.dtype).float()
            angles = position[:, None] * frequencies
            cos, sin = angles.cos(), angles.sin()
            if fault == "interleaved":
                a, b = x[..., block, 0::2].float(), x[..., block, 1::2].float()
            else:
                a, b = x[..., block, :half].float(), x[..., block, half:].float()
            sign = -1 if fault == "sign" else 1
            rotated = torch.cat([a * cos - sign * b * sin, b * cos + sign * a * sin], -1)
            out[..., block, :] = rotated.to(x.dtype)
        return out

    return kernel
