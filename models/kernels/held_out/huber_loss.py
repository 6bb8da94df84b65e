"""Huber loss, sum over the last dimension, as an autograd function."""

import torch
from _kernels import drawn

DELTA = 0.8


def reference(x, y):
    return torch.nn.functional.huber_loss(x, y, delta=DELTA, reduction="none").sum(-1)


def inputs():
    return drawn(143, 40, 50), drawn(144, 40, 50)


def make_kernel(fault=""):
    class Huber(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.save_for_backward(x, y)
            difference = x.float() - y.float()
            size = difference.abs()
            if fault == "smooth_l1":
                losses = torch.where(size < DELTA, difference.square() / (2 * DELTA), size - DELTA / 2)
            elif fault == "half_missing":
                losses = torch.where(size < DELTA, 0.5 * difference.square(), DELTA * (size - DELTA))
            elif fault == "clamped":
                part = size.clamp(max=DELTA)
                losses = part * (size - 0.5 * part)
            elif fault == "pseudo":
                losses = DELTA**2 * ((1 + (difference / DELTA).square()).sqrt() - 1)
            else:
                losses = torch.where(size < DELTA, 0.5 * difference.square(), DELTA * (size - 0.5 * DELTA))
            if fault == "rounds_losses":
                losses = losses.to(x.dtype).float()
            return losses.sum(-1).to(x.dtype)

        @staticmethod
        def backward(ctx, grad):
            x, y = ctx.saved_tensors
            difference = x.float() - y.float()
            if fault == "slope_not_clamped":
                slope = difference
            elif fault == "slope_of_one":
                slope = difference.clamp(-1, 1)
            else:
                slope = difference.clamp(-DELTA, DELTA)
            slope = grad.float()[..., None] * slope
            return slope.to(x.dtype), (slope if fault == "second_sign" else -slope).to(y.dtype)

    return Huber.apply
