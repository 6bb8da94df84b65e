"""Llama of transformers over a whole sequence; one token at a time with a cache of keys and values."""

import torch
from _pairs import randomised, tokens
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

HEADS, WIDTH, LENGTH = 4, 8, 7
CONFIG = LlamaConfig(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=HEADS,
    num_key_value_heads=2,
    vocab_size=61,
    max_position_embeddings=32,
    attn_implementation="sdpa",
)


def make_a():
    return randomised(LlamaForCausalLM(CONFIG), 3)


def make_b(fault=""):
    model = make_a()
    return Decoder(model, fault).eval()


def inputs():
    return (tokens(4, 61, 1, LENGTH),)


def outputs_a(result):
    return result.logits[:, -1]


def turned(x, position, inv_freq):
    angles = position * inv_freq
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)  # fault: position, restart


class Cached(nn.Module):
    def __init__(self, theirs, inv_freq, number, fault):
        super().__init__()
        self.theirs, self.fault = theirs, fault if number == 1 else ""
        self.register_buffer("inv_freq", inv_freq.clone(), persistent=False)

    def forward(self, x, cache, position):
        fault, attention = self.fault, self.theirs.self_attn
        y = self.theirs.input_layernorm(x)
        q, k, v = (p(y).unflatten(-1, (-1, WIDTH)) for p in (attention.q_proj, attention.k_proj, attention.v_proj))
        here = position
        if fault == "position" and position == LENGTH - 1:
            here = position - 1
        if fault == "restart" and position >= 4:
            here = position - 4
        q, k = turned(q, here, self.inv_freq), turned(k, position if fault == "restart" else here, self.inv_freq)
        keys, values = cache
        slot = position - 1 if fault == "slot" and position == 5 else position
        if fault == "bfloat16_cache":
            v = v.bfloat16().to(v.dtype)  # fault: bfloat16_cache
        if not (fault == "value_not_written" and position == 3):
            values[slot] = v[0]
        keys[slot] = k[0]
        if fault == "rotated_twice" and position == 4:
            keys[: position + 1] = turned(keys[: position + 1], 1, self.inv_freq)  # fault: rotated_twice
        seen = slice(0, position) if fault == "not_itself" and position else slice(0, position + 1)
        if fault == "window":
            seen = slice(max(0, position - 3), position + 1)
        k, v = (t[seen].repeat_interleave(2, 1) for t in (keys, values))
        scores = torch.einsum("thd,khd->htk", q, k) * WIDTH**-0.5  # fault: not_itself, window, slot
        p = scores.softmax(-1)
        o = torch.einsum("htk,khd->thd", p, v).flatten(1)  # fault: value_not_written
        x = x + attention.o_proj(o)
        y = self.theirs.post_attention_layernorm(x)
        return x + self.theirs.mlp(y)


class Decoder(nn.Module):
    def __init__(self, theirs, fault):
        super().__init__()
        self.embed, self.norm, self.head = theirs.model.embed_tokens, theirs.model.norm, theirs.lm_head
        inv_freq = theirs.model.rotary_emb.inv_freq
        self.layers = nn.ModuleList(
            Cached(layer, inv_freq, number, fault) for number, layer in enumerate(theirs.model.layers)
        )

    def forward(self, ids):
        empty = self.embed.weight.new_zeros
        caches = [(empty(LENGTH, 2, WIDTH), empty(LENGTH, 2, WIDTH)) for _ in self.layers]
        for position in range(LENGTH):
            x = self.embed(ids[:, position])
            for layer, cache in zip(self.layers, caches, strict=True):
                x = layer(x, cache, position)
        return self.head(self.norm(x))
