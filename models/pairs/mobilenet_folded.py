"""MobileNet V2 of torchvision; one of functions with its batch norms folded into the convolutions, or written out."""

import torch
from _pairs import drawn, randomised
from torch import nn
from torchvision.models import MobileNetV2

F = nn.functional

SETTING = [[1, 8, 1, 1], [4, 12, 2, 2], [4, 16, 2, 2]]


def make_a():
    return randomised(MobileNetV2(8, width_mult=1.0, inverted_residual_setting=SETTING, round_nearest=4), 17)


def make_b(fault=""):
    return Folded(make_a(), fault).eval()


def inputs():
    return (drawn(18, 2, 3, 32, 32),)


class Conv(nn.Module):
    """A convolution and its batch norm, read by one convolution."""

    def __init__(self, conv, norm, fault):
        super().__init__()
        self.conv, self.norm, self.fault = conv, norm, fault

    def forward(self, x):
        fault, conv, norm = self.fault, self.conv, self.norm
        options = {"stride": conv.stride, "padding": conv.padding, "groups": conv.groups}
        if fault == "batch_statistics":
            x = F.conv2d(x, conv.weight, **options)
            return F.batch_norm(x, None, None, norm.weight, norm.bias, True, 0.0, norm.eps)  # fault: batch_statistics
        if fault in ("written_out", "mean_missing", "variance_for_deviation", "stale_mean"):
            x = F.conv2d(x, conv.weight, **options)
            mean = norm.running_mean * {"mean_missing": 0.0, "stale_mean": 1.001}.get(fault, 1.0)
            x = x - mean[:, None, None]  # fault: mean_missing, stale_mean
            deviation = norm.running_var + norm.eps
            deviation = deviation if fault == "variance_for_deviation" else deviation.sqrt()
            x = x / deviation[:, None, None]  # fault: variance_for_deviation
            return x * norm.weight[:, None, None] + norm.bias[:, None, None]
        scale = norm.weight / (norm.running_var + (1e-3 if fault == "eps" else norm.eps)).sqrt()
        bias = norm.bias - norm.running_mean * scale
        if fault == "bias_not_folded":
            bias = norm.bias
        if fault in ("reflect", "replicate"):
            x = F.pad(x, (1, 1, 1, 1), mode=fault)
            options["padding"] = 0
        if fault == "padding_after":
            x = F.pad(x, (0, 2, 0, 2))
            options["padding"] = 0
        weight = conv.weight * scale[:, None, None, None]
        if fault == "flipped":
            weight = weight.flip(-1)
        return F.conv2d(
            x, weight, bias, **options
        )  # fault: eps, bias_not_folded, reflect, replicate, padding_after, flipped


class Block(nn.Module):
    def __init__(self, theirs, number, fault):
        super().__init__()
        self.residual, self.fault = theirs.use_res_connect, fault if number == 3 else ""
        (first, first_norm, _), (depth, depth_norm, _), last, last_norm = theirs.conv
        everywhere = fault if fault == "written_out" else ""
        self.first = Conv(first, first_norm, everywhere)
        self.depth = Conv(depth, depth_norm, self.fault or everywhere)
        self.last = Conv(last, last_norm, everywhere)

    def forward(self, x):
        fault = self.fault
        y = self.first(x)
        y = F.relu(y) if fault == "relu" else y.clamp(0, 6)  # fault: relu
        y = self.depth(y)
        y = F.hardswish(y) if fault == "hardswish" else F.relu6(y)  # fault: hardswish
        y = self.last(y)
        if fault == "relu_after_last":
            y = F.relu6(y)  # fault: relu_after_last
        if self.residual and fault != "no_residual":
            y = y + x
        return y


class Folded(nn.Module):
    def __init__(self, theirs, fault):
        super().__init__()
        self.fault = fault
        stem, *blocks, head = theirs.features
        self.stem, self.head = Conv(stem[0], stem[1], ""), Conv(head[0], head[1], "")
        self.start = nn.ModuleList(Conv(c[0], c[1], "") for c in blocks[0].conv[:1])
        self.second = Conv(blocks[0].conv[1], blocks[0].conv[2], "")
        self.blocks = nn.ModuleList(Block(block, number, fault) for number, block in enumerate(blocks[1:]))
        self.classifier = theirs.classifier[1]

    def forward(self, x):
        fault = self.fault
        if fault == "channels_last":
            x = x.contiguous(memory_format=torch.channels_last)
        x = F.relu6(self.stem(x))
        x = self.second(F.relu6(self.start[0](x)))
        for block in self.blocks:
            x = block(x)
        x = F.relu6(self.head(x))
        x = x.amax((2, 3)) if fault == "max_pooled" else x.mean((2, 3))  # fault: max_pooled
        return F.linear(x, self.classifier.weight, self.classifier.bias)
