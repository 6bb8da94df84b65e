"""Selective state space scan: states of each channel, by chunks of time, with a skip connection."""

import torch
from _kernels import blocks, drawn, uniform

CHUNK = 16


def reference(x, dt, a, b, c, skip):
    state, results = x.new_zeros(x.shape[1], a.shape[1]), []
    for t in range(x.shape[0]):
        state = torch.exp(dt[t, :, None] * a) * state + (dt[t] * x[t])[:, None] * b[t]
        results.append((state * c[t]).sum(-1) + skip * x[t])
    return torch.stack(results)


def inputs():
    return (
        drawn(145, 40, 10),
        uniform(146, 0.05, 0.4, 40, 10),
        -uniform(147, 0.3, 3, 10, 6),
        drawn(148, 40, 6),
        drawn(149, 40, 6),
        drawn(150, 10),
    )


def make_kernel(fault=""):
    def kernel(x, dt, a, b, c, skip):
        wide_x, wide_dt, wide_a, wide_b, wide_c = (t.float() for t in (x, dt, a, b, c))
        state, out = torch.zeros(x.shape[1], a.shape[1]), torch.empty_like(x)
        for chunk in blocks(x.shape[0], CHUNK):
            if fault == "state_reset":
                state = torch.zeros_like(state)
            for t in range(chunk.start, chunk.stop):
                if fault == "euler":
                    decay = 1 + wide_dt[t, :, None] * wide_a
                elif fault == "decay_of_step_before" and t == chunk.start and t:
                    decay = torch.exp(wide_dt[t - 1, :, None] * wide_a)
                elif fault == "exp2":
                    decay = torch.exp2(wide_dt[t, :, None] * (wide_a * 1.4426950408889634))
                else:
                    decay = torch.exp(wide_dt[t, :, None] * wide_a)
                added = wide_x[t, :, None] * wide_b[t]
                if fault != "step_missing":
                    added = added * wide_dt[t, :, None]
                read = state if fault == "read_before" else decay * state + added
                state = decay * state + added
                result = (read * wide_c[t]).sum(-1)
                if fault != "skip_missing":
                    result = result + skip.float() * wide_x[t]
                out[t] = result.to(x.dtype)
            if fault == "state_in_dtype":
                state = state.to(x.dtype).float()
        return out

    return kernel
