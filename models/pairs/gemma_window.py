"""Gemma 2 of transformers; one with keys and values grouped instead of repeated and a window of its own."""

import torch
from _pairs import randomised, tokens
from torch import nn
from transformers import Gemma2Config, Gemma2ForCausalLM

F = nn.functional

WINDOW, CAP = 4, 5.0
CONFIG = Gemma2Config(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    query_pre_attn_scalar=24,
    vocab_size=89,
    sliding_window=WINDOW,
    attn_logit_softcapping=CAP,
    final_logit_softcapping=3.0,
    attn_implementation="eager",
)


def make_a():
    return randomised(Gemma2ForCausalLM(CONFIG), 23)


def make_b(fault=""):
    return Own(make_a(), fault).eval()


def inputs_a():
    return {"input_ids": tokens(24, 89, 2, 10), "use_cache": False}


def inputs_b():
    return (tokens(24, 89, 2, 10),)


def outputs_a(result):
    return result.logits


class Norm(nn.Module):
    def __init__(self, theirs, fault=""):
        super().__init__()
        self.weight, self.fault = theirs.weight, fault

    def forward(self, x):
        plus = 0.0 if self.fault == "not_one_plus" else 1.0
        return F.rms_norm(x, (64,), self.weight + plus, 1e-6)  # fault: not_one_plus


class Layer(nn.Module):
    def __init__(self, theirs, number, fault):
        super().__init__()
        self.fault = fault if number == 0 else ""
        self.sliding = number % 2 == 0
        self.attention, self.mlp = theirs.self_attn, theirs.mlp
        self.norms = nn.ModuleList(
            [
                Norm(theirs.input_layernorm),
                Norm(theirs.post_attention_layernorm),
                Norm(theirs.pre_feedforward_layernorm, self.fault),
                Norm(theirs.post_feedforward_layernorm),
            ]
        )

    def forward(self, x, cos, sin):
        fault, attention = self.fault, self.attention
        y = self.norms[0](x)
        q, k, v = (
            p(y).unflatten(-1, (-1, 16)).transpose(1, 2) for p in (attention.q_proj, attention.k_proj, attention.v_proj)
        )

        def rotate(t):
            a, b = t.chunk(2, -1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

        q, k = rotate(q).unflatten(1, (2, 2)), rotate(k)
        if fault == "groups_across":
            q = q.transpose(1, 2)
        scores = (
            torch.einsum("bgrqd,bgkd->bgrqk", q, k) * (16 if fault == "head_scale" else 24) ** -0.5
        )  # fault: head_scale, groups_across
        if fault == "cap_quotient":
            scores = (scores / CAP).tanh()
        elif fault != "cap_missing":
            scores = (scores / CAP).tanh() * CAP
        rows = torch.arange(scores.shape[-1])
        ahead = rows[None] - rows[:, None]
        hidden = ahead > 0
        if self.sliding and fault != "window_missing":
            window = WINDOW + 1 if fault == "window_off_by_one" else WINDOW
            hidden = hidden | (ahead <= -window)
        scores = scores.masked_fill(
            hidden, -1e30
        )  # fault: cap_quotient, cap_missing, window_missing, window_off_by_one
        o = torch.einsum("bgrqk,bgkd->bqgrd", scores.softmax(-1), v).flatten(2)
        h = attention.o_proj(o)
        x = x + (h if fault == "post_norm_missing" else self.norms[1](h))  # fault: post_norm_missing
        y = self.norms[2](x)
        gate = F.gelu(self.mlp.gate_proj(y), approximate="none" if fault == "gelu_erf" else "tanh")  # fault: gelu_erf
        h = self.mlp.down_proj(gate * self.mlp.up_proj(y))
        if fault == "norm_after_residual":
            return self.norms[3](x + h)  # fault: norm_after_residual
        return x + self.norms[3](h)


class Own(nn.Module):
    def __init__(self, theirs, fault):
        super().__init__()
        self.fault, self.embed = fault, theirs.model.embed_tokens.weight
        self.layers = nn.ModuleList(Layer(layer, number, fault) for number, layer in enumerate(theirs.model.layers))
        self.norm = Norm(theirs.model.norm)
        self.register_buffer("inv_freq", theirs.model.rotary_emb.inv_freq.clone(), persistent=False)

    def forward(self, ids):
        fault = self.fault
        angles = torch.arange(ids.shape[1])[:, None] * self.inv_freq
        cos, sin = angles.cos().to(self.embed.dtype), angles.sin().to(self.embed.dtype)
        x = self.embed[ids]
        if fault != "embedding_not_scaled":
            x = x * 8.0
        for layer in self.layers:
            x = layer(x, cos, sin)  # fault: embedding_not_scaled
        logits = self.norm(x) @ self.embed.t()
        if fault == "last_cap_missing":
            return logits
        return 3.0 * torch.tanh(logits / (5.0 if fault == "last_cap" else 3.0))  # fault: last_cap
