"""Squared distances of all pairs of points, by blocks of points."""

import torch
from _kernels import blocks, drawn

POINTS = 16


def reference(x, y):
    return (x[:, None] - y).square().sum(-1)


def inputs():
    return drawn(141, 40, 12), drawn(142, 35, 12)


def make_kernel(fault=""):
    def kernel(x, y):
        if x.shape[1] != y.shape[1]:
            raise ValueError(f"points must have the same number of coordinates, not {x.shape[1]} and {y.shape[1]}")
        if fault == "written_blocks_only":
            out = torch.empty(len(x), len(y), dtype=x.dtype)
        else:
            out = torch.zeros(len(x), len(y), dtype=x.dtype)
        for rows in blocks(len(x), POINTS):
            for columns in blocks(len(y), POINTS):
                if fault == "written_blocks_only" and columns.stop - columns.start < POINTS:
                    continue
                a, b = x[rows].float(), y[columns].float()
                if fault == "sequential":
                    result = torch.zeros(len(a), len(b))
                    for d in range(a.shape[1]):
                        result = result + (a[:, d, None] - b[:, d]).square()
                elif fault == "cross_term_once":
                    result = a.square().sum(1)[:, None] + b.square().sum(1) - a @ b.T
                elif fault == "norm_of_first_block":
                    first = y[: len(b)].float()
                    result = a.square().sum(1)[:, None] + first.square().sum(1) - 2 * a @ b.T
                elif fault == "absolute":
                    result = (a[:, None] - b).abs().sum(-1)
                elif fault == "last_coordinate_lost":
                    result = (a[:, None, :-1] - b[:, :-1]).square().sum(-1)
                elif fault == "difference_in_dtype":
                    result = (x[rows][:, None] - y[columns]).float().square().sum(-1)
                elif fault == "diagonal_zero":
                    result = (a[:, None] - b).square().sum(-1)
                    if rows.start == columns.start:
                        result.fill_diagonal_(0)
                else:
                    result = (a[:, None] - b).square().sum(-1)
                out[rows, columns] = result.to(x.dtype)
        return out

    return kernel
