"""Backward of a softmax from its result and the gradient, by blocks of columns."""

import torch
from _kernels import drawn, load, store

BLOCK = 64


def reference(grad, result):
    wide = result.float()
    return (wide * (grad.float() - (grad.float() * wide).sum(-1, keepdim=True))).to(grad.dtype)


def inputs():
    return drawn(38, 30, 170), torch.softmax(2 * drawn(39, 30, 170), -1)


def make_kernel(fault=""):
    def kernel(grad, result):
        n = grad.shape[-1]
        inner = torch.zeros(grad.shape[:-1])
        for start in range(0, n, BLOCK):
            if fault == "first_block_lost" and start == 0 and n > BLOCK:
                continue
            product = load(grad, start, BLOCK) * load(result, start, BLOCK)
            if fault == "sum_in_dtype":
                inner = (inner + product.sum(-1)).to(grad.dtype).float()
            else:
                inner = inner + product.sum(-1)
        if fault == "mean":
            inner = inner / n
        if fault == "statistics_of_first_row":
            inner = torch.where(torch.arange(len(inner)) % 8 == 7, inner[0], inner)
        out = torch.empty_like(grad)
        for start in range(0, n, BLOCK):
            wide, slope = load(result, start, BLOCK), load(grad, start, BLOCK)
            if fault == "log_softmax":
                block = slope - wide * inner[..., None]
            elif fault == "inner_missing":
                block = wide * slope
            elif fault == "product_then_difference":
                block = wide * slope - wide * inner[..., None]
            else:
                block = wide * (slope - inner[..., None])
            store(out, start, block)
        return out

    return kernel
