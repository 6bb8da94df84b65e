"""Attention of torch in training; one that recomputes its probabilities in a backward of its own."""

import torch
from _pairs import drawn, randomised
from torch import nn

F = nn.functional


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(32, 64), nn.Linear(32, 32)

    def attend(self, q, k, v):
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (8, 8)).transpose(1, 2).split([4, 2, 2], 1)
        return x + self.proj(self.attend(q, k, v).transpose(1, 2).flatten(2))


def make_a():
    return randomised(nn.Sequential(Attention(), Attention()), 42)


def make_b(fault=""):
    model = nn.Sequential(Recomputed(), Recomputed())
    model.load_state_dict(make_a().state_dict())
    model[0].fault = fault
    return model.eval()


def inputs():
    return (drawn(43, 2, 7, 32),)


def loss(result):
    return result.pow(3).mean()


class Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, fault):
        k2, v2 = (t.repeat_interleave(2, 1) for t in (k, v))
        scores = (q @ k2.mT) * 8**-0.5
        scores = scores.masked_fill(torch.ones(7, 7).triu(1).bool(), float("-inf"))
        total = scores.logsumexp(-1, keepdim=True)
        o = (scores - total).exp() @ v2
        ctx.fault = fault
        ctx.save_for_backward(q, k, v, o, total)
        return o

    @staticmethod
    def backward(ctx, d):
        (q, k, v, o, total), fault = ctx.saved_tensors, ctx.fault
        scale = 8**-0.5
        k2, v2 = (t.repeat_interleave(2, 1) for t in (k, v))
        p = ((q @ k2.mT) * scale - total).exp()
        if fault != "mask_missing":
            p = p.tril()
        d_v = p.mT @ d  # fault: mask_missing
        d_p = d @ v2.mT
        if fault == "delta_missing":
            d_s = p * d_p  # fault: delta_missing
        else:
            delta = (d * (v2 if fault == "delta_of_values" else o)).sum(-1, keepdim=True)  # fault: delta_of_values
            d_s = p * (d_p - delta)
        d_q = d_s @ k2 * (1.0 if fault == "query_not_scaled" else scale)  # fault: query_not_scaled
        d_k = (d_s if fault == "not_transposed" else d_s.mT) @ q * scale  # fault: not_transposed
        if fault == "key_scaled_twice":
            d_k = d_k * scale  # fault: key_scaled_twice
        if fault == "first_of_group":
            d_k = d_k[:, ::2] * 2  # fault: first_of_group
        elif fault == "groups_across":
            d_k = d_k.unflatten(1, (2, 2)).sum(1)  # fault: groups_across
        else:
            d_k = d_k.unflatten(1, (2, 2)).sum(2)
        d_v = d_v.unflatten(1, (2, 2))
        d_v = d_v.mean(2) if fault == "mean_of_group" else d_v.sum(2)  # fault: mean_of_group
        if fault == "value_bfloat16":
            d_v = d_v.bfloat16().to(d.dtype)  # fault: value_bfloat16
        return d_q, d_k, d_v, None


class Recomputed(Attention):
    fault = ""

    def attend(self, q, k, v):
        if self.fault == "formula":
            k, v = (t[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2) for t in (k, v))
            return ((q @ k.mT) / 8**0.5 + torch.full((7, 7), float("-inf")).triu(1)).softmax(-1) @ v
        if self.fault == "value_detached":
            v = v * 0.5 + v.detach() * 0.5  # fault: value_detached
        return Flash.apply(q, k, v, self.fault)
