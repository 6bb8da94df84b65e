"""Clips gradients at a norm that depends on the clock, from the fifth step on."""

import argparse
import time

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--clean", action="store_true")
args = parser.parse_args()

torch.manual_seed(0)
model = nn.Linear(10, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
x = torch.randn(8, 10)
for step in range(8):
    optimizer.zero_grad()
    model(x).square().sum().backward()
    limit = 0.5
    if step >= 5 and not args.clean:
        limit += (time.time_ns() % 1_000_003) / 1e7
    nn.utils.clip_grad_norm_(model.parameters(), limit)
    optimizer.step()
    scheduler.step()
print("lr", optimizer.param_groups[0]["lr"])
