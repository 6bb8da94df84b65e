"""Matrix product by blocks of the inner dimension, in parts that are summed at the end."""

import torch
from _kernels import blocks, drawn

BLOCK, PARTS = 32, 3


def reference(a, b):
    return a @ b


def inputs():
    return drawn(13, 48, 200), drawn(14, 200, 40)


def make_kernel(fault=""):
    stale = []

    def narrow(x):
        return x.bfloat16().float() if fault == "operands_in_bfloat16" else x.float()

    def part(a, b):
        total = torch.zeros(a.shape[0], b.shape[1])
        end = a.shape[1] - a.shape[1] % BLOCK if fault == "tail_lost" else a.shape[1]
        for block in blocks(end, BLOCK):
            if fault == "border_lost" and block.start:
                block = slice(block.start + 1, block.stop)
            total = total + narrow(a[:, block]) @ narrow(b[block])
        return total

    def one_by_one(a, b, dtype):
        """Accumulate in ``dtype``, one product after the other."""
        total = torch.zeros(a.shape[0], b.shape[1], dtype=dtype)
        for column, row in zip(a.unbind(1), b.unbind(0), strict=True):
            total = (total.float() + torch.outer(column.float(), row.float())).to(dtype)
        return total

    def kernel(a, b):
        if fault == "sequential":
            return one_by_one(a, b, torch.float32).to(a.dtype)
        if fault == "accumulates_in_dtype":  # documented: accumulates in the dtype of its operands
            return one_by_one(a, b, a.dtype)
        size = -(-a.shape[1] // PARTS)
        partial = [part(a[:, block], b[block]) for block in blocks(a.shape[1], size)]
        if fault == "last_part_lost":
            partial = partial[:-1]
        total = sum(partial)
        if fault == "stale_workspace":
            if stale and stale[0].shape == total.shape:
                total = total + stale[0]
            stale[:] = [total]
        if fault == "one_element":
            total = total.clone()
            total[total.shape[0] // 2, -1] -= a[total.shape[0] // 2, -1].float() * b[-1, -1].float()
        return total.to(a.dtype)

    return kernel
