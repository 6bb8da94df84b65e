"""A decoder in one piece; the shards of two ranks, computed one after the other and added up."""

import torch
from _pairs import randomised, tokens
from torch import nn

F = nn.functional


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(32, eps=1e-5), nn.RMSNorm(32, eps=1e-5)
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))
        self.gate, self.up, self.down = nn.Linear(32, 48), nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x):
        y = self.norm1(x)
        q, k, v = (p(y).unflatten(-1, (4, 8)).transpose(1, 2) for p in (self.q, self.k, self.v))
        p = ((q @ k.mT) / 8**0.5).masked_fill(torch.ones(9, 9).triu(1).bool(), float("-inf")).softmax(-1)
        x = x + self.o((p @ v).transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(60, 32), nn.Linear(32, 60, bias=False)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make_a():
    return randomised(Model(), 50)


def make_b(fault=""):
    return Ranks(make_a(), fault).eval()


def inputs():
    return (tokens(51, 60, 2, 9),)


def half(weight, rank, dim=0):
    return nn.Parameter(weight.data.chunk(2, dim)[rank].clone())


class Rank(nn.Module):
    """The shard of one layer."""

    def __init__(self, layer, rank, fault):
        super().__init__()
        self.rank, self.fault = rank, fault
        kv = 0 if fault == "kv_of_first" else rank
        self.qkv = nn.Parameter(
            torch.cat([half(layer.q.weight, rank), half(layer.k.weight, kv), half(layer.v.weight, kv)])
        )
        self.qkv_bias = nn.Parameter(
            torch.cat([half(layer.q.bias, rank), half(layer.k.bias, kv), half(layer.v.bias, kv)])
        )
        if fault == "cut_before_fusing" and rank == 1:
            self.qkv.data = torch.cat([layer.q.weight, layer.k.weight, layer.v.weight]).data[48:].clone()
        self.o, self.down = half(layer.o.weight, rank, 1), half(layer.down.weight, rank, 1)
        if fault == "wrong_shard" and rank == 1:
            self.down = half(layer.down.weight, 0, 1)
        self.gate_up = nn.Parameter(torch.cat([half(layer.gate.weight, rank), half(layer.up.weight, rank)]))
        self.gate_up_bias = nn.Parameter(torch.cat([half(layer.gate.bias, rank), half(layer.up.bias, rank)]))
        self.o_bias, self.down_bias = layer.o.bias, layer.down.bias

    def attend(self, y):
        fault = self.fault
        q, k, v = F.linear(y, self.qkv, self.qkv_bias).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        scale = 16**-0.5 if fault == "scale_of_shard" else None
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)  # fault: scale_of_shard, kv_of_first
        bias = self.o_bias if self.rank == 0 or fault == "bias_twice" else None
        return F.linear(o.transpose(1, 2).flatten(2), self.o, bias)  # fault: bias_twice

    def forward(self, y, kind):
        return self.attend(y) if kind == "attention" else self.feed(y)

    def feed(self, y):
        fault = self.fault
        gate, up = F.linear(y, self.gate_up, self.gate_up_bias).chunk(2, -1)
        h = F.silu(gate) * up
        bias = None if self.rank or fault == "bias_missing" else self.down_bias
        return F.linear(h, self.down, bias)  # fault: wrong_shard


class Ranks(nn.Module):
    def __init__(self, whole, fault):
        super().__init__()
        self.fault, self.embed = fault, nn.ParameterList([half(whole.embed.weight, rank) for rank in range(2)])
        self.heads = nn.ParameterList([half(whole.head.weight, rank) for rank in range(2)])
        self.norms = nn.ModuleList(nn.ModuleList([layer.norm1, layer.norm2]) for layer in whole.layers)
        self.layers = nn.ModuleList(
            nn.ModuleList(Rank(layer, rank, fault if number == 1 else "") for rank in range(2))
            for number, layer in enumerate(whole.layers)
        )

    def forward(self, ids):
        fault, parts = self.fault, []
        for rank, weight in enumerate(self.embed):
            own = (ids // 30) == rank
            rows = F.embedding((ids - 30 * rank).clamp(0, 29), weight)
            parts.append(rows if fault == "embedding_not_masked" and rank else rows * own[..., None])
        x = parts[0] + parts[1]  # fault: embedding_not_masked
        for number, (ranks, norms) in enumerate(zip(self.layers, self.norms, strict=True)):
            here = fault if number == 1 else ""
            y = norms[0](x)
            h = [rank(y, "attention") for rank in ranks]
            total = h[0] if here == "reduce_missing" else h[0] + h[1]
            if here == "reduce_mean":
                total = total / 2  # fault: reduce_mean
            if here == "residual_on_both":
                total = h[0] + x + h[1]
            x = x + total  # fault: reduce_missing, residual_on_both
            y = norms[1](x)
            h = [rank(y, "mlp") for rank in ranks]
            if here == "reduce_later":  # a clean variation
                x = (x / 2 + h[0]) + (x / 2 + h[1])
            elif here == "reduced_twice":
                x = x + (h[0] + h[1]) * 2  # fault: reduced_twice
            else:
                x = x + (h[0] + h[1])  # fault: bias_missing
        logits = [x @ weight.t() for weight in self.heads]
        return torch.cat(logits[::-1] if fault == "gathered_reversed" else logits, -1)
