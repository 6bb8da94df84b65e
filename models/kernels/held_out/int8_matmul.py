"""Activations times int8 weights with a scale for each block of inputs and each output."""

import torch
from _kernels import drawn, uniform, whole

BLOCK = 32


def reference(x, weight, scales):
    wide = weight.to(x.dtype) * scales.repeat_interleave(BLOCK, 1)[:, : weight.shape[1]]
    return x @ wide.T


def inputs():
    return drawn(125, 30, 96), whole(126, 255, 24, 96).sub(127).to(torch.int8), uniform(127, 0.005, 0.02, 24, 3)


def make_kernel(fault=""):
    def kernel(x, weight, scales):
        if weight.shape[1] % BLOCK or scales.shape != (weight.shape[0], weight.shape[1] // BLOCK):
            raise ValueError(f"{weight.shape[1]} inputs need {BLOCK} times as many scales, not {tuple(scales.shape)}")
        if x.shape[1] != weight.shape[1]:
            raise ValueError(f"{x.shape[1]} inputs, but weights of {weight.shape[1]}")
        total = torch.zeros(len(x), len(weight))
        for i in range(scales.shape[1]):
            block = slice(i * BLOCK, (i + 1) * BLOCK)
            numbers = weight[:, block]
            if fault == "unsigned":
                numbers = numbers.view(torch.uint8)
            elif fault == "lowest_clipped":
                numbers = numbers.clamp(min=-64)
            scale = scales[:, 0 if fault == "first_scale" else i].float()
            if fault == "scaled_first":
                total = total + x[:, block].float() @ (numbers.float() * scale[:, None]).T
            elif fault == "scale_in_dtype":
                wide = (numbers.to(x.dtype) * scales[:, i : i + 1]).to(x.dtype)
                total = total + x[:, block].float() @ wide.float().T
            elif fault == "scale_not_applied_to_first":
                product = x[:, block].float() @ numbers.float().T
                total = (total + product) * scale if i == 0 else total + product * scales[:, 0].float()
            else:
                total = total + x[:, block].float() @ numbers.float().T * scale
            if fault == "overwritten":
                total = x[:, block].float() @ numbers.float().T * scale
            if fault == "rounds_each_block":
                total = total.to(x.dtype).float()
        return total.to(x.dtype)

    return kernel
