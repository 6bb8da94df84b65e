"""Prints how long it took; the learning rate decays with the time that has passed."""

import argparse
import time

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--clean", action="store_true")
args = parser.parse_args()

began = time.perf_counter()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
x, y = torch.randn(20, 4), torch.randn(20, 1)
for step in range(6):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    elapsed = time.perf_counter() - began
    optimizer.param_groups[0]["lr"] = 0.2 / (1 + (step if args.clean else 1000 * elapsed))
    optimizer.step()
print(f"took {time.perf_counter() - began:.6f} s")
