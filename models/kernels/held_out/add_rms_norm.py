"""Residual added, then RMS norm with 1 + weight: both results."""

import torch
from _kernels import drawn, load, store

BLOCK, EPS = 32, 1e-5


def reference(x, residual, weight):
    total = x + residual
    wide = total.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * (1 + weight.float())
    return normed.to(x.dtype), total


def inputs():
    return drawn(138, 40, 100), drawn(139, 40, 100), 0.3 * drawn(140, 100)


def make_kernel(fault=""):
    def kernel(x, residual, weight):
        n = x.shape[-1]
        total = residual if fault == "writes_input" else torch.empty_like(residual)
        squares = torch.zeros(x.shape[:-1])
        for start in range(0, n, BLOCK):
            block = load(x, start, BLOCK) + load(residual, start, BLOCK)
            store(total, start, block)
            if fault == "square_of_input":
                block = load(x, start, BLOCK)
            squares = squares + block.square().sum(-1)
            if fault == "rounds_squares":
                squares = squares.to(x.dtype).float()
        if fault == "count_of_padded":
            count = -(-n // BLOCK) * BLOCK
        elif fault == "sum_for_mean":
            count = 1
        else:
            count = n
        scale = torch.rsqrt(squares / count + (1e-6 if fault == "eps" else EPS))
        out = torch.empty_like(x)
        for start in range(0, n, BLOCK):
            if fault == "residual_twice":
                block = load(total, start, BLOCK) + load(residual, start, BLOCK)
            elif fault == "sum_not_rounded":
                block = load(x, start, BLOCK) + load(residual, start, BLOCK)
            else:
                block = load(total, start, BLOCK)
            factor = load(weight, start, BLOCK)
            store(out, start, block * scale[..., None] * (factor if fault == "one_plus_missing" else 1 + factor))
        return out, total

    return kernel
