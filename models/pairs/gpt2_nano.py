"""GPT-2 of transformers; one in the manner of nanoGPT: one attention op, matrices the other way round."""

import torch
from _pairs import randomised, tokens
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

F = nn.functional

CONFIG = GPT2Config(n_embd=48, n_layer=2, n_head=4, vocab_size=77, n_positions=32, attn_implementation="eager")


def make_a():
    return randomised(GPT2LMHeadModel(CONFIG), 6)


def make_b(fault=""):
    return Nano(make_a().state_dict(), fault).eval()


def inputs_a():
    return {"input_ids": tokens(7, 77, 2, 9), "use_cache": False}


def inputs_b():
    return (tokens(7, 77, 2, 9),)


def outputs_a(result):
    return result.logits


class Block(nn.Module):
    def __init__(self, state, number, fault):
        super().__init__()
        self.fault = fault if number == 1 or fault in ("formula", "heads_loop") else ""

        def linear(name):
            weight = state[f"transformer.h.{number}.{name}.weight"]
            layer = nn.Linear(*weight.shape)
            layer.weight.data, layer.bias.data = weight.t().contiguous(), state[f"transformer.h.{number}.{name}.bias"]
            return layer

        self.ln_1, self.ln_2 = nn.LayerNorm(48, 1e-6 if self.fault == "eps" else 1e-5), nn.LayerNorm(48)
        for name in ("ln_1", "ln_2"):
            for part in ("weight", "bias"):
                getattr(getattr(self, name), part).data = state[f"transformer.h.{number}.{name}.{part}"].clone()
        self.qkv, self.proj, self.fc, self.out = map(linear, ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"))
        if self.fault == "not_transposed":
            self.proj.weight.data = self.proj.weight.data.t().contiguous()
        if self.fault == "norm_bias_missing":
            self.ln_2.bias.data.zero_()

    def attend(self, q, k, v):
        fault = self.fault
        if fault == "formula":
            scores = torch.einsum("bhqd,bhkd->bhqk", q * 12**-0.25, k * 12**-0.25)
            return (scores + torch.full((9, 9), float("-inf"), dtype=q.dtype).triu(1)).softmax(-1) @ v
        if fault == "heads_loop":
            seen = torch.ones(9, 9).tril()
            heads = []
            for a, b, c in zip(q.unbind(1), k.unbind(1), v.unbind(1), strict=True):
                weight = ((a @ b.mT) / 12**0.5 - (1 - seen) * 1e9).exp() * seen
                heads.append((weight / weight.sum(-1, keepdim=True)) @ c)
            return torch.stack(heads, 1)
        if fault == "not_causal":
            return F.scaled_dot_product_attention(q, k, v)  # fault: not_causal
        if fault == "mask_off_by_one":
            seen = torch.ones(9, 9).tril(1).bool()
            return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)  # fault: mask_off_by_one
        scale = {"no_scale": 1.0, "scale": 12**-0.5 * 1.001}.get(fault)
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale
        )  # fault: no_scale, scale, qk_exchanged

    def forward(self, x):
        fault = self.fault
        y = self.ln_1(x)  # fault: eps
        q, k, v = (t.unflatten(-1, (4, 12)).transpose(1, 2) for t in self.qkv(y).split(48, 2))
        if fault == "qk_exchanged":
            q, k = k, q
        o = self.attend(q, k, v)
        if fault != "heads_not_back":
            o = o.transpose(1, 2)
        x = x + self.proj(o.reshape(2, 9, 48))  # fault: not_transposed, heads_not_back
        y = F.layer_norm(x, (48,), self.ln_2.weight, self.ln_2.bias)  # fault: norm_bias_missing
        kind = "none" if fault == "gelu_erf" else "tanh"
        h = F.relu(self.fc(y)) if fault == "relu" else F.gelu(self.fc(y), approximate=kind)  # fault: gelu_erf, relu
        if fault == "mlp_bias_missing":
            return x + F.linear(h, self.out.weight)  # fault: mlp_bias_missing
        return (self.ln_1(x) if fault == "post_norm" else x) + self.out(h)  # fault: post_norm


class Nano(nn.Module):
    def __init__(self, state, fault):
        super().__init__()
        self.fault, self.wte = fault, nn.Parameter(state["transformer.wte.weight"])
        self.wpe = nn.Parameter(state["transformer.wpe.weight"])
        self.blocks = nn.ModuleList(Block(state, number, fault) for number in range(2))
        self.weight = nn.Parameter(state["transformer.ln_f.weight"])
        self.bias = nn.Parameter(state["transformer.ln_f.bias"])

    def forward(self, ids):
        start = 1 if self.fault == "position_offset" else 0
        positions = torch.arange(start, start + ids.shape[1])
        x = F.embedding(ids, self.wte) + F.embedding(positions, self.wpe)  # fault: position_offset
        for block in self.blocks:
            x = block(x)
        if self.fault != "no_last_norm":
            x = F.layer_norm(x, (48,), self.weight, self.bias)
        return x @ self.wte.t()  # fault: no_last_norm
