"""Average pooling of images, kernel 3, stride 2, padding 1, padding not counted."""

import torch
from _kernels import drawn


def reference(x):
    return torch.nn.functional.avg_pool2d(x, 3, 2, 1, count_include_pad=False)


def inputs():
    return (drawn(131, 2, 5, 21, 18),)


def make_kernel(fault=""):
    def kernel(x):
        height, width = x.shape[-2:]
        out_height, out_width = (height + 1) // 2, (width + 1) // 2
        out_width_written = out_width - (1 if width % 2 else 0) if fault == "last_column_unwritten" else out_width
        out = torch.empty(*x.shape[:-2], out_height, out_width, dtype=x.dtype)
        padded = torch.nn.functional.pad(x.float(), (1, 1, 1, 1))
        counts = torch.nn.functional.pad(torch.ones(height, width), (1, 1, 1, 1))
        for i in range(out_height):
            for j in range(out_width_written):
                top, left = 2 * i, 2 * j
                if fault == "stride_off_at_end" and j == out_width - 1 and j:
                    left -= 1
                window = padded[..., top : top + 3, left : left + 3]
                count = counts[top : top + 3, left : left + 3].sum()
                if fault == "padding_counted":
                    count = torch.tensor(9.0)
                if fault == "maximum":
                    out[..., i, j] = window.amax((-2, -1)).to(x.dtype)
                elif fault == "separable":
                    out[..., i, j] = (window.sum(-1).sum(-1) / count).to(x.dtype)
                elif fault == "corner_lost" and i == 0 and j == 0:
                    out[..., i, j] = ((window.sum((-2, -1)) - window[..., -1, -1]) / count).to(x.dtype)
                else:
                    out[..., i, j] = (window.sum((-2, -1)) / count).to(x.dtype)
        return out

    return kernel
