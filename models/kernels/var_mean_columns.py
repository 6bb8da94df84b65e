"""Variance and mean of each column: partial ones of blocks of rows are merged pairwise."""

import torch
from _kernels import blocks, drawn

ROWS = 16


def reference(x):
    return torch.var_mean(x, 0)


def inputs():
    return (drawn(40, 100, 30) + 0.5,)


def merged(one, other, forgotten):
    n, m = one[0], other[0]
    difference = other[1] - one[1]
    mean = one[1] + difference * m / (n + m)
    between = 0 if forgotten else difference.square() * n * m / (n + m)
    return n + m, mean, one[2] + other[2] + between


def make_kernel(fault=""):
    def kernel(x):
        parts = []
        for block in blocks(len(x), ROWS):
            rows = x[block].float()
            mean = rows.mean(0)
            parts.append((len(rows), mean, (rows - mean).square().sum(0)))
        if fault == "last_block_lost" and len(parts) > 1:
            parts.pop()
        if fault == "equal_counts":
            parts = [(ROWS, *part[1:]) for part in parts]
        while len(parts) > 1:
            pairs = [merged(*parts[i : i + 2], fault == "between_forgotten") for i in range(0, len(parts) - 1, 2)]
            parts = pairs + (parts[-1:] if len(parts) % 2 else [])
        count, mean, squares = parts[0]
        if fault == "one_pass":
            wide = x.float()
            mean = wide.sum(0) / count
            squares = wide.square().sum(0) - count * mean.square()
        var = squares / (count if fault == "biased" else count - 1)
        if fault == "deviation":
            var = var.sqrt()
        if fault == "negative_hidden":
            mean = mean.abs()
        return var.to(x.dtype), mean.to(x.dtype)

    return kernel
