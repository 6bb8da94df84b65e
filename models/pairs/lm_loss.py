"""A language model with a summed loss by torch; one whose loss is a fused head that writes its own gradient."""

import torch
from _pairs import randomised, tokens
from torch import nn

F = nn.functional

IGNORED = -100


class Trained(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(53, 24), nn.Linear(24, 53, bias=False)
        self.fc1, self.fc2, self.norm = nn.Linear(24, 48), nn.Linear(48, 24), nn.RMSNorm(24, eps=1e-6)

    def hidden(self, ids):
        x = self.embed(ids)
        x = x + x.cumsum(1) / torch.arange(1, ids.shape[1] + 1)[:, None]
        return self.norm(x + self.fc2(F.silu(self.fc1(x))))

    def forward(self, ids, targets):
        logits = self.head(self.hidden(ids))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), ignore_index=IGNORED)


def make_a():
    return randomised(Trained(), 38)


def make_b(fault=""):
    model = Fused()
    model.load_state_dict(make_a().state_dict())
    model.fault = fault
    return model.eval()


def inputs():
    ids = tokens(39, 53, 3, 8)
    targets = ids.clone()
    targets[0, :4] = targets[2, 5:] = IGNORED
    return ids, targets


def loss(result):
    return result


class FusedLoss(torch.autograd.Function):
    """The mean loss of rows, in chunks, with the gradients of rows and head computed on the way."""

    @staticmethod
    def forward(ctx, x, weight, targets, fault):
        kept = targets != IGNORED
        if fault == "ignored_counted":
            kept = torch.ones_like(kept)
        count = kept.sum() if fault != "count_of_all" else torch.tensor(len(targets))
        total, d_x, d_weight = x.new_zeros(()), torch.zeros_like(x), torch.zeros_like(weight)
        for start in range(0, len(x), 6):
            rows = slice(start, start + 6)
            logits = x[rows] @ weight.t()
            if fault == "logits_scaled":
                logits = logits * 1.001  # fault: logits_scaled
            target = targets[rows].clamp(min=0)
            top = logits.amax(-1, keepdim=True)
            p = (logits - top).exp()
            norm = p.sum(-1, keepdim=True)
            here = kept[rows]
            each = (norm.log() + top)[:, 0] - logits.gather(1, target[:, None])[:, 0]
            if fault == "z_loss":
                each = each + 1e-3 * (norm.log() + top)[:, 0].square()  # fault: z_loss
            if fault == "smoothed":
                each = 0.9 * each + 0.1 * ((norm.log() + top) - logits).mean(-1)  # fault: smoothed
            total = total + (each * here).sum()  # fault: ignored_counted
            d_logits = p / norm
            if fault != "one_hot_missing":
                d_logits.scatter_add_(1, target[:, None], -torch.ones_like(p[:, :1]))
            if fault != "gradient_not_masked":
                d_logits = d_logits * here[:, None]
            d_x[rows] = d_logits @ weight  # fault: one_hot_missing, gradient_not_masked
            if fault == "last_chunk_only":
                d_weight = d_logits.t() @ x[rows]  # fault: last_chunk_only
            else:
                d_weight += d_logits.t() @ x[rows]
        ctx.fault, ctx.count = fault, count
        ctx.save_for_backward(d_x, d_weight)
        return total if fault == "summed" else total / count  # fault: count_of_all, ignored_counted

    @staticmethod
    def backward(ctx, gradient):
        d_x, d_weight = ctx.saved_tensors
        count = 1 if ctx.fault == "gradient_not_divided" else ctx.count
        d_x = d_x * (gradient / count)  # fault: gradient_not_divided
        d_weight = d_weight * (gradient / ctx.count)
        if ctx.fault == "head_gradient_scaled":
            d_weight = d_weight * 1.01  # fault: head_gradient_scaled
        return d_x, d_weight, None, None


class Fused(Trained):
    fault = ""

    def forward(self, ids, targets):
        fault, x = self.fault, self.hidden(ids)
        if fault == "hidden_detached":
            x = x + (x.detach() - x) * 0.5  # fault: hidden_detached
        if fault == "not_shifted":
            rows, wanted = x.flatten(0, 1), targets.flatten()
        else:
            rows, wanted = x[:, :-1].flatten(0, 1), targets[:, 1:].flatten()
        if fault == "rows_kept":  # a clean variation
            rows, wanted = rows[wanted != IGNORED], wanted[wanted != IGNORED]
        if fault == "formula":
            return -(rows @ self.head.weight.t()).log_softmax(-1)[wanted >= 0, wanted[wanted >= 0]].mean()
        if fault == "mean_of_means":
            parts = zip(x[:, :-1], targets[:, 1:], strict=True)
            return torch.stack(
                [FusedLoss.apply(a, self.head.weight, b, "") for a, b in parts]
            ).mean()  # fault: mean_of_means
        return FusedLoss.apply(rows, self.head.weight, wanted, fault)  # fault: not_shifted
