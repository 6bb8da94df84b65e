"""A small segmentation network; one that gathers windows by hand and upsamples by matrices."""

import torch
from _pairs import drawn, randomised
from torch import nn

F = nn.functional


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect")
        self.wide = nn.Conv2d(8, 8, 3, padding=2, dilation=2)
        self.up = nn.ConvTranspose2d(8, 8, 3, stride=2, padding=1, output_padding=1)
        self.norm, self.last = nn.InstanceNorm2d(8, affine=True), nn.Conv2d(16, 5, 1)

    def forward(self, x):
        high = F.leaky_relu(self.first(x), 0.1)
        low = F.avg_pool2d(high, 3, 2, 1)
        low = self.norm(self.wide(low))
        low = low + F.max_pool2d(F.hardtanh(low), 3, 1, 1)
        small = F.adaptive_avg_pool2d(low, 3)
        small = F.interpolate(small, size=low.shape[2:], mode="bilinear", align_corners=True)
        up = self.up(low + small)
        return self.last(torch.cat([up, high], 1))


def make_a():
    return randomised(Net(), 46)


def make_b(fault=""):
    model = ByHand()
    model.load_state_dict(make_a().state_dict())
    model.fault = fault
    return model.eval()


def inputs():
    return (drawn(47, 2, 3, 12, 12),)


def windows(x, stride=1, dilation=1):
    """Return the 3 x 3 windows of a padded image: [batch, channels, height, width, 9]."""
    size = 2 * dilation + 1
    return x.unfold(2, size, stride).unfold(3, size, stride)[..., ::dilation, ::dilation].flatten(4)


def stretch(given, wanted, fault):
    """Return the matrix of a linear interpolation."""
    if fault == "align_corners":
        places = ((torch.arange(wanted) + 0.5) * (given / wanted) - 0.5).clamp(0, given - 1)
    else:
        places = torch.arange(wanted) * ((given - 1) / (wanted - 1))
    if fault == "nearest":
        places = places.round()
    return (1 - (places[:, None] - torch.arange(given)).abs()).clamp(min=0)


class ByHand(Net):
    fault = ""

    def forward(self, x):
        fault = self.fault
        mode = {"zeros": "constant", "replicate": "replicate"}.get(fault, "reflect")
        taps = windows(F.pad(x, (1, 1, 1, 1), mode=mode))
        high = torch.einsum("bchwk,ock->bohw", taps, self.first.weight.flatten(2))  # fault: zeros, replicate
        high = high + self.first.bias[:, None, None]
        slope = 0.01 if fault == "slope" else 0.1
        high = high.clamp(min=0) + slope * high.clamp(max=0)  # fault: slope
        if fault == "pool_of_torch":
            low = F.avg_pool2d(high, 3, 2, 1)
        else:
            low = windows(F.pad(high, (1, 1, 1, 1)), 2).sum(-1)
            if fault == "pad_not_counted":
                low = low / windows(F.pad(torch.ones_like(high), (1, 1, 1, 1)), 2).sum(-1)  # fault: pad_not_counted
            else:
                low = low / (8 if fault == "divisor" else 9)  # fault: divisor
        spread = 1 if fault == "dilation" else 2
        low = F.conv2d(low, self.wide.weight, self.wide.bias, padding=spread, dilation=spread)  # fault: dilation
        if fault == "batch_norm":
            low = F.batch_norm(low, None, None, self.norm.weight, self.norm.bias, True)  # fault: batch_norm
        elif fault == "one_group":
            low = F.group_norm(low, 1, self.norm.weight, self.norm.bias)  # fault: one_group
        elif fault == "affine_missing":
            low = F.instance_norm(low)  # fault: affine_missing
        else:
            low = F.group_norm(low, 8, self.norm.weight, self.norm.bias)
        limit = 6.0 if fault == "hardtanh" else 1.0
        pad = 0.0 if fault == "max_of_zeros" else -10.0
        taps = windows(F.pad(low.clamp(-1, limit), (1, 1, 1, 1), value=pad))  # fault: hardtanh
        low = low + (taps.mean(-1) if fault == "mean_for_max" else taps.amax(-1))  # fault: mean_for_max, max_of_zeros
        small = low.unflatten(2, (3, 2)).unflatten(4, (3, 2))
        small = small.amax((3, 5)) if fault == "adaptive_max" else small.mean((3, 5))  # fault: adaptive_max
        matrix = stretch(3, 6, fault).to(x.dtype)
        low = low + torch.einsum("hi,bcij,wj->bchw", matrix, small, matrix)  # fault: align_corners, nearest
        if fault == "up_flipped":
            up = F.conv_transpose2d(low, self.up.weight.flip(2), self.up.bias, 2, 1, 1)  # fault: up_flipped
        elif fault == "up_as_convolution":
            spaced = torch.zeros(2, 8, 14, 14, dtype=x.dtype)
            spaced[:, :, 1:13:2, 1:13:2] = low
            up = F.conv2d(spaced, self.up.weight.transpose(0, 1).flip(2, 3), self.up.bias)
        else:
            up = F.conv_transpose2d(low, self.up.weight, self.up.bias, 2, 1, 1)
        w_up, w_high = self.last.weight[:, :, 0, 0].chunk(2, 1)
        if fault == "skip_exchanged":
            w_up, w_high = w_high, w_up
        out = torch.einsum("bchw,oc->bohw", up, w_up) + torch.einsum(
            "bchw,oc->bohw", high, w_high
        )  # fault: skip_exchanged
        return out + self.last.bias[:, None, None]
