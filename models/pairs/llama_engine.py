"""Llama of transformers; written as engines do: tokens x width, fused projections, the residual carried beside."""

import torch
from _pairs import randomised, tokens
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

F = nn.functional

HEADS, GROUPS, WIDTH = 4, 2, 16
CONFIG = LlamaConfig(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=HEADS,
    num_key_value_heads=GROUPS,
    vocab_size=101,
    max_position_embeddings=64,
    attn_implementation="eager",
)


def make_a():
    return randomised(LlamaForCausalLM(CONFIG), 1)


def make_b(fault=""):
    return Engine(make_a().state_dict(), fault).eval()


def inputs():
    return (tokens(2, 101, 2, 11),)


def outputs_a(result):
    return result.logits


class Norm(nn.Module):
    def __init__(self, weight, fault):
        super().__init__()
        self.weight, self.fault = nn.Parameter(weight), fault

    def forward(self, x):
        if self.fault == "fused_norm":
            return F.rms_norm(x, (64,), self.weight, 1e-6)
        variance = x.float().pow(2).mean(-1, keepdim=True) + (1e-5 if self.fault == "eps" else 1e-6)  # fault: eps
        if self.fault == "layer_norm":
            x = x - x.mean(-1, keepdim=True)  # fault: layer_norm
        y = x.float() * variance.rsqrt()
        if self.fault == "one_rounding":
            return (y * self.weight.float()).to(x.dtype)
        weight = 1 + self.weight if self.fault == "one_plus" else self.weight
        return weight * y.to(x.dtype)  # fault: one_plus


class Layer(nn.Module):
    def __init__(self, state, number, fault):
        super().__init__()
        self.fault = fault = fault if number == 1 or fault in ("sdpa", "fused_norm", "one_rounding") else ""
        q, k, v, o, gate, up, down, n1, n2 = (
            state[f"model.layers.{number}.{name}.weight"].clone()
            for name in (
                *(f"self_attn.{letter}_proj" for letter in "qkvo"),
                *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
                "input_layernorm",
                "post_attention_layernorm",
            )
        )
        if fault == "kv_exchanged":
            k, v = v, k
        if fault == "gate_up_exchanged":
            gate, up = up, gate
        if fault == "heads_permuted":
            q = q.unflatten(0, (GROUPS, 2, WIDTH)).transpose(0, 1).reshape(64, 64)
        if fault == "stale":
            o[3] *= 1.01
        self.qkv, self.o = nn.Parameter(torch.cat([q, k, v])), nn.Parameter(o)
        self.gate_up, self.down = nn.Parameter(torch.cat([gate, up])), nn.Parameter(down)
        self.n1 = Norm(n1, fault)
        self.n2 = Norm(n2, fault if fault in ("fused_norm", "one_rounding") else "")

    def forward(self, h, residual, rotate, sequences):
        fault = self.fault
        residual = h if residual is None else residual + h
        x = self.n1(residual)
        if fault == "norm_as_residual":
            residual = x
        q, k, v = F.linear(x, self.qkv).split(
            [HEADS * WIDTH, GROUPS * WIDTH, GROUPS * WIDTH], -1
        )  # fault: heads_permuted
        q, k, v = (t.unflatten(-1, (-1, WIDTH)) for t in (q, k, v))
        q = q if fault == "no_rope" else rotate(q, fault)
        k = rotate(k, "")
        q, k, v = (t.unflatten(0, (sequences, -1)).transpose(1, 2) for t in (q, k, v))
        if fault == "repeat":
            k, v = (t.repeat(1, HEADS // GROUPS, 1, 1) for t in (k, v))  # fault: repeat
        else:
            k, v = (t.repeat_interleave(HEADS // GROUPS, 1) for t in (k, v))
        if fault == "sdpa":
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(2, 3)) * (
                WIDTH**-0.5 * (1.001 if fault == "scale" else 1)
            )  # fault: no_rope, scale
            length = scores.shape[-1]
            shift = 2 if fault == "mask_off_by_one" else 1
            hidden = torch.ones(length, length).triu(shift).bool()
            scores = scores.masked_fill(hidden, float("-inf"))  # fault: mask_off_by_one
            dim = -2 if fault == "softmax_dim" else -1
            p = torch.softmax(scores.nan_to_num(neginf=-1e9), dim, dtype=torch.float32)  # fault: softmax_dim
            o = p.to(q.dtype) @ v
        o = o.transpose(1, 2).flatten(0, 1).flatten(1)
        kept = 32 if fault == "shard_missing" else 64
        h = F.linear(o[:, :kept], self.o[:, :kept])  # fault: shard_missing, stale
        residual = h if fault == "no_residual" else residual + h
        if fault == "bfloat16_residual":
            residual = residual.bfloat16().to(h.dtype)  # fault: bfloat16_residual
        x = self.n2(residual)
        gate, up = F.linear(x, self.gate_up).chunk(2, -1)
        gate = F.gelu(gate) if fault == "gelu" else F.silu(gate)  # fault: gelu, gate_up_exchanged
        return F.linear(gate * up, self.down), residual


class Engine(nn.Module):
    def __init__(self, state, fault):
        super().__init__()
        self.fault = fault
        self.embed = nn.Parameter(state["model.embed_tokens.weight"])
        self.layers = nn.ModuleList(Layer(state, number, fault) for number in range(3))
        self.norm = Norm(state["model.norm.weight"], fault if fault in ("fused_norm", "one_rounding") else "")
        head = state["model.embed_tokens.weight" if fault == "head_tied" else "lm_head.weight"]
        self.head = nn.Parameter(head.clone())
        theta = 10100.0 if fault == "theta" else 10000.0
        self.register_buffer("inv_freq", 1.0 / theta ** (torch.arange(0, WIDTH, 2).float() / WIDTH))

    def forward(self, input_ids):
        sequences, length = input_ids.shape
        start = 3 if self.fault == "offset" else 0  # of all positions: RoPE does not see it
        positions = torch.arange(start, start + length).repeat(sequences)
        angles = torch.outer(positions.to(self.inv_freq.dtype), self.inv_freq)
        cos, sin = (t.to(self.embed.dtype).unsqueeze(1) for t in (angles.cos(), angles.sin()))

        def rotate(x, fault):
            if fault == "interleaved":
                a, b = x[..., ::2], x[..., 1::2]
                return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)  # fault: interleaved
            if fault == "sign":
                a, b = x.chunk(2, -1)
                return torch.cat([a * cos + b * sin, b * cos - a * sin], -1)  # fault: sign
            c, s = (cos.roll(1, 0), sin.roll(1, 0)) if fault == "query_off_by_one" else (cos, sin)
            a, b = x.chunk(2, -1)
            return torch.cat([a * c - b * s, b * c + a * s], -1)  # fault: theta, query_off_by_one, kv_exchanged

        h, residual = F.embedding(input_ids.flatten(), self.embed), None
        for layer in self.layers:
            h, residual = layer(h, residual, rotate, sequences)
        last = h if self.fault == "last_residual" else residual + h
        x = self.norm(last)
        return F.linear(x, self.head)  # fault: head_tied
