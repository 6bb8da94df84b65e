"""RMS norm as an autograd function; the weight's gradient is summed over blocks of rows."""

import torch
from _kernels import blocks, drawn

EPS = 1e-6


def reference(x, weight):
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, EPS)


def inputs():
    return drawn(5, 50, 96), 1 + 0.3 * drawn(6, 96)


def make_kernel(fault=""):
    class RMSNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            wide = x.float()
            scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + (1e-5 if fault == "eps" else EPS))
            ctx.save_for_backward(x, weight, scale)
            return (wide * scale * weight.float()).to(x.dtype)

        @staticmethod
        def backward(ctx, grad):
            x, weight, scale = ctx.saved_tensors
            wide, grad = x.float(), grad.float()
            scaled = grad * weight.float()
            inner = (scaled * wide).mean(-1, keepdim=True)
            if fault == "term_missing":
                d_x = scaled * scale
            elif fault == "sign":
                d_x = scaled * scale + wide * scale**3 * inner
            elif fault == "square_for_cube":
                d_x = scaled * scale - wide * scale**2 * inner
            else:
                d_x = scaled * scale - wide * scale**3 * inner
            d_weight = torch.zeros(weight.shape)
            rows = grad * wide * (1.0 if fault == "weight_of_raw" else scale)
            end = len(rows) - len(rows) % 16 if fault == "last_rows_lost" else len(rows)
            for block in blocks(end, 16):
                partial = rows[block].sum(0)
                if fault == "partial_in_dtype":
                    partial = partial.to(x.dtype).float()
                d_weight = partial if fault == "partial_overwritten" else d_weight + partial
            return d_x.to(x.dtype), d_weight.to(weight.dtype)

    return RMSNorm.apply
