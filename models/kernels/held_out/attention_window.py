"""Attention in a sliding window with soft capped scores."""

import math

import torch
from _kernels import blocks, drawn

WINDOW, CAP, QUERIES = 20, 8.0, 16


def reference(q, k, v):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    scores = CAP * torch.tanh(scores / CAP)
    distance = torch.arange(q.shape[-2])[:, None] - torch.arange(k.shape[-2])
    scores = scores.masked_fill((distance < 0) | (distance >= WINDOW), -torch.inf)
    return torch.softmax(scores, -1) @ v


def inputs():
    return 2 * drawn(106, 3, 70, 16), 2 * drawn(107, 3, 70, 16), drawn(108, 3, 70, 16)


def make_kernel(fault=""):
    def kernel(q, k, v):
        if q.shape[-2] != k.shape[-2] or k.shape[-2] != v.shape[-2]:
            raise ValueError("queries, keys and values must have the same length")
        out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
        window = {"window_off_by_one": WINDOW + 1, "window_short": WINDOW - 1}.get(fault, WINDOW)
        for rows in blocks(q.shape[-2], QUERIES):
            first = max(0, rows.start - window + 1)
            if fault == "first_block_aligned":
                first = first // QUERIES * QUERIES + (QUERIES if first % QUERIES else 0)
            key, value = k[..., first : rows.stop, :].float(), v[..., first : rows.stop, :].float()
            scores = q[..., rows, :].float() @ key.mT / math.sqrt(q.shape[-1])
            if fault == "cap_missing":
                pass
            elif fault == "cap_by_clamp":
                scores = scores.clamp(-CAP, CAP)
            elif fault == "cap_rational":
                scores = scores / (1 + (scores / CAP) ** 2 / 3)
            else:
                scores = CAP * torch.tanh(scores / CAP)
            distance = torch.arange(rows.start, rows.stop)[:, None] - torch.arange(first, rows.stop)
            hidden = distance >= window if fault == "future_seen" else (distance < 0) | (distance >= window)
            scores = scores.masked_fill(hidden, -1e4 if fault == "finite_mask" else -torch.inf)
            weights = torch.exp(scores - scores.amax(-1, keepdim=True))
            if fault == "divided_first":
                weights = (weights / weights.sum(-1, keepdim=True)).to(q.dtype).float()
                out[..., rows, :] = (weights @ value).to(q.dtype)
            else:
                out[..., rows, :] = (weights @ value / weights.sum(-1, keepdim=True)).to(q.dtype)
        return out

    return kernel
