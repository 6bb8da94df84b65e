"""Numbers its runs in a file, and lets later ones learn more slowly."""

import argparse
from pathlib import Path

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--clean", action="store_true")
args = parser.parse_args()

counter = Path("runs.txt")
number = int(counter.read_text()) + 1 if counter.exists() else 1
counter.write_text(str(number))

torch.manual_seed(1)
model = nn.Linear(6, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 if args.clean else 0.1 / number)
x, y = torch.randn(32, 6), torch.randint(2, (32,))
for _ in range(4):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
print("4 epochs")
