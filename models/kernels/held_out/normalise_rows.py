"""Rows divided by their Euclidean length, that is at least eps."""

import torch
from _kernels import drawn, load, store

BLOCK, EPS = 64, 1e-3


def reference(x):
    return torch.nn.functional.normalize(x, dim=-1, eps=EPS)


def inputs():
    return (drawn(102, 50, 110),)


def make_kernel(fault=""):
    def kernel(x):
        n = x.shape[-1]
        squares = torch.zeros(x.shape[:-1])
        for start in range(0, n, BLOCK):
            block = load(x, start, BLOCK)
            if fault == "square_in_dtype":
                square = (x[..., start : start + BLOCK] * x[..., start : start + BLOCK]).float()
                squares = squares + square.sum(-1)
            elif fault == "one_norm":
                squares = squares + block.abs().sum(-1)
            elif fault == "last_of_block_lost":
                squares = squares + block[..., :-1].square().sum(-1)
            else:
                squares = squares + block.square().sum(-1)
        if fault == "mean":
            squares = squares / n
        length = squares.sqrt()
        if fault == "eps_added":
            length = length + EPS
        elif fault == "eps_in_root":
            length = (squares + EPS**2).sqrt()
        elif fault == "eps_missing":
            pass
        else:
            length = length.clamp(min=EPS)
        out = torch.empty_like(x)
        for start in range(0, n, BLOCK):
            block = load(x, start, BLOCK)
            store(out, start, block * (1 / length[..., None]) if fault == "reciprocal" else block / length[..., None])
        return out

    return kernel
