"""Exact GELU as an autograd function."""

import math

import torch
from _kernels import drawn


def reference(x):
    return torch.nn.functional.gelu(x)


def inputs():
    return (2 * drawn(16, 40, 100),)


def make_kernel(fault=""):
    constant = 0.7071 if fault == "constant" else math.sqrt(0.5)

    class Gelu(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            wide = x.float()
            if fault == "tanh":
                inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)
                return (0.5 * wide * (1 + torch.tanh(inner))).to(x.dtype)
            if fault == "sigmoid":
                return (wide * torch.sigmoid(1.702 * wide)).to(x.dtype)
            if fault == "half_lost_below":
                return torch.where(wide < -3, 0.0, 0.5 * wide * (1 + torch.erf(wide * constant))).to(x.dtype)
            return (0.5 * wide * torch.special.erfc(-wide * constant)).to(x.dtype)

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            wide = x.float()
            below = 0.5 * torch.special.erfc(-wide * constant)
            density = torch.exp(-0.5 * wide.square()) / math.sqrt(2 * math.pi)
            if fault == "density_missing":
                slope = below
            elif fault == "density_squared_scale":
                slope = below + wide * density * math.sqrt(2)
            else:
                slope = below + wide * density
            return (grad.float() * slope).to(x.dtype)

    return Gelu.apply
