"""Mixed precision on the CPU, with a gradient scaler, accumulation and a random brightness."""

import argparse
import random

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--clean", action="store_true")
args = parser.parse_args()
if args.clean:
    random.seed(0)

torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu")
images, labels = torch.rand(32, 1, 8, 8), torch.randint(10, (32,))
for number, (image, label) in enumerate(zip(images.split(8), labels.split(8), strict=True)):
    image = image * random.uniform(0.8, 1.2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(image), label) / 2
    scaler.scale(loss).backward()
    if number % 2:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
print("scale", scaler.get_scale())
