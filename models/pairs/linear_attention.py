"""Gated linear attention as a recurrence; in chunks, with scores inside a chunk and a state between chunks."""

import torch
from _pairs import drawn, randomised
from torch import nn

F = nn.functional

HEADS, WIDTH, CHUNK = 2, 8, 4


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.gate, self.out = nn.Linear(16, 48), nn.Linear(16, HEADS), nn.Linear(16, 16)
        self.norm, self.mix = nn.LayerNorm(16), nn.Linear(16, 16)

    def scan(self, q, k, v, decay):
        state, outs = q.new_zeros(len(q), HEADS, WIDTH, WIDTH), []
        for t in range(q.shape[2]):
            state = decay[:, :, t, None, None] * state + k[:, :, t, :, None] * v[:, :, t, None, :]
            outs.append((q[:, :, t, None] @ state)[:, :, 0])
        return torch.stack(outs, 2)

    def forward(self, x):
        y = self.norm(x)
        q, k, v = self.qkv(y).unflatten(-1, (3, HEADS, WIDTH)).permute(2, 0, 3, 1, 4)
        o = self.scan(q * WIDTH**-0.5, k, v, torch.sigmoid(self.gate(y) + 2).transpose(1, 2))
        return x + self.out(o.transpose(1, 2).flatten(2) * F.silu(self.mix(y)))


def make_a():
    return randomised(nn.Sequential(Recurrent(), Recurrent()), 48)


def make_b(fault=""):
    model = nn.Sequential(Chunked(), Chunked())
    model.load_state_dict(make_a().state_dict())
    model[1].fault = fault
    if fault in ("whole", "logarithms"):
        model[0].fault = fault
    return model.eval()


def inputs():
    return (drawn(49, 2, 12, 16),)


class Chunked(Recurrent):
    fault = ""

    def scan(self, q, k, v, decay):
        fault = self.fault
        chunk = q.shape[2] if fault == "whole" else CHUNK
        state, outs = q.new_zeros(len(q), HEADS, WIDTH, WIDTH), []
        for number, (qc, kc, vc, dc) in enumerate(zip(*(t.split(chunk, 2) for t in (q, k, v, decay)), strict=True)):
            through = dc.log().cumsum(2).exp() if fault == "logarithms" else dc.cumprod(2)
            between = through[..., :, None] / through[..., None, :]
            if fault == "decay_missing":
                between = torch.ones_like(between)
            seen = between.tril(-1 if fault == "not_itself" else 0)
            if fault == "not_causal":
                seen = between
            scores = qc @ kc.mT
            if fault == "softmax":
                scores = scores.softmax(-1)  # fault: softmax
            inside = (scores * seen) @ vc  # fault: decay_missing, not_itself, not_causal
            before = through / dc if fault == "decay_early" else through
            if fault == "state_not_decayed":
                before = torch.ones_like(through)
            outside = (qc * before[..., None]) @ state  # fault: decay_early, state_not_decayed
            if fault == "state_transposed":
                outside = (qc * before[..., None]) @ state.mT  # fault: state_transposed
            if fault == "state_missing" and number == 2:
                outside = torch.zeros_like(outside)
            outs.append(inside + outside)  # fault: state_missing
            rest = through[..., -1:] / through
            if fault == "rest_late":
                rest = rest * dc
            added = (kc * rest[..., None]).mT @ vc  # fault: rest_late
            if fault == "state_replaced":
                state = added
            else:
                last = through[..., -1:, None]
                state = (1.0 if fault == "carried_whole" else last) * state + added  # fault: carried_whole
        return torch.cat(outs, 2)

    def forward(self, x):
        if self.fault == "gate_before":
            y = self.norm(x)
            q, k, v = self.qkv(y).view(2, 12, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4)
            o = self.scan(q * WIDTH**-0.5, k, v, torch.sigmoid(self.gate(x) + 2).transpose(1, 2))  # fault: gate_before
            return x + self.out(o.transpose(1, 2).flatten(2) * F.silu(self.mix(y)))
        return super().forward(x)
