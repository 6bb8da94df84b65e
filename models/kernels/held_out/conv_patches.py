"""Convolution of images with 3 by 3 taps and padding 1, as a product with patches."""

import torch
from _kernels import blocks, drawn

PIXELS = 64


def reference(x, weight, bias):
    return torch.nn.functional.conv2d(x, weight, bias, padding=1)


def inputs():
    return drawn(132, 2, 6, 14, 15), drawn(133, 8, 6, 3, 3) / 5, 0.3 * drawn(134, 8)


def make_kernel(fault=""):
    def kernel(x, weight, bias):
        if weight.shape[1] != x.shape[1] or weight.shape[2:] != (3, 3):
            raise ValueError(f"weights must be (outputs, {x.shape[1]}, 3, 3), not {tuple(weight.shape)}")
        mode = "replicate" if fault == "edge_repeated" else "constant"
        padded = torch.nn.functional.pad(x.float(), (1, 1, 1, 1), mode=mode)
        height, width = x.shape[-2:]
        taps = [padded[..., i : i + height, j : j + width] for i in range(3) for j in range(3)]
        patches = torch.stack(taps, 2).flatten(3).flatten(1, 2)
        wide = weight.float()
        if fault == "taps_transposed":
            wide = wide.mT
        elif fault == "true_convolution":
            wide = wide.flip(2, 3)
        wide = wide.flatten(1)
        if fault == "channels_first_lost":
            wide = wide.clone()
            wide[:, -1] = 0
        out = torch.empty(x.shape[0], weight.shape[0], height * width, dtype=x.dtype)
        for block in blocks(height * width, PIXELS):
            result = wide @ patches[..., block]
            if fault == "by_taps":
                result = torch.zeros_like(result)
                for tap in range(wide.shape[1]):
                    result = result + wide[:, tap : tap + 1] * patches[:, tap : tap + 1, block]
            if fault != "bias_missing":
                result = result + bias.float()[:, None]
            if fault == "row_wraps" and block.start:
                result[..., 0] = (wide @ patches[..., block.start - 1 : block.start])[..., 0] + bias.float()
            out[..., block] = result.to(x.dtype)
        return out.reshape(x.shape[0], -1, height, width)

    return kernel
