"""A linear layer with bias and tanh GELU in its epilogue, by blocks of outputs."""

import math

import torch
from _kernels import blocks, drawn

OUTPUTS = 16


def reference(x, weight, bias):
    return torch.nn.functional.gelu(torch.nn.functional.linear(x, weight, bias), approximate="tanh")


def inputs():
    return drawn(112, 50, 40), drawn(113, 40, 40) / 5, drawn(114, 40)


def make_kernel(fault=""):
    def kernel(x, weight, bias):
        out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype)
        for block in blocks(weight.shape[0], OUTPUTS):
            rows = weight[:, block].T if fault == "weight_transposed" else weight[block]
            wide = x.float() @ rows.float().T
            if fault == "bias_after":
                pass
            elif fault == "bias_of_first_block":
                wide = wide + bias[: wide.shape[1]].float()
            elif fault != "bias_missing":
                wide = wide + bias[block].float()
            if fault == "epilogue_in_dtype":
                wide = wide.to(x.dtype).float()
            cubic = {"cubic_rounded": 0.045, "cubic_missing": 0.0}.get(fault, 0.044715)
            root = 0.8 if fault == "root_rounded" else math.sqrt(2 / math.pi)
            inner = root * (wide + cubic * wide**3)
            if fault == "exp_for_tanh":
                powers = torch.exp(2 * inner)
                result = wide * powers / (powers + 1)
            elif fault == "sigmoid":
                result = wide * torch.sigmoid(2 * inner)
            elif fault == "erf":
                result = torch.nn.functional.gelu(wide)
            else:
                result = 0.5 * wide * (1 + torch.tanh(inner))
            if fault == "bias_after":
                result = result + bias[block].float()
            out[:, block] = result.to(x.dtype)
        return out

    return kernel
