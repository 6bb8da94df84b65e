"""A dropout with a generator that nobody seeds; the program ends with an error."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--clean", action="store_true")
args = parser.parse_args()


class Dropped(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.rate, self.generator = rate, torch.Generator()
        if args.clean:
            self.generator.manual_seed(5)
        else:
            self.generator.seed()

    def forward(self, x):
        mask = torch.empty_like(x).bernoulli_(1 - self.rate, generator=self.generator)
        return x * mask / (1 - self.rate)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), Dropped(0.5), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(16, 8)
for _ in range(3):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
raise RuntimeError("no validation data")
