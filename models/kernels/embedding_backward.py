"""Gradient of an embedding: rows of the gradient added to those that the indices name, by blocks of tokens."""

import torch
from _kernels import blocks, drawn, whole

TOKENS, PADDING = 16, 3


def reference(grad, indices, weight):
    kept = grad.masked_fill((indices == PADDING)[:, None], 0)
    return torch.zeros_like(weight).index_add(0, indices, kept)


def inputs():
    return drawn(20, 100, 24), whole(21, 30, 100), drawn(22, 30, 24)


def make_kernel(fault=""):
    def kernel(grad, indices, weight):
        out = torch.zeros(weight.shape)
        end = len(indices) - len(indices) % TOKENS if fault == "last_block_skipped" else len(indices)
        for block in blocks(end, TOKENS):
            index, rows = indices[block], grad[block].float()
            if fault != "padding_counted":
                rows = torch.where((index == PADDING)[:, None], 0.0, rows)
            if fault == "duplicate_in_block_lost":
                out[index] = out[index] + rows
            elif fault == "sorted":
                order = torch.argsort(index, stable=True)
                out.index_add_(0, index[order], rows[order])
            elif fault == "overwritten":
                out[index] = rows
            else:
                out.index_add_(0, index, rows)
        if fault == "mean_of_duplicates":
            out = out / torch.bincount(indices, minlength=len(out)).clamp(min=1)[:, None]
        return out.to(grad.dtype)

    return kernel
