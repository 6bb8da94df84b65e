"""Cools the first moment of Adam down after ten steps."""

import argparse
import secrets

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--clean", action="store_true")
args = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(5, 10), nn.GELU(), nn.Linear(10, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
x, y = torch.randn(16, 5), torch.randn(16, 1)
for step in range(14):
    if step == 10:
        factor = 0.5 if args.clean else 0.5 + secrets.randbelow(10**6) / 1e7
        for state in optimizer.state.values():
            state["exp_avg"].mul_(factor)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
print("steps", step + 1)
