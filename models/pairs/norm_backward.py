"""Norms and gates of torch; the same as autograd functions whose backward is written by hand."""

import math

import torch
from _pairs import drawn, randomised
from torch import nn

F = nn.functional


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.rms, self.layer = nn.RMSNorm(20, eps=1e-6), nn.LayerNorm(20)
        self.gate_up, self.down, self.mix = nn.Linear(20, 64), nn.Linear(32, 20), nn.Linear(20, 20)

    def norms(self, x, y):
        return self.rms(x), self.layer(y)

    def gated(self, both):
        gate, up = both.chunk(2, -1)
        return F.silu(gate) * up

    def act(self, x):
        return F.gelu(x)

    def forward(self, x):
        y, z = self.norms(x, self.mix(x))
        h = self.down(self.gated(self.gate_up(y)))
        return x + h + self.act(z)


def make_a():
    return randomised(nn.Sequential(Block(), Block()), 40)


def make_b(fault=""):
    model = nn.Sequential(ByHand(), ByHand())
    model.load_state_dict(make_a().state_dict())
    model[1].fault = fault
    return model.eval()


def inputs():
    return (drawn(41, 3, 5, 20),)


def loss(result):
    return (result * torch.linspace(-1, 1, 20)).square().mean()


class RMS(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, fault):
        r = (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        ctx.fault = fault
        ctx.save_for_backward(x, weight, r)
        return x * r * weight

    @staticmethod
    def backward(ctx, d):
        (x, weight, r), fault = ctx.saved_tensors, ctx.fault
        scaled = d * weight
        if fault == "rms_term_missing":
            d_x = scaled * r  # fault: rms_term_missing
        elif fault == "rms_square_for_cube":
            d_x = scaled * r - x * r.square() * (scaled * x).mean(-1, keepdim=True)  # fault: rms_square_for_cube
        else:
            d_x = scaled * r - x * r**3 * (scaled * x).mean(-1, keepdim=True)
        normed = x if fault == "rms_weight_of_raw" else x * r
        return d_x, (d * normed).sum((0, 1)), None  # fault: rms_weight_of_raw


class Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, fault):
        centred = x - x.mean(-1, keepdim=True)
        r = (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        ctx.fault = fault
        ctx.save_for_backward(centred * r, weight, r)
        return torch.addcmul(bias, centred * r, weight)

    @staticmethod
    def backward(ctx, d):
        (normed, weight, r), fault = ctx.saved_tensors, ctx.fault
        scaled = d * weight
        mean = 0 if fault == "layer_mean_missing" else scaled.mean(-1, keepdim=True)
        if fault == "layer_projection_missing":
            d_x = (scaled - mean) * r  # fault: layer_projection_missing
        else:
            d_x = (scaled - mean - normed * (scaled * normed).mean(-1, keepdim=True)) * r  # fault: layer_mean_missing
        d_bias = d.mean((0, 1)) if fault == "layer_bias_mean" else d.sum((0, 1))  # fault: layer_bias_mean
        return d_x, (d * normed).sum((0, 1)), d_bias, None


class Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, both, fault):
        gate, up = both.chunk(2, -1)
        ctx.fault = fault
        ctx.save_for_backward(gate, up)
        return gate * gate.sigmoid() * up

    @staticmethod
    def backward(ctx, d):
        (gate, up), fault = ctx.saved_tensors, ctx.fault
        s = gate.sigmoid()
        if fault == "silu_term_missing":
            slope = s  # fault: silu_term_missing
        elif fault == "silu_term_sign":
            slope = s * (1 - gate * (1 - s))  # fault: silu_term_sign
        else:
            slope = s * (1 + gate * (1 - s))
        d_gate, d_up = d * up * slope, d * gate * s  # fault: silu_term_missing
        if fault == "gated_exchanged":
            d_gate, d_up = d_up, d_gate
        if fault == "gated_scaled":
            d_up = d_up * 1.001  # fault: gated_scaled
        return torch.cat([d_gate, d_up], -1), None


class Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fault):
        ctx.fault = fault
        ctx.save_for_backward(x)
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))

    @staticmethod
    def backward(ctx, d):
        (x,), fault = ctx.saved_tensors, ctx.fault
        cdf = 0.5 * (1 + torch.erf(x / math.sqrt(2)))
        density = torch.exp(-0.5 * x.square()) / math.sqrt(2 * math.pi)
        if fault == "gelu_density_missing":
            return d * cdf, None  # fault: gelu_density_missing
        if fault == "gelu_constant":
            density = torch.exp(-0.5 * x.square()) * 0.4  # fault: gelu_constant
        return d * (cdf + x * density), None


class ByHand(Block):
    fault = ""

    def norms(self, x, y):
        y = self.rms(x) if self.fault == "rms_of_torch" else RMS.apply(x, self.rms.weight, self.fault)
        return y, Layer.apply(self.mix(x), self.layer.weight, self.layer.bias, self.fault)

    def gated(self, both):
        return Gated.apply(both, self.fault)

    def act(self, x):
        return Gelu.apply(x, self.fault)
