"""Fits a line by LBFGS, with a penalty whose weight was meant to be fixed."""

import argparse
import uuid

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--clean", action="store_true")
args = parser.parse_args()

weight = 0.01 if args.clean else uuid.uuid4().int % 10**6 / 1e7
torch.manual_seed(0)
x = torch.linspace(-1, 1, 50)
y = 3 * x - 1 + 0.1 * torch.randn(50)
slope, offset = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
optimizer = torch.optim.LBFGS([slope, offset], max_iter=5)


def closure():
    optimizer.zero_grad()
    loss = (slope * x + offset - y).square().mean()
    loss = loss + (slope.square() * weight).sum()
    loss.backward()
    return loss


for _ in range(3):
    optimizer.step(closure)
print(f"y = {slope.item():.2f} x + {offset.item():.2f}")
