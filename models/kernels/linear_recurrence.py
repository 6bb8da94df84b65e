"""The recurrence h[t] = a[t] h[t-1] + b[t] by chunks: a scan inside each, a carry between them."""

import torch
from _kernels import blocks, drawn, uniform

CHUNK = 16


def reference(a, b):
    state, states = torch.zeros_like(b[:, 0]), []
    for t in range(b.shape[1]):
        state = a[:, t] * state + b[:, t]
        states.append(state)
    return torch.stack(states, 1)


def inputs():
    return uniform(28, 0.3, 0.98, 3, 50, 20), drawn(29, 3, 50, 20)


def scan(a, b, add_only):
    """Combine pairs (a, b) at distances 1, 2, 4 … (Hillis and Steele)."""
    distance = 1
    while distance < a.shape[1]:
        before_a = torch.cat([torch.ones_like(a[:, :distance]), a[:, :-distance]], 1)
        before_b = torch.cat([torch.zeros_like(b[:, :distance]), b[:, :-distance]], 1)
        b = b + (before_b if add_only and distance > 4 else a * before_b)
        a = a * before_a
        distance *= 2
    return a, b


def make_kernel(fault=""):
    def kernel(a, b):
        out, carry = torch.empty_like(b), torch.zeros(b[:, 0].shape)
        for chunk in blocks(b.shape[1], CHUNK):
            wide_a, wide_b = a[:, chunk].float(), b[:, chunk].float()
            if fault == "sequential":
                steps, state = [], carry
                for t in range(wide_b.shape[1]):
                    state = wide_a[:, t] * state + wide_b[:, t]
                    steps.append(state)
                states = torch.stack(steps, 1)
            else:
                decay, inside = scan(wide_a, wide_b, fault == "decay_lost_in_scan")
                if fault == "carry_without_decay":
                    decay = torch.ones_like(decay)
                elif fault == "decay_shifted":
                    decay = torch.cat([torch.ones_like(decay[:, :1]), decay[:, :-1]], 1)
                states = inside + decay * carry[:, None]
            out[:, chunk] = states.to(b.dtype)
            if fault == "carry_lost":
                continue
            carry = out[:, chunk][:, -1].float() if fault == "carry_in_dtype" else states[:, -1]
        return out

    return kernel
