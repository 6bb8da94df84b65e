"""Rows added to a table at indices with duplicates, and the number of rows of each."""

import torch
from _kernels import blocks, drawn, whole

ROWS = 32


def reference(table, index, rows):
    count = torch.zeros(len(table), dtype=torch.int64).index_add(0, index, torch.ones_like(index))
    return table.index_add(0, index, rows), count


def inputs():
    return drawn(120, 25, 18), whole(121, 25, 90), drawn(122, 90, 18)


def make_kernel(fault=""):
    def kernel(table, index, rows):
        if fault == "writes_input":
            out = table.index_add_(0, index, rows)
            return out, torch.bincount(index, minlength=len(table))
        total = table.float() if fault != "table_lost" else torch.zeros(table.shape)
        total = total.clone()
        count = torch.zeros(len(table), dtype=torch.int64)
        for block in blocks(len(index), ROWS):
            place, added = index[block], rows[block].float()
            if fault == "duplicate_lost":
                total[place] = total[place] + added
            elif fault == "segments":
                unique, inverse = place.unique(return_inverse=True)
                total[unique] += torch.zeros(len(unique), rows.shape[1]).index_add(0, inverse, added)
            else:
                total.index_add_(0, place, added)
            if fault == "count_of_duplicates_lost":
                count[place] += 1
            else:
                count.index_add_(0, place, torch.ones_like(place))
            if fault == "rounds_each_block":
                total = total.to(table.dtype).float()
        if fault == "last_index_wraps":
            total[0] = total[0] + total[-1]
        return total.to(table.dtype), count

    return kernel
