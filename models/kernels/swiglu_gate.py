"""SwiGLU of a joint projection as an autograd function: silu(gate) * up."""

import torch
from _kernels import drawn


def reference(both):
    gate, up = both.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def inputs():
    return (2 * drawn(41, 30, 2 * 44),)


def make_kernel(fault=""):
    class SwiGLU(torch.autograd.Function):
        @staticmethod
        def forward(ctx, both):
            if both.shape[-1] % 2:
                raise ValueError(f"the last dimension must be even, not {both.shape[-1]}")
            ctx.save_for_backward(both)
            gate, up = both.float().chunk(2, -1)
            if fault == "exchanged":
                gate, up = up, gate
            if fault == "silu_in_dtype":
                return torch.nn.functional.silu(gate).to(both.dtype) * up.to(both.dtype)
            if fault == "gelu_like":
                return (gate * torch.sigmoid(1.01 * gate) * up).to(both.dtype)
            if fault == "sigmoid_overflows":
                powers = torch.exp(gate)
                return (gate * powers / (1 + powers) * up).to(both.dtype)
            return (gate / (1 + torch.exp(-gate)) * up).to(both.dtype)

        @staticmethod
        def backward(ctx, grad):
            gate, up = ctx.saved_tensors[0].float().chunk(2, -1)
            grad = grad.float()
            sigmoid = torch.sigmoid(gate)
            if fault == "slope_term_missing":
                slope = sigmoid
            elif fault == "slope_sign":
                slope = sigmoid * (1 - gate * (1 - sigmoid))
            else:
                slope = sigmoid * (1 + gate * (1 - sigmoid))
            d_up = grad * (sigmoid if fault == "up_without_gate" else gate * sigmoid)
            return torch.cat([grad * up * slope, d_up], -1).to(ctx.saved_tensors[0].dtype)

    return SwiGLU.apply
