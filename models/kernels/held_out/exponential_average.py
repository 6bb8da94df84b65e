"""Exponential moving average along time with a given start, by chunks."""

import torch
from _kernels import blocks, drawn

ALPHA, CHUNK = 0.2, 16


def reference(x, start):
    state, results = start, []
    for row in x.unbind(0):
        state = state + ALPHA * (row - state)
        results.append(state)
    return torch.stack(results)


def inputs():
    return drawn(157, 60, 30), drawn(158, 30)


def make_kernel(fault=""):
    def kernel(x, start):
        out, state = torch.empty_like(x), start.float()
        if fault == "start_ignored":
            state = torch.zeros_like(state)
        for chunk in blocks(len(x), CHUNK):
            rows = x[chunk].float()
            n = len(rows)
            if fault == "steps":
                for t in range(n):
                    state = (1 - ALPHA) * state + ALPHA * rows[t]
                    out[chunk.start + t] = state.to(x.dtype)
                continue
            place = torch.arange(n)
            inside = torch.zeros_like(rows)
            for distance in range(n):
                inside[distance:] += ALPHA * (1 - ALPHA) ** distance * rows[: n - distance]
            reach = place + (0 if fault == "carry_too_young" and chunk.start else 1)
            states = inside + ((1 - ALPHA) ** reach.float())[:, None] * state
            if fault == "alpha_exchanged" and chunk.start == 0:
                states = states * (1 - ALPHA) / (1 - ALPHA + 1e-3)
            out[chunk] = states.to(x.dtype)
            if fault == "carry_stuck":
                continue
            state = states[0] if fault == "carry_of_first" else states[-1]
            if fault == "carry_in_dtype":
                state = state.to(x.dtype).float()
            if fault == "noise":
                state = state + 1e-2 * torch.randn(state.shape)
        return out

    return kernel
