"""Running maximum along time by blocks, and the position of it."""

import torch
from _kernels import blocks, drawn

BLOCK = 24


def reference(x):
    return tuple(torch.cummax(x, 0))


def inputs():
    return (drawn(115, 100, 20) - 1,)


def make_kernel(fault=""):
    def kernel(x):
        values, places = torch.empty_like(x), torch.empty(x.shape, dtype=torch.int64)
        start = 0.0 if fault == "starts_at_zero" else -torch.inf
        best = torch.full(x.shape[1:], start, dtype=x.dtype)
        place = torch.zeros(x.shape[1:], dtype=torch.int64)
        for block in blocks(len(x), BLOCK):
            if fault == "reset_at_block":
                best = torch.full_like(best, -torch.inf)
            for t in range(block.start, block.stop):
                if fault == "first_of_equal":
                    taken = (x[t] > best) | x[t].isnan() & ~best.isnan()
                elif fault == "nan_lost":
                    taken = x[t] >= best
                else:
                    taken = (x[t] >= best) & ~best.isnan() | x[t].isnan()
                best = torch.where(taken, x[t], best)
                place = torch.where(taken, t - block.start if fault == "place_in_block" else t, place)
                values[t], places[t] = best, place
        return values, places

    return kernel
