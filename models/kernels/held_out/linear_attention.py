"""Causal linear attention by chunks, with a state that decays."""

import torch
from _kernels import blocks, drawn

CHUNK, DECAY = 16, 0.95


def reference(q, k, v):
    distance = torch.arange(q.shape[1])[:, None] - torch.arange(k.shape[1])
    weights = torch.where(distance >= 0, DECAY ** distance.clamp(min=0), 0.0).to(q.dtype)
    return (q @ k.mT * weights) @ v


def inputs():
    return drawn(109, 2, 60, 12), drawn(110, 2, 60, 12), drawn(111, 2, 60, 14)


def make_kernel(fault=""):
    def kernel(q, k, v):
        if not q.shape[1] == k.shape[1] == v.shape[1]:
            raise ValueError("queries, keys and values must have the same length")
        state = torch.zeros(q.shape[0], k.shape[2], v.shape[2])
        out = torch.empty(*q.shape[:2], v.shape[2], dtype=q.dtype)
        for chunk in blocks(q.shape[1], CHUNK):
            query, key, value = (x[:, chunk].float() for x in (q, k, v))
            n = query.shape[1]
            if fault == "sequential":
                steps = []
                for t in range(n):
                    state = DECAY * state + key[:, t, :, None] * value[:, t, None]
                    steps.append((query[:, t, :, None] * state).sum(1))
                out[:, chunk] = torch.stack(steps, 1).to(q.dtype)
                continue
            position = torch.arange(n)
            distance = position[:, None] - position
            lowest = 1 if fault == "diagonal_lost" else 0
            weights = torch.where(distance >= lowest, DECAY ** distance.clamp(min=0).float(), 0.0)
            inside = (query @ key.mT * weights) @ value
            reach = position if fault == "state_one_step_young" else position + 1
            across = (query * (DECAY ** reach.float())[:, None]) @ state
            if fault == "state_not_read_by_last" and n < CHUNK:
                across = across * 0
            out[:, chunk] = (inside + across).to(q.dtype)
            left = DECAY ** (n - 1 - position).float()[:, None]
            added = (key if fault == "state_without_weights" else key * left).mT @ value
            whole = CHUNK - 1 if fault == "state_decay_short" else n
            state = added if fault == "state_overwritten" else DECAY**whole * state + added
            if fault == "state_in_dtype":
                state = state.to(q.dtype).float()
        return out

    return kernel
