"""Causal depthwise convolution by blocks of time, each with a halo of the steps before it."""

import torch
from _kernels import blocks, drawn

BLOCK = 32


def reference(x, weight, bias):
    taps = weight.shape[-1]
    return torch.nn.functional.conv1d(
        torch.nn.functional.pad(x, (taps - 1, 0)), weight[:, None], bias, groups=weight.shape[0]
    )


def inputs():
    return drawn(42, 2, 12, 90), drawn(43, 12, 4), 0.3 * drawn(44, 12)


def make_kernel(fault=""):
    def kernel(x, weight, bias):
        if weight.shape[0] != x.shape[1] or bias.shape != weight.shape[:1]:
            raise ValueError(f"{x.shape[1]} channels need as many rows of taps and biases, not {weight.shape[0]}")
        taps, out = weight.shape[-1], torch.empty_like(x)
        flipped = weight.float().flip(-1) if fault == "taps_flipped" else weight.float()
        for block in blocks(x.shape[-1], BLOCK):
            first = block.start - taps + 1
            window = x[..., max(first, 0) : block.stop].float()
            window = torch.nn.functional.pad(window, (max(-first, 0), 0))
            if fault == "halo_lost" and block.start:
                window = torch.nn.functional.pad(window[..., taps - 1 :], (taps - 1, 0))
            elif fault == "halo_short" and block.start and taps > 1:
                window = torch.nn.functional.pad(window[..., 1:], (1, 0))
            length = block.stop - block.start
            if fault == "one_step_early":
                window = torch.nn.functional.pad(window[..., 1:], (0, 1))
            total = torch.zeros(*x.shape[:-1], length)
            for tap in range(taps):
                total = total + window[..., tap : tap + length] * flipped[:, tap : tap + 1]
                if fault == "rounds_each_tap":
                    total = total.to(x.dtype).float()
            total = total + bias.float()[:, None] * (2 if fault == "bias_twice" else 1)
            out[..., block] = total.to(x.dtype)
        return out

    return kernel
