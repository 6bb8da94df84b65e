"""ConvNeXt of timm; one that keeps pixels as rows and gathers its depthwise convolution from shifted copies."""

import torch
from _pairs import drawn, randomised
from timm.models.convnext import ConvNeXt
from torch import nn

F = nn.functional


def make_a():
    return randomised(ConvNeXt(in_chans=3, num_classes=7, depths=(1, 2, 1, 1), dims=(16, 24, 24, 32), patch_size=4), 19)


def make_b(fault=""):
    model = make_a()
    for stage in model.stages:
        stage.blocks = nn.Sequential(
            *(
                Rows(block, fault if number == 1 or fault == "unfolded" else "")
                for number, block in enumerate(stage.blocks)
            )
        )
    return model


def inputs():
    return (drawn(20, 2, 3, 64, 64),)


class Rows(nn.Module):
    def __init__(self, theirs, fault):
        super().__init__()
        self.conv, self.norm, self.fc1, self.fc2 = theirs.conv_dw, theirs.norm, theirs.mlp.fc1, theirs.mlp.fc2
        self.gamma, self.fault = theirs.gamma, fault

    def convolve(self, x):
        fault, (_, _, height, width) = self.fault, x.shape
        if fault == "unfolded":
            columns = F.unfold(x, 7, padding=3).view(*x.shape[:2], 49, -1)
            return (columns * self.conv.weight.view(1, -1, 49, 1)).sum(2).view_as(x) + self.conv.bias[:, None, None]
        shift = 1 if fault == "one_pixel_off" else 0
        padded = F.pad(x, (3 + shift, 3 - shift, 3, 3), mode="circular" if fault == "circular" else "constant")
        kernel = self.conv.weight[:, 0].mT if fault == "kernel_transposed" else self.conv.weight[:, 0]
        taps = padded.unfold(2, height, 1).unfold(3, width, 1)
        out = torch.einsum("bcijhw,cij->bchw", taps, kernel)  # fault: one_pixel_off, circular, kernel_transposed
        return out if fault == "bias_missing" else out + self.conv.bias[:, None, None]

    def forward(self, x):
        fault, (batch, _, height, width) = self.fault, x.shape
        y = self.convolve(x).flatten(2).mT.flatten(0, 1)
        if fault == "rms":
            y = F.rms_norm(y, (y.shape[-1],), self.norm.weight, self.norm.eps) + self.norm.bias  # fault: rms
        elif fault == "norm_over_pixels":
            y = F.layer_norm(y.t(), (y.shape[0],)).t() * self.norm.weight + self.norm.bias  # fault: norm_over_pixels
        else:
            eps = 1e-3 if fault == "eps" else self.norm.eps
            y = F.layer_norm(y, (y.shape[-1],), self.norm.weight, self.norm.bias, eps)  # fault: eps, bias_missing
        h = torch.addmm(self.fc1.bias, y, self.fc1.weight.t())
        h = F.gelu(h, approximate="tanh") if fault == "gelu_tanh" else F.gelu(h)  # fault: gelu_tanh
        y = torch.addmm(self.fc2.bias, h, self.fc2.weight.t())
        if fault == "gamma_twice":
            y = y * self.gamma
        if fault != "gamma_missing":
            y = y * self.gamma  # fault: gamma_twice
        y = y.view(batch, height * width, -1).mT.unflatten(2, (height, width))
        return y if fault == "no_residual" else x + y  # fault: gamma_missing
