"""One query against a cache of keys, in splits that are combined by their logsumexp."""

import math

import torch
from _kernels import blocks, drawn

SPLIT = 40


def reference(q, keys, values):
    scores = torch.einsum("bhd,bhtd->bht", q, keys) / math.sqrt(q.shape[-1])
    return torch.einsum("bht,bhtd->bhd", torch.softmax(scores, -1), values)


def inputs():
    return drawn(103, 4, 3, 16), drawn(104, 4, 3, 130, 16), drawn(105, 4, 3, 130, 16)


def make_kernel(fault=""):
    def kernel(q, keys, values):
        results, logs = [], []
        length = keys.shape[2]
        for block in blocks(length, SPLIT):
            key, value = keys[:, :, block].float(), values[:, :, block].float()
            scale = 1 / math.sqrt(q.shape[-1])
            if fault == "scale_of_split":
                scale = 1 / math.sqrt(q.shape[-1] + 1)
            scores = (q.float()[:, :, None] * key).sum(-1) * scale
            if fault == "new_key_lost" and block.stop == length and length > 1:
                scores = torch.cat([scores[..., :-1], torch.full_like(scores[..., -1:], -torch.inf)], -1)
            logs.append(scores.logsumexp(-1))
            weights = torch.exp(scores - logs[-1][..., None])
            if fault == "weights_in_dtype":
                weights = weights.to(q.dtype).float()
            results.append((weights[..., None] * value).sum(2))
        logs, results = torch.stack(logs), torch.stack(results)
        if fault == "mean_of_splits":
            return results.mean(0).to(q.dtype)
        if fault == "splits_not_shifted":
            weights = torch.exp(logs) / torch.exp(logs).sum(0)
        elif fault == "weights_of_maximum":
            weights = torch.exp(logs - logs.amax(0))
            weights = weights / weights.amax(0)
        elif fault == "split_in_dtype":
            results = results.to(q.dtype).float()
            weights = torch.softmax(logs, 0)
        else:
            weights = torch.softmax(logs, 0)
        if fault == "heads_exchanged":
            weights = weights.flip(2)
        return (results * weights[..., None]).sum(0).to(q.dtype)

    return kernel
