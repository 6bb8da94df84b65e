"""Binary cross entropy of logits with a weight of positives, mean of all, as an autograd function."""

import torch
from _kernels import blocks, drawn, uniform

POSITIVE, ROWS = 3.0, 16


def reference(logits, targets):
    return torch.nn.functional.binary_cross_entropy_with_logits(
        logits, targets, pos_weight=torch.tensor(POSITIVE, dtype=logits.dtype)
    )


def inputs():
    return 2 * drawn(123, 50, 30), (uniform(124, 0, 1, 50, 30) > 0.6).float()


def make_kernel(fault=""):
    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits, targets):
            ctx.save_for_backward(logits, targets)
            total = torch.zeros(())
            for block in blocks(len(logits), ROWS):
                x, t = logits[block].float(), targets[block].float()
                if fault == "not_stable":
                    below = torch.log(1 + torch.exp(-x))
                else:
                    below = (-x).clamp(min=0) + torch.log1p(torch.exp(-x.abs()))
                weight = 1 + (POSITIVE - 1) * t
                if fault == "weight_of_all":
                    weight = torch.full_like(t, POSITIVE)
                elif fault == "weight_missing":
                    weight = torch.ones_like(t)
                losses = (1 - t) * x + weight * below
                if fault == "last_rows_lost" and block.stop - block.start < ROWS:
                    continue
                total = total + losses.mean() * x.numel() if fault == "mean_of_means" else total + losses.sum()
            return (total / (len(logits) if fault == "mean_of_rows" else logits.numel())).to(logits.dtype)

        @staticmethod
        def backward(ctx, grad):
            logits, targets = ctx.saved_tensors
            x, t = logits.float(), targets.float()
            weight = 1 + (POSITIVE - 1) * t
            slope = (1 - t) - weight * torch.sigmoid(-x)
            if fault == "backward_without_weight":
                slope = torch.sigmoid(x) - t
            if fault != "backward_of_sum":
                slope = slope / logits.numel()
            below = (-x).clamp(min=0) + torch.log1p(torch.exp(-x.abs()))
            d_targets = (-x + (POSITIVE - 1) * below) / logits.numel()
            return (grad.float() * slope).to(logits.dtype), (grad.float() * d_targets).to(targets.dtype)

    return Loss.apply
