"""Batch norm in training: the result, and running statistics as new tensors."""

import torch
from _kernels import blocks, drawn, uniform

MOMENTUM, EPS, ROWS = 0.1, 1e-5, 16


def reference(x, weight, bias, running_mean, running_var):
    mean, var = x.float().mean(0), x.float().var(0, correction=0)
    out = (x.float() - mean) * torch.rsqrt(var + EPS) * weight + bias
    unbiased = var * len(x) / (len(x) - 1)
    return (
        out.to(x.dtype),
        ((1 - MOMENTUM) * running_mean + MOMENTUM * mean).to(running_mean.dtype),
        ((1 - MOMENTUM) * running_var + MOMENTUM * unbiased).to(running_var.dtype),
    )


def inputs():
    return (
        drawn(33, 70, 20),
        1 + 0.3 * drawn(34, 20),
        0.3 * drawn(35, 20),
        0.3 * drawn(36, 20),
        uniform(37, 0.5, 2, 20),
    )


def make_kernel(fault=""):
    def kernel(x, weight, bias, running_mean, running_var):
        n = len(x)
        mean = sum(x[block].float().sum(0) for block in blocks(n, ROWS)) / n
        squares = sum((x[block].float() - mean).square().sum(0) for block in blocks(n, ROWS))
        if fault == "one_pass":
            squares = sum(x[block].float().square().sum(0) for block in blocks(n, ROWS)) - n * mean.square()
        var = squares / n
        scale = torch.rsqrt((squares / (n - 1) if fault == "unbiased" else var) + EPS) * weight.float()
        out = ((x.float() - mean) * scale + bias.float()).to(x.dtype)
        kept = {"momentum_exchanged": MOMENTUM, "momentum": 0.99}.get(fault, 1 - MOMENTUM)
        seen = var if fault == "running_biased" else squares / (n - 1)
        if fault == "running_of_deviation":
            seen = seen.sqrt()
        new_mean = (kept * running_mean.float() + (1 - kept) * mean).to(running_mean.dtype)
        new_var = (kept * running_var.float() + (1 - kept) * seen).to(running_var.dtype)
        if fault == "writes_input":
            return out, running_mean.copy_(new_mean), running_var.copy_(new_var)
        return out, new_mean, new_var

    return kernel
