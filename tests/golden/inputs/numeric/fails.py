"""After the change it raises."""

import torch
from same import before, inputs  # noqa: F401 – what the command looks for

RENAME = {"0.weight": "weight"}
STAGES = ["outputs", "parameters"]


class Fails(torch.nn.Linear):
    def forward(self, x):
        raise ValueError(f"no such width: {x.shape[1]}")


def after(model):
    return Fails(5, 1, bias=model is None)
