"""Dropout with a given mask, and a residual added."""

from _kernels import drawn, uniform

P = 0.1


def reference(x, residual, keep):
    return x * keep / (1 - P) + residual


def inputs():
    return drawn(17, 60, 70), drawn(18, 60, 70), uniform(19, 0, 1, 60, 70) >= P


def make_kernel(fault=""):
    scale = {"scale_by_p": 1 / P, "scale_missing": 1.0, "scale_rounded": 1.1}.get(fault, 1 / (1 - P))

    def kernel(x, residual, keep):
        if fault == "mask_of_next":
            keep = keep.roll(1, -1)
        if fault == "writes_input":
            return residual.add_((x.float() * keep * scale).to(x.dtype))
        if fault == "in_dtype":
            return x * scale * keep + residual
        if fault == "inverted":
            keep = ~keep
        return (x.float() * scale * keep + residual.float()).to(x.dtype)

    return kernel
