"""Product with the lower triangle of a square matrix, tiles above the diagonal skipped."""

import torch
from _kernels import blocks, drawn

TILE = 16


def reference(a, x):
    return torch.tril(a) @ x


def inputs():
    return drawn(155, 70, 70), drawn(156, 70, 12)


def make_kernel(fault=""):
    kept = []

    def kernel(a, x):
        if a.shape[0] != a.shape[1]:
            raise ValueError(f"the matrix must be square, not {tuple(a.shape)}")
        if fault == "keeps_first_result" and kept and kept[0].shape == (len(a), x.shape[1]):
            return kept[0].to(a.dtype)
        out = torch.zeros(len(a), x.shape[1])
        for rows in blocks(len(a), TILE):
            for columns in blocks(rows.stop, TILE):
                tile = a[rows, columns].float()
                if columns.start == rows.start and fault != "diagonal_tile_whole":
                    tile = torch.tril(tile, -1 if fault == "diagonal_lost" else 0)
                if fault == "tile_lost" and columns.start == 0 and rows.start == 2 * TILE:
                    continue
                if fault == "one_product":
                    tile = torch.tril(a.float()[rows, : rows.stop], rows.start)
                    out[rows] = tile @ x[: rows.stop].float()
                    continue
                product = tile @ x[columns].float()
                out[rows] = product if fault == "overwritten" else out[rows] + product
            if fault == "rounds_each_row":
                out[rows] = out[rows].to(a.dtype).float()
        if fault == "keeps_first_result" and not kept:
            kept.append(out)
        if fault == "one_row_scaled":
            out[len(a) // 2] *= 1.02
        if fault == "a_little_less":
            out = out * 0.998
        if fault == "shifted":
            out = out + 0.01
        return out.to(a.dtype)

    return kernel
