"""Transpose one matrix and add another, by tiles."""

import torch
from _kernels import blocks, drawn

TILE = 16


def reference(x, y):
    return x.T + y


def inputs():
    return drawn(52, 64, 64), drawn(53, 64, 64)


def make_kernel(fault=""):
    calls = []

    def kernel(x, y):
        if x.dim() != 2 or x.shape != y.shape[::-1]:
            raise ValueError(f"shapes {tuple(x.shape)} and {tuple(y.shape)} are not each other's transpose")
        if fault == "refuses" and (x.shape[0] % TILE or x.shape[1] % TILE):
            raise ValueError(f"sizes {tuple(x.shape)} are no multiples of {TILE}")
        if fault == "assumes_contiguous":
            x = torch.as_strided(x, x.shape, (x.shape[1], 1), x.storage_offset())
        if fault == "assumes_no_offset":
            x = torch.as_strided(x, x.shape, x.stride(), 0)
        out = torch.empty_like(y, memory_format=torch.contiguous_format)
        calls.append(0)
        for rows in blocks(y.shape[0], TILE):
            for columns in blocks(y.shape[1], TILE):
                if fault == "tail_unwritten" and max(rows.stop - rows.start, columns.stop - columns.start) > min(
                    rows.stop - rows.start, columns.stop - columns.start
                ):
                    continue
                if fault == "tile_not_transposed" and rows.start == columns.start == TILE:
                    out[rows, columns] = x[rows, columns] + y[rows, columns]
                elif fault == "every_other_call" and len(calls) % 2 == 0 and rows.start == 0:
                    out[rows, columns] = x[columns, rows].T
                else:
                    out[rows, columns] = x[columns, rows].T + y[rows, columns]
        return out

    return kernel
