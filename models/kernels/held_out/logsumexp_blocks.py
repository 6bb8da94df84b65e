"""Log of the sum of exponentials by blocks, with a temperature."""

import torch
from _kernels import drawn, load

BLOCK, TEMPERATURE = 64, 0.7


def reference(x):
    return torch.logsumexp(x / TEMPERATURE, -1)


def inputs():
    return (drawn(101, 40, 180),)


def make_kernel(fault=""):
    def kernel(x):
        n = x.shape[-1]
        scale = {"temperature_missing": 1.0, "temperature_multiplied": TEMPERATURE, "temperature_rounded": 1.43}.get(
            fault, 1 / TEMPERATURE
        )
        maximum, total = torch.full(x.shape[:-1], -torch.inf), torch.zeros(x.shape[:-1])
        if fault == "two_passes":
            maximum = torch.stack([load(x, s, BLOCK, -torch.inf).amax(-1) for s in range(0, n, BLOCK)]).amax(0) * scale
            shift = torch.where(maximum.isinf(), 0.0, maximum)
            for start in range(0, n, BLOCK):
                total = total + torch.exp(load(x, start, BLOCK, -torch.inf) * scale - shift[..., None]).sum(-1)
            return (shift + total.log()).to(x.dtype)
        for start in range(0, n, BLOCK):
            block = load(x, start, BLOCK, 0.0 if fault == "tail" else -torch.inf) * scale
            new = torch.maximum(maximum, block.amax(-1))
            shift = torch.where(new.isinf(), 0.0, new)
            old = torch.where(maximum == -torch.inf, 0.0, torch.exp(maximum - shift))
            if fault == "rescale_wrong_way":
                old = torch.where(maximum == -torch.inf, 0.0, torch.exp(shift - maximum))
            weights = torch.exp(block - shift[..., None])
            if fault == "first_column_twice" and start:
                weights = torch.cat([weights, weights[..., :1]], -1)
            total = total * old + weights.sum(-1)
            maximum = new
        shift = torch.where(maximum.isinf(), 0.0, maximum)
        if fault == "maximum_not_added":
            return total.log().to(x.dtype)
        return (shift + total.log()).to(x.dtype)

    return kernel
