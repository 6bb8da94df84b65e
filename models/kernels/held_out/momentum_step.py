"""One step of SGD with Nesterov momentum, weight decay and clipping by the length of the gradient."""

import torch
from _kernels import blocks, drawn

RATE, MOMENTUM, DECAY, LONGEST, BLOCK = 0.05, 0.9, 0.01, 5.0, 256


def reference(parameter, grad, velocity):
    length = torch.linalg.vector_norm(grad.float())
    grad = grad * (LONGEST / (length + 1e-6)).clamp(max=1).to(grad.dtype)
    grad = grad + DECAY * parameter
    velocity = MOMENTUM * velocity + grad
    return parameter - RATE * (grad + MOMENTUM * velocity), velocity


def inputs():
    return drawn(135, 40, 30), drawn(136, 40, 30), drawn(137, 40, 30)


def make_kernel(fault=""):
    def kernel(parameter, grad, velocity):
        old, wide, speed = parameter.float(), grad.float(), velocity.float()
        flat = wide.flatten()
        parts = [flat[block].square().sum() for block in blocks(len(flat), BLOCK)]
        if fault == "length_of_full_blocks" and len(flat) % BLOCK and len(parts) > 1:
            parts.pop()
        squares = sum(parts)
        length = squares if fault == "root_missing" else squares.sqrt()
        wide = wide * (LONGEST / (length + 1e-6)).clamp(max=torch.inf if fault == "always_clipped" else 1)
        if fault != "decay_missing":
            wide = wide + DECAY * old
        if fault == "dampened":
            speed = MOMENTUM * speed + (1 - MOMENTUM) * wide
        else:
            speed = (0.99 if fault == "momentum" else MOMENTUM) * speed + wide
        if fault == "not_nesterov":
            update = speed
        elif fault == "velocity_before":
            update = wide + MOMENTUM * velocity.float()
        else:
            update = wide + MOMENTUM * speed
        new = old - RATE * update
        if fault == "writes_input":
            velocity.copy_(speed)
        return new.to(parameter.dtype), speed.to(velocity.dtype)

    return kernel
