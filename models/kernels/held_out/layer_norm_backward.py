"""Layer norm as an autograd function, gradients of weight and bias by partial sums of rows."""

import torch
from _kernels import blocks, drawn

ROWS, EPS = 16, 1e-5


def reference(x, weight, bias):
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, EPS)


def inputs():
    return drawn(128, 52, 60), 1 + 0.3 * drawn(129, 60), 0.3 * drawn(130, 60)


def make_kernel(fault=""):
    class LayerNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, bias):
            wide = x.float()
            mean = wide.mean(-1, keepdim=True)
            scale = torch.rsqrt((wide - mean).square().mean(-1, keepdim=True) + EPS)
            ctx.save_for_backward(x, weight, mean, scale)
            return ((wide - mean) * scale * weight.float() + bias.float()).to(x.dtype)

        @staticmethod
        def backward(ctx, grad):
            x, weight, mean, scale = ctx.saved_tensors
            normed, grad = (x.float() - mean) * scale, grad.float()
            if fault == "mean_not_saved":
                normed = x.float() * scale
            scaled = grad * weight.float()
            centre = scaled.mean(-1, keepdim=True)
            slope = (scaled * normed).mean(-1, keepdim=True)
            if fault == "centre_missing":
                centre = torch.zeros_like(centre)
            elif fault == "slope_missing":
                slope = torch.zeros_like(slope)
            elif fault == "slope_of_gradient":
                slope = (grad * normed).mean(-1, keepdim=True)
            elif fault == "count_less_one":
                slope = slope * x.shape[-1] / max(x.shape[-1] - 1, 1)
            d_x = (scaled - centre - normed * slope) * scale
            d_weight, d_bias = torch.zeros(weight.shape), torch.zeros(weight.shape)
            for block in blocks(len(x), ROWS):
                d_weight = d_weight + (grad[block] * normed[block]).sum(0)
                if fault == "bias_of_full_blocks" and block.stop - block.start < ROWS:
                    continue
                d_bias = d_bias + grad[block].sum(0)
            if fault == "one_sum":
                d_weight, d_bias = (grad * normed).sum(0), grad.sum(0)
            if fault == "exchanged":
                d_weight, d_bias = d_bias, d_weight
            return d_x.to(x.dtype), d_weight.to(weight.dtype), d_bias.to(weight.dtype)

    return LayerNorm.apply
