"""Group norm: sums of each group by blocks of positions, in float32."""

import torch
from _kernels import blocks, drawn

GROUPS, EPS, POSITIONS = 4, 1e-5, 32


def reference(x, weight, bias):
    return torch.nn.functional.group_norm(x, GROUPS, weight, bias, EPS)


def inputs():
    return drawn(30, 3, 12, 50), 1 + 0.3 * drawn(31, 12), 0.3 * drawn(32, 12)


def make_kernel(fault=""):
    def kernel(x, weight, bias):
        if x.shape[1] % GROUPS:
            raise ValueError(f"{x.shape[1]} channels are no multiple of {GROUPS} groups")
        wide = x.float().reshape(x.shape[0], GROUPS, x.shape[1] // GROUPS, -1)
        count = wide.shape[2] * wide.shape[3]
        mean = torch.zeros(*wide.shape[:2], 1, 1)
        for block in blocks(wide.shape[3], POSITIONS):
            mean = mean + wide[..., block].sum((2, 3), keepdim=True)
        mean = mean / count
        squares = torch.zeros_like(mean)
        for block in blocks(wide.shape[3], POSITIONS):
            if fault == "last_block_skipped" and block.stop == wide.shape[3] and block.start:
                continue
            squares = squares + (wide[..., block] - mean).square().sum((2, 3), keepdim=True)
        if fault == "statistics_of_first_channel":
            mean, variance = wide[:, :, :1].mean(3, keepdim=True), wide[:, :, :1].var(3, keepdim=True, correction=0)
        else:
            variance = squares / {"unbiased": count - 1, "count_of_channels": wide.shape[3]}.get(fault, count)
        eps = {"eps": 1e-6, "eps_missing": 0.0}.get(fault, EPS)
        normed = ((wide - mean) * torch.rsqrt(variance + eps)).reshape(x.shape)
        shape = (1, -1, *[1] * (x.dim() - 2))
        if fault == "weight_of_group":
            weight = weight[:GROUPS].repeat_interleave(x.shape[1] // GROUPS)
        return (normed * weight.float().reshape(shape) + bias.float().reshape(shape)).to(x.dtype)

    return kernel
