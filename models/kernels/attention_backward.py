"""Attention as an autograd function that computes its weights again in the backward, by blocks of keys."""

import math

import torch
from _kernels import blocks, drawn

KEYS = 24


def reference(q, k, v):
    return torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1) @ v


def inputs():
    return drawn(10, 2, 40, 16), drawn(11, 2, 60, 16), drawn(12, 2, 60, 16)


def make_kernel(fault=""):
    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            scores = q.float() @ k.float().mT / math.sqrt(q.shape[-1])
            logsumexp = scores.logsumexp(-1, keepdim=True)
            wide = torch.exp(scores - logsumexp) @ v.float()
            out = wide.to(q.dtype)
            ctx.save_for_backward(q, k, v, wide, logsumexp)
            return out

        @staticmethod
        def backward(ctx, grad):
            q, k, v, out, logsumexp = ctx.saved_tensors
            scale = 1 / math.sqrt(q.shape[-1])
            wide, grad = q.float(), grad.float()
            inner = (grad * out).sum(-1, keepdim=True)
            if fault == "inner_missing":
                inner = torch.zeros_like(inner)
            d_q, d_k, d_v = torch.zeros(q.shape), torch.empty(k.shape), torch.empty(v.shape)
            for block in blocks(k.shape[-2], KEYS):
                key, value = k[..., block, :].float(), v[..., block, :].float()
                weights = torch.exp(wide @ key.mT * scale - logsumexp)
                d_weights = grad @ value.mT
                d_scores = weights * (d_weights - inner)
                if fault == "scale_missing_in_keys":
                    d_k[..., block, :] = d_scores.mT @ wide
                else:
                    d_k[..., block, :] = d_scores.mT @ wide * scale
                d_v[..., block, :] = weights.mT @ grad
                d_q = d_scores @ key * scale if fault == "query_of_last_block" else d_q + d_scores @ key * scale
            if fault == "sign":
                d_q = -d_q
            return d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype)

    return Attention.apply
