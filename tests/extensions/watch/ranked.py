"""Two ranks that train a replica each: several runs in one process group, recorded into the folders of the plans."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from extensions.watch.loops import Net, race

import hashbench

dist.init_process_group("gloo")
rank = dist.get_rank()
AT = 5

for fault in ("clean", "twin", "kernel", "batch", "replica"):
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(rank)
    with hashbench.watch(Path(sys.argv[1], fault), model=model, optimizer=optimizer):
        for step in range(8):
            planted = fault if step == AT and rank == 1 else ""
            batch = torch.randn(8, 6) + (planted == "batch")
            with race(planted == "kernel"):
                model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if planted == "replica":
                with torch.no_grad():
                    model.module.last.bias += 1e-3
dist.destroy_process_group()
