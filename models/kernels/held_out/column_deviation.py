"""Standard deviation of each column and the standardised columns, sums by blocks of rows."""

import torch
from _kernels import blocks, drawn

ROWS = 32


def reference(x):
    return (x - x.mean(0)) / (x.std(0) + 1e-3), x.std(0)


def inputs():
    return (drawn(151, 100, 24) * 2 + 1,)


def make_kernel(fault=""):
    def kernel(x):
        n = len(x)
        total = torch.zeros(x.shape[1])
        for block in blocks(n, ROWS):
            total = total + x[block].float().sum(0)
        mean = total / n
        if fault == "mean_rounded":
            mean = mean.to(x.dtype).float()
        squares = torch.zeros(x.shape[1])
        for block in blocks(n, ROWS):
            centred = x[block].float() - mean
            if fault == "padded_rows" and len(centred) < ROWS:
                centred = torch.cat([centred, (-mean).expand(ROWS - len(centred), -1)])
            squares = squares + centred.square().sum(0)
        if fault == "mean_absolute":
            deviation = (x.float() - mean).abs().mean(0) * 1.2533
        elif fault == "biased":
            deviation = (squares / n).sqrt()
        elif fault == "root_missing":
            deviation = squares / (n - 1)
        else:
            deviation = (squares / (n - 1)).sqrt()
        if fault == "eps_in_root":
            scale = 1 / (squares / (n - 1) + 1e-3).sqrt()
        elif fault == "eps_missing":
            scale = 1 / deviation
        else:
            scale = 1 / (deviation + 1e-3)
        out = (x.float() - mean) * scale
        if fault == "mean_of_next_column":
            out = (x.float() - mean.roll(1)) * scale
        return out.to(x.dtype), deviation.to(x.dtype)

    return kernel
