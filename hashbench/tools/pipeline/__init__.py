"""``hashbench pipeline``: does a training pipeline repeat, and if not, where does it part?

A check runs the user's own loader, transforms, model and a few steps in a fresh process and leaves a folder; two
folders, of two processes, days or machines, are compared. The functions of a pipeline are found in a file by their
names, or marked by the decorators below.

>>> from hashbench.tools import pipeline
>>> @pipeline.loader
... def images(seed):
...     return torch.utils.data.DataLoader(...)
"""

from __future__ import annotations

from hashbench.tools.pipeline.config import forward, loader, loss, model, optimizer, seeding

__all__ = ["forward", "loader", "loss", "model", "optimizer", "seeding"]
