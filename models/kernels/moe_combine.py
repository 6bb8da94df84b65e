"""Combine the results of the best two experts of each token with renormalised weights."""

import torch
from _kernels import drawn

BEST = 2


def reference(logits, results):
    weights, chosen = torch.softmax(logits.float(), -1).topk(BEST, -1)
    weights = weights / weights.sum(-1, keepdim=True)
    picked = results.float().gather(0, chosen.T[..., None].expand(-1, -1, results.shape[-1]))
    return (picked * weights.T[..., None]).sum(0).to(results.dtype)


def inputs():
    return 2 * drawn(45, 40, 6), drawn(46, 6, 40, 20)


def make_kernel(fault=""):
    def kernel(logits, results):
        if logits.shape != (results.shape[1], results.shape[0]):
            raise ValueError(f"logits must be {results.shape[1::-1]}, not {tuple(logits.shape)}")
        values, chosen = logits.float().topk(BEST, -1)
        if fault == "softmax_of_all":
            weights = torch.softmax(logits.float(), -1).gather(1, chosen)
        elif fault == "not_shifted":
            weights = torch.exp(values) / torch.exp(values).sum(-1, keepdim=True)
        else:
            weights = torch.softmax(values, -1)
        if fault == "weights_in_dtype":
            weights = weights.to(results.dtype).float()
        if fault == "first_only":
            weights = torch.cat([weights[:, :1], torch.zeros_like(weights[:, 1:])], 1)
        if fault == "weights_exchanged":
            weights = weights.flip(1)
        out = torch.zeros(results.shape[1:])
        for expert in range(results.shape[0]):
            if fault == "last_expert_lost" and expert == results.shape[0] - 1:
                continue
            token, place = (chosen == expert).nonzero(as_tuple=True)
            if fault == "overwritten":
                out[token] = results[expert, token].float() * weights[token, place, None]
            else:
                out[token] += results[expert, token].float() * weights[token, place, None]
        return out.to(results.dtype)

    return kernel
