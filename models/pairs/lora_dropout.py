"""A low rank adapter beside its layer; merged into the weight. Also with dropout, whose draws are other ones."""

from _pairs import drawn, randomised
from torch import nn

F = nn.functional


class Beside(nn.Module):
    def __init__(self):
        super().__init__()
        self.base, self.down, self.up = nn.Linear(24, 24), nn.Linear(24, 4, bias=False), nn.Linear(4, 24, bias=False)
        self.norm = nn.LayerNorm(24)
        self.rate = 0.0

    def forward(self, x):
        y = self.norm(x)
        h = self.base(y) + self.up(self.down(F.dropout(y, self.rate))) * (8 / 4)
        return x + F.gelu(h)


def make_a():
    return randomised(nn.Sequential(Beside(), Beside(), Beside()), 54)


def make_b(fault=""):
    model = nn.Sequential(Merged(), Merged(), Merged())
    model.load_state_dict(make_a().state_dict())
    model[1].fault = fault
    return model.eval()


def inputs():
    return (drawn(55, 2, 6, 24),)


def loss(result):
    return result.square().mean()


class Merged(Beside):
    fault = ""

    def forward(self, x):
        fault = self.fault
        y = F.rms_norm(x, (24,), self.norm.weight) + self.norm.bias if fault == "rms" else self.norm(x)  # fault: rms
        low = self.up.weight @ self.down.weight
        if fault == "low_transposed":
            low = low.t()
        scale = {"scale_of_rank": 8 / 24, "scale_missing": 1.0, "scale_root": 8 / 4**0.5}.get(fault, 8 / 4)
        weight = self.base.weight + low * scale
        if fault == "merged_twice":
            weight = weight + low * scale
        if fault == "merged_bfloat16":
            weight = self.base.weight + (low * scale).bfloat16().to(x.dtype)
        if fault == "not_merged":
            weight = self.base.weight
        if fault == "base_detached":
            weight = self.base.weight.detach() + low * scale
        if fault == "low_gradient_scaled":
            weight = self.base.weight + low * scale * 0.5 + (low * scale * 0.5).detach()
        h = F.linear(
            y, weight, self.base.bias
        )  # fault: scale_of_rank, scale_missing, scale_root, merged_twice, not_merged, low_transposed
        if fault == "dropout":
            h = F.dropout(h, 0.25)  # fault: dropout
        if fault == "dropout_not_scaled":
            h = h * 0.9  # fault: dropout_not_scaled
        if fault == "gelu_tanh":
            return x + F.gelu(h, approximate="tanh")  # fault: gelu_tanh
        return (y if fault == "residual_from_norm" else x) + F.gelu(h)  # fault: residual_from_norm
