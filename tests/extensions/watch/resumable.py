"""A training script that goes on from the checkpoint in its folder; LOSES names what it does not restore."""

import os
import random
from pathlib import Path

import torch

import hashbench

LOSES = os.environ.get("LOSES", "").split(",")

torch.manual_seed(0)
random.seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(6, 12), torch.nn.BatchNorm1d(12), torch.nn.Dropout(0.5), torch.nn.Linear(12, 1)
)
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
shuffling = torch.Generator().manual_seed(5)
data = torch.randn(64, 6, generator=torch.Generator().manual_seed(7))
order = torch.randperm(64, generator=shuffling)
step = 0

parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
checkpoint = Path("checkpoint.pt")
if checkpoint.exists() and "everything" not in LOSES:
    saved = torch.load(checkpoint)
    for name, part in parts.items():
        if name not in LOSES:
            part.load_state_dict(saved[name])
    for group in optimizer.param_groups:
        group["lr"] = 0.05 if "scheduler" in LOSES else scheduler.get_last_lr()[0]
    if "generator" not in LOSES:
        torch.set_rng_state(saved["generator"])
    step = saved["step"]
    if "position" in LOSES:
        order = order.roll(7)

with hashbench.watch("watch", model=model, optimizer=optimizer, scaler=scaler, start=step or None):
    while step < 40:
        at = 4 * step % 64
        loss = model(data[order[at : at + 4]]).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
        step += 1
        saved = {name: part.state_dict() for name, part in parts.items()}
        torch.save({**saved, "generator": torch.get_rng_state(), "step": step}, checkpoint)
