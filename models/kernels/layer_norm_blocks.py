"""Layer norm with weight and bias over the last dimension, statistics by blocks in float32."""

import torch
from _kernels import drawn, load, store

BLOCK = 64
EPS = 1e-5


def reference(x, weight, bias):
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, EPS)


def inputs():
    return drawn(2, 33, 150), 1 + 0.3 * drawn(3, 150), 0.3 * drawn(4, 150)


def welford(x):
    """Merge mean and squared deviations of each block with those before (Chan)."""
    count, mean, deviations = 0, torch.zeros(x.shape[:-1]), torch.zeros(x.shape[:-1])
    for start in range(0, x.shape[-1], BLOCK):
        block = x[..., start : start + BLOCK].float()
        n = block.shape[-1]
        block_mean = block.mean(-1)
        difference = block_mean - mean
        deviations = deviations + (block - block_mean[..., None]).square().sum(-1)
        deviations = deviations + difference.square() * count * n / (count + n)
        mean = mean + difference * n / (count + n)
        count += n
    return mean, deviations


def two_passes(x, unmasked):
    mean = sum(load(x, start, BLOCK).sum(-1) for start in range(0, x.shape[-1], BLOCK)) / x.shape[-1]
    deviations = torch.zeros_like(mean)
    for start in range(0, x.shape[-1], BLOCK):
        centred = load(x, start, BLOCK) - mean[..., None]
        if not unmasked:
            centred = torch.where(start + torch.arange(BLOCK) < x.shape[-1], centred, 0.0)
        deviations = deviations + centred.square().sum(-1)
    return mean, deviations


def one_pass(x, in_dtype):
    total, squares = torch.zeros(x.shape[:-1]), torch.zeros(x.shape[:-1])
    for start in range(0, x.shape[-1], BLOCK):
        block = x[..., start : start + BLOCK]
        total = total + block.float().sum(-1)
        squares = squares + ((block * block).float() if in_dtype else block.float().square()).sum(-1)
    mean = total / x.shape[-1]
    return mean, squares - x.shape[-1] * mean.square()


def make_kernel(fault=""):
    def kernel(x, weight, bias):
        n = x.shape[-1]
        if fault in ("two_passes", "tail"):
            mean, deviations = two_passes(x, fault == "tail")
        elif fault in ("one_pass", "square_in_dtype"):
            mean, deviations = one_pass(x, fault == "square_in_dtype")
        else:
            mean, deviations = welford(x)
        count = {"unbiased": n - 1, "count_of_padded": -(-n // BLOCK) * BLOCK}.get(fault, n)
        variance = deviations / count
        eps = 1e-6 if fault == "eps" else EPS
        scale = 1 / (variance.sqrt() + eps) if fault == "eps_outside_root" else torch.rsqrt(variance + eps)
        if fault == "statistics_of_row_before":
            scale = torch.cat([scale[:1], scale[:-1]])
        out = torch.empty_like(x)
        for start in range(0, n, BLOCK):
            normed = (load(x, start, BLOCK) - mean[..., None]) * scale[..., None]
            shift = load(bias, start, BLOCK) * (2 if fault == "bias_twice" else 1)
            store(out, start, normed * load(weight, start, BLOCK) + shift)
        return out

    return kernel
