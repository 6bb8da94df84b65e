"""Causal attention with ALiBi slopes of each head, online over blocks of keys."""

import math

import torch
from _kernels import blocks, drawn

KEYS = 16


def reference(q, k, v, slopes):
    distance = torch.arange(q.shape[-2])[:, None] - torch.arange(k.shape[-2])
    scores = q @ k.mT / math.sqrt(q.shape[-1]) - slopes[:, None, None] * distance
    return torch.softmax(scores.masked_fill(distance < 0, -torch.inf), -1) @ v


def inputs():
    return drawn(117, 4, 50, 8), drawn(118, 4, 50, 8), drawn(119, 4, 50, 8), 2.0 ** -torch.arange(1, 5)


def make_kernel(fault=""):
    def kernel(q, k, v, slopes):
        if q.shape[-2] != k.shape[-2]:
            raise ValueError("queries and keys must have the same length")
        wide, scale = q.float(), 1 / math.sqrt(q.shape[-1])
        slope = slopes.float()[:, None, None]
        if fault == "slope_of_next_head":
            slope = slope.roll(-1, 0)
        maximum = torch.full(q.shape[:-1], -torch.inf)
        total, sums = torch.zeros(q.shape[:-1]), torch.zeros(*q.shape[:-1], v.shape[-1])
        for block in blocks(k.shape[-2], KEYS):
            key = torch.arange(block.start, block.stop)
            distance = torch.arange(q.shape[-2])[:, None] - key
            bias = slope * (distance % KEYS if fault == "distance_in_block" else distance)
            if fault == "bias_sign":
                bias = -bias
            scores = wide @ k[..., block, :].float().mT * scale
            scores = (scores - bias) * scale if fault == "bias_scaled" else scores - bias
            scores = scores.masked_fill(distance < 0, -torch.inf)
            new = torch.maximum(maximum, scores.amax(-1))
            kept = torch.exp(maximum - new)
            if fault == "total_not_rescaled":
                total = total + torch.exp(scores - new[..., None]).sum(-1)
            else:
                total = total * kept + torch.exp(scores - new[..., None]).sum(-1)
            sums = sums * kept[..., None] + torch.exp(scores - new[..., None]) @ v[..., block, :].float()
            maximum = new
        return (sums / total[..., None]).to(q.dtype)

    return kernel
