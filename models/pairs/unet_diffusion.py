"""A small U-Net with a time embedding; one that normalises by hand, on channels last, with attention over pixels."""

import math

import torch
from _pairs import drawn, randomised
from torch import nn

F = nn.functional


class Res(nn.Module):
    def __init__(self, given, wanted):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, given), nn.Conv2d(given, wanted, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(4, wanted), nn.Conv2d(wanted, wanted, 3, padding=1)
        self.time = nn.Linear(32, 2 * wanted)
        self.skip = nn.Conv2d(given, wanted, 1) if given != wanted else nn.Identity()

    def forward(self, x, t):
        h = self.conv1(F.silu(self.norm1(x)))
        scale, shift = self.time(F.silu(t))[:, :, None, None].chunk(2, 1)
        h = self.norm2(h) * (1 + scale) + shift
        return self.skip(x) + self.conv2(F.silu(h))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 3, 3, padding=1)
        self.down, self.middle, self.up = Res(16, 16), Res(24, 24), Res(40, 16)
        self.shrink = nn.Conv2d(16, 24, 3, stride=2, padding=1)
        self.norm, self.qkv, self.proj = nn.GroupNorm(4, 24), nn.Conv2d(24, 72, 1), nn.Conv2d(24, 24, 1)
        self.embed = nn.Linear(32, 32)

    def attend(self, x):
        q, k, v = self.qkv(self.norm(x)).flatten(2).chunk(3, 1)
        p = torch.softmax(torch.einsum("bcq,bck->bqk", q, k) / 24**0.5, -1)
        return x + self.proj(torch.einsum("bqk,bck->bcq", p, v).unflatten(2, x.shape[2:]))

    def forward(self, x, time):
        rate = torch.exp(-math.log(10000) * torch.arange(16) / 16)
        angle = time[:, None] * rate
        t = self.embed(torch.cat([angle.sin(), angle.cos()], -1).to(x.dtype))
        high = self.down(self.first(x), t)
        low = self.attend(self.middle(self.shrink(high), t))
        low = F.interpolate(low, scale_factor=2, mode="bilinear", align_corners=False)
        return self.last(self.up(torch.cat([low, high], 1), t))


def make_a():
    return randomised(UNet(), 34)


def make_b(fault=""):
    model = Other(fault)
    model.load_state_dict(make_a().state_dict())
    return model.eval()


def inputs():
    return drawn(35, 2, 3, 12, 12), torch.tensor([7.0, 431.0])


class OtherRes(Res):
    fault = ""

    def norm(self, x, layer):
        groups = 8 if self.fault == "groups" else 4
        y = x.unflatten(1, (groups, -1))
        centred = y - y.mean((2, 3, 4), keepdim=True)  # fault: groups
        variance = centred.square().mean((2, 3, 4), keepdim=True)
        if self.fault == "unbiased":
            variance = y.var((2, 3, 4), keepdim=True)  # fault: unbiased
        y = centred / (variance + (1e-4 if self.fault == "eps" else 1e-5)).sqrt()  # fault: eps
        return y.flatten(1, 2) * layer.weight[:, None, None] + layer.bias[:, None, None]

    def forward(self, x, t):
        fault = self.fault
        h = self.norm(x, self.norm1)
        h = self.conv1(h if fault == "silu_missing" else h * h.sigmoid())  # fault: silu_missing
        both = self.time(t if fault == "time_silu_missing" else F.silu(t))  # fault: time_silu_missing
        scale, shift = both[:, :, None, None].chunk(2, 1)
        if fault == "shift_first":
            scale, shift = shift, scale
        h = F.group_norm(h, 4, self.norm2.weight, self.norm2.bias)
        h = h * (scale if fault == "not_one_plus" else 1 + scale) + shift  # fault: not_one_plus, shift_first
        h = self.conv2(F.silu(h))
        return h if fault == "no_skip" else h + self.skip(x)


class Other(UNet):
    def __init__(self, fault):
        super().__init__()
        self.fault = fault
        self.down, self.middle, self.up = OtherRes(16, 16), OtherRes(24, 24), OtherRes(40, 16)
        self.middle.fault = fault

    def attend(self, x):
        fault, (batch, _, height, width) = self.fault, x.shape
        y = self.norm(x).permute(0, 2, 3, 1).reshape(batch, height * width, 24)
        q, k, v = F.linear(y, self.qkv.weight.flatten(1), self.qkv.bias).split(24, -1)
        scale = 24**-0.5 * (1.001 if fault == "scale" else 1)
        if fault == "over_queries":
            o = torch.softmax(q @ k.mT * scale, 1) @ v  # fault: over_queries
        else:
            o = F.scaled_dot_product_attention(q, k, v, scale=scale)  # fault: scale
        o = F.linear(o, self.proj.weight.flatten(1), self.proj.bias)
        return x + o.view(batch, height, width, 24).permute(0, 3, 1, 2)

    def forward(self, x, time):
        fault = self.fault
        count = 15 if fault == "frequencies" else 16
        if fault == "rate_by_power":
            rate = 10000.0 ** -(torch.arange(16) / count)
        else:
            rate = torch.exp(-math.log(10000) * torch.arange(16) / count)
        angle = torch.outer(time, rate)
        parts = [angle.cos(), angle.sin()] if fault == "cos_first" else [angle.sin(), angle.cos()]
        t = self.embed(torch.cat(parts, -1).to(x.dtype))  # fault: frequencies, cos_first
        if fault == "channels_last":
            x = x.contiguous(memory_format=torch.channels_last)
        high = self.down(self.first(x), t)
        if fault == "padded_right":
            low = F.conv2d(F.pad(high, (0, 1, 0, 1)), self.shrink.weight, self.shrink.bias, 2)  # fault: padded_right
        else:
            low = self.shrink(high)
        low = self.attend(self.middle(low, t))
        if fault == "nearest":
            low = F.interpolate(low, scale_factor=2, mode="nearest")  # fault: nearest
        else:
            align = fault == "align_corners"
            low = F.interpolate(low, size=x.shape[2:], mode="bilinear", align_corners=align)  # fault: align_corners
        parts = [high, low] if fault == "skip_first" else [low, high]
        return self.last(self.up(torch.cat(parts, 1), t))
