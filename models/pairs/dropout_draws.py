"""A network with active dropout; one that draws the same noise in the same order, in another order, or otherwise."""

import torch
from _pairs import drawn, randomised
from torch import nn

F = nn.functional


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = x + F.dropout(F.relu(layer(x)), 0.25)
        return x


def make_a():
    return randomised(Net(), 56).train()


def make_b(fault=""):
    model = Other()
    model.load_state_dict(make_a().state_dict())
    model.fault = fault
    return model.train()


def inputs():
    return (drawn(57, 6, 24),)


class Other(Net):
    fault = ""

    def forward(self, x):
        if self.fault == "one_more_draw":
            torch.rand(3)
        if self.fault == "noise_before":
            masks = [torch.rand(6, 24) < 0.75 for _ in self.layers]
        for number, layer in enumerate(self.layers):
            h = torch.addmm(layer.bias, x, layer.weight.t()).clamp(min=0)
            fault = self.fault if number == 1 else ""
            if self.fault == "noise_before":
                x = x + h * masks[number] / 0.75
            elif fault == "rate":
                x = x + F.dropout(h, 0.2)
            elif fault == "not_active":
                x = x + h
            else:
                x = x + F.dropout(h, 0.25)
        return x
