"""Cumulative sum of the last dimension by blocks, with a carry from block to block."""

import torch
from _kernels import drawn, load, store

BLOCK = 32


def reference(x):
    return torch.cumsum(x, -1)


def inputs():
    return (drawn(15, 20, 150),)


def make_kernel(fault=""):
    def kernel(x):
        n = x.shape[-1]
        if fault == "refuses" and n % 50:
            raise ValueError(f"length {n} is no multiple of 50")
        out = torch.empty_like(x)
        carry = torch.zeros(*x.shape[:-1], 1)
        for start in range(0, n, BLOCK):
            block = load(x, start, BLOCK)
            if fault == "sequential":
                steps = [block[..., 0]]
                for i in range(1, BLOCK):
                    steps.append(steps[-1] + block[..., i])
                inside = torch.stack(steps, -1)
            elif fault == "exclusive":
                inside = block.cumsum(-1) - block
            else:
                inside = block.cumsum(-1)
            if fault == "last_block_unwritten" and start + BLOCK > n:
                break
            store(out, start, inside + carry)
            last = inside[..., -1:]
            if fault == "carry_lost":
                continue
            if fault == "carry_of_block_before":
                carry = last
            elif fault == "carry_without_last":
                carry = carry + inside[..., -2:-1]
            elif fault == "carry_in_dtype":
                carry = (carry + last).to(x.dtype).float()
            else:
                carry = carry + last
        return out

    return kernel
