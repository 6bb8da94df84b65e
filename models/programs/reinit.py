"""A loop of 300 steps that gives the head new weights at step 200."""

import argparse

import numpy as np
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--clean", action="store_true")
args = parser.parse_args()

torch.manual_seed(4)
body, head = nn.Linear(8, 8), nn.Linear(8, 1)
optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.05)
x, y = torch.randn(32, 8), torch.randn(32, 1)


def reset(layer):
    rng = np.random.default_rng(99 if args.clean else None)
    fresh = torch.from_numpy(rng.normal(scale=0.1, size=tuple(layer.weight.shape)))
    with torch.no_grad():
        layer.weight.copy_(fresh)


for step in range(300):
    if step == 200:
        reset(head)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(head(torch.tanh(body(x))), y)
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(f"step {step}: {loss.item():.4f}")
