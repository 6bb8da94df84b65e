"""Mamba of transformers, a loop over tokens; one whose scan doubles its stride, on tokens x width."""

import torch
from _pairs import randomised, tokens
from torch import nn
from transformers import MambaConfig, MambaForCausalLM

F = nn.functional

CONFIG = MambaConfig(vocab_size=59, hidden_size=24, state_size=4, num_hidden_layers=2, conv_kernel=4, time_step_rank=3)


def make_a():
    return randomised(MambaForCausalLM(CONFIG), 21)


def make_b(fault=""):
    model = make_a()
    for number, layer in enumerate(model.backbone.layers):
        layer.mixer = Scan(layer.mixer, fault if number == 1 or fault in ("loop", "conv_loop") else "")
    return model


def inputs():
    return {"input_ids": tokens(22, 59, 2, 9), "use_cache": False}


def outputs(result):
    return result.logits


def doubled(decay, value):
    """Return the states of ``s = decay s + value`` along dim 1."""
    step = 1
    while step < decay.shape[1]:
        earlier = F.pad(value[:, :-step], (0, 0, 0, 0, step, 0))
        value = value + decay * earlier
        decay = decay * F.pad(decay[:, :-step], (0, 0, 0, 0, step, 0), value=1.0)
        step *= 2
    return value


class Scan(nn.Module):
    def __init__(self, theirs, fault):
        super().__init__()
        self.theirs, self.fault = theirs, fault

    def forward(self, x, *_, **__):
        fault, theirs = self.fault, self.theirs
        u, z = theirs.in_proj(x).chunk(2, -1)
        if fault == "gate_exchanged":
            u, z = z, u
        kernel = theirs.conv1d.weight[:, 0]
        pad = (0, 0, 2, 1) if fault == "not_causal" else (0, 0, 3, 0)
        taps = F.pad(u, pad).unfold(1, 4, 1)
        if fault == "conv_loop":
            u = sum(F.pad(u, (0, 0, 3 - k, 0))[:, : u.shape[1]] * kernel[:, k] for k in range(4)) + theirs.conv1d.bias
        else:
            kernel = kernel.flip(-1) if fault == "kernel_flipped" else kernel
            u = (taps * kernel).sum(-1) + theirs.conv1d.bias  # fault: not_causal, kernel_flipped, gate_exchanged
        if fault != "conv_silu_missing":
            u = F.silu(u)
        step, b, c = theirs.x_proj(u).split([3, 4, 4], -1)  # fault: conv_silu_missing
        if fault == "bc_exchanged":
            b, c = c, b
        step = F.linear(step, theirs.dt_proj.weight, None if fault == "step_bias_missing" else theirs.dt_proj.bias)
        step = step.exp() if fault == "step_exp" else F.softplus(step)  # fault: step_exp, step_bias_missing
        decay = -theirs.A_log.float().exp()
        if fault == "a_not_exp":
            decay = -theirs.A_log.float()
        decay = (step[..., None] * decay).exp()  # fault: a_not_exp
        value = step[..., None] * b[:, :, None, :] * u[..., None]  # fault: bc_exchanged
        if fault == "step_missing":
            value = b[:, :, None, :] * u[..., None]  # fault: step_missing
        if fault == "decay_late":
            decay = decay.roll(1, 1)
        if fault == "loop":
            state, states = torch.zeros_like(value[:, 0]), []
            for t in range(value.shape[1]):
                state = torch.addcmul(value[:, t], decay[:, t], state)
                states.append(state)
            states = torch.stack(states, 1)
        else:
            states = doubled(decay, value)
        if fault == "state_late":
            states = F.pad(states[:, :-1], (0, 0, 0, 0, 1, 0))
        y = torch.einsum("btdn,btn->btd", states.to(c.dtype), c)  # fault: state_late
        if fault != "skip_missing":
            y = y + u * theirs.D
        y = y * (z.sigmoid() if fault == "gate_sigmoid" else F.silu(z))  # fault: gate_sigmoid, skip_missing
        return theirs.out_proj(y)
