"""Mean of the rows of each segment, given by sorted offsets."""

import torch
from _kernels import drawn


def reference(values, offsets):
    lengths = offsets.diff()
    segment = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    sums = values.new_zeros(len(lengths), values.shape[1]).index_add(0, segment, values[: len(segment)])
    return sums / lengths.clamp(min=1)[:, None]


def inputs():
    return drawn(51, 90, 16), torch.tensor([0, 7, 7, 20, 21, 50, 63, 90])


def make_kernel(fault=""):
    def kernel(values, offsets):
        if not bool((offsets.diff() >= 0).all()) or int(offsets[0]) != 0 or int(offsets[-1]) > len(values):
            raise ValueError("offsets must ascend from 0 to at most the number of rows")
        count = len(offsets) - 1
        empty = torch.empty if fault == "empty_unwritten" else torch.zeros
        out = empty(count, values.shape[1], dtype=values.dtype)
        for i in range(count):
            start, stop = int(offsets[i]), int(offsets[i + 1])
            if start == stop:
                continue
            rows = values[start:stop].float()
            if fault == "last_row_lost" and len(rows) > 8:
                rows = rows[:-1]
            elif fault == "row_of_next":
                rows = values[start : stop + 1].float()
            if fault == "sum":
                out[i] = rows.sum(0).to(out.dtype)
            elif fault == "length_plus_one":
                out[i] = (rows.sum(0) / (len(rows) + 1)).to(out.dtype)
            elif fault == "running_mean":
                mean = torch.zeros(values.shape[1])
                for n, row in enumerate(rows, 1):
                    mean = mean + (row - mean) / n
                out[i] = mean.to(out.dtype)
            else:
                out[i] = (rows.sum(0) / (stop - start)).to(out.dtype)
        return out

    return kernel
