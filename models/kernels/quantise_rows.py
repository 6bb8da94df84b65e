"""Quantise each row to int8 by its largest magnitude; returns numbers and scales."""

import torch
from _kernels import drawn, load

BLOCK = 64


def reference(x):
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-8) / 127
    return torch.round(x.float() / scale).to(torch.int8), scale


def inputs():
    return (drawn(25, 40, 130),)


def make_kernel(fault=""):
    def kernel(x):
        n = x.shape[-1]
        largest = torch.zeros(x.shape[:-1])
        for start in range(0, n - n % BLOCK if fault == "tail_not_seen" else n, BLOCK):
            block = load(x, start, BLOCK)
            largest = torch.maximum(largest, (block if fault == "maximum_for_absolute" else block.abs()).amax(-1))
        if fault == "one_scale_for_all":
            largest = largest.amax().expand_as(largest)
        scale = largest[..., None].clamp(min=1e-8) / (128 if fault == "128" else 127)
        numbers = x.float() / scale
        rounded = numbers if fault == "truncates" else torch.round(numbers)
        return rounded.clamp(-128, 127).to(torch.int8), scale

    return kernel
