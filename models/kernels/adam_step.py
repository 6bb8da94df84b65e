"""One step of AdamW with bias correction: new parameter and both moments."""

import math

from _kernels import drawn

RATE, BETA1, BETA2, EPS, DECAY, STEP = 1e-2, 0.9, 0.999, 1e-8, 0.1, 3


def reference(parameter, grad, first, second):
    first = BETA1 * first + (1 - BETA1) * grad
    second = BETA2 * second + (1 - BETA2) * grad.square()
    update = (first / (1 - BETA1**STEP)) / ((second / (1 - BETA2**STEP)).sqrt() + EPS)
    return parameter * (1 - RATE * DECAY) - RATE * update, first, second


def inputs():
    return drawn(47, 50, 40), drawn(48, 50, 40), 0.1 * drawn(49, 50, 40), 0.01 * drawn(50, 50, 40).square()


def make_kernel(fault=""):
    def kernel(parameter, grad, first, second):
        old, wide, m, v = (x.float() for x in (parameter, grad, first, second))
        step = STEP - 1 if fault == "step_before" else STEP
        decay = 0.0 if fault == "decay_missing" else DECAY
        if fault == "decay_in_gradient":
            wide, decay = wide + DECAY * old, 0.0
        m = m + (1 - BETA1) * (wide - m) if fault == "lerp" else BETA1 * m + (1 - BETA1) * wide
        v = BETA2 * v + (1 - BETA2) * wide * wide
        if fault == "moments_exchanged_betas":
            v = BETA1 * second.float() + (1 - BETA1) * wide * wide
        root = v.sqrt() / math.sqrt(1 - BETA2**step)
        if fault == "second_not_corrected":
            root = v.sqrt()
        denominator = (v / (1 - BETA2**STEP) + EPS).sqrt() if fault == "eps_inside_root" else root + EPS
        new = old * (1 - RATE * decay) - RATE / (1 - BETA1**step) * m / denominator
        if fault == "writes_input":
            return parameter.copy_(new), first.copy_(m), second.copy_(v)
        return new.to(parameter.dtype), m.to(first.dtype), v.to(second.dtype)

    return kernel
