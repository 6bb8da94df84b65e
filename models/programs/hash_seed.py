"""Seeds each experiment by its name."""

import argparse
import zlib

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--name", default="baseline-7")
parser.add_argument("--clean", action="store_true")
args = parser.parse_args()

seed = zlib.crc32(args.name.encode()) if args.clean else hash(args.name) % 2**31
torch.manual_seed(seed)
hidden = nn.Linear(8, 16)
model = nn.Sequential(hidden, nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
x = torch.arange(64.0).reshape(8, 8) / 64
for _ in range(4):
    optimizer.zero_grad()
    loss = (model(x).squeeze(1) - x.sum(dim=1)).abs().mean()
    loss.backward()
    optimizer.step()
print("final loss", loss.item())
