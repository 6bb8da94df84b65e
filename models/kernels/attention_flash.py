"""Causal attention by blocks of queries and keys, with an online softmax."""

import math

import torch
from _kernels import blocks, drawn

QUERIES, KEYS = 32, 32
LOG2_E = 1.4426950408889634


def reference(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def inputs():
    return drawn(7, 2, 2, 80, 16), drawn(8, 2, 2, 80, 16), drawn(9, 2, 2, 80, 16)


def make_kernel(fault=""):
    def attend(query, k, v, rows, scale):
        maximum = torch.full(query.shape[:-1], -torch.inf)
        total = torch.zeros(query.shape[:-1])
        sums = torch.zeros(*query.shape[:-1], v.shape[-1])
        end = rows.stop - (KEYS if fault == "diagonal_block_skipped" and rows.start else 0)
        for columns in blocks(end, KEYS):
            scores = query @ k[..., columns, :].float().mT * scale
            row = torch.arange(rows.start, rows.stop)[:, None]
            column = torch.arange(columns.start, columns.stop)
            if fault == "mask_off_by_one":
                seen = (row > column) | (row == 0)
            elif fault == "mask_one_too_many":
                seen = row + 1 >= column
            else:
                seen = row >= column
            scores = torch.where(seen, scores, -torch.inf)
            new = torch.maximum(maximum, scores.amax(-1))
            shift = torch.where(new == -torch.inf, 0.0, new)
            weights = torch.exp2(scores - shift[..., None])
            kept = torch.exp2(maximum - shift)
            total = total * kept + weights.sum(-1)
            if fault == "weights_in_dtype":
                weights = weights.to(k.dtype).float()
            kept_sums = 1.0 if fault == "rescale_forgotten" else kept[..., None]
            sums = sums * kept_sums + weights @ v[..., columns, :].float()
            maximum = new
        return sums / total[..., None]

    def kernel(q, k, v):
        scale = LOG2_E / math.sqrt(q.shape[-1])
        if fault == "scale_missing":
            scale = LOG2_E
        elif fault == "scale_of_length":
            scale = LOG2_E / math.sqrt(q.shape[-2])
        elif fault == "log2_e_rounded":
            scale = 1.44 / math.sqrt(q.shape[-1])
        out = torch.empty_like(q)
        for rows in blocks(q.shape[-2], QUERIES):
            out[..., rows, :] = attend(q[..., rows, :].float(), k, v, rows, scale).to(q.dtype)
        return out

    return kernel
