"""One weight is another, and a module is put around a layer."""

import torch
from same import before, inputs  # noqa: F401 – what the command looks for


def after(model):
    with torch.no_grad():
        model[2].weight[0, 0] += 1
        model[0].bias[1] = -0.0
    model[1] = torch.nn.Threshold(0.0, 0.0)
    return model
