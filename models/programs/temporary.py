"""Saves a checkpoint under a temporary name, which it prints and seeds by."""

import argparse
import tempfile
import zlib
from pathlib import Path

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--clean", action="store_true")
args = parser.parse_args()

with tempfile.TemporaryDirectory(prefix="run-") as folder:
    torch.manual_seed(0 if args.clean else zlib.crc32(folder.encode()))
    print("writing to", folder)
    model = nn.LSTM(4, 8, batch_first=True)
    x = torch.ones(2, 5, 4)
    optimizer = torch.optim.Adagrad(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(x)[0].sum().backward()
        optimizer.step()
    torch.save(model.state_dict(), Path(folder) / "model.pt")
print("saved")
