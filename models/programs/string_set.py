"""Four named layers of an attention block, made in the order of a set."""

import argparse

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--clean", action="store_true")
args = parser.parse_args()

torch.manual_seed(0)
names = {"query", "key", "value", "output", "gate", "up", "down", "norm", "bias", "scale", "rotary", "head"}
order = sorted(names) if args.clean else names
weights = torch.nn.ParameterDict()
for name in order:
    weights[name] = torch.nn.Parameter(torch.randn(8, 8) / 8**0.5)


def forward(x):
    for name in sorted(names):
        x = torch.tanh(x @ weights[name])
    return x


optimizer = torch.optim.SGD(weights.parameters(), lr=0.1)
x = torch.randn(16, 8)
for _ in range(5):
    optimizer.zero_grad()
    loss = forward(x).square().mean()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.6f}")
