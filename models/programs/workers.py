"""A DataLoader whose workers add noise of a generator of their own."""

import argparse
import os

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--clean", action="store_true")
args = parser.parse_args()


class Noisy(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        sample = np.full(8, index / 64, dtype=np.float32)
        return sample + np.random.normal(scale=0.1, size=8).astype(np.float32), index % 2


def seed_worker(worker):
    np.random.seed(worker if args.clean else os.getpid())


torch.manual_seed(0)
loader = DataLoader(Noisy(), batch_size=16, num_workers=2, worker_init_fn=seed_worker)
model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for x, y in loader:
    optimizer.zero_grad()
    logits = model(x)
    nn.functional.cross_entropy(logits, y).backward()
    optimizer.step()
print("done")
