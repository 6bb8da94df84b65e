"""A convnet with batch norms in training; one that takes its statistics by hand and keeps them running."""

import torch
from _pairs import drawn, randomised
from torch import nn

F = nn.functional


class Net(nn.Module):
    def __init__(self, norm=nn.BatchNorm2d):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 12, 3, padding=1), nn.Conv2d(12, 12, 3, padding=1, groups=3)
        self.norm1, self.norm2, self.head = norm(12), norm(12), nn.Linear(12, 4)

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)) + y)
        running = [getattr(n, f"running_{kind}").clone() for n in (self.norm1, self.norm2) for kind in ("mean", "var")]
        return self.head(y.mean((2, 3))), *running


def make_a():
    return randomised(Net(), 44).train()


def make_b(fault=""):
    model = Net(ByHand)
    model.load_state_dict(make_a().state_dict())
    model.norm2.fault = fault
    if fault == "in_place_fused":
        model.norm1.fault = fault
    return model.train()


def inputs():
    return (drawn(45, 4, 3, 6, 6),)


def loss(result):
    return result[0].square().mean()


class ByHand(nn.BatchNorm2d):
    fault = ""

    def forward(self, x):
        fault = self.fault
        y = x.transpose(0, 1).flatten(1)
        mean = y.mean(1)
        variance = (y - mean[:, None]).square().mean(1)
        with torch.no_grad():
            count = y.shape[1]
            unbiased = variance * (1 if fault == "running_biased" else count / (count - 1))  # fault: running_biased
            rate = 0.9 if fault == "momentum" else 0.1
            if fault == "mean_not_updated":
                rate = 0.0
            self.running_mean.lerp_(mean, rate)  # fault: momentum, mean_not_updated
            self.running_var.lerp_(
                unbiased.sqrt() if fault == "running_deviation" else unbiased, 0.1
            )  # fault: running_deviation
        if fault == "running_used":
            mean, variance = self.running_mean.clone(), self.running_var.clone()
        if fault == "statistics_detached":
            mean, variance = mean.detach(), variance.detach()
        if fault == "one_ranks_batch":
            half = y[:, : y.shape[1] // 2]
            mean, variance = half.mean(1), half.var(1, correction=0)  # fault: one_ranks_batch
        if fault == "unbiased":
            variance = y.var(1)  # fault: unbiased
        y = y - mean[:, None]  # fault: running_used, one_ranks_batch
        if fault == "eps_outside":
            y = y / (variance.sqrt() + self.eps)[:, None]  # fault: eps_outside
        else:
            y = y * (variance + (1e-3 if fault == "eps" else self.eps)).rsqrt()[:, None]  # fault: eps
        if fault == "in_place_fused":
            y = y.mul(self.weight[:, None]).add_(self.bias[:, None])
        else:
            weight = self.weight.abs() if fault == "weight_abs" else self.weight
            y = y * (1 + weight if fault == "one_plus" else weight)[:, None] + self.bias[:, None]  # fault: one_plus
        return y.view(x.shape[1], x.shape[0], *x.shape[2:]).transpose(0, 1)
