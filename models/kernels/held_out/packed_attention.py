"""Attention of packed sequences, given by their offsets."""

import math

import torch
from _kernels import drawn


def reference(q, k, v, offsets):
    place = torch.arange(len(q))
    sequence = torch.searchsorted(offsets, place, right=True)
    seen = (sequence[:, None] == sequence) & (place[:, None] >= place)
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
    return torch.einsum("hqk,khd->qhd", torch.softmax(scores.masked_fill(~seen, -torch.inf), -1), v)


def inputs():
    return drawn(152, 60, 2, 8), drawn(153, 60, 2, 8), drawn(154, 60, 2, 8), torch.tensor([0, 9, 10, 37, 60])


def make_kernel(fault=""):
    def kernel(q, k, v, offsets):
        if int(offsets[0]) != 0 or int(offsets[-1]) != len(q) or not bool((offsets.diff() > 0).all()):
            raise ValueError("offsets must ascend from 0 to the number of tokens")
        if len(k) != len(q) or len(v) != len(q):
            raise ValueError("queries, keys and values must have as many tokens")
        out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
        for i in range(len(offsets) - 1):
            start, stop = int(offsets[i]), int(offsets[i + 1])
            first = start - 1 if fault == "token_of_sequence_before" and start else start
            query = q[start:stop].float().transpose(0, 1)
            key, value = k[first:stop].float().transpose(0, 1), v[first:stop].float().transpose(0, 1)
            scores = query @ key.mT / math.sqrt(q.shape[-1])
            row, column = torch.arange(start, stop)[:, None], torch.arange(first, stop)
            if fault == "not_causal":
                pass
            elif fault == "mask_of_whole":
                scores = scores.masked_fill(column >= row + 1 + (i == 2), -torch.inf)
            else:
                scores = scores.masked_fill(column > row, -torch.inf)
            weights = torch.softmax(scores, -1)
            if fault == "weights_in_dtype":
                weights = weights.to(q.dtype).float()
            if fault == "last_sequence_unwritten" and i == len(offsets) - 2 and i:
                continue
            result = (weights @ value).transpose(0, 1)
            if fault == "heads_exchanged" and stop - start > 20:
                result = result.flip(1)
            out[start:stop] = result.to(q.dtype)
        return out

    return kernel
