"""Softmax of the last dimension, online: one pass for maximum and sum, one to write."""

import torch
from _kernels import drawn, load, store

BLOCK = 64
LOG2_E = 1.4426950408889634


def reference(x):
    return torch.softmax(x, -1)


def inputs():
    return (drawn(1, 24, 200),)


def make_kernel(fault=""):
    exp = torch.exp2 if fault == "exp2" else torch.exp
    scale = LOG2_E if fault == "exp2" else 1.0

    def kernel(x):
        n = x.shape[-1]
        out = torch.empty_like(x)
        maximum = torch.full(x.shape[:-1], -torch.inf)
        total = torch.zeros(x.shape[:-1])
        end = n - n % BLOCK if fault == "last_block_skipped" else n
        for start in range(0, end, BLOCK):
            block = load(x, start, BLOCK, 0.0 if fault == "tail" else -torch.inf) * scale
            if fault == "no_maximum":
                maximum = torch.zeros_like(maximum)
                total = total + exp(block).sum(-1)
                continue
            if fault == "maximum_of_first_block" and start:
                new = maximum
            elif fault == "nan_hidden":
                block = torch.where(block.isnan(), -torch.inf, block)
                new = torch.maximum(maximum, block.amax(-1))
            else:
                new = torch.maximum(maximum, block.amax(-1))
            shift = torch.where(new == -torch.inf, 0.0, new)
            kept = 1.0 if fault == "rescale_forgotten" else exp(maximum - shift)
            total = total * kept + exp(block - shift[..., None]).sum(-1)
            maximum = new
        for start in range(0, n, BLOCK):
            block = load(x, start, BLOCK) * scale
            if fault == "nan_hidden":
                block = torch.where(block.isnan(), -torch.inf, block)
            store(out, start, exp(block - maximum[..., None]) / total[..., None])
        return out

    return kernel
