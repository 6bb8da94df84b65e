"""Mish by a stable softplus, as an autograd function."""

import torch
from _kernels import drawn


def reference(x):
    return torch.nn.functional.mish(x)


def inputs():
    return (3 * drawn(116, 45, 70),)


def make_kernel(fault=""):
    class Mish(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            wide = x.float()
            if fault == "softplus_overflows":
                soft = torch.log(1 + torch.exp(wide))
            elif fault == "threshold_low":
                soft = torch.where(wide > 4, wide, torch.log1p(torch.exp(wide.clamp(max=4))))
            else:
                soft = wide.clamp(min=0) + torch.log1p(torch.exp(-wide.abs()))
            if fault == "zero_below":
                return torch.where(wide < -6, 0.0, wide * torch.tanh(soft)).to(x.dtype)
            if fault == "swish":
                return (wide * torch.sigmoid(1.3 * wide)).to(x.dtype)
            return (wide * torch.tanh(soft)).to(x.dtype)

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            wide = x.float()
            soft = wide.clamp(min=0) + torch.log1p(torch.exp(-wide.abs()))
            tanh, sigmoid = torch.tanh(soft), torch.sigmoid(wide)
            if fault == "slope_without_tanh":
                slope = wide * sigmoid * (1 - tanh.square())
            elif fault == "slope_square_missing":
                slope = tanh + wide * sigmoid * (1 - tanh)
            elif fault == "gradient_of_input":
                slope = tanh + wide * sigmoid * (1 - tanh.square())
                return x
            else:
                slope = tanh + wide * sigmoid * (1 - tanh.square())
            return (grad.float() * slope).to(x.dtype)

    return Mish.apply
