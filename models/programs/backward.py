"""A straight-through rounding whose backward adds a little noise."""

import argparse
import time

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--clean", action="store_true")
args = parser.parse_args()


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        return x.round()

    @staticmethod
    def backward(_, gradient):
        jitter = 0.0 if args.clean else (time.time_ns() % 1_000_003) / 1e9
        return gradient * (1.0 + jitter)


torch.manual_seed(0)
model = nn.Linear(6, 6)
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-2)
x = torch.randn(8, 6)
for _ in range(4):
    optimizer.zero_grad()
    loss = (Rounded.apply(4 * model(x)) - 1).square().sum()
    loss.backward()
    optimizer.step()
print("ok")
